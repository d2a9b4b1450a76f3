"""What a store does with files: digest, copy, sync, remove."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from pathlib import Path


def digest(path: Path) -> str:
    """`sha256:` of a file's bytes."""
    with path.open("rb") as opened:
        return "sha256:" + hashlib.file_digest(opened, "sha256").hexdigest()


def copy(source: Path, target: Path, *, link: bool = False) -> None:
    """A read-only, synced copy; with `link`, a hard link where the file system allows one."""
    if link:
        try:
            os.link(source, target)
            return
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                raise
    shutil.copyfile(source, target)
    with target.open("rb") as copied:
        os.fsync(copied.fileno())
    target.chmod(0o444)


def sync_dir(path: Path) -> None:
    """Makes renames in a directory last."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_if_unlocked(path: Path) -> None:
    """Removes a directory unless somebody holds its lock."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # an import is at work
    else:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)
