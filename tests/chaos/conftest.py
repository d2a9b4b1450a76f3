"""A real node over containers for each test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from dsec.backends.base import LayerMount
from tests.kit import rootfs, runtime
from tests.kit.realnode import RealNode, running

Scenario = Callable[[RealNode], Awaitable[None]]


@pytest.fixture(scope="session")
def busybox(tmp_path_factory: pytest.TempPathFactory) -> LayerMount:
    if reason := runtime.missing() or rootfs.missing():
        pytest.skip(reason)
    return rootfs.busybox_layer(Path(tmp_path_factory.mktemp("rootfs")))


@pytest.fixture
def real(busybox: LayerMount) -> Iterator[Callable[[Scenario], None]]:
    """Runs a scenario on a node of its own; afterwards nothing of its sandboxes may be left."""
    with runtime.own_place() as place:

        def run(scenario: Scenario) -> None:
            async def main() -> None:
                async with running(place, busybox) as node:
                    await scenario(node)

            asyncio.run(main())

        yield run
