"""Guests for this lane: both are started together and share the run's payload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.vm import image, lanes, machine, payload
from tests.kit.vm.machine import Guest


@pytest.fixture(scope="session")
def disk() -> Iterator[Path]:
    with payload.disk() as made:
        yield made


def _asked(items: list[pytest.Item]) -> dict[str, list[str]]:
    """Guests and their lanes, by the tests that were chosen: `-k contract` runs that lane only."""
    calls = [
        item.callspec.params for item in items if isinstance(item, pytest.Function) and "runs" in item.fixturenames
    ]
    return {
        series: [lane for lane in lanes.LANES if {"series": series, "lane": lane} in calls]
        for series in image.KERNELS
        if any(call["series"] == series for call in calls)
    }


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, disk: Path) -> Iterator[dict[str, lanes.GuestRun]]:
    # Made one after the other: two builds or two boots at once would only be slower on two cores.
    for series in _asked(request.session.items):
        machine.snapshot(series)
    started = {series: lanes.GuestRun(series, disk, names) for series, names in _asked(request.session.items).items()}
    yield started
    for run in started.values():
        run.join()


@pytest.fixture(scope="module", params=image.KERNELS)
def guest(request: pytest.FixtureRequest, disk: Path) -> Iterator[Guest]:
    with machine.restored(request.param, disk) as restored:
        yield restored
