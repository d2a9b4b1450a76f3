"""The machine's numbers: memory, processes, descriptors, disks, the boot. Sizes are bytes."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Final

import msgspec

from dsec.model.limits import KIB

PROC: Final = Path("/proc")
CAP_SYS_RESOURCE: Final = 24
_MEMORY: Final = re.compile(rb"^(MemTotal|MemAvailable|SwapTotal|SwapFree):\s*(\d+)", re.MULTILINE)


class Memory(msgspec.Struct, frozen=True):
    """Of /proc/meminfo. `available` is the kernel's estimate of what can be used without swapping."""

    total: int
    available: int
    swap_total: int = 0
    swap_free: int = 0


class Disk(msgspec.Struct, frozen=True):
    """The file system a path is on; `available` and `inodes_available` are what an unprivileged user may still take."""

    total: int
    available: int
    inodes_total: int
    inodes_available: int


def memory(proc: Path = PROC) -> Memory:
    """Memory now. Costs about 30 us."""
    # Four of some sixty lines: parsing them all cost more than the kernel takes to write them.
    fields = {name: int(kib) * KIB for name, kib in _MEMORY.findall((proc / "meminfo").read_bytes())}
    return Memory(fields[b"MemTotal"], fields[b"MemAvailable"], fields.get(b"SwapTotal", 0), fields.get(b"SwapFree", 0))


def disk(path: Path) -> Disk:
    """The file system that holds the path, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    found = os.statvfs(path)
    unit = found.f_frsize
    return Disk(found.f_blocks * unit, found.f_bavail * unit, found.f_files, found.f_favail)


def pid_max(proc: Path = PROC) -> int:
    """How many processes and threads this machine can have: the lower of two limits, both global."""
    names = ("pid_max", "threads-max")
    return min(int((proc / "sys/kernel" / name).read_text()) for name in names)


def pty_max(proc: Path = PROC) -> int:
    """How many pseudo terminals this machine can have, in all its namespaces together."""
    return int((proc / "sys/kernel/pty/max").read_text())


def file_max(proc: Path = PROC) -> int:
    """How many files can be open on this machine, in all its processes together."""
    return int((proc / "sys/fs/file-max").read_text())


def processes(proc: Path = PROC) -> int:
    """How many processes and threads there are now (the fourth field of loadavg: running/all)."""
    return int((proc / "loadavg").read_text().split()[3].partition("/")[2])


def descriptors_max(proc: Path = PROC) -> int:
    """How many descriptors one process of a node may have: what the kernel gives anybody if it may raise its hard limit
    (as keeper and runtime then do), or that limit."""
    status = (proc / "self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    if effective >> CAP_SYS_RESOURCE & 1:
        return int((proc / "sys/fs/nr_open").read_text())
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def cpus() -> tuple[int, ...]:
    """The CPUs this process may run on, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


def boot_id(proc: Path = PROC) -> str:
    """A name for the time since the machine was started; another one means that nothing survived."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int, proc: Path = PROC) -> int | None:
    """When a process started, in ticks since boot: with the pid it names a process for good. None: there is none.

    Field 22 of stat; counted from the last parenthesis, because the name of the program may contain any letter.
    """
    fields = _stat(pid, proc)
    return None if fields is None else int(fields[19])


def command_line(pid: int, proc: Path = PROC) -> list[bytes]:
    """The arguments a process was started with; none when it has ended."""
    try:
        return (proc / str(pid) / "cmdline").read_bytes().split(b"\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _stat(pid: int, proc: Path) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the third on."""
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(b")")[2].split()
