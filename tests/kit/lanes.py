"""Lanes of tests, by directory: `tests/root/...` is the lane `root`.

A lane that cannot run here is skipped with its probe's reason. `DSEC_REQUIRE=root,vm` turns every skip in these lanes
into a failure, so that continuous integration cannot pass by skipping. One skip stays allowed: `kernel_lacks()`, for
a mechanism this kernel was built without; the vm lane runs the same test on kernels that have it.

In a guest (`DSEC_GUEST=1`) tests that are marked `same_everywhere` are left out, and what others do many times they do
a tenth as often (`fewer`): a guest without hardware acceleration is ten to twenty times slower than its host. What is
marked `one_guest` is dealt out among the guests (`DSEC_GUEST_SHARE`).
"""

from __future__ import annotations

import os
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final, NoReturn

import pytest

REQUIRE_ENV: Final = "DSEC_REQUIRE"
TESTS: Final = Path(__file__).resolve().parent.parent
LACKS: Final = "this kernel lacks "
GUEST_ENV: Final = "DSEC_GUEST"
SAME_EVERYWHERE: Final = "same_everywhere"
#: "0/2": the first of two guests, each of which runs its part of what is marked `one_guest`.
SHARE_ENV: Final = "DSEC_GUEST_SHARE"
ONE_GUEST: Final = "one_guest"

_Probe = Callable[[], str | None]


def runtime_binary() -> Path | None:
    """The native binary: $DSEC_RUNTIME_BIN, beside the interpreter, or in the clone's target directory."""
    named = os.environ.get("DSEC_RUNTIME_BIN")
    target = Path(os.environ.get("CARGO_TARGET_DIR") or TESTS.parent / "target")
    places = [Path(named)] if named else [Path(sys.executable).parent / "dsec-runtime"]
    if not named:
        places += sorted(target.glob("*/release/dsec-runtime"))
    return next((place for place in places if os.access(place, os.X_OK)), None)


def _nothing() -> str | None:
    return None


def _cargo() -> str | None:
    return None if shutil.which("cargo") else "no cargo on PATH (scripts/setup installs it)"


def _root() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    if not _may_mount():
        return "needs CAP_SYS_ADMIN"
    return None if runtime_binary() else "dsec-runtime is not built (scripts/build)"


def _may_mount() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> 21 & 1)  # CAP_SYS_ADMIN


def adapters_python() -> Path | None:
    """The interpreter that has the frameworks: in $DSEC_ADAPTERS_VENV, or where set-up has put it."""
    venv = Path(os.environ.get("DSEC_ADAPTERS_VENV") or Path(sys.prefix) / "adapters")
    python = venv / "bin/python"
    return python if os.access(python, os.X_OK) else None


def _adapters() -> str | None:
    if (lacks := _root()) is not None:
        return lacks
    return None if adapters_python() else "the frameworks are not installed (scripts/setup --for test)"


def _vm() -> str | None:
    return None if shutil.which("qemu-system-x86_64") else "no qemu-system-x86_64 (scripts/setup --for test)"


# In the order they run: what fails fast first.
LANES: Final[dict[str, _Probe]] = {
    "style": _nothing,
    "unit": _nothing,
    "native": _cargo,
    "contract": _nothing,
    "root": _root,
    "security": _root,
    "chaos": _root,
    "adapters": _adapters,
    "perf": _root,
    "vm": _vm,
}


def required() -> set[str]:
    """Lanes whose skips are failures."""
    return set(filter(None, os.environ.get(REQUIRE_ENV, "").split(",")))


def lane_of(path: Path) -> str | None:
    """The lane a test file belongs to."""
    if not path.is_relative_to(TESTS):
        return None
    first = path.relative_to(TESTS).parts[0]
    return first if first in LANES else None


def kernel_lacks(mechanism: str, reason: str) -> NoReturn:
    """Skip: the kernel here was built without it. Allowed in required lanes too."""
    pytest.skip(f"{LACKS}{mechanism}: {reason}")


def in_guest() -> bool:
    """Whether this is a guest of the vm lane."""
    return bool(os.environ.get(GUEST_ENV))


def fewer(times: int) -> int:
    """How often a test does what it does many times: a tenth of it in a guest."""
    return max(2, times // 10) if in_guest() else times


def _is_mine(item: pytest.Item) -> bool:
    """By its name, so that the guests agree about it whatever else each of them runs."""
    number, _, guests = os.environ.get(SHARE_ENV, "0/1").partition("/")
    return zlib.crc32(item.nodeid.encode()) % int(guests) == int(number)


def _is_left_out(item: pytest.Item) -> bool:
    if item.get_closest_marker(SAME_EVERYWHERE):
        return True
    return item.get_closest_marker(ONE_GUEST) is not None and not _is_mine(item)


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    out = [item for item in items if _is_left_out(item)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Lanes in their order; markers by directory; whole lanes skipped or failed by their probe."""
    if in_guest():
        _leave_out(config, items)
    order = list(LANES)
    items.sort(key=lambda item: order.index(lane_of(item.path) or "unit"))
    reasons: dict[str, str | None] = {}
    for item in items:
        lane = lane_of(item.path)
        if lane is None:
            continue
        item.add_marker(lane)
        if lane not in reasons:
            reasons[lane] = LANES[lane]()
        if (reason := reasons[lane]) is not None:
            item.add_marker(pytest.mark.skip(reason=f"lane {lane}: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip in a required lane is a failure."""
    report = yield
    lane = lane_of(item.path)
    if report.skipped and not hasattr(report, "wasxfail") and lane in required():
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if LACKS not in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped, but {REQUIRE_ENV} names the lane {lane}: {reason}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each lane: what ran, what did not and why."""
    counts: dict[str, Counter[str]] = {}
    reasons: dict[str, str] = {}
    for outcome in ("passed", "failed", "error", "skipped", "xfailed"):
        for report in terminalreporter.stats.get(outcome, ()):
            lane = lane_of(TESTS.parent / report.nodeid.partition("::")[0])
            if lane is None:
                continue
            counts.setdefault(lane, Counter())[outcome] += 1
            if outcome == "skipped" and isinstance(report.longrepr, tuple):
                reasons.setdefault(lane, report.longrepr[2].removeprefix("Skipped: "))
    terminalreporter.section("lanes")
    for lane in LANES:
        if lane in counts:
            numbers = ", ".join(f"{number} {outcome}" for outcome, number in counts[lane].items())
            why = f" ({reasons[lane]})" if lane in reasons else ""
            terminalreporter.write_line(f"{lane:10} {numbers}{why}")
