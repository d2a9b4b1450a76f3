"""The values of the native runtime's protocol, as `docs/reference/native.md` has them.

Unknown fields are ignored, so that an older client reads a newer runtime. Sizes are bytes.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

PROTOCOL: Final = 1

RunCause = Literal["exited", "signalled", "timeout", "oom", "killed"]
SandboxState = Literal["running", "ended"]
UpperKind = Literal["auto", "btrfs", "ext4", "tmpfs", "prjquota"]


class Request(msgspec.Struct, frozen=True, gc=False):
    """One frame to the runtime."""

    id: int
    op: str
    args: Any


class WireError(msgspec.Struct, frozen=True):
    """Why the runtime did not do it."""

    code: str
    message: str
    detail: dict[str, int | str | float | bool | None] = {}


class SandboxExit(msgspec.Struct, frozen=True):
    """How a sandbox ended. `reason`: stopped, init_died, disk_lost, lost."""

    reason: str = "lost"
    code: int | None = None
    signal: int | None = None
    oom: bool = False


class SandboxStatus(msgspec.Struct, frozen=True):
    """A sandbox as the runtime knows it."""

    id: str
    state: SandboxState
    init_pid: int = 0
    started_ns: int = 0
    uid_base: int = 0
    upper_kind: str = ""
    exit: SandboxExit | None = None
    cgroup_id: int = 0
    runs: int = 0


class Answer(msgspec.Struct, gc=False):
    """One frame from the runtime: an answer (`ok` or `err`) or an event (`ev`)."""

    id: int
    ok: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    err: WireError | None = None
    ev: str | None = None
    s: int = 0
    o: int = 0
    d: bytes = b""
    pid: int = 0
    status: SandboxStatus | None = None


class Nothing(msgspec.Struct, frozen=True):
    """Arguments or an answer without content."""


class HelloArgs(msgspec.Struct, frozen=True):
    protocol: int = PROTOCOL


class Hello(msgspec.Struct, frozen=True):
    """Who answers. `instance` is new with each keeper."""

    protocol: int
    version: str
    pid: int
    instance: str
    binary: str = ""


class CgroupProbe(msgspec.Struct, frozen=True):
    mode: str | None = None
    controllers: tuple[str, ...] = ()


class Probe(msgspec.Struct, frozen=True):
    """What the kernel can do, found by trying it. `upper` has the best kind first."""

    kernel: str
    cgroup: CgroupProbe = CgroupProbe()
    erofs: str | None = None
    overlay: str | None = None
    idmap: dict[str, bool] = {}
    upper: tuple[str, ...] = ()
    network: str | None = None
    reasons: dict[str, str] = {}


class LayerArgs(msgspec.Struct, frozen=True, omit_defaults=True):
    digest: str
    path: str = ""


class Layers(msgspec.Struct, frozen=True):
    layers: tuple[LayerArgs, ...]


class UpperSpec(msgspec.Struct, frozen=True):
    bytes: int
    kind: UpperKind = "auto"
    inodes: int = 0


class TmpfsSpec(msgspec.Struct, frozen=True):
    path: str
    bytes: int
    mode: int


class SeccompSpec(msgspec.Struct, frozen=True):
    deny: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    ioctl_deny: tuple[int, ...] = ()


class SandboxPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything the runtime needs to put a sandbox together."""

    id: str
    hostname: str
    layers: tuple[str, ...]
    upper: UpperSpec
    memory_bytes: int
    pids_max: int
    nofile: int
    shm_bytes: int
    pty_max: int
    deadline_ms: int
    swap_bytes: int = 0
    cpu_milli: int = 0
    cpu_weight: int = 100
    cpus: tuple[int, ...] = ()
    tmpfs: tuple[TmpfsSpec, ...] = ()
    files: dict[str, bytes] = {}
    no_new_privs: bool = False
    caps: tuple[str, ...] | None = None
    seccomp: SeccompSpec = SeccompSpec()
    network: str = "loopback"


class CreateArgs(msgspec.Struct, frozen=True):
    plan: SandboxPlan


class IdArgs(msgspec.Struct, frozen=True):
    id: str


class StopArgs(msgspec.Struct, frozen=True):
    id: str
    grace_ms: int


class Sandboxes(msgspec.Struct, frozen=True):
    sandboxes: tuple[SandboxStatus, ...]


class Pressure(msgspec.Struct, frozen=True):
    """How long some task of a sandbox waited for each; None where the kernel keeps no account."""

    cpu_us: int | None = None
    memory_us: int | None = None
    io_us: int | None = None


