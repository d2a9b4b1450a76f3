"""Guests for this lane: both start as soon as it is known which tests were chosen, and share the run's payload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.vm import image, lanes, machine
from tests.kit.vm.beside import Beside
from tests.kit.vm.machine import Guest

_BESIDE = pytest.StashKey[Beside]()


def pytest_collection_finish(session: pytest.Session) -> None:
    here = Path(__file__).parent
    chosen = [item for item in session.items if here in item.path.parents and not item.get_closest_marker("skip")]
    if chosen and not session.config.option.collectonly:
        session.config.stash[_BESIDE] = Beside(_asked(chosen))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (beside := session.config.stash.get(_BESIDE, None)) is not None:
        beside.close()


def _asked(items: list[pytest.Item]) -> dict[str, list[str]]:
    """Guests and their lanes, by the tests that were chosen: `-k contract` runs that lane only."""
    calls = [
        item.callspec.params
        for item in items
        if isinstance(item, pytest.Function) and "guest_runs" in item.fixturenames
    ]
    return {
        series: [lane for lane in lanes.LANES if {"series": series, "lane": lane} in calls]
        for series in image.KERNELS
        if any(call["series"] == series for call in calls)
    }


@pytest.fixture(scope="session")
def disk(request: pytest.FixtureRequest) -> Path:
    return request.config.stash[_BESIDE].disk()


@pytest.fixture(scope="session")
def guest_runs(request: pytest.FixtureRequest) -> dict[str, lanes.GuestRun]:
    return request.config.stash[_BESIDE].runs()


@pytest.fixture(scope="module", params=image.KERNELS)
def guest(request: pytest.FixtureRequest, disk: Path) -> Iterator[Guest]:
    with machine.restored(request.param, disk) as restored:
        yield restored
