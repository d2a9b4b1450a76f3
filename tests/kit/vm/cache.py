"""Large build products, kept outside the clone and named by the content of their recipe.

An entry is a directory that appears whole, by rename, or not at all: a build that was interrupted
leaves only a temporary directory, which the next builder removes. Concurrent builders of one entry
wait for each other on a lock, which the kernel drops when its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DEFAULT_CACHE = "/var/cache/dsec"
KEY_CHARS = 16
TEMPORARY = ".tmp-"
# An image and its snapshots are about 2 GiB; old recipes are not kept for ever.
UNUSED_SECONDS = 14 * 24 * 3600


def root_dir() -> Path:
    return Path(os.environ.get("DSEC_CACHE") or DEFAULT_CACHE)


def guests_dir() -> Path:
    path = root_dir() / "guests"
    path.mkdir(parents=True, exist_ok=True)
    return path


def key_of(*parts: bytes | str) -> str:
    """A name for what these parts, in this order, would build."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:KEY_CHARS]


@contextlib.contextmanager
def locked(name: str, *, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of one entry; yields False when it is held elsewhere and `wait` is off."""
    lock = os.open(guests_dir() / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(lock)


def entry(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The directory `kind-key`, built now if it is not there."""
    name = f"{kind}-{key}"
    final = guests_dir() / name
    with locked(name):
        if not final.is_dir():
            for leftover in guests_dir().glob(f"{TEMPORARY}{name}-*"):
                shutil.rmtree(leftover)
            work = guests_dir() / f"{TEMPORARY}{name}-{os.getpid()}"
            work.mkdir(mode=0o755)
            try:
                build(work)
                _sync_tree(work)
                work.rename(final)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        os.utime(final)
    return final


def discard(path: Path) -> None:
    """Removes an entry that turned out to be unusable; it is made again at the next use."""
    with locked(path.name):
        doomed = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def prune(keep: set[Path]) -> list[Path]:
    """Removes entries that nothing has asked for in a while, and what dead builders left.

    A guest that still runs from an entry holds its files open.
    """
    removed = []
    oldest = time.time() - UNUSED_SECONDS
    for path in guests_dir().iterdir():
        name = path.name
        if path in keep or not path.is_dir():
            continue
        if name.startswith(TEMPORARY):
            name = name.removeprefix(TEMPORARY).rpartition("-")[0]
        elif path.stat().st_mtime > oldest:
            continue
        with locked(name, wait=False) as held:
            if held:
                shutil.rmtree(path)
                removed.append(path)
    return removed


def _sync_tree(path: Path) -> None:
    """One sync for the file system: an entry must not be empty files after a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    os.sync()
