"""A simulated node for each test, and a runner for coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.kit.simnode import SimNode

Scenario = Callable[[SimNode], Awaitable[None]]


@pytest.fixture
def sim(tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario on a node of its own."""

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            async with SimNode(tmp_path) as node:
                await scenario(node)

        asyncio.run(main())

    return run
