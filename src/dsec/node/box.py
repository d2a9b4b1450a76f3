"""One sandbox in the node's memory, and the row it has on the disk."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from dsec.backends.base import Exit, Guest, Handle, Runtime
from dsec.model.errors import DsecError, InvalidState, SandboxLost
from dsec.model.states import EndReason, LayerRef, SandboxInfo, State
from dsec.node.helpers import Helpers
from dsec.node.plan import BARE, Defaults
from dsec.node.store import Statement

if TYPE_CHECKING:
    from dsec.node.runs import Flight
    from dsec.node.sessions import Shell

encode_value = msgspec.msgpack.Encoder().encode
_decode_info = msgspec.msgpack.Decoder(SandboxInfo).decode
_decode_base = msgspec.msgpack.Decoder(Defaults).decode
_decode_handle = msgspec.msgpack.Decoder(Handle).decode

_COLUMNS = "id, state, name, job, backend, info, handle, base, expires_boot, idle_boot, ended_at"


class Box:
    """A sandbox that is alive. Everything here is changed on the event loop only."""

    __slots__ = (
        "active",
        "base",
        "creator",
        "expires_boot",
        "flights",
        "guest",
        "helpers",
        "idle_boot",
        "info",
        "kept",
        "next_step",
        "programs",
        "ready",
        "runtime",
        "settings_from",
        "shells",
        "stopping",
        "watcher",
    )

    def __init__(self, info: SandboxInfo, base: Defaults) -> None:
        self.info = info
        self.base = base
        self.settings_from: dict[str, LayerRef] = {}  # while it is created: which layer sets `cwd` and `user`
        self.runtime: Runtime | None = None
        self.guest: Guest | None = None
        self.helpers = Helpers()
        self.active = 0  # calls in flight, open streams, runs alive
        self.next_step = 1
        self.expires_boot: float | None = None
        self.idle_boot = 0.0
        self.flights: dict[str, Flight] = {}  # by key
        self.programs: dict[str, Flight] = {}  # those that are talked to, by process id
        self.shells: dict[str, Shell] = {}  # of sessions, by process id
        self.kept: deque[str] = deque()  # of those, ended ones whose output is still there; oldest first
        # Set once creation is over: None, or the error it failed with.
        self.ready: asyncio.Future[DsecError | None] = asyncio.get_running_loop().create_future()
        self.creator: asyncio.Task[Any] | None = None
        self.stopping: asyncio.Task[SandboxInfo] | None = None
        self.watcher: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def handle(self) -> Handle | None:
        return self.runtime.handle if self.runtime is not None else None

    def change(self, **fields: Any) -> None:
        """Replace fields of the info."""
        self.info = msgspec.structs.replace(self.info, **fields)

    def end(self, info: SandboxInfo, boot: float) -> None:
        """It has ended. When, by the clock that nobody sets, stays in its row as well: nothing goes on in it since."""
        self.info = info
        self.idle_boot = boot

    def remember(self) -> Callable[[], None]:
        """What puts back what callers may change of it."""
        before, expires = self.info, self.expires_boot

        def put_back() -> None:
            self.change(labels=before.labels, spec=before.spec)
            self.expires_boot = expires

        return put_back

    def adopt(self, runtime: Runtime) -> None:
        """It runs."""
        self.runtime = runtime
        self.guest = runtime.guest()

    def running_guest(self) -> Guest:
        """Where programs are run. Raises SandboxLost, and InvalidState before it runs."""
        if self.guest is None or self.info.state != "running":
            raise not_running(self.info)
        return self.guest

    def end_told(self, error: SandboxLost) -> SandboxLost:
        """A backend's word that it has ended, with the reason as the node knows it: an idle end is a stop below."""
        return lost(self.info) if self.info.end_reason is not None else error

    def idle_deadline(self) -> float | None:
        """When (boot clock) it will have been idle too long; None while something goes on in it."""
        limit = self.info.spec.idle_timeout_s
        return None if limit is None or self.active else self.idle_boot + limit

    def next_deadline(self) -> float | None:
        """When to look at it again at the latest. A busy one is looked at when it becomes idle."""
        moments = [moment for moment in (self.expires_boot, self.idle_deadline()) if moment is not None]
        return min(moments, default=None)

    def row(self) -> Statement:
        """The statement that writes its row as it is now."""
        info = self.info
        handle = None if self.handle is None else encode_value(self.handle)
        marks = ", ".join(["?"] * 11)
        return f"INSERT OR REPLACE INTO sandboxes ({_COLUMNS}) VALUES ({marks})", (
            info.id,
            info.state,
            info.name,
            info.job,
            info.backend,
            encode_value(info),
            handle,
            encode_value(self.base),
            self.expires_boot,
            self.idle_boot,
            info.ended_at,
        )


class Row(msgspec.Struct, frozen=True):
    """A row of the table of sandboxes."""

    info: SandboxInfo
    handle: Handle | None
    base: Defaults
    expires_boot: float | None
    idle_boot: float | None


SELECT = "SELECT info, handle, base, expires_boot, idle_boot FROM sandboxes"


def read_row(columns: tuple[Any, ...]) -> Row:
    """A row from what `SELECT` gives."""
    info, handle, base, expires_boot, idle_boot = columns
    return Row(
        _decode_info(info),
        None if handle is None else _decode_handle(handle),
        BARE if base is None else _decode_base(base),
        expires_boot,
        idle_boot,
    )


def ended(info: SandboxInfo, state: State, exit_: Exit, at: float) -> SandboxInfo:
    """The info of a sandbox after its end."""
    return msgspec.structs.replace(info, state=state, end_reason=exit_.reason, ended_at=at, idle_since=None)


def not_running(info: SandboxInfo) -> DsecError:
    """The error for a call that needs a running sandbox."""
    if info.state in ("stopping", "stopped", "lost"):
        return lost(info)
    return InvalidState(
        f"sandbox {info.id} is {info.state}; this call needs a running one",
        detail={"state": info.state},
        sandbox_id=info.id,
    )


def lost(info: SandboxInfo) -> SandboxLost:
    """The error for every call on a sandbox that has ended, or is ending: one class, with the reason."""
    reason = info.end_reason or "lost"
    return SandboxLost(
        f"sandbox {info.id} has ended: {_ending_in_words(info, reason)}; create a new one",
        detail={"state": info.state, "reason": reason, "ended_by": info.ended_by},
        sandbox_id=info.id,
    )


def _ending_in_words(info: SandboxInfo, reason: EndReason) -> str:
    words: dict[EndReason, str] = {
        "stopped": f"a call stopped it ({info.ended_by or 'stop'})",
        "idle": f"nothing went on in it for {info.spec.idle_timeout_s or 0:g} s (idle)",
        "lifetime": "its time was over (lifetime)",
        "init_died": "its init died (init_died)",
        "oom": "it ran out of memory (oom)",
        "lost": "the node lost it (lost)",
        "disk_lost": "the node's disk failed or was full, and what it had written is lost (disk_lost)",
        "reboot": "the machine was restarted (reboot)",
        "create_failed": "its creation failed (create_failed)",
    }
    return words[reason]
