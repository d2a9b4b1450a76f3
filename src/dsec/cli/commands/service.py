"""`dsec up` and `dsec down`: the node agent of this machine, started in the background and stopped."""

from __future__ import annotations

import errno
import importlib.util
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec.cli.agentlock import read_lock
from dsec.cli.terminal import note
from dsec.model.errors import DeadlineExceeded, DsecError, NodeUnreachable, Rejected, Unavailable, Unsupported

if TYPE_CHECKING:
    import argparse

RUN_DIR: Final = "/run/dsec"
STATE_DIR: Final = "/var/lib/dsec"
CGROUP: Final = "dsec"
LOG_NAME: Final = "agent.log"
# A first start may have to recover thousands of sandboxes.
UP_TIMEOUT_S: Final = 60.0
DOWN_TIMEOUT_S: Final = 30.0
# An agent that does not answer is given so long to let go of its lock.
DYING_S: Final = 5.0
LOG_LINES_SHOWN: Final = 8
WORDS_MAX_BYTES: Final = 1 << 20
# The agent's: its standard error is a file of its own until it is up, and the log is its standard output.
WORDS_APART_ENV: Final = "DSEC_WORDS_APART"
_POLL_S: Final = 0.05
# What the extra `dsec[node]` brings; the agent imports them all.
NODE_MODULES: Final = ("uvicorn", "uvloop", "httptools", "starlette")


# The node of another machine is not started or ended from here: these commands have no `--url`.
OF_THIS_MACHINE: Final = True
_LOCAL: Final = "this is about the node of this machine; DSEC_RUN_DIR or --run-dir says which"


class NotStarted(Unavailable):
    """The node agent did not come up."""


