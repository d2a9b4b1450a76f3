"""The boundary between a node and the ways to run a sandbox.

A node builds a complete `StartPlan`; a backend carries it out. Plans and handles are values: logged, stored, replayed.
A backend never decides, never resolves names of layers, never reads policy. `conformance` is the executable suite
that every backend passes.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import msgspec

from dsec.model import limits
from dsec.model.files import DiffReport, Entry, FileChange, FileEvent, Listing, TreeReport, Written
from dsec.model.processes import InputState, OutputPiece, Process, Terminal
from dsec.model.states import Capabilities, EndReason, RunOutcome, Usage

HANDLE_VERSION = 1

# Called with (stream, offset of the first byte, bytes); the awaited time is back-pressure. Streams are standard output
# (1), standard error (2) and, of a program that has one, the control stream (3).
Sink = Callable[[int, int, bytes], Awaitable[None]]
# Bytes of a file or a tree; a view is valid until the next piece.
Piece = bytes | memoryview
DataSink = Callable[[Piece], Awaitable[None]]


class LayerMount(msgspec.Struct, frozen=True, kw_only=True):
    """One read-only layer: its digest and where its EROFS image lies on this node."""

    digest: str
    path: str


class StartPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to start one sandbox. Layers stand base first; sizes are bytes; `cpu` is in cores."""

    id: str
    hostname: str
    layers: tuple[LayerMount, ...]
    env: dict[str, str]
    cwd: str
    user: str
    cpu: float
    cpu_weight: int
    cpus: tuple[int, ...]
    memory_bytes: int
    disk_bytes: int
    pids: int
    nofile: int = limits.NOFILE_DEFAULT
    shm_bytes: int = limits.SHM_DEFAULT_BYTES
    pty_max: int = limits.PTY_MAX
    no_new_privs: bool = False
    files: dict[str, bytes] = {}
    deadline_s: float = 30.0


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """What finds a sandbox again after the node agent restarted. `data` is the backend's own."""

    backend: str
    id: str
    version: int = HANDLE_VERSION
    data: dict[str, Any] = {}


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a sandbox ended."""

    reason: EndReason
    detail: str = ""


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One program to run, complete: nothing is looked up any more. `process_id` makes starting it idempotent.

    `stdin_open`: `stdin` are the first bytes of its input, more come by `write_stdin`. `tty`: a terminal of this size,
    with one output (1). `control`: a third output, its descriptor 3. Of each output the newest `spool_bytes` stay
    readable until it is forgotten.
    """

    process_id: str
    argv: tuple[bytes, ...]
    env: dict[str, str]
    cwd: str
    user: str
    stdin: bytes = b""
    timeout_s: float | None = None
    head_bytes: int = limits.OUTPUT_HEAD_BYTES
    tail_bytes: int = limits.OUTPUT_TAIL_BYTES
    stdin_open: bool = False
    tty: Terminal | None = None
    control: bool = False
    spool_bytes: int = 0


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A program started in a sandbox, alive or ended and not yet forgotten."""

    process_id: str
    state: str  # starting | running | ended
    pid: int | None = None


class ProgramStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A program as it is now; usage and limits since its start. `totals`: bytes of each output so far.

    `met`: of limits that are counted, how often each was met, while it runs.
    """

    ended: bool
    usage: Usage
    limits_hit: tuple[str, ...] = ()
    met: dict[str, int] = {}
    totals: tuple[int, ...] = (0, 0)
    input: InputState | None = None


class Inside(msgspec.Struct, frozen=True, kw_only=True):
    """Processes alive in a sandbox; `more`: there are some beyond those listed."""

    processes: tuple[Process, ...]
    more: bool = False


