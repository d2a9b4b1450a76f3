"""Which control groups this machine has. The runtime decides by trying; this is for messages and for `doctor`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

# Which node a cgroup belongs to. `trusted`: only root can read or set it, and a sandbox's root is not.
OWNER_XATTR: Final = "trusted.dsec.run_dir"
WANTED: Final = frozenset({"cpu", "memory", "pids"})

Mode = Literal["v2", "hybrid", "none"]


class Cgroups(msgspec.Struct, frozen=True):
    """`v2`: one tree with the controllers. `hybrid`: v1 trees with them, and a v2 tree beside. `missing`: not found."""

    mode: Mode
    controllers: frozenset[str]
    v2: Path | None = None

    @property
    def missing(self) -> frozenset[str]:
        """Controllers a node needs and does not find."""
        return WANTED - self.controllers


def detect(mountinfo: Path = Path("/proc/self/mountinfo")) -> Cgroups:
    """What is mounted."""
    v2: Path | None = None
    v1: set[str] = set()
    for line in mountinfo.read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        point = Path(left.split(" ")[4].encode().decode("unicode_escape"))
        if kind == "cgroup2" and v2 is None:
            v2 = point
        elif kind == "cgroup":
            v1.update(WANTED & set(options.split(",")))
    own = frozenset((v2 / "cgroup.controllers").read_text().split()) if v2 else frozenset[str]()
    if own >= WANTED or not v1:
        return Cgroups("v2" if v2 else "none", own, v2)
    return Cgroups("hybrid" if v2 else "none", frozenset(v1), v2)


@contextlib.contextmanager
def locked(cgroup: Path) -> Iterator[None]:
    """Alone among all who lock this cgroup."""
    fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def owner(cgroup: Path) -> str | None:
    """The name `set_owner` put on it."""
    try:
        return os.fsdecode(os.getxattr(cgroup, OWNER_XATTR))
    except OSError as error:
        if error.errno == errno.ENODATA:
            return None
        raise


def set_owner(cgroup: Path, name: str) -> None:
    """Put a name on it, for as long as it is there."""
    os.setxattr(cgroup, OWNER_XATTR, os.fsencode(name))


def populated(cgroup: Path) -> bool:
    """Whether a process lives in it, or in one below it."""
    return "populated 1" in (cgroup / "cgroup.events").read_text().splitlines()
