"""How much room this machine has, and how much of it is really free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dsec.linux import proc
from dsec.model.limits import MIB
from dsec.node.admission import Room
from dsec.node.clock import Clock

# Kept for the system, the agent and the runtime: of the machine's total, with a floor.
RESERVE_FRACTION: Final = 0.05
MEMORY_RESERVE_MIB: Final = 512.0
DISK_RESERVE_MIB: Final = 2048.0
# Twice what the cgroup of all sandboxes leaves to the rest of the machine (PIDS_LEFT): when sandboxes have used theirs
# up, no further one is let in to find that nothing can be started in it.
PIDS_RESERVE: Final = 4096.0
DESCRIPTORS_RESERVE: Final = 512.0

# How far promises may exceed what is there. Sandboxes use a small part of their limits, most of them are idle, and an
# upper is sparse: 3,200 default sandboxes (512 MiB each) fit a machine of 24 GiB, and what protects it is `keep_free`.
OVERCOMMIT: Final[Mapping[str, float]] = {"memory_mib": 80.0, "disk_mib": 80.0, "pids": 512.0, "descriptors": 1.0}

_GAUGE_AGE_S: Final = 0.1  # reading /proc/meminfo costs 30 us: not for each of a thousand requests


class MachineGauge:
    """What is free on this machine now: memory, disk where the uppers lie, and numbers for processes."""

    def __init__(self, state_dir: Path, clock: Clock) -> None:
        self._state_dir = state_dir
        self._clock = clock
        self._read_at = float("-inf")
        self._free: dict[str, float] = {}

    def free(self) -> Mapping[str, float]:
        now = self._clock.boot()
        if now - self._read_at > _GAUGE_AGE_S:
            disk = proc.disk(self._state_dir)
            self._free = {
                "memory_mib": proc.memory().available / MIB,
                "disk_mib": disk.available / MIB,
                "pids": float(proc.pid_max() - proc.processes()),
            }
            self._read_at = now
        return self._free


class EndlessGauge:
    """A simulated node: the machine is never short of anything."""

    def free(self) -> Mapping[str, float]:
        return {}


def machine_room(state_dir: Path, overcommit: Mapping[str, float]) -> Room:
    """The room of this machine: its totals less reserves, times the factors."""
    memory_mib = proc.memory().total / MIB
    disk_mib = proc.disk(state_dir).total / MIB
    keep_free = {
        "memory_mib": max(MEMORY_RESERVE_MIB, memory_mib * RESERVE_FRACTION),
        "disk_mib": max(DISK_RESERVE_MIB, disk_mib * RESERVE_FRACTION),
        "pids": PIDS_RESERVE,
    }
    base = {
        "memory_mib": memory_mib - keep_free["memory_mib"],
        "disk_mib": disk_mib - keep_free["disk_mib"],
        "pids": proc.pid_max() - keep_free["pids"],
        "descriptors": proc.descriptors_max() - DESCRIPTORS_RESERVE,
    }
    factors = {**OVERCOMMIT, **overcommit}
    return Room(total={name: max(value, 0.0) * factors[name] for name, value in base.items()}, keep_free=keep_free)
