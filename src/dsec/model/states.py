"""What a caller is told: the state of a sandbox, the result of a run, usage, capabilities."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from dsec.model.errors import no_attribute
from dsec.model.specs import Spec

State = Literal["creating", "running", "paused", "stopping", "stopped", "lost"]
Cause = Literal["exited", "signalled", "timeout", "oom", "killed", "policy"]
EndReason = Literal["stopped", "idle", "lifetime", "init_died", "oom", "lost", "disk_lost", "reboot", "create_failed"]

SHOWN_BYTES: Final = 64  # of an output, by its repr
ALIVE: tuple[State, ...] = ("creating", "running", "paused", "stopping")


class LayerRef(msgspec.Struct, frozen=True, kw_only=True):
    """A layer a sandbox runs on: the reference as it was asked for and the digest it meant at that moment."""

    ref: str
    digest: str
    role: Literal["base", "workspace", "toolkit"]


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """For how many seconds of a sandbox's life some process of it could not go on for want of each.

    From the kernel's pressure stall information (PSI, the totals of `some`); None where it keeps none.
    """

    cpu_s: float | None = None
    memory_s: float | None = None
    io_s: float | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sandbox or a run has used. CPU in seconds, memory and disk in bytes.

    `cpu_throttled_s`: how long its CPUs stood still since its quota (`cpu`) was used up. `memory_limit_hits`: how often
    an allocation met the limit, whether or not the kernel found memory to take back. Both, and `pressure`, are a
    sandbox's; those of a run are not counted apart.
    """

    cpu_user_s: float = 0.0
    cpu_system_s: float = 0.0
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    disk_bytes: int | None = None
    pids: int | None = None
    cpu_throttled_s: float | None = None
    memory_limit_hits: int | None = None
    pressure: Pressure | None = None


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sandbox as its node knows it. Times are seconds since the epoch."""

    id: str
    node: str
    state: State
    backend: str
    spec: Spec
    layers: tuple[LayerRef, ...] = ()
    name: str | None = None
    job: str | None = None
    labels: dict[str, str] = {}
    created_at: float = 0.0
    admitted_at: float | None = None  # when there was room for it
    started_at: float | None = None
    ended_at: float | None = None
    expires_at: float | None = None  # when its lifetime ends
    idle_since: float | None = None  # None while something is going on in it
    end_reason: EndReason | None = None
    ended_by: str | None = None  # the call and the caller: "stop by uid 0", "job stop by key ci"; None: nobody did
    parent: str | None = None
    replaced_by: str | None = None


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One output stream of a run: its start, its end, and how many bytes it had in all."""

    head: bytes = b""
    tail: bytes = b""
    total: int = 0

    @property
    def dropped_bytes(self) -> int:
        """Bytes between head and tail that were not kept."""
        return self.total - len(self.head) - len(self.tail)

    def text(self) -> str:
        """UTF-8 with replacement; says in one line of its own what is missing."""
        if not self.dropped_bytes:
            return (self.head + self.tail).decode("utf-8", "replace")
        gap = f"\n[... {self.dropped_bytes} bytes dropped ...]\n"
        return self.head.decode("utf-8", "replace") + gap + self.tail.decode("utf-8", "replace")

    def __repr__(self) -> str:
        # Short: a result is printed by hand, and in every traceback that shows variables.
        shown = self.head[:SHOWN_BYTES]
        return f"Output({shown!r}{'...' if self.total > len(shown) else ''}, total={self.total})"


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a program ended, as its backend says.

    `exit_code` is 128 + signal for what was killed. `limits_hit` names the limits (`memory pids disk output spool`)
    that a process of the run is known to have met, whatever the exit code.
    """

    exit_code: int
    cause: Cause
    signal: int | None = None
    limits_hit: tuple[str, ...] = ()
    out: Output = Output()
    err: Output = Output()
    started_at: float = 0.0
    duration_s: float = 0.0
    usage: Usage = Usage()


class RunResult(RunOutcome, frozen=True, kw_only=True, omit_defaults=True):
    """How a program ended. Nothing the program did raises; a lost sandbox or node always does.

    Beside what a `RunOutcome` says: `step` numbers the calls of a sandbox from 1; `session_ended`, of a session's
    command: its shell has ended with it, and directory, variables and functions are gone.
    """

    process_id: str
    step: int = 0
    session_ended: bool = False

    @property
    def ok(self) -> bool:
        """Whether it exited by itself with code 0."""
        return self.exit_code == 0 and self.cause == "exited"

    @property
    def stdout(self) -> str:
        """Standard output as text: UTF-8 with replacement; a gap is marked."""
        return self.out.text()

    @property
    def stderr(self) -> str:
        """Standard error as text: UTF-8 with replacement; a gap is marked."""
        return self.err.text()

    @property
    def stdout_bytes(self) -> bytes:
        """Standard output exactly: head and tail, see `dropped_bytes`."""
        return self.out.head + self.out.tail

    @property
    def stderr_bytes(self) -> bytes:
        """Standard error exactly: head and tail, see `dropped_bytes`."""
        return self.err.head + self.err.tail

    @property
    def dropped_bytes(self) -> int:
        """Bytes of both streams that were not kept."""
        return self.out.dropped_bytes + self.err.dropped_bytes

    @property
    def truncated(self) -> bool:
        """Whether any output was not kept."""
        return self.dropped_bytes > 0


# Not within the class: a type checker would take every attribute for one that is there.
RunResult.__getattr__ = no_attribute  # type: ignore[attr-defined]  # of a class: asked for what it does not have


class Capability(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing a backend can or cannot do here: the mechanism used, or the reason it is missing."""

    available: bool
    mechanism: str | None = None
    reason: str | None = None


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one backend can do on this node."""

    backend: str
    available: bool
    reason: str | None = None
    features: dict[str, Capability] = {}


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node, its room and what it can do."""

    node: str
    version: str
    started_at: float
    sandboxes: int
    capabilities: dict[str, Capabilities] = {}
    capacity: dict[str, Any] = {}


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A layer in the store."""

    digest: str
    names: tuple[str, ...] = ()
    role: Literal["base", "workspace", "toolkit"] = "base"
    size_bytes: int = 0
    created_at: float = 0.0
    source: str | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    user: str | None = None
    in_use: int = 0
