"""What bodies may hold of memory, of all connections together: more of them wait unread, and slow ones make room."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from dsec.model.errors import Unavailable
from dsec.model.limits import KIB, MIB

# Of all that are on their way. Each has room for the whole of it before it is read: with room for what has come, many
# half ones would wait for each other.
BODIES_MAX_BYTES: Final = 256 * MIB
# Smaller ones need no room; 8192 connections with one each hold 128 MiB.
SMALL_BYTES: Final = 16 * KIB
# Before a body that waits is not read further, so much of it has come: what uvicorn and uvloop read ahead.
_AHEAD_BYTES: Final = 320 * KIB
WAITING_MAX_BYTES: Final = 128 * MIB  # of that, of all that wait
WAIT_S: Final = 30.0
# A body that others wait for is given up when nothing of it came for so long,
SILENT_S: Final = 2.0
# or after this and what those that came take at this rate.
WHOLE_S: Final = 10.0
RATE_MIN: Final = 1 * MIB
_LOOK_S: Final = 0.25


class Room:
    """Room for one body."""

    __slots__ = ("bytes", "came", "limit", "size", "turn", "was")

    def __init__(self, size: int, turn: asyncio.Future[None]) -> None:
        self.size = size
        self.turn = turn
        self.limit: asyncio.Timeout | None = None
        self.was = 0.0  # when it got room
        self.came = 0.0  # when something of it came
        self.bytes = 0  # so much

    def more(self, count: int) -> None:
        """Something of it has come."""
        self.came = self.turn.get_loop().time()
        self.bytes += count

    def slow(self, now: float) -> bool:
        """Whether it has had its time."""
        return now - self.came > SILENT_S or now - self.was > WHOLE_S + self.bytes / RATE_MIN


class Bodies:
    """All that are on their way into this process. Who waited first is first."""

    def __init__(self, most: int = BODIES_MAX_BYTES) -> None:
        self._most = most
        self._held = 0
        self._ahead = 0
        self._rooms: set[Room] = set()
        self._waiting: deque[Room] = deque()
        self._looker: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def room(self, size: int) -> AsyncIterator[Room]:
        """Room for a body of that size. Raises Unavailable when there is none for long, or others wait for its end."""
        loop = asyncio.get_running_loop()
        one = Room(size, loop.create_future())
        await self._enter(one)
        try:
            async with asyncio.timeout(None) as one.limit:
                yield one
        except TimeoutError as error:
            raise Unavailable("the body came too slowly while others waited for its room") from error
        finally:
            self._leave(one)

    async def _enter(self, one: Room) -> None:
        ahead = min(one.size, _AHEAD_BYTES)
        if self._ahead + ahead > WAITING_MAX_BYTES:
            raise Unavailable("too many large bodies wait to be read")
        self._waiting.append(one)
        self._ahead += ahead
        self._next()
        try:
            if not one.turn.done():
                self._look()
                async with asyncio.timeout(WAIT_S):
                    await one.turn
        except BaseException as error:  # also a cancel: its place is given back
            if one in self._rooms:
                self._leave(one)
            else:
                self._waiting.remove(one)
                self._next()  # those behind it may need less
            if isinstance(error, TimeoutError):
                raise Unavailable(f"there was no room to read the body within {WAIT_S:g} s") from error
            raise
        finally:
            self._ahead -= ahead

    def _next(self) -> None:
        while self._waiting and self._held + self._waiting[0].size <= self._most:
            one = self._waiting.popleft()
            self._held += one.size
            self._rooms.add(one)
            one.was = one.came = one.turn.get_loop().time()
            if not one.turn.done():  # else it is being cancelled, and leaves
                one.turn.set_result(None)

    def _leave(self, one: Room) -> None:
        self._rooms.discard(one)
        self._held -= one.size
        self._next()

    def _look(self) -> None:
        if self._looker is None:
            self._looker = asyncio.get_running_loop().call_later(_LOOK_S, self._end_slow)

    def _end_slow(self) -> None:
        self._looker = None
        if not self._waiting:
            return
        now = asyncio.get_running_loop().time()
        for one in self._rooms:
            if one.limit is not None and not one.limit.expired() and one.slow(now):
                one.limit.reschedule(now)
        self._look()
