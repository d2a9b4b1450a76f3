"""Memory of a node's own processes stays where it is, whatever has run: many short runs, and much output.

`DSEC_SOAK_RUNS=100000 DSEC_SOAK_MIB=51200` for the long form; `-s` shows the figures as they come.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest

import dsec
from tests.kit.home import BASE, Home, standing
from tests.kit.memory import held_kib
from tests.kit.rtclient import Client

RUNS: Final = int(os.environ.get("DSEC_SOAK_RUNS", "3000"))
OUTPUT_MIB: Final = int(os.environ.get("DSEC_SOAK_MIB", "2048"))
# Until then tables, caches and allocators have the size they keep.
WARM_RUNS: Final = 1500
WARM_MIB: Final = 512
LOOKS: Final = 10
WORKERS: Final = 4
PIECE_MIB: Final = 64
# More than the noise of allocators: 3,000 runs that leave 1 KiB each do not pass.
RUNS_KIB: Final = 2 << 10
# The agent's buffers are as large as its clients are slow, and its allocator keeps them: 25 to 40 MiB were seen.
OUTPUT_KIB: Final = 20 << 10
SETTLE_S: Final = 30.0

Work = Callable[[dsec.Sandbox, int], None]


def pids(home: Home) -> dict[str, int]:
    with Client(home.place.run_dir / "runtime.sock") as c:
        runtime = int(c.hello["pid"])
    keeper = int((home.place.run_dir / "keeper.pid").read_text().split()[0])
    return {"agent": home.agent(), "runtime": runtime, "keeper": keeper}


def held(home: Home) -> dict[str, int]:
    return {name: held_kib(pid) for name, pid in pids(home).items()}


def settled(home: Home, warm: dict[str, int], allowed_kib: int) -> dict[str, int]:
    """What ended last is given back in the background."""
    end = time.monotonic() + SETTLE_S
    while (now := held(home)) and grown(warm, now, allowed_kib) and time.monotonic() < end:
        time.sleep(0.2)
    return now


def grown(warm: dict[str, int], now: dict[str, int], allowed_kib: int) -> dict[str, int]:
    """Which holds more than it may, and how many KiB more than before."""
    return {name: now[name] - kib for name, kib in warm.items() if now[name] - kib > allowed_kib}


def share(boxes: list[dsec.Sandbox], work: Work, numbers: range) -> None:
    """Does some work by several clients' threads; an error of one is the caller's."""
    todo: Iterator[int] = iter(numbers)
    lock = threading.Lock()
    failed: list[BaseException] = []

    def one() -> None:
        try:
            while not failed:
                with lock:
                    number = next(todo, None)
                if number is None:
                    return
                work(boxes[number % len(boxes)], number)
        except BaseException as error:  # noqa: BLE001 - a thread's edge: the test gets it
            failed.append(error)

    threads = [threading.Thread(target=one) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def soak(home: Home, work: Work, warm: int, count: int, allowed_kib: int) -> None:
    """Works on, and looks now and then at who holds how much."""
    with home.client() as client:
        boxes = [client.create(base=BASE, idle_timeout_s=None) for _ in range(WORKERS)]
        share(boxes, work, range(warm))
        before = held(home)
        print(f"\n{warm:>8}: {before} KiB", flush=True)
        who = pids(home)
        now = before
        for look in range(LOOKS):
            first = warm + count * look // LOOKS
            last = warm + count * (look + 1) // LOOKS
            share(boxes, work, range(first, last))
            now = held(home)
            print(f"{last:>8}: {now} KiB", flush=True)
        now = settled(home, before, allowed_kib)
        print(f" settled: {now} KiB", flush=True)
        assert pids(home) == who, "one of them died on the way"
        assert grown(before, now, allowed_kib) == {}, f"{before} -> {now}"
        for box in boxes:
            box.stop()


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with standing() as made:
        yield made


def run(box: dsec.Sandbox, number: int) -> None:
    result = box.run(f"echo {number}; exit {number % 200}")
    assert (result.exit_code, result.stdout) == (number % 200, f"{number}\n")


def much(box: dsec.Sandbox, number: int) -> None:
    """Half of it is captured, half is streamed, read and kept on the disk."""
    size = PIECE_MIB << 20
    command = f"head -c {size} /dev/zero"
    if number % 2:
        result = box.run(command)
        assert (result.exit_code, len(result.stdout_bytes) + result.dropped_bytes) == (0, size)
        return
    program = box.spawn(command, stdin=False)
    reader = program.stdout.follow()
    assert sum(map(len, reader)) + reader.dropped == size  # it may be ahead of its reader by more than is kept
    assert program.wait().exit_code == 0


@pytest.mark.timeout(0)
def test_memory_is_flat_over_many_runs(home: Home) -> None:
    soak(home, run, WARM_RUNS, RUNS, RUNS_KIB)


@pytest.mark.timeout(0)
def test_memory_is_flat_over_much_output(home: Home) -> None:
    soak(home, much, WARM_MIB // PIECE_MIB, OUTPUT_MIB // PIECE_MIB, OUTPUT_KIB)


@pytest.mark.parametrize("what", ["bytearray(size)", "[os.write(file, bytes(1 << 20)) for _ in range(size >> 20)]"])
def test_what_a_process_takes_is_seen(what: str) -> None:
    """Memory of its own, and in files in memory that it has open."""
    said = "print(flush=True); input()"
    script = f"import os; size = {(2 * RUNS_KIB) << 10}; file = os.memfd_create('x'); {said}; x = {what}; {said}"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        before = {"it": held_kib(process.pid)}
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert grown(before, {"it": held_kib(process.pid)}, RUNS_KIB)
        process.communicate(b"\n")
