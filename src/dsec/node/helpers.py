"""File helpers of a sandbox: processes inside it, each serving one call at a time.

The first is started with the first call, and each is let go a moment after its last, so that an idle sandbox has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Final

from dsec.backends.base import Files
from dsec.model.errors import Exhausted
from dsec.model.limits import FILE_CALLS_MAX

# How long a helper waits for the next call. Starting one costs some milliseconds, keeping one some hundred KiB.
IDLE_S: Final = 2.0
# For one of the calls that go on to end. Those that nobody reads may never.
WAIT_S: Final = 60.0


class Helpers:
    """The helpers of one sandbox."""

    def __init__(self) -> None:
        self._idle: dict[Hashable, list[tuple[Files, asyncio.TimerHandle]]] = {}
        self._room = asyncio.Semaphore(FILE_CALLS_MAX)

    @asynccontextmanager
    async def use(self, kind: Hashable, open_helper: Callable[[], Awaitable[Files]]) -> AsyncIterator[Files]:
        """A helper of a kind for one call, which waits while as many are busy as one sandbox may have. Exhausted."""
        await self._enter()
        try:
            helper = self._take(kind)
            if helper is None:
                helper = await open_helper()
            try:
                yield helper
            finally:
                self._give(kind, helper)
        finally:
            self._room.release()

    async def _enter(self) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                await self._room.acquire()
        except TimeoutError:
            raise Exhausted(
                f"the sandbox has {FILE_CALLS_MAX} file calls that go on, the most allowed, and none ended within "
                f"{WAIT_S:g} s; end one (a watch, a download or a diff that nobody reads)",
                detail={"resource": "file_calls", "limit": FILE_CALLS_MAX},
                retry="later",
            ) from None

    def _take(self, kind: Hashable) -> Files | None:
        idle = self._idle.get(kind)
        while idle:
            helper, timer = idle.pop()
            timer.cancel()
            if helper.usable:
                return helper
            helper.close()
        return None

    def _give(self, kind: Hashable, helper: Files) -> None:
        if not helper.usable:
            helper.close()
            return
        timer = asyncio.get_running_loop().call_later(IDLE_S, self._expire, kind, helper)
        self._idle.setdefault(kind, []).append((helper, timer))

    def _expire(self, kind: Hashable, helper: Files) -> None:
        left = [one for one in self._idle.pop(kind, []) if one[0] is not helper]
        if left:
            self._idle[kind] = left
        helper.close()

    def close(self) -> None:
        """Let go of all that wait."""
        for idle in self._idle.values():
            for helper, timer in idle:
                timer.cancel()
                helper.close()
        self._idle.clear()
