"""The command loop of a driver written in Python."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Target(Protocol):
    """What is driven. A session belongs to one thread."""

    def session(self) -> Any:
        """What one thread needs of its own: a connection."""

    def create(self, session: Any) -> Any:
        """A new sandbox, ready to run programs."""

    def run(self, session: Any, sandbox: Any) -> None:
        """Run `true` and see that it returned 0."""

    def stop(self, session: Any, sandbox: Any) -> None:
        """End it for good."""

    def cycle(self, session: Any) -> None:
        """Create, run, stop, in the shortest way the peer has."""


# What passes so much through one sandbox.
Flow = Callable[[Any, int], dict[str, Any]]


class Driver:
    """Carries out the lines of `bench.drivers` on a target."""

    def __init__(
        self,
        target: Target,
        many: Callable[[int], list[Any]] | None = None,
        flows: Mapping[str, Flow] | None = None,
    ) -> None:
        """`many` is there when the peer can create a number in one call; `flows` are by their names."""
        self.target = target
        self.flows = flows or {}
        self.many = many
        self.kept: list[Any] = []

    def serve(self) -> None:
        """Until standard input ends; then everything kept is stopped."""
        for line in sys.stdin:
            words = line.split()
            print(json.dumps(self.perform(words[0], words[1:])), flush=True)
        if self.kept:
            self.perform("stop", ["2"])

    def perform(self, op: str, args: list[str]) -> dict[str, Any]:
        """One line. ValueError when it is none."""
        target = self.target
        if op == "cycle":
            return self._timed(float(args[0]), int(args[1]), target.cycle)
        if op == "run":
            return self._timed(float(args[0]), int(args[1]), lambda s: target.run(s, random.choice(self.kept)))
        if op == "create":
            return self._times(int(args[0]), int(args[1]), lambda s: self.kept.append(target.create(s)))
        if op == "stop":
            return self._times(len(self.kept), int(args[0]), lambda s: target.stop(s, self.kept.pop()))
        if op == "many" and self.many is not None:
            begin = time.perf_counter()
            self.kept.extend(self.many(int(args[0])))
            seconds = time.perf_counter() - begin
            return {"count": int(args[0]), "seconds": seconds, "latencies_us": [seconds * 1e6]}
        if op in self.flows:
            return self.flows[op](self.kept[0], int(args[0]))
        raise ValueError(f"no such operation here: {op!r}")

    def _timed(self, seconds: float, jobs: int, step: Callable[[Any], None]) -> dict[str, Any]:
        until = time.perf_counter() + seconds
        return self._threads(jobs, step, lambda: time.perf_counter() < until)

    def _times(self, count: int, jobs: int, step: Callable[[Any], None]) -> dict[str, Any]:
        left = iter(range(count))
        lock = threading.Lock()

        def more() -> bool:
            with lock:
                return next(left, None) is not None

        return self._threads(jobs, step, more)

    def _threads(self, jobs: int, step: Callable[[Any], None], more: Callable[[], bool]) -> dict[str, Any]:
        latencies: list[float] = []
        failures: list[BaseException] = []

        def work() -> None:
            session = self.target.session()
            try:
                while not failures and more():
                    begin = time.perf_counter()
                    step(session)
                    latencies.append((time.perf_counter() - begin) * 1e6)
            except BaseException as error:  # noqa: BLE001 - a thread's edge: raised again by the thread that waits
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(jobs)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        if failures:
            raise failures[0]
        return {"count": len(latencies), "seconds": seconds, "latencies_us": latencies}
