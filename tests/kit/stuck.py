"""Processes that no signal ends: they write to a file system that is frozen, or are frozen themselves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.kit import groups

# The one of v2 lets what is killed die.
FREEZER: Final = Path("/sys/fs/cgroup/freezer")
_WAIT_S: Final = 60.0
# In a process of its own: a mount namespace is a whole process's, and that one has no programs in it. What it needs
# is loaded before. It thaws when it is told to, and when nobody is there any more to tell it.
_HOLDER: Final = """
import ctypes, fcntl, os, sys
FREEZE, THAW, NEWNS = 0xC0045877, 0xC0045878, 0x20000
namespace = os.open(sys.argv[1], os.O_RDONLY)
if ctypes.CDLL(None, use_errno=True).setns(namespace, NEWNS):
    raise OSError(ctypes.get_errno(), "setns")
at = os.open(sys.argv[2], os.O_RDONLY)
fcntl.ioctl(at, FREEZE, 0)
os.write(1, b"frozen\\n")
os.read(0, 1)
fcntl.ioctl(at, THAW, 0)
"""


class Frozen:
    """The writable part of a sandbox of kind ext4, which is a file system of its own."""

    def __init__(self, run_dir: Path, sandbox: str) -> None:
        line = [sys.executable, "-c", _HOLDER, str(run_dir / "ns/mnt"), f"/uppers/{sandbox}"]
        self._holder = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"frozen\n"

    def thaw(self) -> None:
        """Everything goes on; idempotent."""
        if self._holder.returncode is None:
            self._holder.communicate(b"\n")
            assert self._holder.returncode == 0


@contextlib.contextmanager
def frozen(run_dir: Path, sandbox: str) -> Iterator[Frozen]:
    """Frozen within, whatever happens."""
    made = Frozen(run_dir, sandbox)
    try:
        yield made
    finally:
        made.thaw()


def until_stuck(pid: int) -> None:
    """Wait until a process is in a sleep that nothing interrupts."""
    end = time.monotonic() + _WAIT_S
    while state(pid) != "D":
        assert time.monotonic() < end, f"{pid} is not stuck: {state(pid)}"
        time.sleep(0.01)


def state(pid: int) -> str:
    """As the kernel has it; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def stuck_in(cgroup: str) -> list[int]:
    """Processes below a group that wait for a frozen file system; one that only waits for a page is not among them."""
    found: set[int] = set()
    for group in groups.below(cgroup):
        found |= groups.processes(group)
    return [pid for pid in found if state(pid) == "D" and _waits_in(pid) == "percpu_rwsem_wait"]


def _waits_in(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return ""


class Held:
    """Processes in a group of the freezer of cgroup v1: no signal ends them until they are thawed."""

    def __init__(self, pids: list[int]) -> None:
        self._group = FREEZER / f"dsec-held-{os.getpid()}-{pids[0]}"
        self._group.mkdir()
        self.pids = pids
        for pid in pids:
            (self._group / "cgroup.procs").write_text(str(pid))
        (self._group / "freezer.state").write_text("FROZEN")
        for pid in pids:
            until_stuck(pid)

    def thaw(self) -> None:
        """Everything goes on; idempotent."""
        if not self._group.exists():
            return
        (self._group / "freezer.state").write_text("THAWED")
        for pid in (self._group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (FREEZER / "cgroup.procs").write_text(pid)
        end = time.monotonic() + _WAIT_S
        while self._group.exists():
            with contextlib.suppress(OSError):
                self._group.rmdir()
            assert time.monotonic() < end, "the group of the freezer stays"
            time.sleep(0.01)
