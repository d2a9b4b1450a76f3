"""What the allocator keeps is given back to the kernel.

glibc keeps what was freed between blocks that are in use, and takes blocks of up to 32 MiB from there once one of that
size was freed: after 64 streams and results of some MiB at once an agent held 300 MiB, of which 30 were in use. Fixed
thresholds (`M_MMAP_THRESHOLD`) would have it map and clear each piece of a program's output anew.
Giving back holds the event loop up: some 0.1 ms where there is nothing, 0.25 for each MiB there is (at load 6).
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsec.model.limits import MIB

EVERY_S: Final = 5.0
# More than there was after the last time. Less is not worth the look at the whole heap, nor the pages that come back.
SLACK_BYTES: Final = 16 * MIB
# So many times rarer, where it gives back nothing: the memory is in use.
PAUSE_MAX: Final = 32


def own_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """The memory of this process that is no file's."""
    _, resident, shared, *_ = statm.read_bytes().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def trimmer() -> Callable[[], object]:
    """What makes the allocator give back; nothing where it has no such call (musl gives back by itself)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return lambda: None
    return lambda: trim(0)


class GiveBack:
    """Looks now and then, and gives back what has come since the beginning."""

    def __init__(self, trim: Callable[[], object], held: Callable[[], int] = own_bytes) -> None:
        self._trim = trim
        self._held = held
        self._first = self._kept = held()
        self._pause = 1
        self._looks_left = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look from now on, in the running loop."""
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._look)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Give back if much has come; what could not be given before, as it was in use, is tried again less often."""
        self._looks_left -= 1
        held = self._held()
        come = held > self._kept + SLACK_BYTES
        if not come and (held <= self._first + SLACK_BYTES or self._looks_left > 0):
            return
        self._trim()
        self._kept = self._held()
        gave = held - self._kept >= SLACK_BYTES
        self._pause = 1 if come or gave else min(self._pause * 2, PAUSE_MAX)
        self._looks_left = self._pause

    def _look(self) -> None:
        self.look()
        self.start()
