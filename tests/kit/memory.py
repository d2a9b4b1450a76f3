"""What a process holds in memory: of its own, swapped out, and in files without a place on a disk."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

_OWN: Final = ("RssAnon:", "RssShmem:", "VmSwap:")
_BLOCK: Final = 512


def held_kib(pid: int) -> int:
    """All of it. A memory file that two of them have open counts for each."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    own = sum(int(line.split()[1]) for line in status if line.startswith(_OWN))
    return own + _memory_files(pid) // 1024


def _memory_files(pid: int) -> int:
    sizes: dict[int, int] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith("/memfd:"):
                found = link.stat()
                sizes[found.st_ino] = found.st_blocks * _BLOCK
    return sum(sizes.values())
