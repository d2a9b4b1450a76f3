"""A peer: something that runs sandboxes, its accounting groups, and one operation measured."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from bench import cgroups, machine
from bench.root import Root

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0
REPO = Path(__file__).resolve().parents[2]


def python_env() -> dict[str, str]:
    """The environment of a Python process that finds the bench and, in a checkout, the project, installed or not."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "src")])}


class Failed(Exception):
    """A peer did not do what was asked; the figures of its round do not exist."""


@dataclass(frozen=True)
class Sample:
    """One operation over a few seconds. CPU times are what the groups used from its begin to its end."""

    op: str
    jobs: int
    count: int
    seconds: float
    latencies_us: list[float] = field(repr=False)
    server_cpu_s: float
    client_cpu_s: float
    kernel_cpu_s: float  # all kernel threads of the machine
    parts: dict[str, float] = field(default_factory=dict)  # of the server's CPU time, single processes

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.count / self.seconds

    @property
    def server_ms(self) -> float:
        """CPU milliseconds of the server side for one operation."""
        return self.server_cpu_s * 1000 / max(1, self.count)

    @property
    def client_ms(self) -> float:
        """CPU milliseconds of the client side for one operation."""
        return self.client_cpu_s * 1000 / max(1, self.count)


@dataclass(frozen=True)
class Env:
    """What all peers share: a directory and a cgroup name of this run, the root, the tools built."""

    work: Path
    name: str
    layout: cgroups.Layout
    root: Root
    tools: Path


class Peer:
    """The common part. A subclass starts its server, and turns an operation into a driver's line or a command line."""

    name: ClassVar[str]
    ops: ClassVar[tuple[str, ...]]

    def __init__(self, env: Env) -> None:
        self.env = env
        self.work = env.work / self.name
        self.server = cgroups.Group(env.layout, f"{env.name}/{self.name}/server")
        self.client = cgroups.Group(env.layout, f"{env.name}/{self.name}/client")
        self.processes: list[subprocess.Popen[str]] = []
        self.driver: subprocess.Popen[str] | None = None

    @classmethod
    def missing(cls, env: Env) -> str | None:
        """Why this peer cannot run here, or None."""
        raise TypeError(f"{cls.__name__} does not say what it needs")

    def start(self) -> None:
        """Bring everything up; returns when it takes requests."""

    def perform(self, op: str, *args: float | int) -> dict[str, Any]:
        """One operation, unmeasured: its count, seconds and latencies. By default the driver's."""
        return self.ask(" ".join([op, *(str(arg) for arg in args)]))

    def measure(self, op: str, jobs: int, *args: float | int) -> Sample:
        """One operation between two readings of the accounting groups."""
        pids = self.parts()
        before = (self.server.cpu_s(), self.client.cpu_s(), machine.kernel_threads_s())
        parts = {name: machine.cpu_s(pid) for name, pid in pids.items()}
        done = self.perform(op, *args)
        after = (self.server.cpu_s(), self.client.cpu_s(), machine.kernel_threads_s())
        parts = {name: machine.cpu_s(pid) - parts[name] for name, pid in pids.items()}
        server, client, kernel = (end - begin for begin, end in zip(before, after, strict=True))
        return Sample(op, jobs, done["count"], done["seconds"], done["latencies_us"], server, client, kernel, parts)

    def parts(self) -> dict[str, int]:
        """Processes of the server whose CPU time is shown beside that of all, by name."""
        return {}

    def close(self) -> None:
        """End all of it, the driver first, so that it can take back what it made."""
        for process in reversed(self.processes):
            if process.stdin is not None:
                process.stdin.close()
                _wait(process, END_TIMEOUT_S)
            process.terminate()
            _wait(process, END_TIMEOUT_S)
        self.processes.clear()

    # -- for subclasses --

    def spawn(self, group: cgroups.Group, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[str]:
        """A process inside an accounting group, its error output in a log file of its own."""
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / f"log-{len(self.processes)}").open("w") as log:
            words = [*group.prefix(), *(str(word) for word in command)]
            process = subprocess.Popen(words, stderr=log, text=True, **options)
        self.processes.append(process)
        return process

    def start_driver(self, group: cgroups.Group, command: Sequence[str | Path]) -> None:
        """The driver `ask` speaks to."""
        self.driver = self.spawn(group, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=python_env())

    def ask(self, line: str) -> dict[str, Any]:
        """One line to the driver, and its answer."""
        driver = self.driver
        if driver is None or driver.stdin is None or driver.stdout is None:
            raise Failed(f"{self.name} has no driver")
        driver.stdin.write(line + "\n")
        driver.stdin.flush()
        answer = driver.stdout.readline()
        if not answer:
            raise Failed(f"{self.name}: the driver ended during {line!r}: {self.last_words()}")
        done: dict[str, Any] = json.loads(answer)
        return done

    def loop(self, group: cgroups.Group, seconds: float, jobs: int, command: Sequence[str | Path]) -> dict[str, Any]:
        """A command line over and over, by the driver written in C."""
        words = [*group.prefix(limits=True), self.env.tools / "loop", seconds, jobs, self.name, *command]
        with tempfile.TemporaryFile("w+") as errors:
            run = subprocess.run(
                [str(word) for word in words], stdout=subprocess.PIPE, stderr=errors, text=True, check=False
            )
            errors.seek(0)
            if run.returncode:
                raise Failed(f"{self.name}: {errors.read()[-2000:]}")
        done: dict[str, Any] = json.loads(run.stdout)
        return done

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Poll, since a foreign daemon offers nothing better. Raises Failed when it ended or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            if any(process.poll() is not None for process in self.processes):
                raise Failed(f"{self.name}: ended while waiting for {what}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise Failed(f"{self.name}: no {what} within {START_TIMEOUT_S:.0f} s: {self.last_words()}")
            time.sleep(0.05)

    def last_words(self) -> str:
        """The ends of the logs."""
        return " | ".join(path.read_text(errors="replace")[-1000:] for path in sorted(self.work.glob("log-*")))


def _wait(process: subprocess.Popen[str], timeout_s: float) -> None:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
