"""What exists on the host because of us: taken before and after a test, the two must be equal.

    before = Inventory.take(scope)
    ...
    assert not (changes := Inventory.take(scope).changes_since(before)), "\\n".join(changes)

The machine may run other nodes at the same time, so only what can be traced to the scope counts: to its run and
state directories or its cgroups.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.kit import groups

NSENTER_TIMEOUT_S: Final = 10
# In a pinned namespace there is neither a program nor a /proc: of the caller's that is open already the kernel answers
# for whoever asks.
ENTER: Final = """
import ctypes, os, sys
proc, pinned = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
if libc.setns(pinned, 0x20000):
    raise OSError(ctypes.get_errno(), "setns")
with open(os.open("self/mountinfo", os.O_RDONLY, dir_fd=proc), "rb") as mounts:
    sys.stdout.buffer.write(mounts.read())
"""
# Rows of each table that are something of a living sandbox, or of nobody; others are kept for a while on purpose.
ROWS: Final = {
    "sandboxes": "ended_at IS NULL",
    "steps": "state = 0",
    "events": "sandbox NOT IN (SELECT id FROM sandboxes)",
    "meta": "0",
}
LISTENING: Final = "00010000"
# Options of a mount that name directories.
LAID_OVER: Final = ("lowerdir", "upperdir", "workdir")
# Files that come and go, or grow, without meaning anything.
TRANSIENT: Final = ("*-wal", "*-shm", "*.log", "*.sqlite", "*.db")


@dataclasses.dataclass(frozen=True)
class Scope:
    """What belongs to us: directories and the names of cgroups below the root of each hierarchy."""

    run_dir: Path
    state_dir: Path
    cgroups: tuple[str, ...] = ()
    ignore_files: tuple[str, ...] = TRANSIENT

    @property
    def dirs(self) -> tuple[str, str]:
        return str(self.run_dir), str(self.state_dir)

    def names(self, text: str) -> bool:
        """Whether a path of ours occurs in a text."""
        return any(re.search(re.escape(path) + r"(?![\w.-])", text) for path in self.dirs)


@dataclasses.dataclass(frozen=True)
class Inventory:
    """Things by kind, each with how often it is there. Descriptions have no number that changes by itself."""

    kinds: dict[str, Counter[str]]

    @classmethod
    def take(cls, scope: Scope) -> Inventory:
        """What is there now."""
        ours = list(_processes(scope))
        return cls(
            {
                "mount": Counter(_mounts(scope)),
                "cgroup": Counter(_cgroups(scope)),
                "process": Counter(_describe(pid) for pid in ours),
                "namespace": Counter(_namespaces(ours)),
                "descriptors": Counter(_descriptors(ours)),
                "loop device": Counter(_loops(scope)),
                "file": Counter(_files(scope)),
                "row": Counter(_rows(scope)),
                "unix socket": Counter(_sockets(scope)),
            }
        )

    @classmethod
    def settled(cls, scope: Scope, before: Inventory, within_s: float = 10.0) -> Inventory:
        """As `take`, but waits while there are differences: some things end in the background."""
        deadline = time.monotonic() + within_s
        while (now := cls.take(scope)).changes_since(before) and time.monotonic() < deadline:
            time.sleep(0.05)
        return now

    def changes_since(self, before: Inventory) -> list[str]:
        """Readable differences, `+` for what is new and `-` for what is gone."""
        changes = []
        for kind, now in self.kinds.items():
            then = before.kinds.get(kind, Counter())
            for sign, difference in (("+", now - then), ("-", then - now)):
                for what, count in sorted(difference.items()):
                    changes.append(f"{sign} {kind}: {what}" + (f" ({count} times)" if count > 1 else ""))
        return changes


def _mounts(scope: Scope) -> Iterator[str]:
    seen: set[int] = set()
    for pid in _pids():
        # A process may end, and a namespace with it, at any moment: then it holds nothing.
        with contextlib.suppress(OSError):
            inode = Path(f"/proc/{pid}/ns/mnt").stat().st_ino
            if inode not in seen:
                seen.add(inode)
                yield from _of_interest(Path(f"/proc/{pid}/mountinfo").read_text(errors="replace"), scope)
    for pinned in scope.run_dir.glob("ns/*"):
        # `is_mount` of a Path is for directories only.
        if pinned.name == "mnt" and os.path.ismount(pinned):
            # Paths in it do not name us, but all of it is ours.
            yield from (f"{mount} (pinned)" for mount in _each(_pinned_mounts(pinned)))


def _pinned_mounts(pinned: Path) -> str:
    """The mounts of a namespace no process is in."""
    proc, inside = os.open("/proc", os.O_PATH), os.open(pinned, os.O_RDONLY)
    try:
        return subprocess.run(
            [sys.executable, "-I", "-c", ENTER, str(proc), str(inside)],
            pass_fds=(proc, inside),
            stdout=subprocess.PIPE,
            timeout=NSENTER_TIMEOUT_S,
            check=True,
        ).stdout.decode(errors="replace")
    finally:
        os.close(proc)
        os.close(inside)


def _of_interest(mountinfo: str, scope: Scope) -> Iterator[str]:
    return (mount for mount in _each(mountinfo) if scope.names(mount))


def _each(mountinfo: str) -> Iterator[str]:
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split(" ")[3:5]
        kind, source, options = right.split(" ")[:3]
        if kind == "nsfs":
            root = root.partition(":")[0]  # the number differs every time
        source = re.sub(r"(/dev/loop)[0-9]+", r"\1N", source)
        shown = "".join(f" {option}" for option in options.split(",") if option.startswith(LAID_OVER))
        yield f"{kind} {source} {root} on {point}{shown}"


def _cgroups(scope: Scope) -> Iterator[str]:
    for name in scope.cgroups:
        for group in map(str, groups.below(name)):
            # Groups of ended sandboxes that wait for the next one, and those of launchers, are a bounded number.
            if "/.spare-" not in group and "/.launcher-" not in group:
                yield group


def _processes(scope: Scope) -> Iterator[int]:
    for pid in _pids():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if _left_to_init(pid):
                continue
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            groups = Path(f"/proc/{pid}/cgroup").read_text()
            inside = any(f":/{name}/" in groups + "/" or f":/{name}\n" in groups for name in scope.cgroups)
            if inside or scope.names(command):
                yield pid


def _left_to_init(pid: int) -> bool:
    """Whether it has ended as an orphan: the host's init reaps it, some within a second or two, and nobody else can."""
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return (state, parent) == ("Z", "1")


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "(ended)"
    return command or f"[{name}]"


