"""One run of the fake backend: its program, its captured output, those who read along, its end."""

from __future__ import annotations

import asyncio
import signal as signals
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from dsec.backends import fake_programs as programs
from dsec.backends.base import ProgramStatus, RunPlan, Sink, StartPlan
from dsec.backends.capture import Capture
from dsec.model import limits
from dsec.model.errors import DsecError
from dsec.model.processes import InputState, OutputPiece
from dsec.model.states import Cause, RunOutcome, Usage

if TYPE_CHECKING:
    from dsec.backends.fake import Clock

# Output is handed on in pieces of at most this size, as a pipe would.
PIECE_BYTES: Final = 64 * limits.KIB
# A writer to open input waits while more than this was not read.
INPUT_WAITING_BYTES: Final = 256 * limits.KIB
# CPU a program of the fake is said to use, so that usage is never zero.
CPU_PER_RUN_S: Final = 0.001

_IGNORED_BY_DEFAULT = frozenset({signals.SIGCHLD, signals.SIGURG, signals.SIGWINCH, signals.SIGCONT})
_NEVER_IGNORED = frozenset({signals.SIGKILL, signals.SIGSTOP})


class Input:
    """Standard input that is open: what was taken, and what was read of it."""

    def __init__(self, first: bytes, *, open_: bool) -> None:
        self.size = len(first)
        self.ended = not open_
        self._unread = bytearray(first)
        self._changed = asyncio.Condition()

    async def give(self, data: bytes, *, eof: bool) -> None:
        """More of it; returns once little of it waits to be read."""
        async with self._changed:
            self._unread += data
            self.size += len(data)
            self.ended = self.ended or eof
            self._changed.notify_all()
            await self._changed.wait_for(lambda: len(self._unread) <= INPUT_WAITING_BYTES)

    async def read(self) -> bytes:
        """What is there, once something is; empty: the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._unread or self.ended)
            data = bytes(self._unread)
            self._unread.clear()
            self._changed.notify_all()
            return data

    async def drop(self) -> None:
        """Nobody reads it any more."""
        async with self._changed:
            self.ended = True
            self._unread.clear()
            self._changed.notify_all()


class Reader:
    """Someone who reads along. What it has not taken yet is bounded: the program waits for it."""

    def __init__(self, *, lossy: bool = False) -> None:
        self.lossy = lossy
        self.pending: deque[tuple[int, int, bytes]] = deque()
        self.size = 0
        self.more = asyncio.Event()
        self.room = asyncio.Event()
        self.room.set()

    def push(self, stream: int, offset: int, data: bytes) -> None:
        """Queue a piece of output."""
        if self.lossy and self.size >= limits.STREAM_WINDOW_BYTES:
            return  # it would rather miss some than hold the program back
        self.pending.append((stream, offset, data))
        self.size += len(data)
        if self.size >= limits.STREAM_WINDOW_BYTES and not self.lossy:
            self.room.clear()
        self.more.set()

    async def pump(self, sink: Sink, done: asyncio.Event) -> None:
        """Hand everything to the sink until the run is done."""
        while True:
            while self.pending:
                stream, offset, data = self.pending.popleft()
                await sink(stream, offset, data)
                self.size -= len(data)
                if self.size < limits.STREAM_WINDOW_BYTES:
                    self.room.set()
            if done.is_set():
                return
            self.more.clear()
            await self.more.wait()


class FakeRun:
    """A program of the fake, from its start to the moment its result is forgotten."""

    def __init__(self, plan: RunPlan, box: StartPlan, directories: set[str], clock: Clock, pid: int) -> None:
        self.plan = plan
        self.pid = pid
        self.memory_bytes = 0
        self.cpu_s = CPU_PER_RUN_S
        self.done = asyncio.Event()
        self.ignored: set[int] = set()
        self._box = box
        self._clock = clock
        kept = (plan.head_bytes, plan.tail_bytes, plan.spool_bytes)
        self._captures = (Capture(*kept), Capture(*kept))
        self.input = Input(plan.stdin, open_=plan.stdin_open)
        self._readers: list[Reader] = []
        self._children: set[asyncio.Task[int]] = set()
        self._verdict: tuple[Cause, int] | None = None
        self._outcome: RunOutcome | None = None
        self._error: DsecError | None = None
        self._task: asyncio.Task[int] | None = None
        self._timer: asyncio.Task[None] | None = None
        self._started_at = clock.time()
        self._started = clock.monotonic()
        self._program = programs.load(plan, directories)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return not self.done.is_set()

    def start(self) -> None:
        """Let it run."""
        self._task = asyncio.get_running_loop().create_task(self._program(self))
        self._task.add_done_callback(self._ended)
        if self.plan.timeout_s is not None:
            self._timer = asyncio.get_running_loop().create_task(self._time_out(self.plan.timeout_s))

    async def _time_out(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self.kill_tree("timeout")

    # What a program may do.

    async def write(self, stream: int, data: bytes) -> None:
        """Write to standard output (1) or error (2); waits for slow readers."""
        capture = self._captures[stream - 1]
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            offset = capture.total
            capture.append(piece)
            for reader in list(self._readers):
                reader.push(stream, offset, piece)
            for reader in list(self._readers):
                await reader.room.wait()

    async def sleep(self, seconds: float) -> None:
        """Sleep by the world's clock."""
        await self._clock.sleep(seconds)

    def allocate(self, size: int) -> None:
        """Use memory; more than the sandbox has kills the program."""
        self.memory_bytes += size
        if self.memory_bytes > self._box.memory_bytes:
            raise programs.Died("oom", signals.SIGKILL)

    def spawn_child(self, program: programs.Program) -> None:
        """Start a child that may outlive the program and hold its pipes."""
        child = asyncio.get_running_loop().create_task(program(self))
        self._children.add(child)
        child.add_done_callback(self._child_ended)

    def _child_ended(self, child: asyncio.Task[int]) -> None:
        self._children.discard(child)
        if not child.cancelled():
            child.exception()  # a child that died by itself is nobody's business

    @property
    def hostname(self) -> str:
        """The sandbox's name for itself."""
        return self._box.hostname

    # What is done to it.

    def signal(self, number: int, lost: DsecError | None = None) -> None:
        """Deliver a signal to its process, which may ignore it. With `lost`, that is what its death by it means."""
        ignored = number in self.ignored or number in _IGNORED_BY_DEFAULT
        if self.alive and (number in _NEVER_IGNORED or not ignored) and number != signals.SIGSTOP:
            self._verdict = self._verdict or ("signalled", number)
            self._error = self._error or lost
            self._cancel()

    def kill_tree(self, cause: Cause) -> None:
        """Kill it and all its children at once; nothing can be ignored."""
        for child in list(self._children):
            child.cancel()
        if self.alive:
            self._verdict = self._verdict or (cause, signals.SIGKILL)
            self._cancel()

    def lose(self, error: DsecError) -> None:
        """It is gone together with its sandbox, or nobody knows how it ended: those who wait get the error."""
        for child in list(self._children):
            child.cancel()
        if self.alive:
            self._error = error
            self._cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[int]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        fault = None if task.cancelled() else task.exception()
        if fault is not None and not isinstance(fault, programs.Died):
            self._error = DsecError(f"the fake's program {self.plan.argv[0]!r} has a bug: {fault!r}")
        if self._error is None:
            self._outcome = self._conclude(task)
        self.done.set()
        asyncio.get_running_loop().create_task(self.input.drop())
        for reader in self._readers:
            reader.more.set()

    def _conclude(self, task: asyncio.Task[int]) -> RunOutcome:
        cause: Cause = "exited"
        signal: int | None = None
        if task.cancelled():
            cause, signal = self._verdict or ("signalled", signals.SIGKILL)
        elif (error := task.exception()) is not None:
            assert isinstance(error, programs.Died)
            cause, signal = error.cause, error.signal
        hit = ["memory"] if cause == "oom" else []
        out, err = (capture.output() for capture in self._captures)
        if out.dropped_bytes or err.dropped_bytes:
            hit.append("output")
        return RunOutcome(
            exit_code=task.result() if signal is None else 128 + signal,
            cause=cause,
            signal=None if signal is None else int(signal),
            limits_hit=tuple(hit),
            out=out,
            err=err,
            started_at=self._started_at,
            duration_s=self._clock.monotonic() - self._started,
            usage=Usage(cpu_user_s=self.cpu_s, memory_peak_bytes=self.memory_bytes),
        )

    async def follow(self, sink: Sink | None, offsets: tuple[int, ...], *, lossy: bool = False) -> RunOutcome:
        """Wait for its end; with a sink, read along from the offsets on."""
        if sink is not None:
            await self._read_along(sink, offsets, lossy=lossy)
        await self.done.wait()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def kept(self, stream: int, offset: int, limit: int) -> OutputPiece:
        """Kept output from an offset on."""
        capture = self._captures[stream - 1]
        piece = OutputPiece.first_of(stream, capture.kept_from(offset), capture.total, ended=not self.alive)
        return msgspec.structs.replace(piece, data=piece.data[:limit])

    def status(self) -> ProgramStatus:
        """As it is now."""
        totals = tuple(capture.total for capture in self._captures)
        usage = Usage(cpu_user_s=self.cpu_s, memory_peak_bytes=self.memory_bytes)
        taken = InputState(size=self.input.size, closed=self.input.ended)
        return ProgramStatus(ended=not self.alive, usage=usage, totals=totals, input=taken)

    async def _read_along(self, sink: Sink, offsets: tuple[int, ...], *, lossy: bool) -> None:
        reader = Reader(lossy=lossy)
        for stream, (capture, offset) in enumerate(zip(self._captures, offsets, strict=True), 1):
            for at, data in capture.kept_from(offset):
                reader.push(stream, at, data)
        self._readers.append(reader)
        try:
            await reader.pump(sink, self.done)
        finally:
            # Gone, or cancelled: the program must not wait for it.
            self._readers.remove(reader)
            reader.room.set()
