"""Whether a node agent runs: it holds a lock on a file with its pid in it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

FILE: Final = "agent.pid"


def read_lock(run_dir: Path) -> int | None:
    """The pid of the agent that runs in this directory; None: none does (a file may be left from one that was killed)."""
    try:
        fd = os.open(run_dir / FILE, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(fd, 32).decode("ascii", "replace").strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(fd)
    return None
