"""What a client of the runtime knows about a request in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from dsec.model import limits
from dsec.model.errors import DsecError
from dsec.wire import faults
from dsec.wire.frames import FrameError
from dsec.wire.ops import Op
from dsec.wire.values import Answer, Request, RunAttach, RunStart, SandboxStatus, TalkStart

Sink = Callable[[int, int, bytes], Awaitable[None]]

# Credit is given back in portions of the window, so that acknowledging costs little beside the data.
ACKS_PER_WINDOW: Final = 4
OUTPUTS: Final = 3  # standard output and error, and a session's control

T = TypeVar("T")


class Pending(Generic[T]):
    """A request that was not answered yet."""

    __slots__ = ("args", "future", "id", "launched", "on_started", "op", "sandbox_id", "sent", "timer")

    def __init__(self, id_: int, op: Op[T], args: Any, future: asyncio.Future[T], sandbox_id: str | None) -> None:
        self.id = id_
        self.op = op
        self.args = args
        self.future = future
        self.sandbox_id = sandbox_id
        self.sent = 0
        self.launched = False
        self.on_started: Callable[[], None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def request(self) -> Request:
        """The frame to send, for the first time or again."""
        return Request(self.id, self.op.name, self.args)

    @property
    def is_run(self) -> bool:
        """Whether it waits for the end of a program."""
        return isinstance(self.args, RunStart | RunAttach)

    def started(self) -> None:
        """The program has been launched. After a break the event comes again; the caller hears of it once."""
        if not self.launched:
            self.launched = True
            if self.on_started is not None and not self.future.done():
                self.on_started()

    def out(self, answer: Answer) -> int:
        """Output came for one who reads along; the bytes to give credit for at once."""
        return len(answer.d)

    def finish(self, answer: Answer) -> None:
        """The answer came."""
        self._stop_timer()
        if self.future.done():
            return
        if answer.err is not None:
            error = faults.translate(answer.err, op=self.op.name, sandbox_id=self.sandbox_id)
            self.future.set_exception(error)
        elif answer.ok is msgspec.UNSET:
            raise FrameError(f"the runtime's answer to {self.op.name} has neither ok nor err")
        else:
            self.future.set_result(self.op.decode(answer.ok))

    def fail(self, error: DsecError) -> None:
        """No answer will come."""
        self._stop_timer()
        if not self.future.done():
            self.future.set_exception(error)

    def settle(self) -> None:
        """Nobody waits for it any more."""
        self._stop_timer()
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()  # marks it as seen

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class Stream(Pending[T]):
    """A run whose output is read along.

    Pieces wait here for the sink, at most a window of them: credit goes back as the sink takes them. After a break it
    attaches where it was. When its reader is gone it gives credit for everything, so that the program never waits.
    """

    __slots__ = ("_lossy", "_offsets", "_unacked", "_waiter", "detached", "pieces", "queued")

    def __init__(self, id_: int, op: Op[T], args: Any, future: asyncio.Future[T], sandbox_id: str | None) -> None:
        super().__init__(id_, op, args, future, sandbox_id)
        self.pieces: deque[tuple[int, int, bytes]] = deque()
        self.queued = 0
        self.detached = False
        streams = 3 if isinstance(args, TalkStart) and args.control else 2
        self._offsets = list(args.offsets) if isinstance(args, RunAttach) else [0] * streams
        self._lossy = isinstance(args, RunAttach) and args.lossy
        self._unacked = 0
        self._waiter: asyncio.Future[None] | None = None

    def request(self) -> Request:
        if self.sent and (self.launched or any(self._offsets)):
            window = max(1, limits.STREAM_WINDOW_BYTES - self.queued - self._unacked)
            again = RunAttach(
                sandbox=self.args.sandbox,
                run=self.args.run,
                stream=True,
                window=window,
                offsets=tuple(self._offsets),
                lossy=self._lossy,
            )
            return Request(self.id, "run.attach", again)
        return super().request()

    def out(self, answer: Answer) -> int:
        if not 1 <= answer.s <= OUTPUTS:
            raise FrameError(f"output of stream {answer.s}")
        size, data = len(answer.d), answer.d
        if answer.s > len(self._offsets):
            return size  # a session's control, of no interest to who follows what it shows
        known = self._offsets[answer.s - 1]
        skip = max(0, known - answer.o)  # seen before the break
        self._offsets[answer.s - 1] = max(known, answer.o + size)
        if self.detached:
            return size
        if skip < size:
            self.pieces.append((answer.s, answer.o + skip, data[skip:] if skip else data))
            self.queued += size - skip
            self._wake()
        return min(skip, size)

    def finish(self, answer: Answer) -> None:
        super().finish(answer)
        self._wake()

    def fail(self, error: DsecError) -> None:
        super().fail(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def detach(self) -> int:
        """Its reader is gone; the bytes to give credit for."""
        self.detached = True
        credit = self.queued + self._unacked
        self.pieces.clear()
        self.queued = self._unacked = 0
        self.future.cancel()
        return credit

    async def pump(self, sink: Sink, ack: Callable[[int, int], None]) -> None:
        """Hand output to the sink until the run has ended and all of it was taken."""
        portion = limits.STREAM_WINDOW_BYTES // ACKS_PER_WINDOW
        while True:
            while self.pieces:
                stream, offset, data = self.pieces.popleft()
                self.queued -= len(data)
                self._unacked += len(data)
                await sink(stream, offset, data)
                if self._unacked >= portion:
                    ack(self.id, self._unacked)
                    self._unacked = 0
            if self.future.done():
                return
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


class Subscription:
    """Who wants to hear of ended sandboxes."""

    def __init__(self, on_ended: Callable[[SandboxStatus], None], on_gap: Callable[[], None]) -> None:
        self.on_ended = on_ended
        self.on_gap = on_gap
        self.sent = 0
