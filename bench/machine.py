"""What the figures were taken on, and what only the whole machine tells: memory available, kernel threads' time."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from bench import cgroups

KTHREADD = 2
SETTLE_S = 0.4
SETTLE_SAMPLES = 5


def describe() -> dict[str, Any]:
    """The machine and the versions of everything compared, for the head of a report."""
    return {
        "kernel": platform.release(),
        "arch": platform.machine(),
        "cpus": os.cpu_count(),
        "cpu_model": _cpu_model(),
        "memory_mib": _meminfo("MemTotal") // 1024,
        "cgroups": cgroups.detect().mode,
        "python": platform.python_version(),
        "load_before": Path("/proc/loadavg").read_text().split()[:3],
        "versions": {name: _version(name) for name in ("dockerd", "runc", "bwrap", "gcc")},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _version(program: str) -> str | None:
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if found is None:
        return None
    words = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    return (words.stdout or words.stderr).partition("\n")[0].strip()


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/meminfo has no {key}")


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def available_bytes() -> int:
    """MemAvailable once things have settled: the median of a few samples."""
    samples = []
    for _ in range(SETTLE_SAMPLES):
        time.sleep(SETTLE_S)
        samples.append(_meminfo("MemAvailable") * 1024)
    return sorted(samples)[SETTLE_SAMPLES // 2]


def kernel_threads_s() -> float:
    """CPU seconds of all kernel threads alive: the deferred part of unmounting, freeing cgroups, network namespaces.

    It belongs to nobody's cgroup, and to everybody on the machine: meaningful only when nothing else runs.
    """
    total = 0
    children = Path(f"/proc/{KTHREADD}/task/{KTHREADD}/children").read_text().split()
    for pid in children:
        try:
            total += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):  # a worker that ended meanwhile
            continue
    return total / 1e9
