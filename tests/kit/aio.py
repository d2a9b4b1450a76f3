"""Small helpers for asynchronous tests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


def asynchronous(test: Callable[P, Coroutine[Any, Any, None]], *, within_s: float = 60.0) -> Callable[P, None]:
    """A test that is a coroutine, run in a loop of its own; fails when it does not end."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(within_s):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


async def until(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Wait for something that no event announces. Fails the test when it does not come."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the thing watched belongs to another process or has no event
            await asyncio.sleep(0.001)
