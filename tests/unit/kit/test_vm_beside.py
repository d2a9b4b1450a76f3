"""Guests that work beside the other lanes: who waits for them is told, and nothing of them outlives the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.vm import beside, lanes, machine, payload


class Run:
    """Of a guest, what this is about."""

    ended: list[str] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, series: str, disk: Path, names: list[str]) -> None:
        self.series, self.disk, self.names = series, disk, names

    def end(self) -> None:
        assert self.disk.exists(), "a guest reads it until it is ended"
        self.ended.append(self.series)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "disk"

    @contextlib.contextmanager
    def made() -> Iterator[Path]:
        path.touch()
        try:
            yield path
        finally:
            path.unlink()

    Run.ended.clear()
    monkeypatch.setattr(payload, "disk", made)
    monkeypatch.setattr(machine, "snapshot", lambda series: None)
    monkeypatch.setattr(lanes, "GuestRun", Run)
    return path


def test_it_ends_when_the_tests_do(disk: Path) -> None:
    guests = beside.Beside({"6.1": ["native"], "6.12": []})
    assert guests.disk() == disk
    assert {name: run.names for name, run in guests.runs().items() if isinstance(run, Run)} == {
        "6.1": ["native"],
        "6.12": [],
    }
    guests.close()
    assert Run.ended == ["6.1", "6.12"]
    assert not disk.exists()


def test_what_fails_is_told_to_who_waits(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(series: str) -> None:
        raise machine.GuestError(f"{series} does not boot")

    monkeypatch.setattr(machine, "snapshot", snapshot)
    guests = beside.Beside({"6.1": ["native"]})
    with pytest.raises(machine.GuestError, match=r"6\.1 does not boot"):
        guests.runs()
    guests.close()
    assert not disk.exists()