def _directories(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", type=Path, default=Path(os.environ.get("DSEC_RUN_DIR") or RUN_DIR), metavar="DIR")
    asked = os.environ.get("DSEC_STATE_DIR")
    parser.add_argument("--state-dir", type=Path, default=Path(asked) if asked else None, metavar="DIR")


def _state_dir(args: argparse.Namespace) -> Path:
    return Path(args.state_dir or STATE_DIR).absolute()


def up_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec up`."""
    import argparse

    _directories(parser)
    parser.add_argument(
        "--cgroup", metavar="NAME", help="(default: DSEC_CGROUP, else a name of the run directory's own)"
    )
    parser.add_argument("--foreground", action="store_true", help="stay in this terminal (for a service manager)")
    parser.add_argument("--timeout-s", type=float, default=UP_TIMEOUT_S, metavar="S", help="(default: %(default)s)")
    parser.add_argument(
        "agent",
        nargs=argparse.REMAINDER,
        metavar="-- AGENT OPTION",
        help="for the agent: `python -m dsec.node --help` lists them (--listen, --backend, --node ...)",
    )


def up_command(args: argparse.Namespace) -> int:
    """Start the agent and wait until it answers."""
    _require_node()
    run_dir, state_dir = args.run_dir.absolute(), _state_dir(args)
    extra = args.agent[1:] if args.agent[:1] == ["--"] else args.agent
    pid = _living(run_dir)
    if pid is not None:
        return _runs_already(pid, run_dir, args, extra)
    line = [sys.executable, "-m", "dsec.node", "--run-dir", str(run_dir), "--state-dir", str(state_dir), *extra]
    line += ["--cgroup", args.cgroup] if args.cgroup else []
    if args.foreground:
        os.execv(sys.executable, line)
    starting = _Starting(line, state_dir)
    try:
        node = _await(starting, run_dir, args.timeout_s)
    except KeyboardInterrupt:
        # In a session of its own it has not heard of it, and would come up when nobody expects it any more.
        _end(starting.process)
        raise
    print(f"node {node} is up (pid {starting.process.pid}): {run_dir}/api.sock; log: {starting.log}")
    if any(word.partition("=")[0] == "--listen" for word in extra):
        print(
            f"TCP asks for a key (DSEC_API_KEY): {state_dir}/api-key has the one made at the first start with --listen"
        )
    if variables := _variables(starting.process.pid, run_dir):
        print(f"for other commands: export {variables}")
    return 0


def _variables(pid: int, run_dir: Path) -> str:
    """What another shell has to set to mean this node, and to start it again as it is."""
    from dsec.backends.container.keeper import options_of

    has = options_of(pid)
    values = {
        "DSEC_RUN_DIR": str(run_dir) if run_dir != Path(RUN_DIR) else "",
        "DSEC_STATE_DIR": has.get("--state-dir", ""),
        "DSEC_CGROUP": has.get("--cgroup") or os.environ.get("DSEC_CGROUP"),
        "DSEC_NODE": has.get("--node") or os.environ.get("DSEC_NODE"),
    }
    usual = {"DSEC_STATE_DIR": STATE_DIR, "DSEC_CGROUP": CGROUP if run_dir == Path(RUN_DIR) else ""}
    return " ".join(
        f"{name}={shlex.quote(value)}" for name, value in values.items() if value and value != usual.get(name)
    )


def _living(run_dir: Path) -> int | None:
    """The pid of the agent that runs there. One that was killed a moment ago may have its lock still, and no more."""
    from dsec.sdk._sync.client import Client

    end = time.monotonic() + DYING_S
    while (pid := read_lock(run_dir)) is not None and time.monotonic() < end:
        try:
            Client(f"unix://{run_dir}/api.sock").node()
        except NodeUnreachable:
            time.sleep(_POLL_S)
        except Rejected:
            break  # it answers, but not to us
        else:
            break
    return pid


def up_hint(words: list[str]) -> str:
    """What to say of options that `dsec up` does not have: they are probably the agent's."""
    if words[0].startswith("--url"):
        return f"; {_LOCAL}"
    return f"; options of the agent stand after `--`: dsec up -- {' '.join(words)}"


def _runs_already(pid: int, run_dir: Path, args: argparse.Namespace, extra: list[str]) -> int:
    """Say so, and that what was asked for is not what runs; 1 when it is not."""
    has = _options_of(pid, run_dir)
    state = f"; its state is in {has['--state-dir']}" if "--state-dir" in has else ""
    print(f"a node agent is running already (pid {pid}); it listens at {run_dir}/api.sock{state}")
    asked = {"--state-dir": args.state_dir and os.path.realpath(args.state_dir), "--cgroup": args.cgroup}
    others = [
        f"{name} {value} (it has {has[name]})"
        for name, value in asked.items()
        if value and value != has.get(name, value)
    ]
    for name in others:
        note(
            f"dsec: not applied: {name}: for another node give a run directory of its own, too (DSEC_RUN_DIR or "
            "--run-dir); to move this one, `dsec down --stop-all` first"
        )
    if extra:
        note(f"dsec: not applied: {' '.join(extra)}: `dsec down` first (sandboxes live on), then `dsec up` with them")
    return 1 if extra or others else 0


def node_state(run_dir: Path) -> str | None:
    """The state directory of the node that lives there, its links resolved; None: none lives, or it does not say."""
    return _options_of(read_lock(run_dir), run_dir).get("--state-dir")


def _options_of(pid: int | None, run_dir: Path) -> dict[str, str]:
    """What an agent was started with, as far as its command line or its keeper's says."""
    from dsec.backends.container.keeper import living_keeper, options_of

    keeper = living_keeper(run_dir)
    has = (options_of(keeper.pid) if keeper is not None else {}) | (options_of(pid) if pid is not None else {})
    if "--state-dir" in has:
        has["--state-dir"] = os.path.realpath(has["--state-dir"])
    return has


def _require_node() -> None:
    missing = [name for name in NODE_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise Unsupported.lacks("dsec up", "dsec[node]", f"no {', '.join(missing)}: in a clone: pip install '.[node]'")


class _Starting:
    """An agent on its way up: a session of its own, its log, and what it says until it is up.

    That goes into a file in memory: an agent that cannot start since the disk is full cannot write why into a log.
    """

    def __init__(self, line: list[str], state_dir: Path) -> None:
        self.log = state_dir / LOG_NAME
        log = self._open_log()
        self._said = os.memfd_create("said", os.MFD_CLOEXEC)
        try:
            # In our directory, which relative paths among the options mean; it goes to / once it has read them.
            self.process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=self._said,
                start_new_session=True,
                env={**os.environ, WORDS_APART_ENV: "1"},
            )
        finally:
            os.close(log)

    def _open_log(self) -> int:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            # Private: the log names commands and paths of sandboxes.
            return os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and self.log.parent.is_dir():
                note(f"dsec: no log is written: {self.log}: {error.strerror}")
                return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            advice = "run as root, or give --run-dir and --state-dir"
            raise NotStarted(f"cannot write {self.log}: {error}; {advice}") from error

    def failed(self, how: str) -> NotStarted:
        """The error with its last words, which go into the log, too."""
        said = os.pread(self._said, WORDS_MAX_BYTES, 0)
        with suppress(OSError), self.log.open("ab") as log:
            log.write(said)
        lines = said.decode("utf-8", "replace").strip().splitlines()
        words = "\n".join(lines[-LOG_LINES_SHOWN:]) or "(nothing)"
        return NotStarted(f"the node agent {how}; its last words (log: {self.log}):\n{words}")


def _await(starting: _Starting, run_dir: Path, timeout_s: float) -> str:
    from dsec.sdk._sync.client import Client

    client = Client(f"unix://{run_dir}/api.sock")
    end = time.monotonic() + timeout_s
    while True:
        # First the process, then the question: an agent that answers is up, whatever happens next.
        code = starting.process.poll()
        try:
            return client.node().node
        except Rejected as error:
            raise NotStarted(f"the node agent answers, but not to us: {error}") from error
        except NodeUnreachable:
            pass
        if code is not None:
            raise starting.failed(f"ended with code {code}")
        if time.monotonic() > end:
            _end(starting.process)
            raise starting.failed(f"did not answer within {timeout_s:g} s")
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(DOWN_TIMEOUT_S)
        return
    process.kill()
    process.wait()


def down_hint(words: list[str]) -> str:
    """What to say of options that `dsec down` does not have."""
    return f"; {_LOCAL}" if words[0].startswith("--url") else ""


def down_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec down`."""
    _directories(parser)
    parser.add_argument("--stop-all", action="store_true", help="stop all sandboxes first, and then the runtime too")
    parser.add_argument("--timeout-s", type=float, default=DOWN_TIMEOUT_S, metavar="S", help="(default: %(default)s)")


def down_command(args: argparse.Namespace) -> int:
    """Stop the agent; without --stop-all its sandboxes live on."""
    run_dir = args.run_dir.absolute()
    pid = read_lock(run_dir)
    if pid is None:
        pid = _agent_for_what_lives(args, run_dir) if args.stop_all else None
    if pid is None:
        print(f"no node agent runs in {run_dir}")
        return 0
    state = node_state(run_dir)
    if args.stop_all:
        _stop_all(run_dir)
    _terminate(pid, run_dir, args.timeout_s)
    print(f"the node agent (pid {pid}) has stopped")
    if args.stop_all:
        _stop_runtime(run_dir)
    elif state is not None and state != os.path.realpath(_state_dir(args)):
        note(f"dsec: its state is in {state}: DSEC_STATE_DIR={shlex.quote(state)} dsec up finds its sandboxes again")
    return 0


def _agent_for_what_lives(args: argparse.Namespace, run_dir: Path) -> int | None:
    """A new agent over the runtime of one that has died: it finds the sandboxes, and can stop them. Its pid."""
    from dsec.backends.container.keeper import living_keeper, options_of

    keeper = living_keeper(run_dir)
    if keeper is None:
        return None
    _require_node()
    from dsec.node.claim import LOCK

    options = options_of(keeper.pid)
    state_dir = Path(options.get("--state-dir", _state_dir(args)))
    cgroup = ["--cgroup", options["--cgroup"]] if "--cgroup" in options else []
    places = ["--run-dir", str(run_dir), "--state-dir", str(state_dir), *cgroup]
    # All are to end: also those whose state is not there any more, for which an agent is refused else.
    state_dir.mkdir(parents=True, exist_ok=True)
    (state_dir / LOCK).touch()
    starting = _Starting([sys.executable, "-m", "dsec.node", *places], state_dir)
    _await(starting, run_dir, args.timeout_s)
    return starting.process.pid


def _stop_all(run_dir: Path) -> None:
    from dsec.sdk._sync.client import Client
    from dsec.sdk._sync.net import each

    client = Client(f"unix://{run_dir}/api.sock")
    stopped = 0
    # Again until there is none: callers may create more while we stop these.
    while found := list(client.list()):
        errors = each(lambda sandbox: sandbox.stop(grace_s=0), found)
        if errors:
            raise errors[0]
        stopped += len(found)
    print(f"stopped {stopped} sandbox{'' if stopped == 1 else 'es'}")


def _terminate(pid: int, run_dir: Path, timeout_s: float) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # The lock again: between reading it and opening the pidfd the number may have become another process's.
        if read_lock(run_dir) != pid:
            return
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise DeadlineExceeded(
                f"the node agent (pid {pid}) has not stopped within {timeout_s:g} s; its log says why"
            )
    except PermissionError as error:
        raise Unavailable(f"the node agent (pid {pid}) is another user's: {error}; run as root") from error
    finally:
        os.close(fd)


def _stop_runtime(run_dir: Path) -> None:
    """End keeper and runtime, which outlive the agent for the sandboxes' sake; there are none now."""
    import asyncio

    from dsec.backends.container.keeper import living_keeper
    from dsec.wire.runtime import RuntimeClient

    if living_keeper(run_dir) is None:
        return

    async def stop() -> None:
        runtime = RuntimeClient(run_dir / "runtime.sock")
        try:
            await runtime.connect()
            await runtime.stop_keeper()
        finally:
            await runtime.close()

    try:
        asyncio.run(stop())
    except DsecError as error:
        note(f"dsec: the runtime goes on: {error}")
        return
    # It has answered; now it unmounts and ends. Only then may its directories be removed, or another be started.
    end = time.monotonic() + DOWN_TIMEOUT_S
    while living_keeper(run_dir) is not None:
        if time.monotonic() > end:
            note(f"dsec: the runtime has not ended within {DOWN_TIMEOUT_S:g} s; {run_dir}/runtime.log says why")
            return
        time.sleep(_POLL_S)
    print("the runtime has stopped")
