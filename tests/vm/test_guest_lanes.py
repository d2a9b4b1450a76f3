"""The lanes that depend on the kernel, run again in each guest: one test here for a guest and a lane."""

from __future__ import annotations

import pytest

from tests.kit.vm import image, lanes, payload

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("lane", lanes.LANES)
@pytest.mark.parametrize("series", image.KERNELS)
def test_lane(series: str, lane: str, runs: dict[str, lanes.GuestRun], capsys: pytest.CaptureFixture[str]) -> None:
    if lane != "native" and not payload.has_tests(lane):
        pytest.skip(f"tests/{lane} holds no tests")
    outcome = runs[series].outcome(lane)
    with capsys.disabled():
        print(f"\n[guest {series}] {lane}: {outcome.summary} ({outcome.seconds:.0f} s)")
        for skipped in sorted(set(outcome.skipped)):
            print(f"    skipped {skipped}")
    if not outcome.ok:
        failures = "\n".join(outcome.failed) or "nothing passed"
        pytest.fail(f"{failures}\n\nThe end of the guest's output:\n{outcome.tail}", pytrace=False)
