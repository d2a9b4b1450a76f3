"""The lanes that depend on the kernel, run again in each guest: one test here for a guest and a lane."""

from __future__ import annotations

import pytest

from tests.kit.vm import frameworks, lanes

# The first test waits for image, boots and builds too, where they are not there yet.
pytestmark = pytest.mark.timeout(lanes.GUEST_BUDGET_S + 900)


# Why this machine cannot run a lane.
LACKS = {"adapters": frameworks.missing()}
CASES = [
    pytest.param(series, lane, marks=[pytest.mark.skip(reason)] if (reason := LACKS.get(lane)) else [])
    for lane in lanes.LANES
    for series in lanes.guests_of(lane)
]


@pytest.mark.parametrize(("series", "lane"), CASES)
def test_lane(
    series: str, lane: str, guest_runs: dict[str, lanes.GuestRun], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = guest_runs[series].outcome(lane)
    with capsys.disabled():
        times = f"{outcome.seconds:.0f} s, {outcome.cpu_seconds:.0f} s of CPU"
        print(f"\n[guest {series}] {lane}: {outcome.summary} ({times})")
        for name, reason in lanes.left_out(series, lane).items():
            print(f"    left out {name}: {reason}")
        for note in outcome.notes:
            print(f"    {note}")
        for skipped in sorted(set(outcome.skipped)):
            print(f"    skipped {skipped}")
    if not outcome.ok:
        failures = "\n".join(outcome.failed) or "nothing passed"
        pytest.fail(f"{failures}\n\nThe end of the guest's output:\n{outcome.tail}", pytrace=False)
