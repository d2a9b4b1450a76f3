"""Small helpers for asynchronous tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Wait for something that no event announces. Fails the test when it does not come."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the thing watched belongs to another process or has no event
            await asyncio.sleep(0.001)
