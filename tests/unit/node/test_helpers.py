"""File helpers of a sandbox: so many at once, and a word for who waits in vain."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from dsec.backends.base import Files
from dsec.model.errors import Exhausted
from dsec.model.limits import FILE_CALLS_MAX
from dsec.node import helpers

pytestmark = pytest.mark.unit


class Helper:
    usable = True

    def close(self) -> None:
        self.usable = False


async def _open() -> Files:
    return cast(Files, Helper())


async def _hold(kept: helpers.Helpers, begun: asyncio.Event, end: asyncio.Event) -> None:
    async with kept.use("a", _open):
        begun.set()
        await end.wait()


def test_a_call_that_finds_no_room_for_long_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "WAIT_S", 0.05)

    async def scenario() -> None:
        kept, end = helpers.Helpers(), asyncio.Event()
        begun = [asyncio.Event() for _ in range(FILE_CALLS_MAX)]
        tasks = [asyncio.ensure_future(_hold(kept, event, end)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        with pytest.raises(Exhausted) as refused:
            await _hold(kept, asyncio.Event(), end)
        assert refused.value.detail == {"resource": "file_calls", "limit": FILE_CALLS_MAX}
        end.set()
        await asyncio.gather(*tasks)
        await _hold(kept, asyncio.Event(), end)
        kept.close()

    asyncio.run(scenario())
