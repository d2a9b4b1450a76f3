"""The command loop of the drivers, on a target that only counts."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from bench.drivers.base import Driver
from bench.peers.base import Failed
from bench.peers.raw import KEY, timed

pytestmark = pytest.mark.unit


class Counting:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.alive: set[int] = set()
        self.made = self.runs = 0

    def session(self) -> None:
        return None

    def create(self, session: None) -> int:
        with self.lock:
            self.made += 1
            self.alive.add(self.made)
            return self.made

    def run(self, session: None, sandbox: int) -> None:
        assert sandbox in self.alive
        self.runs += 1

    def stop(self, session: None, sandbox: int) -> None:
        with self.lock:
            self.alive.remove(sandbox)

    def cycle(self, session: None) -> None:
        self.stop(session, self.create(session))

    def many(self, count: int) -> list[int]:
        return [self.create(None) for _ in range(count)]


def test_create_makes_exactly_as_many_as_asked_whatever_the_jobs() -> None:
    target = Counting()
    driver = Driver(target, target.many)
    assert driver.perform("create", ["100", "7"])["count"] == 100
    assert driver.perform("many", ["11"])["count"] == 11
    assert len(target.alive) == 111
    assert driver.perform("stop", ["3"])["count"] == 111
    assert not target.alive


def test_timed_operations_count_what_they_did() -> None:
    target = Counting()
    driver = Driver(target)
    driver.perform("create", ["3", "1"])
    done = driver.perform("run", ["0.02", "1"])
    assert done["count"] == target.runs == len(done["latencies_us"]) > 0
    assert driver.perform("cycle", ["0.02", "2"])["count"] > 0
    assert len(target.alive) == 3


def test_a_failure_in_a_thread_ends_the_operation() -> None:
    target = Counting()
    driver = Driver(target)
    driver.perform("create", ["1", "1"])
    target.alive.clear()
    with pytest.raises(AssertionError):
        driver.perform("run", ["10", "2"])


@pytest.mark.parametrize("op", ["many", "nonsense"])
def test_what_a_target_cannot_do_is_refused(op: str) -> None:
    with pytest.raises(ValueError, match="no such operation"):
        Driver(Counting()).perform(op, ["1"])


def test_what_flows_goes_through_one_sandbox() -> None:
    target = Counting()
    asked: list[tuple[int, int]] = []

    def stream(sandbox: int, mib: int) -> dict[str, Any]:
        asked.append((sandbox, mib))
        return {"count": mib, "seconds": 1.0, "latencies_us": [1e6]}

    driver = Driver(target, flows={"stream": stream})
    driver.perform("create", ["1", "1"])
    assert driver.perform("stream", ["7"])["count"] == 7
    assert asked == [(1, 7)]
    with pytest.raises(ValueError, match="no such operation"):
        driver.perform("echo", ["7"])


def test_another_key_than_the_one_typed_is_no_figure() -> None:
    typed: list[int] = []
    assert timed(5, lambda: typed.append(1), lambda: KEY)["count"] == len(typed) == 5
    with pytest.raises(Failed, match="came back"):
        timed(5, lambda: None, lambda: b"y")
