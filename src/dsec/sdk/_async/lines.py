"""Output of a program by whole lines."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from dsec.model.errors import DeadlineExceeded, InvalidState
from dsec.sdk._async.closing import AsyncClosing
from dsec.sdk.http1 import Late
from dsec.sdk.keywords import explained
from dsec.sdk.lines import Line, Offsets, Pattern, Splitter, Wanted
from dsec.sdk.values import seconds

if TYPE_CHECKING:
    from dsec.model.states import RunResult
    from dsec.sdk._async.output import AsyncFollow
    from dsec.sdk._async.programs import AsyncProcess

# How long `wait_for` may look through what is there when its time is over.
_LOOK_S: Final = 1.0


@explained
class AsyncLines(AsyncClosing):
    """Both streams of a program by lines, each once its newline is there, to the end: an iterator of `Line`.

    A loop that was left goes on where it was with the same iterator. `dropped`: bytes of each stream that are not kept
    any more and were passed over. `result`: how the program ended, once the iteration is over.
    """

    def __init__(self, follow: AsyncFollow) -> None:
        self._follow = follow
        self._splitter = Splitter((follow.offsets[1], follow.offsets[2]))
        self._ready: deque[Line] = deque()
        self._over = False

    @property
    def offsets(self) -> tuple[int, int]:
        """Where the next line of each stream begins: `process.lines(offsets)` goes on there, also elsewhere."""
        waiting = {line.stream: line.offset for line in reversed(self._ready)}
        found = {**self._splitter.offsets, **waiting}
        return found[1], found[2]

    @property
    def dropped(self) -> dict[int, int]:
        """Bytes of each stream that are not kept any more and were passed over."""
        return self._follow.dropped

    @property
    def result(self) -> RunResult | None:
        """How the program ended; None before the iteration is over."""
        return self._follow.result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Line:
        while not self._ready:
            if self._over:
                raise StopAsyncIteration
            try:
                stream, data = await self._follow.__anext__()
            except StopAsyncIteration:
                self._over = True
                self._ready.extend(self._splitter.rest(self._follow.offsets))
                continue
            self._ready.extend(self._splitter.feed(stream, data, self._follow.offsets[stream]))
            if not self._ready and (end := self._follow.deadline) is not None and time.monotonic() >= end:
                raise Late  # what comes all the time, and has no newline
        return self._ready.popleft()

    async def next(self, timeout_s: float | None = None) -> Line:
        """The next line. DeadlineExceeded (a TimeoutError): none was whole within `timeout_s` seconds; nothing is lost,
        and the next call goes on. InvalidState: there is none any more, the output has ended or this was closed.
        """
        limit_s = seconds(timeout_s)
        self._follow.deadline = None if limit_s is None else time.monotonic() + limit_s
        try:
            return await self.__anext__()
        except StopAsyncIteration:
            raise InvalidState("there are no more lines: the output has ended, or this iterator was closed") from None
        except Late:
            raise DeadlineExceeded(f"no line has come within {timeout_s:g} s; the program goes on") from None
        finally:
            self._follow.deadline = None

    def close(self) -> None:
        """Read no longer. The program goes on."""
        self._over = True
        self._follow.close()


async def wait_for(
    process: AsyncProcess, pattern: Pattern, timeout_s: float | None, offsets: Offsets, behind: Line | None
) -> Line:
    """The first line from there on that matches; `behind`: the one before, if a call has returned one."""
    wanted, limit_s = Wanted(pattern, behind), seconds(timeout_s)
    end = None if limit_s is None else time.monotonic() + limit_s
    follow = process.follow(offsets)
    lines = follow.lines()
    try:
        if (line := await _look(follow, lines, wanted, end)) is not None:
            return line
    except Late:
        # What was written in time is looked at, however little of the time it took to come.
        follow = process.follow(lines.offsets, wait=False)
        with suppress(Late):
            if (line := await _look(follow, follow.lines(), wanted, time.monotonic() + _LOOK_S)) is not None:
                return line
        if follow.result is None:
            raise wanted.too_late(process.id, limit_s or 0.0) from None
    raise wanted.ended_first(process.id, follow.result)


async def _look(follow: AsyncFollow, lines: AsyncLines, wanted: Wanted, end: float | None) -> Line | None:
    """The line; None: the output ended without it. Late: the time `end` has come."""
    follow.deadline = end
    async with lines:
        async for line in lines:
            # Where only what is kept now is read, more of its last line may come.
            if wanted.found(line, whole=line.ending != "end" or lines.result is not None):
                return line
            if end is not None and time.monotonic() >= end:
                raise Late
    return None
