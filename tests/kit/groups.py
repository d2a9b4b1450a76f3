"""Cgroups as the kernel has them, in every hierarchy. Others come and go meanwhile: what is gone is passed over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")


def hierarchies() -> list[Path]:
    """Where cgroup v1 has its controllers there is one for each, beside the unified one."""
    return [CGROUPS, *(path for path in CGROUPS.iterdir() if path.is_dir())]


def below(name: str, *, topdown: bool = True) -> Iterator[Path]:
    """A group of this name, and those below it."""
    for hierarchy in hierarchies():
        for directory, _, _ in os.walk(hierarchy / name, topdown=topdown):
            yield Path(directory)


def processes(group: Path) -> set[int]:
    """Those in a group itself; none when it is gone."""
    try:
        return {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
    except OSError:
        return set()
