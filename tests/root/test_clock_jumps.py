"""A node whose wall clock is set by days, forward and back, while sandboxes live and over a restart of all of it.

The machine's own clock is left alone: the agent has a library before the C library's that adds to what that says.
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.home import BASE, Home, standing
from tests.kit.rtclient import Client

pytestmark = pytest.mark.timeout(300)

DAY = 86_400
LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static long long *ahead(void) {
    static long long *mapped;
    if (!mapped) {
        int file = open(getenv("WALL_AHEAD"), O_RDONLY | O_CLOEXEC);
        mapped = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    }
    return mapped;
}
int clock_gettime(clockid_t which, struct timespec *out) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    int said = next(which, out);
    if (!said && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) out->tv_sec += *ahead();
    return said;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


class Wall:
    """The wall clock of a node."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "ahead"
        self.ahead = 0
        self._file.write_bytes(bytes(8))
        source, library = directory / "wall.c", directory / "wall.so"
        source.write_text(LIBRARY)
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self.env = {"LD_PRELOAD": str(library), "WALL_AHEAD": str(self._file)}

    def set(self, ahead: int) -> None:
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", ahead))
        self.ahead = ahead

    def now(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def wall(tmp_path: Path) -> Wall:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc (scripts/setup)")
    return Wall(tmp_path)


@pytest.fixture
def home(wall: Wall) -> Iterator[Home]:
    with standing() as made:
        made.dsec("down")
        made.env |= wall.env
        made.dsec("up")
        yield made


def all_die(home: Home) -> None:
    with Client(home.place.run_dir / "runtime.sock") as runtime:
        os.kill(runtime.hello["pid"], signal.SIGKILL)
    os.kill(home.agent(), signal.SIGKILL)
    home.dsec("up")


@pytest.mark.parametrize("days", [2, -2])
def test_the_wall_clock_of_a_node_is_set(home: Home, wall: Wall, days: int) -> None:
    with home.client() as client:
        sbx = client.create(base=BASE, lifetime_s=40_000, idle_timeout_s=40_000)
        gone = client.create(base=BASE)
        gone.stop()
        waits = sbx.spawn("read x; echo $x; exit 3", timeout_s=40_000)
        wall.set(days * DAY)
        # It is this that the node sees.
        assert abs(client.create(base=BASE).info().created_at - wall.now()) < 3600

        def all_is_well() -> None:
            info = sbx.info()
            assert (info.state, gone.info().end_reason) == ("running", "stopped")
            assert info.expires_at is not None and 30_000 < info.expires_at - wall.now() <= 40_000
            result = sbx.run("echo hi; exit 4", timeout_s=1000)
            assert (result.exit_code, result.stdout, result.cause) == (4, "hi\n", "exited")
            assert 0 <= result.duration_s < 1000
            assert sbx.process(waits.id).info().state == "running"

        all_is_well()
        all_die(home)
        all_is_well()
        wall.set(0)
        all_is_well()
        all_die(home)
        all_is_well()
        waits.stdin.write("told\n")
        result = waits.wait()
        assert (result.exit_code, result.stdout, result.cause) == (3, "told\n", "exited")
        assert 0 <= result.duration_s < 1000
        # Their order is not that of the clock.
        events = list(sbx.events())
        assert [event.seq for event in events] == sorted(event.seq for event in events)
        assert [event.kind for event in events][-1] != "ended"
        assert sbx.stop().end_reason == "stopped"
