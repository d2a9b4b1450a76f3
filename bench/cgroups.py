"""Accounting groups: whose CPU time is whose, children that have ended included.

A cgroup counts every process ever started in it, whoever reaped it and whoever its parent is now, which neither rusage
(a daemon's children that fell to another parent) nor /proc (gone with the process) does. On v1 the `cpuacct` hierarchy
does this and sandboxes may join whatever they like in the others; on v2 the sandboxes' own cgroups are made below ours.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
LIMIT_CONTROLLERS = ("memory", "cpu", "pids")
REMOVE_TRIES = 100
REMOVE_PAUSE_S = 0.05


@dataclass(frozen=True)
class Layout:
    """How this machine mounts cgroups."""

    v2: Path
    v1: tuple[Path, ...]  # empty where v2 has the controllers
    cpuacct: Path | None

    @property
    def mode(self) -> str:
        """`v2` or `hybrid`, as `dsec doctor` calls them."""
        return "hybrid" if self.v1 else "v2"


def detect() -> Layout:
    """The layout found under /sys/fs/cgroup."""
    if (ROOT / "cgroup.controllers").exists():
        return Layout(ROOT, (), None)
    v1 = tuple(ROOT / name for name in LIMIT_CONTROLLERS if (ROOT / name).is_dir())
    return Layout(ROOT / "unified", v1, ROOT / "cpuacct")


@dataclass(frozen=True)
class Group:
    """One accounting group, `NAME` below the root of every hierarchy it needs."""

    layout: Layout
    name: str

    def __post_init__(self) -> None:
        hierarchies = [self.layout.v2, *self.layout.v1]
        if self.layout.cpuacct is not None:
            hierarchies.append(self.layout.cpuacct)
        for hierarchy in hierarchies:
            (hierarchy / self.name).mkdir(parents=True, exist_ok=True)
        if not self.layout.v1:
            _delegate(self.layout.v2, self.name)

    @property
    def v2(self) -> Path:
        """Its directory in the v2 hierarchy."""
        return self.layout.v2 / self.name

    @property
    def v1(self) -> list[Path]:
        """Its directories in the v1 hierarchies that carry limits."""
        return [hierarchy / self.name for hierarchy in self.layout.v1]

    def prefix(self, *, limits: bool = False) -> list[str]:
        """Words to put before a command line so that it starts inside; on v2 in a leaf, as the kernel demands.

        With `limits` it starts in the v1 hierarchies that carry limits too, for what makes its cgroups below its own.
        """
        base = self.v2 if self.layout.cpuacct is None else self.layout.cpuacct / self.name
        leaf = base / "own" if self.layout.cpuacct is None else base
        leaf.mkdir(exist_ok=True)
        # Membership in the v2 hierarchy too, so that whatever is left can be killed as one.
        joins = {leaf, self.v2 if self.layout.cpuacct is not None else leaf}
        joins.update(self.v1 if limits else [])
        script = "".join(f'echo 0 > "{path}/cgroup.procs" && ' for path in sorted(joins)) + 'exec "$@"'
        return ["/bin/sh", "-c", script, "sh"]

    def cpu_s(self) -> float:
        """CPU seconds used in it so far, user and system, ended processes included."""
        if self.layout.cpuacct is not None:
            return int((self.layout.cpuacct / self.name / "cpuacct.usage").read_text()) / 1e9
        for line in (self.v2 / "cpu.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "usage_usec":
                return int(value) / 1e6
        raise RuntimeError(f"{self.v2}/cpu.stat has no usage_usec")


def remove(layout: Layout, name: str) -> None:
    """End what still runs below `name` and remove it in every hierarchy, also in those only a peer has used."""
    top = layout.v2 / name
    if (top / "cgroup.kill").exists():
        (top / "cgroup.kill").write_text("1")
    others = [path for path in ROOT.iterdir() if path.is_dir()] if layout.v1 else []
    for hierarchy in {layout.v2, *others}:
        _remove(hierarchy / name)


def _delegate(root: Path, name: str) -> None:
    wanted = " ".join(f"+{controller}" for controller in LIMIT_CONTROLLERS)
    path = root
    for part in Path(name).parts:
        (path / "cgroup.subtree_control").write_text(wanted)
        path /= part
    (path / "cgroup.subtree_control").write_text(wanted)


def _remove(top: Path) -> None:
    if not top.is_dir():
        return
    for directory, _, _ in os.walk(top, topdown=False):
        for _ in range(REMOVE_TRIES):
            try:
                Path(directory).rmdir()
                break
            except OSError:
                time.sleep(REMOVE_PAUSE_S)
    if top.is_dir():
        raise OSError(f"{top} is still busy; its processes: {(top / 'cgroup.procs').read_text().split()}")
