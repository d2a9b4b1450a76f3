"""What an operator should know about this machine before sandboxes run on it, with what to do about it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

import msgspec

from dsec.linux import cgroups, proc
from dsec.model import limits

GIB: Final = 1 << 30

# Below these a node works, but not for long or not for many.
DESCRIPTORS_LOW: Final = 16_384
# What the kernel itself allows at most on 64 bits.
PID_MAX_HIGHEST: Final = 4_194_304
# What the machine needs besides sandboxes. For terminals it is kernel.pty.reserve, which only the host may use.
PIDS_ASIDE: Final = 4096
OPEN_FILE_BYTES: Final = 256
# As systemd sets it.
FILE_MAX_HIGHEST: Final = (1 << 63) - 1
PTYS_ASIDE: Final = 1024
DISK_LOW_BYTES: Final = 4 * GIB
DISK_LOW_INODES: Final = 100_000

Level = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. `problem`: no sandbox can run, or the host is in danger."""

    name: str
    level: Level
    found: str
    advice: str = ""


def examine(state_dir: Path, root: Path = proc.PROC) -> list[Finding]:
    """Everything that can be seen without changing anything."""
    return [
        _privilege(),
        _cgroups(),
        _core_pattern(root),
        _descriptors(),
        _processes(root),
        _terminals(root),
        _open_files(root),
        _disk(state_dir),
        _swap(root),
    ]


def _privilege() -> Finding:
    if os.geteuid() == 0:
        return Finding("privilege", "ok", "root")
    return Finding("privilege", "problem", f"uid {os.geteuid()}", "the runtime needs root: start the node with sudo")


def _cgroups() -> Finding:
    found = cgroups.detect()
    text = f"{found.mode}: {' '.join(sorted(found.controllers)) or 'no controllers'}"
    if found.mode == "none":
        advice = "mount a cgroup2 file system (systemd does; in a container give it one of its own)"
        return Finding("cgroups", "problem", text, advice)
    if found.missing:
        advice = f"enable {' '.join(sorted(found.missing))} in cgroup.subtree_control of the root (or Delegate=yes)"
        return Finding("cgroups", "problem", text, advice)
    return Finding("cgroups", "ok", text)


def _core_pattern(root: Path) -> Finding:
    pattern = (root / "sys/kernel/core_pattern").read_text().strip()
    if not pattern.startswith("|"):
        return Finding("core_pattern", "ok", pattern)
    # The kernel runs the handler as root on the host for crashes in sandboxes too, whatever RLIMIT_CORE says.
    advice = "a crash in a sandbox starts this program as root on the host: sysctl kernel.core_pattern=core"
    return Finding("core_pattern", "warning", pattern, advice)


def _at_least(name: str, value: int, low: int, advice: str) -> Finding:
    return Finding(name, "ok", str(value)) if value >= low else Finding(name, "warning", str(value), advice)


def _descriptors() -> Finding:
    advice = "about 5 are used per sandbox: raise the hard limit (LimitNOFILE= in the unit, or ulimit -Hn)"
    return _at_least("descriptors", proc.descriptors_max(), DESCRIPTORS_LOW, advice)


def _backed(root: Path) -> int:
    """How many default sandboxes the memory backs without overcommitment: so many may use all they were promised."""
    return max(proc.memory(root).total // (limits.MEMORY_DEFAULT_MIB * limits.MIB), 1)


def _processes(root: Path) -> Finding:
    count = _backed(root)
    low = min(count * limits.PIDS_DEFAULT + PIDS_ASIDE, PID_MAX_HIGHEST)
    advice = (
        f"{count} default sandboxes may use {limits.PIDS_DEFAULT} each, and when they have used all of them up nothing "
        f"starts in any sandbox: sysctl kernel.pid_max={PID_MAX_HIGHEST} kernel.threads-max={PID_MAX_HIGHEST}"
    )
    return _at_least("processes", proc.pid_max(root), low, advice)


def _terminals(root: Path) -> Finding:
    count = _backed(root)
    low = count * limits.PTY_MAX + PTYS_ASIDE
    advice = (
        f"{count} default sandboxes may use {limits.PTY_MAX} each, and when they have used all of them up no other can "
        f"open one: sysctl kernel.pty.max={low}"
    )
    return _at_least("terminals", proc.pty_max(root), low, advice)


def _open_files(root: Path) -> Finding:
    # Memory is what limits a sandbox here, and the number is one for the machine.
    low = proc.memory(root).total // OPEN_FILE_BYTES
    advice = (
        f"an open file costs a sandbox some {OPEN_FILE_BYTES} bytes of its memory, and when all of them together have "
        f"used these up no other can open one: sysctl fs.file-max={FILE_MAX_HIGHEST}"
    )
    return _at_least("open files", proc.file_max(root), low, advice)


def _disk(state_dir: Path) -> Finding:
    found = proc.disk(state_dir)
    text = f"{found.available / GIB:.1f} of {found.total / GIB:.1f} GiB free at {state_dir}"
    # Some file systems (btrfs) make inodes as they go and report none.
    inodes_low = found.inodes_total > 0 and found.inodes_available < DISK_LOW_INODES
    if found.available < DISK_LOW_BYTES or inodes_low:
        return Finding("disk", "warning", text, "make room, or put --state-dir on a bigger file system")
    return Finding("disk", "ok", text)


def _swap(root: Path) -> Finding:
    found = proc.memory(root)
    text = f"{found.swap_total / GIB:.1f} GiB, memory {found.total / GIB:.1f} GiB"
    if found.swap_total:
        return Finding("swap", "ok", text)
    return Finding(
        "swap", "warning", text, "without swap (zram will do) what idle sandboxes once touched stays in memory"
    )
