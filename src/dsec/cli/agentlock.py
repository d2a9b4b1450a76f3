"""Whether a node agent runs: it holds a lock on a file with its pid in it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

FILE: Final = "agent.pid"


def read_lock(run_dir: Path) -> int | None:
    """The pid of the agent that runs in this directory; None: none does.

    A file alone proves nothing: an agent that was killed leaves it, and the number may be another process's by now.
    """
    try:
        fd = os.open(run_dir / FILE, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        text = os.read(fd, 32).decode("ascii", "replace").strip()
        if not text.isdigit():
            # An agent empties it when it leaves. Not trying the lock then keeps us out of the way of one that starts.
            return None
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(text)
    finally:
        os.close(fd)
    return None
