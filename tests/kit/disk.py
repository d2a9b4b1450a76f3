"""A disk of a test's own, small enough to be filled."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
_UNMOUNT_S: Final = 10.0


class Disk:
    """An ext4 in a loop file, mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    @property
    def free_bytes(self) -> int:
        """What anybody but root may still take; nothing is kept for root."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        """Take all there is but so much. With 0 not a block is left: until no file can grow."""
        with self._filler.open("ab") as filler:
            take = self.free_bytes - leave_bytes
            while take > 0:
                with contextlib.suppress(OSError):
                    os.posix_fallocate(filler.fileno(), os.fstat(filler.fileno()).st_size, take)
                    if leave_bytes:
                        return
                    take = self.free_bytes
                    continue
                take //= 2  # what a file system needs to note it is not to be had

    def empty(self) -> None:
        """Give back what `fill` took."""
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(mib: int) -> Iterator[Disk]:
    """Mounted within; whatever was on it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="dsec-d-", dir="/tmp") as top:
        image, at = Path(top, "image"), Path(top, "at")
        at.mkdir()
        with image.open("wb") as opened:
            opened.truncate(mib * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, at], check=True)
        try:
            yield Disk(at)
        finally:
            _unmount(at)


def _unmount(at: Path) -> None:
    """What was mounted from files on it may take a moment to go."""
    end = time.monotonic() + _UNMOUNT_S
    while subprocess.run(["umount", at], check=False, capture_output=True).returncode:
        if time.monotonic() > end:
            subprocess.run(["umount", "--lazy", at], check=True)
            return
        time.sleep(0.1)
