# Generated from dsec/sdk/_async/sandbox.py by scripts/generate_sync.py: edit that file.

"""One sandbox, from the outside."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dsec.model import limits
from dsec.model.errors import DsecError, NotFound, SandboxLost
from dsec.model.ids import new_key
from dsec.model.network import NetworkReport, Policy, plain
from dsec.model.ports import Exposed, check_port
from dsec.model.states import RunResult, SandboxInfo, State, Usage
from dsec.sdk import codec, values
from dsec.sdk._sync.net import entered
from dsec.sdk._sync.run import Run
from dsec.sdk.keywords import Made, asked, explained

if TYPE_CHECKING:
    from dsec.sdk._sync.client import Client
    from dsec.sdk._sync.diff import Diff
    from dsec.sdk._sync.events import Events
    from dsec.sdk._sync.files import Files
    from dsec.sdk._sync.programs import Process
    from dsec.sdk._sync.sessions import Session
    from dsec.sdk.programs import ProcessList, TerminalSize


@explained
class Sandbox(metaclass=Made):
    """A handle on one sandbox. As a context manager it stops the sandbox at the end.

    It pickles to the URL of its server and its id, never to a key: where it is unpickled, DSEC_API_KEY has the key.
    """

    def __init__(self, client: Client, sandbox_id: str, info: SandboxInfo | None = None) -> None:
        self._client = client
        self._id = sandbox_id
        self._info = info
        self._path = f"/v1/sandboxes/{codec.quote(sandbox_id)}"

    @property
    def id(self) -> str:
        """Its id: `sbx-<node>-<random>`."""
        return self._id

    @property
    def name(self) -> str | None:
        """Its name, if it has one (None as well in an unpickled handle before its first `info()`)."""
        return self._info.name if self._info else None

    @property
    def state(self) -> State | None:
        """Its state as of the last answer; `info()` asks again. None in an unpickled handle before that."""
        return self._info.state if self._info else None

    def __repr__(self) -> str:
        name = f" name={self.name!r}" if self.name else ""
        return f"<{type(self).__name__} {self._id}{name} {self.state or ''}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._client.url, self._id)

    def info(self) -> SandboxInfo:
        """What its node knows of it now."""
        return self._update("GET", "")

    def run(
        self,
        command: values.Command,
        *,
        cwd: values.Path | None = None,
        env: Mapping[str, str] | None = None,
        user: values.User | None = None,
        stdin: str | bytes | None = None,
        timeout_s: float | None = None,
        on_output: values.OnOutput | None = None,
        check: bool = False,
        key: str | None = None,
    ) -> RunResult:
        """Run a program to its end. A str runs as `/bin/sh -c`, a list is argv and needs no shell.

        Nothing the program does raises, except with `check=True`: CommandFailed, with `.result`. ProgramNotStarted: the
        sandbox has no such program, directory or user. SandboxLost: it has ended, `.end_reason` says why.
        `on_output(stream, data)` gets output as it comes (stream 1 or 2); while it works the program waits, and its
        exception kills the run and is raised. Cancelling the call (KeyboardInterrupt, a cancelled task) kills the
        program. A connection that breaks is made again and the call goes on under its key; NodeUnreachable: the
        server is silent or stays away.
        `key` names this run within the sandbox: whoever calls again with the same key and content, also a program that
        was killed and started again, waits for that run's result, and nothing is started. Conflict: other content.
        """
        spec = values.make_run(command, cwd=cwd, env=env, user=user, stdin=stdin, timeout_s=timeout_s)
        result = Run(self._client.transport, self._path, spec, on_output, key).result()
        if check and not result.ok:
            raise values.command_failed(command, result, self._id)
        return result

    @cached_property
    def files(self) -> Files:
        """Its files."""
        from dsec.sdk._sync.files import Files  # what it needs is not loaded for those who only run programs

        return Files(self._client, self._path)

    def stop(self, *, grace_s: float = limits.GRACE_DEFAULT_S) -> SandboxInfo:
        """Stop it for good: SIGTERM, and after `grace_s` seconds the end of everything. Can be repeated."""
        return self._update("DELETE", f"?grace_s={values.number('grace_s', grace_s):g}")

    def extend(self, seconds: float) -> SandboxInfo:
        """Its lifetime ends `seconds` later than it would have. No end: nothing changes."""
        return self._update("POST", "/extend", {"seconds": values.number("seconds", seconds)})

    def set_labels(self, labels: Mapping[str, str]) -> SandboxInfo:
        """Replace all its labels."""
        return self._update("PUT", "/labels", {"labels": values.label_map(labels)})

    def set_network(self, network: Mapping[str, Any] | Policy) -> SandboxInfo:
        """Replace what it may reach: names of mirrors (`{"pypi": True}`), or a whole policy.

        When it returns the new one holds: no connection is left that it does not allow. Unsupported: this node cannot
        enforce all of it, and nothing was changed.
        """
        return self._update("PUT", "/network", plain(network))

    def patch_network(self, network: Mapping[str, Any] | Policy) -> SandboxInfo:
        """Change what it may reach by what is named here and keep the rest; what stays allowed is not disturbed.

        Of a policy: rules about the same mirror, domain or range give way to these, and `phase` chooses another one.
        """
        return self._update("PATCH", "/network", plain(network))

    def explain_network(self) -> NetworkReport:
        """What it may reach, rule by rule, what enforces each, and how often each decided."""
        return self._client.transport.call("GET", f"{self._path}/network", NetworkReport)

    def usage(self) -> Usage:
        """What it has used, and uses now. `disk_bytes` may be some 30 s behind (btrfs counts at its commits)."""
        return self._client.transport.call("GET", f"{self._path}/usage", Usage)

    @entered
    def spawn(
        self,
        command: values.Command,
        *,
        cwd: values.Path | None = None,
        env: Mapping[str, str] | None = None,
        user: values.User | None = None,
        stdin: bool = True,
        tty: TerminalSize = False,
        keepalive: bool = True,
        timeout_s: float | None = None,
        spool_bytes: int = limits.SPOOL_BYTES,
        key: str | None = None,
    ) -> Process:
        """Start a program and do not wait for it; the handle talks to it. `command` and the like as for `run`.

        It goes on without its caller, until it ends, is killed, its `timeout_s` is over, or the sandbox ends.
        `stdin`: its input stays open until `p.stdin.close()`; else it is empty. `tty`: it gets a terminal, 24 x 80 or
        `(rows, cols)`. `keepalive=False`: the sandbox is idle though it lives. `spool_bytes`: so much of the newest
        output of each stream stays readable, on the node's disk: NodeDiskFull. ProgramNotStarted as for `run`.
        `key`: whoever calls again with the same key and content gets the same program.
        """
        from dsec.sdk import programs
        from dsec.sdk._sync.programs import spawn  # as for files

        spec = programs.make_spawn(
            command,
            cwd=cwd,
            env=env,
            user=user,
            stdin=stdin,
            tty=tty,
            keepalive=keepalive,
            timeout_s=timeout_s,
            spool_bytes=spool_bytes,
        )
        return spawn(self._client, self._id, spec, key)

    @asked
    def process(self, process_id: str) -> Process:
        """The handle on a program by its id; nothing is asked before it is used."""
        from dsec.sdk._sync.programs import Process  # as for files

        values.check_id("process_id", process_id, "spawn(...).id (a pid inside is another number)")
        return Process(self._client, self._id, process_id)

    def processes(self) -> ProcessList:
        """The processes alive in it, and the programs that calls have started."""
        from dsec.sdk.programs import ProcessList  # as for files

        return self._client.transport.call("GET", f"{self._path}/processes", ProcessList)

    @entered
    def session(
        self,
        shell: values.Path | None = None,
        *,
        cwd: values.Path | None = None,
        env: Mapping[str, str] | None = None,
        user: values.User | None = None,
        keepalive: bool = True,
        key: str | None = None,
    ) -> Session:
        """Start a shell that lives on between commands: a context manager with `run`.

        `shell`: its path inside, or a name in its PATH; None: bash where it is there, else sh. `keepalive=False`: the
        sandbox is idle while no command of it runs.
        """
        from dsec.sdk import programs
        from dsec.sdk._sync.sessions import start  # as for files

        spec = programs.make_session(shell=shell, cwd=cwd, env=env, user=user, keepalive=keepalive)
        return start(self._client, self._id, spec, key)

    @entered
    def get_session(self, session_id: str) -> Session:
        """The handle on a session that is there. NotFound: there is none of that id."""
        from dsec.sdk._sync.sessions import Session  # as for files

        values.check_id("session_id", session_id, "session(...).id")
        found = Session(self._client, self._id, session_id)
        found.info()
        return found

    def expose(self, port: int) -> Exposed:
        """Make a port reachable from outside, for whoever has the token: `url` has it in it, `headers` send it.

        HTTP/1.1 and what begins with it (WebSocket, server-sent events), and raw TCP by CONNECT. Asked again it gives
        the same; it is there until `unexpose`, or the sandbox's end, also over restarts of the node. Nothing need
        listen yet: until then the answer is 502. Unsupported: the node is on another machine.
        """
        body = codec.encode({"port": check_port(port)})
        return self._client.transport.call("POST", f"{self._path}/ports", Exposed, body=body)

    def exposed(self) -> list[Exposed]:
        """Its ports that can be reached from outside."""
        return (self._client.transport.call("GET", f"{self._path}/ports", codec.ExposedPage)).items

    def unexpose(self, port: int) -> None:
        """Close an exposed port for good, with the connections to it. NotFound: it is not exposed."""
        path = f"{self._path}/ports/{check_port(port)}"
        self._client.transport.call("DELETE", path, codec.Nothing, key=new_key())

    def events(self, since: int = 0, *, follow: bool = False) -> Events:
        """What happened to it, the oldest first: iterate over it. Also once it has ended, as long as its node knows it.

        `since`: only what came after the event with that `seq`. `follow`: also what is still to come, until it has
        ended. A node keeps the last 1,000; an event `missed` says how many before are gone.
        """
        from dsec.sdk._sync.events import Events  # not loaded for those who only run programs

        return Events(self._client.transport, self._path, since, follow)

    def diff(self, path: str | bytes | os.PathLike[str] = "/", *, limit: int | None = None) -> Diff:
        """What at `path` and below is not as it was in its layers: iterate over it.

        Each path that was added, changed or deleted is told once, by what it is now and was then, whatever happened in
        between and whoever may read it. Not told: what is mounted inside (`/proc`, `/sys`, `/dev`, `/etc/hosts` and the
        like), and the times of directories. FileNotFound: nothing is there and nothing was. No link is followed.
        `limit`: no more changes than this (`report.more` says whether there are); without one Exhausted is raised after
        a million.
        """
        from dsec.sdk._sync.diff import Diff  # not loaded for those who only run programs

        return Diff(self._client.transport, self._path, values.path_bytes(path), limit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop(grace_s=0)
        except (NotFound, SandboxLost):
            return
        except DsecError as stop_error:
            if error is None:
                raise
            # The caller's own error tells more; this one must not hide it.
            error.add_note(f"and stopping {self._id} failed: {stop_error}")

    def _update(self, method: str, suffix: str, body: object = None) -> SandboxInfo:
        data = codec.encode(body) if body is not None else b""
        key = None if method == "GET" else new_key()
        self._info = self._client.transport.call(method, self._path + suffix, SandboxInfo, body=data, key=key)
        return self._info


def _restore(url: str, sandbox_id: str) -> Sandbox:
    from dsec.sdk._sync.client import shared

    return Sandbox(shared(url), sandbox_id)