class SandboxUsage(msgspec.Struct, frozen=True):
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    swap_bytes: int = 0
    cpu_us: int = 0
    user_us: int = 0
    system_us: int = 0
    pids: int = 0
    oom_kills: int = 0
    pids_max_events: int = 0
    throttled_us: int = 0
    memory_max_events: int = 0
    pressure: Pressure = Pressure()
    disk_bytes: int = 0
    disk_inodes: int = 0


class RunStart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`RunPlan` of the contract, with how the client wants to follow the run."""

    sandbox: str
    run: str
    argv: tuple[bytes, ...]
    env: dict[bytes, bytes]
    cwd: bytes
    user: str
    stdin: bytes = b""
    timeout_ms: int = 0
    head_bytes: int = 0
    tail_bytes: int = 0
    memory_cgroup: bool = True
    nice: int = 0
    stream: bool = False
    window: int = 0


class TtySize(msgspec.Struct, frozen=True, gc=False):
    rows: int
    cols: int


class TalkStart(RunStart, frozen=True, kw_only=True, gc=False):
    """A run that is talked to. Not fields of every run: each is a frame on the hottest path."""

    stdin_open: bool = False
    tty: TtySize | None = None
    control: bool = False
    spool_bytes: int = 0


class RunAttach(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    sandbox: str
    run: str
    stream: bool = False
    window: int = 0
    offsets: tuple[int, ...] = (0, 0)
    lossy: bool = False


class RunAck(msgspec.Struct, frozen=True, gc=False):
    request: int
    bytes: int


class RunRef(msgspec.Struct, frozen=True, gc=False):
    sandbox: str
    run: str


class RunKill(msgspec.Struct, frozen=True, gc=False):
    sandbox: str
    run: str
    signal: int = 0
    cause: Literal["killed", "timeout"] = "killed"


class FenceKill(RunKill, frozen=True, gc=False):
    """What a run has begun since its newest fence was made."""

    fence: int = 0


class RunStdin(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    sandbox: str
    run: str
    offset: int
    d: bytes
    eof: bool


class InputSize(msgspec.Struct, frozen=True, gc=False):
    size: int
    closed: bool = False


class RunRead(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    sandbox: str
    run: str
    s: int
    offset: int
    max: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Kept output: `o` is where it begins, `total` what there was so far, `gap` where it is interrupted."""

    o: int
    d: bytes
    total: int
    state: str
    gap: int | None = None


class RunResize(msgspec.Struct, frozen=True, kw_only=True):
    sandbox: str
    run: str
    rows: int
    cols: int


class Fence(msgspec.Struct, frozen=True):
    fence: int


class RunUsage(msgspec.Struct, frozen=True, gc=False):
    user_us: int = 0
    system_us: int = 0
    max_rss_bytes: int = 0
    memory_peak_bytes: int = 0


class Met(msgspec.Struct, frozen=True):
    """How often a limit was met."""

    memory: int = 0
    pids: int = 0


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it is now, its counters since its start."""

    state: str
    pid: int | None = None
    usage: RunUsage
    limits_hit: tuple[str, ...] = ()
    met: Met = Met()
    totals: tuple[int, ...] = (0, 0)
    input: InputSize | None = None


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A process alive inside."""

    pid: int
    ppid: int = 0
    run: str | None = None
    argv: tuple[bytes, ...] = ()
    name: bytes = b""
    cwd: bytes = b""
    uid: int | None = None
    state: str = ""
    wchan: str = ""
    cpu_us: int = 0
    rss_bytes: int = 0
    age_ms: int = 0
    threads: int = 1


class ProcessTable(msgspec.Struct, frozen=True):
    processes: tuple[ProcessRow, ...]
    more: bool = False


class SandboxRef(msgspec.Struct, frozen=True):
    sandbox: str


class RunInfo(msgspec.Struct, frozen=True):
    run: str
    state: str
    pid: int | None = None


class Runs(msgspec.Struct, frozen=True):
    runs: tuple[RunInfo, ...]


class StreamResult(msgspec.Struct, frozen=True, gc=False):
    total: int = 0
    head: bytes = b""
    tail: bytes = b""
    dropped: int = 0


class RunResult(msgspec.Struct, frozen=True):
    """How a run ended; `streams` are standard output and error."""

    run: str
    cause: RunCause
    streams: tuple[StreamResult, StreamResult]
    exit_code: int | None = None
    signal: int | None = None
    limits_hit: tuple[str, ...] = ()
    started_ns: int = 0
    duration_ns: int = 0
    usage: RunUsage = RunUsage()
    leftover: int = 0


class ShutdownArgs(msgspec.Struct, frozen=True):
    restart: bool = False
