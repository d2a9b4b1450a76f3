"""File helpers of a sandbox: processes inside it, each serving one call at a time.

The first is started with the first call, and each is let go a moment after its last, so that an idle sandbox has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from dsec.backends.base import Files
from dsec.model.limits import FILE_CALLS_MAX

# How long a helper waits for the next call. Starting one costs some milliseconds, keeping one some hundred KiB.
IDLE_S: Final = 2.0


class Helpers:
    """The helpers of one sandbox."""

    def __init__(self) -> None:
        self._idle: dict[str, list[tuple[Files, asyncio.TimerHandle]]] = {}
        self._room = asyncio.Semaphore(FILE_CALLS_MAX)

    @asynccontextmanager
    async def use(self, user: str, open_helper: Callable[[str], Awaitable[Files]]) -> AsyncIterator[Files]:
        """A helper for one call; the call waits while as many are busy as one sandbox may have."""
        async with self._room:
            helper = self._take(user)
            if helper is None:
                helper = await open_helper(user)
            try:
                yield helper
            finally:
                self._give(user, helper)

    def _take(self, user: str) -> Files | None:
        idle = self._idle.get(user)
        while idle:
            helper, timer = idle.pop()
            timer.cancel()
            if helper.usable:
                return helper
            helper.close()
        return None

    def _give(self, user: str, helper: Files) -> None:
        if not helper.usable:
            helper.close()
            return
        timer = asyncio.get_running_loop().call_later(IDLE_S, self._expire, user, helper)
        self._idle.setdefault(user, []).append((helper, timer))

    def _expire(self, user: str, helper: Files) -> None:
        left = [one for one in self._idle.pop(user, []) if one[0] is not helper]
        if left:
            self._idle[user] = left
        helper.close()

    def close(self) -> None:
        """Let go of all that wait."""
        for idle in self._idle.values():
            for helper, timer in idle:
                timer.cancel()
                helper.close()
        self._idle.clear()