def _namespaces(pids: list[int]) -> Iterator[str]:
    """Namespaces our processes are in or hold open, other than the host's."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= {str(path.readlink()) for path in Path(f"/proc/{pid}/ns").iterdir()}
        for link in _links(pid):
            if re.fullmatch(r"\w+:\[\d+\]", link) and not link.startswith(("socket", "pipe", "anon_inode")):
                found.add(link)
    host = {str(path.readlink()) for path in Path("/proc/self/ns").iterdir()}
    return (link.partition(":")[0] for link in found - host)


def _descriptors(pids: list[int]) -> Iterator[str]:
    """Kinds of open descriptors of each process, so that a leak shows."""
    for pid in pids:
        name = _describe(pid)
        for link in _links(pid):
            yield f"{name}: {re.sub(r'[0-9]+', 'N', link)}"


def _links(pid: int) -> list[str]:
    links = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(str(path.readlink()))
    return links


def _loops(scope: Scope) -> Iterator[str]:
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if scope.names(backing.read_text()):
                yield backing.read_text().strip()


def _files(scope: Scope) -> Iterator[str]:
    for top in (scope.run_dir, scope.state_dir):
        for directory, subdirectories, files in os.walk(top):
            for name in [*subdirectories, *files]:
                if not any(fnmatch.fnmatch(name, pattern) for pattern in scope.ignore_files):
                    yield f"{directory}/{name}"


def _rows(scope: Scope) -> Iterator[str]:
    for path in (*scope.state_dir.glob("*.db"), *scope.state_dir.glob("*/*.sqlite")):
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            for (table,) in tables:
                # The names are those of the database itself.
                (count,) = database.execute(f'SELECT count(*) FROM "{table}" WHERE {ROWS.get(table, "1")}').fetchone()
                yield from [f"{table} of {path.name}"] * count


def _sockets(scope: Scope) -> Iterator[str]:
    """Whoever listens, also where the file has gone."""
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[3] == LISTENING and scope.names(fields[7]):
            yield fields[7]


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