class Files(Protocol):
    """The files of a running sandbox, with the rights of one of its users; one operation at a time.

    Whatever is resolved is resolved inside. Paths are bytes, absolute or relative to the directory it was opened with.
    Operations raise a FileError for what the sandbox's kernel refuses, SandboxLost when the sandbox has ended, and
    Unavailable when they were cut short: what only reads may be repeated then. A cancelled write leaves what was there.
    """

    @property
    def usable(self) -> bool:
        """Whether another operation can begin; after one that was cut short it cannot."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...

    async def stat(self, path: bytes, *, follow: bool = True) -> Entry:
        """One file; with `follow` what a symbolic link leads to."""
        ...

    async def list(self, path: bytes, *, cursor: bytes | None = None, limit: int | None = None) -> Listing:
        """A page of a directory. A name that is there all the time comes once, whatever comes and goes beside it."""
        ...

    async def mkdir(self, path: bytes, *, parents: bool, mode: int | None = None) -> Entry:
        """Make a directory; with `parents` also those above, and one that is there is as good."""
        ...

    async def remove(self, path: bytes, *, recursive: bool) -> None:
        """Remove a file, a link itself, or a directory: an empty one, or with all below it. Follows no link."""
        ...

    async def move(self, source: bytes, target: bytes, *, replace: bool) -> Entry:
        """Give it another place. FileExists, unless `replace`. Right also if it is gone from there again."""
        ...

    async def chmod(self, path: bytes, mode: int) -> Entry:
        """Set its permission bits."""
        ...

    async def read(
        self,
        path: bytes,
        *,
        offset: int,
        length: int | None,
        opened: Callable[[Entry], Awaitable[None]],
        sink: DataSink,
    ) -> None:
        """The bytes of a regular file. `opened` is told what was opened before the first of them."""
        ...

    async def write(
        self, path: bytes, pieces: AsyncIterator[Piece], *, mode: int | None, parents: bool, exclusive: bool
    ) -> Written:
        """The whole content of a file: there at once, or the old one stays."""
        ...

    async def append(self, path: bytes, pieces: AsyncIterator[Piece], *, mode: int | None, parents: bool) -> Entry:
        """More at the end of a file, which is made when it is not there."""
        ...

    async def tree_out(self, path: bytes, sink: DataSink) -> TreeReport:
        """A directory with all below it, or one file, as a tar stream (pax)."""
        ...

    async def tree_in(self, path: bytes, pieces: AsyncIterator[Piece], *, parents: bool, owners: bool) -> TreeReport:
        """Unpack a tar stream below a directory; nothing of it lands elsewhere."""
        ...

    async def watch(self, path: bytes, *, recursive: bool, sink: Callable[[FileEvent | None], Awaitable[None]]) -> str:
        """Changes as they happen; None first, once nothing is missed. Returns when what is watched is gone."""
        ...

    async def diff(
        self, path: bytes, *, limit: int | None, sink: Callable[[tuple[FileChange, ...]], Awaitable[None]]
    ) -> DiffReport:
        """What at a path and below is not as it was in the layers, some at a time, a directory before what is in it.

        For what was opened with `diff`. Each path once, by what it is and was, whatever happened in between: what was
        made and removed again is none, nor is what was changed back. Of a directory its time does not count. No link
        is followed, at the path neither (FileError: ELOOP); what is mounted inside is left out (at the path: EXDEV).
        FileNotFound: there is nothing at the path and was nothing.
        """
        ...


class Guest(Protocol):
    """Programs in a running sandbox. The same for every backend.

    Starting the same `process_id` again attaches to it. Raises ProgramNotStarted when this sandbox has no such program,
    user or directory, InvalidSpec for a plan that no sandbox could carry out, SandboxLost when the sandbox ended,
    Unknown when it cannot be known whether or how the program ran. Cancelling a call stops nothing: `kill` does. Nor
    does an exception of the sink: it comes out of the call, and the program runs on, captured. All output has been
    given to the sink when a call returns.
    """

    async def run(
        self, plan: RunPlan, *, sink: Sink | None = None, started: Callable[[], None] | None = None
    ) -> RunOutcome:
        """Start a program and wait for its end. `started` is called once it has been launched."""
        ...

    async def attach(
        self, process_id: str, *, sink: Sink | None = None, offsets: tuple[int, ...] = (0, 0), lossy: bool = False
    ) -> RunOutcome:
        """Wait for a program that was started before. NotFound: it was never launched, or is forgotten.

        A `lossy` reader never makes the program wait: what it was too slow for is a jump of the offset.
        """
        ...

    async def kill(self, process_id: str, signal: int | None = None) -> None:
        """Send a signal to its process; without one, kill its whole tree at once.

        After its end a signal does nothing; without one, what it has left behind is killed.
        """
        ...

    async def write_stdin(self, process_id: str, offset: int, data: bytes, *, eof: bool) -> InputState:
        """More input for a program with an open one; returns once little of it waits to be read.

        Idempotent: a part that was taken before is skipped. InvalidSpec: an offset beyond what was taken, `eof` for a
        terminal; Conflict: its input is not open; Exhausted: too much waits.
        """
        ...

    async def resize(self, process_id: str, size: Terminal) -> None:
        """Another size for its terminal. Conflict: it has none."""
        ...

    async def read_output(self, process_id: str, stream: int, offset: int, limit: int) -> OutputPiece:
        """What is kept of an output from an offset on, without waiting."""
        ...

    async def status(self, process_id: str) -> ProgramStatus:
        """As it is now."""
        ...

    async def fence(self, process_id: str) -> int:
        """What the program begins from now on can be killed by itself. Fences count from 1."""
        ...

    async def kill_fence(self, process_id: str, fence: int) -> None:
        """Kill what was begun since that fence, the newest, with all its descendants; the program lives on."""
        ...

    async def inside(self) -> Inside:
        """Every process that is alive."""
        ...

    async def processes(self) -> list[ProcessInfo]:
        """Programs alive, or ended and not forgotten."""
        ...

    async def forget(self, process_id: str) -> None:
        """Free the kept result; idempotent. Conflict: it is still running."""
        ...

    async def dial(self, port: int) -> socket.socket:
        """A connected, non-blocking TCP socket to what listens on a port of its loopback. InvalidState: nothing."""
        ...

    async def files(self, *, user: str, cwd: str, diff: bool = False) -> Files:
        """Its files; with `diff` also to compare them. ProgramNotStarted: it has no such user."""
        ...

    def discard(self, process_id: str) -> None:
        """As `forget`, soon and without an answer: what cannot be done now is left to the bound on kept results.

        After every run a node has recorded: waiting for an answer that nobody looks at would cost as much as a call.
        """
        ...


class Runtime(Protocol):
    """One running sandbox."""

    @property
    def handle(self) -> Handle: ...

    def guest(self) -> Guest: ...

    async def wait(self) -> Exit:
        """Until it has ended, by itself or by `stop`."""
        ...

    async def stop(self, *, grace_s: float = 0.0) -> Exit:
        """End it for good and release everything; idempotent."""
        ...

    async def usage(self) -> Usage: ...

    async def oom_kills(self) -> int:
        """How many processes the kernel has ended for want of memory: at least the file helpers, also past ones."""
        ...


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided about a connection of a sandbox, or a question for a name; `at` in seconds since the epoch.

    `kind`: `connect`, `dns`, `cut` (a new policy ended it), `dial` (allowed, and could not be made). `rule` is the id
    of the one that decided; where none did `why` says what.
    """

    at: float
    sandbox: str
    kind: str
    allow: bool
    rule: str | None = None
    why: str | None = None
    name: str | None = None
    address: str | None = None
    port: int | None = None


class NetworkCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a sandbox's connections: how many are open, bytes of those that ended, how often each rule decided
    since the table came, and how often none did."""

    connections: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    hits: dict[str, int] = {}
    unmatched: int = 0


Verdicts = Callable[[list[Verdict], dict[str, int]], None]


class Networks(Protocol):
    """What lets sandboxes of a backend reach something. A sandbox that it was told nothing of has loopback only.

    What it is told is kept through the deaths of whatever enforces it; until it is enforced again nothing is reached.
    """

    def configure(self, *, resolvers: tuple[str, ...], own: tuple[str, ...], told: Verdicts) -> None:
        """Of the node: where it asks for names (`ADDRESS:PORT`), and its own addresses, which are closed. Before all
        else, and again when they change. `told` gets verdicts, and how many were dropped, by sandbox."""
        ...

    async def put(self, sandbox_id: str, table: bytes) -> None:
        """From now on this table decides (docs/reference/network-table.md). When it returns no connection is left that
        it denies. When it raises the one before holds. Unavailable; SandboxLost."""
        ...

    async def remove(self, sandbox_id: str) -> None:
        """Nothing is reached any more; its connections end. Nothing to do for one that it was told nothing of."""
        ...

    async def settled(self) -> None:
        """All that live have been put again after a restart of the agent: others are let go."""
        ...

    async def counters(self, sandbox_id: str) -> NetworkCounters | None:
        """None: it was told nothing of it."""
        ...

    async def close(self) -> None:
        """Let go; what is enforced stays so."""
        ...


class Backend(Protocol):
    """A way to run sandboxes on this node."""

    name: str

    @property
    def networks(self) -> Networks | None:
        """None: its sandboxes have loopback only."""
        ...

    async def probe(self) -> Capabilities:
        """What it can do here and, where it cannot, why. Cheap, without side effects, never raises."""
        ...

    async def start(self, plan: StartPlan) -> Runtime:
        """Start a sandbox; on failure or cancellation everything is undone. The same id again: Conflict."""
        ...

    async def attach(self, handle: Handle) -> Runtime:
        """Find a sandbox again. SandboxLost: it has ended."""
        ...

    async def survey(self) -> list[Handle]:
        """Every sandbox of this backend that lives on this node, known to the node agent or not."""
        ...

    async def close(self) -> None:
        """Let go of connections; sandboxes live on."""
        ...
