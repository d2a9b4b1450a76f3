"""What runs again in the guests is decided for every file of these lanes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.kit.lanes import SHARE_ENV, TESTS
from tests.kit.vm import image, lanes
from tests.kit.vm.channel import Result
from tests.kit.vm.machine import Guest

pytestmark = pytest.mark.unit


def test_every_file_is_either_inside_or_left_out_with_a_reason() -> None:
    root = TESTS.parent
    places = [TESTS / lane for lane in lanes.INSIDE]
    files = [path for place in places for kind in ("test_*.py", "*_suite.py") for path in place.rglob(kind)]
    there = {str(path.relative_to(root)) for path in files}
    inside = {path for paths in lanes.INSIDE.values() for path in paths}
    assert inside.isdisjoint(lanes.LEFT_OUT)
    assert there == inside | set(lanes.LEFT_OUT)
    assert all(lanes.LEFT_OUT.values())
    assert {name for name in lanes.IN_ONE if name.startswith("tests/")} <= inside
    assert lanes.IN_ONE.keys().isdisjoint(lanes.NATIVE_LEFT_OUT)
    assert set(lanes.IN_ONE.values()) <= set(image.KERNELS)


class Recorded:
    """Stands for a guest: what it was asked to run."""

    def __init__(self, series: str, *executables: str) -> None:
        self.series = series
        self.machine = SimpleNamespace(cpu_seconds=lambda: 0.0)
        self.asked: list[tuple[list[str], dict[str, str]]] = []
        self._listing = "\n".join(executables).encode()

    def run(self, argv: str | list[str], **options: Any) -> Result:
        if isinstance(argv, list):
            self.asked.append((argv, options.get("env") or {}))
        report = b"<testsuites/>" if isinstance(argv, list) and argv[0] == "cat" else b"1 passed; 0 failed; 0 ignored"
        return Result(0, self._listing if isinstance(argv, str) else report, b"")


def test_what_is_dealt_out_runs_in_exactly_one_guest() -> None:
    """Each guest is told its share of the tests, and files and executables of one are not run by another."""
    shares = set()
    for lane in lanes.INSIDE:
        ran: list[str] = []
        for series in lanes.guests_of(lane):
            guest = Recorded(series)
            lanes.run_pytest(cast(Guest, guest), lane, 1.0)
            ((argv, env),) = [asked for asked in guest.asked if "pytest" in asked[0]]
            ran += [word for word in argv if word.startswith("tests/")]
            shares.add((series, env[SHARE_ENV]))
        for path in lanes.INSIDE[lane]:
            assert ran.count(path) == (1 if path in lanes.IN_ONE else len(image.KERNELS)), path
    assert shares == {(series, f"{number}/{len(image.KERNELS)}") for number, series in enumerate(image.KERNELS)}


def test_a_native_executable_of_one_guest_is_not_run_by_another() -> None:
    dealt = [name for name in lanes.IN_ONE if not name.startswith("tests/")]
    whole = [name for name in dealt if "::" not in name]
    ran, skipped = [], []
    for series in image.KERNELS:
        guest = Recorded(series, *whole, "launch-stores", *lanes.NATIVE_LEFT_OUT)
        lanes.run_native(cast(Guest, guest), "native", 1.0)
        for argv, _ in guest.asked:
            if "--test-threads=2" in argv:
                ran.append(argv[0].rpartition("/")[2])
                skipped += [f"{ran[-1]}::{word[7:]}" for word in argv if word.startswith("--skip=")]
    assert sorted(ran) == sorted([*whole, *["launch-stores"] * len(image.KERNELS)])
    # Each is skipped by all but one.
    assert sorted(skipped) == sorted([name for name in dealt if "::" in name] * (len(image.KERNELS) - 1))


def test_native_tests_that_are_dealt_out_are_there() -> None:
    """Skipping a name that no test has would skip nothing."""
    for name in lanes.IN_ONE:
        where, _, test = name.partition("::")
        if test:
            crate, _, target = where.partition("-")
            source = (TESTS.parent / f"native/{crate}/tests/{target}.rs").read_text()
            assert f"#[test]\nfn {test}()" in source, name


def test_what_a_guest_leaves_out_is_told_with_a_reason() -> None:
    for name, series in lanes.IN_ONE.items():
        lane = name.split("/")[1] if name.startswith("tests/") else "native"
        (other,) = set(image.KERNELS) - {series}
        assert series in lanes.left_out(other, lane)[name]
        assert name not in lanes.left_out(series, lane)


def test_the_slowest_are_named() -> None:
    cases = "".join(f'<testcase classname="c" name="t{number}" time="{number}.2"/>' for number in range(40))
    outcome = lanes.read_report("root", f"<testsuite>{cases}</testsuite>".encode())
    assert outcome.passed == 40
    assert outcome.notes[:2] == ["39 s c::t39", "38 s c::t38"]
    assert len(outcome.notes) == lanes.SLOWEST
