"""Whether a disk that is full is why something failed."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path
from typing import Final

from dsec.linux import proc

# What "the disk is full" is called by file systems and their quotas.
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
# With less free than this, SQLite may have found no room for what its connections share.
_NEARLY_BYTES: Final = 1 << 20


def is_full(error: Exception, directory: Path) -> bool:
    """Of an error of writing in this directory. SQLite says "full" of its files, "I/O error" of its shared memory."""
    if isinstance(error, OSError):
        return error.errno in FULL
    name = error.sqlite_errorname if isinstance(error, sqlite3.OperationalError) else ""
    unclear = name.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN"))
    return name == "SQLITE_FULL" or (unclear and proc.disk(directory).available < _NEARLY_BYTES)
