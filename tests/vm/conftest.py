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


@pytest.fixture(scope="session")
def runs(disk: Path) -> Iterator[dict[str, lanes.GuestRun]]:
    # Made one after the other: two builds or two boots at once would only be slower on two cores.
    for series in image.KERNELS:
        machine.snapshot(series)
    started = {series: lanes.GuestRun(series, disk, lanes.LANES) for series in image.KERNELS}
    yield started
    for run in started.values():
        run.join()


@pytest.fixture(scope="module", params=image.KERNELS)
def guest(request: pytest.FixtureRequest, disk: Path) -> Iterator[Guest]:
    with machine.restored(request.param, disk) as restored:
        yield restored
