# Generated from dsec/sdk/_async/client.py by scripts/generate_sync.py: edit that file.

"""The client: creates sandboxes and finds them again."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Self, Unpack

import msgspec

from dsec.model import limits
from dsec.model.errors import DsecError, InvalidSpec, InvalidState, Unavailable
from dsec.model.ids import check_name, new_key
from dsec.model.specs import Spec
from dsec.model.states import Capabilities, NodeInfo, SandboxInfo
from dsec.sdk import codec, values
from dsec.sdk._sync.batch import Batch
from dsec.sdk._sync.layers import Layers
from dsec.sdk._sync.net import entered, finish
from dsec.sdk._sync.sandbox import Sandbox
from dsec.sdk._sync.transport import Transport
from dsec.sdk.keywords import WrongArgument, explained
from dsec.sdk.target import ENV_KEY, default_url, parse

_SANDBOXES: Final = "/v1/sandboxes"


@explained
class Client:
    """A connection to a node or gateway.

    `url` is `unix:///path`, `http(s)://host:port` or `ssh://user@host`; without one DSEC_URL, else the local node's
    socket. `api_key` is DSEC_API_KEY where it is not given. Nothing is sent before the first call. One client serves
    any number of threads and tasks and goes on working in a forked child.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        for name, given in (("url", url), ("api_key", api_key)):
            if given is not None and not isinstance(given, str):
                # Its type: it may be a key.
                text = f"{name} is of the type {type(given).__name__}; allowed: a str, or None"
                raise WrongArgument(text, detail={"field": name})
        self._target = parse(url or default_url())
        key = os.environ.get(ENV_KEY) if api_key is None else api_key
        if key and not (key.isascii() and key.isprintable()):
            raise InvalidSpec("api_key: it has characters that cannot stand in an HTTP header")
        # Shared by everything made from this client; not part of the public surface.
        self.transport = Transport(self._target, key)
        self.layers = Layers(self.transport)

    @property
    def url(self) -> str:
        """Where it connects to."""
        return self._target.url

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return shared, (self.url,)

    @entered
    def create(self, spec: Spec | None = None, /, **fields: Unpack[values.SpecFields]) -> Sandbox:
        """Create a sandbox and wait until it runs. Fields as in `dsec.Spec`; with a Spec they change it.

        NodeFull: no room (within `wait_s`); InvalidSpec, Unsupported: nothing was made; Conflict: the name is in use.
        """
        made = values.make_spec(spec, fields)
        body, key = codec.encode(made), new_key()
        try:
            info = self.transport.call("POST", _SANDBOXES, SandboxInfo, body=body, key=key)
        except Exception:  # the server's answer, or none: there is nothing to undo
            raise
        except BaseException as error:
            # The caller gives up (KeyboardInterrupt, a cancelled task): nobody would ever stop what is being made.
            if made.if_exists == "error":
                finish(self._undo(body, key, made.wait_s, error), self.transport.timing.kill_s)
            raise
        return Sandbox(self, info.id, info)

    def _undo(self, body: bytes, key: str, wait_s: float, error: BaseException) -> bool:
        """Learn by its key what a creation has made, and stop it."""
        if wait_s > self.transport.timing.kill_s:
            error.add_note("the sandbox may still be made; its idle timeout ends it")
            return False
        try:
            info = self.transport.call("POST", _SANDBOXES, SandboxInfo, body=body, key=key)
            Sandbox(self, info.id, info).stop(grace_s=0)
        except (Unavailable, InvalidState) as failure:
            error.add_note(f"the sandbox may have been made; finding it failed: {failure}; its idle timeout ends it")
            return False
        except DsecError:
            pass  # it was refused: there is none
        return True

    def create_many(
        self,
        specs: int | Sequence[Spec],
        /,
        *,
        atomic: bool = False,
        wait_s: float = 0.0,
        **fields: Unpack[values.ManyFields],
    ) -> Batch:
        """Create many sandboxes at once: a list of Specs, or a number of equal ones with their fields.

        A context manager; inside, iterating gives each sandbox as it gets ready, or CreateFailed (as an item, not
        raised) with `.index` and `.error`. With `atomic=True` there are all or none: entering waits for all, and
        raises when one fails. Leaving stops them all. `wait_s`: how long to wait for room.
        """
        return Batch(self, values.make_specs(specs, fields), atomic=atomic, wait_s=wait_s)

    @entered
    def get(self, ref: str) -> Sandbox:
        """The sandbox with this id or name. NotFound: there is none."""
        info = self.transport.call("GET", f"/v1/sandboxes/{codec.quote(_check_ref(ref))}", SandboxInfo)
        return Sandbox(self, info.id, info)

    def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        job: str | None = None,
        state: values.States | None = None,
    ) -> Iterator[Sandbox]:
        """Sandboxes, page by page as they are asked for: all alive, or those in one of the states (`"any"`: all)."""
        query = [f"label={codec.quote(f'{key}={value}')}" for key, value in values.label_map(labels or {}).items()]
        if job is not None:
            query.append(f"job={codec.quote(check_name(job, 'job'))}")
        states = [state] if isinstance(state, str) else state or ()
        if not isinstance(states, Collection) or not all(isinstance(one, str) for one in states):
            raise WrongArgument.field("state", state, 'a state as "running", several of them, or "any"')
        query += [f"state={codec.quote(one)}" for one in states]
        query.append(f"limit={limits.LIST_PAGE_DEFAULT}")
        cursor: str | None = ""
        while cursor is not None:
            more = [f"cursor={codec.quote(cursor)}"] if cursor else []
            page = self.transport.call("GET", f"/v1/sandboxes?{'&'.join(query + more)}", codec.SandboxPage)
            items = deque(page.items)
            while items:
                info = items.popleft()
                yield Sandbox(self, info.id, info)
            cursor = page.next_cursor

    def capabilities(self) -> dict[str, Capabilities]:
        """What each backend can do there and, where it cannot, why."""
        return self.transport.call("GET", "/v1/capabilities", dict[str, Capabilities])

    def node(self) -> NodeInfo:
        """The node: its version, its room, what runs on it."""
        return self.transport.call("GET", "/v1/node", NodeInfo)

    def job(self, name: str) -> Job:
        """The sandboxes of one training or evaluation run."""
        return Job(self, check_name(name, "job"))

    def close(self) -> None:
        """Let go of connections; sandboxes live on."""
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Stopped(msgspec.Struct):
    stopped: int = 0


@explained
class Job:
    """All sandboxes with one `job`."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = name

    def list(self, *, state: values.States | None = None) -> Iterator[Sandbox]:
        """Its sandboxes, as `Client.list`."""
        return self._client.list(job=self.name, state=state)

    def stop(self) -> int:
        """Stop them all; how many there were."""
        path = f"/v1/jobs/{codec.quote(self.name)}:stop"
        return (self._client.transport.call("POST", path, _Stopped, key=new_key())).stopped


def _check_ref(ref: str) -> str:
    if not isinstance(ref, str) or not ref or ref.startswith("."):
        raise InvalidSpec.field("ref", ref, "the id or the name of a sandbox")
    return ref


_shared: dict[str, Client] = {}


def shared(url: str) -> Client:
    """This process's client for unpickled handles of one server."""
    # setdefault: two threads that meet here end up with the same one.
    return _shared.get(url) or _shared.setdefault(url, Client(url))
