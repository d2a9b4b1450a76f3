"""Mounting an image, for a look inside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_MS_RDONLY = 1


@contextlib.contextmanager
def mounted(image: str | Path) -> Iterator[Path]:
    """The image, mounted read-only: file-backed where the kernel can, else by a loop device."""
    with tempfile.TemporaryDirectory() as point:
        if _LIBC.mount(os.fsencode(image), os.fsencode(point), b"erofs", _MS_RDONLY, None) != 0:
            subprocess.run(["mount", "-t", "erofs", "-o", "ro,loop", str(image), point], check=True)
        try:
            yield Path(point)
        finally:
            subprocess.run(["umount", point], check=True)


@contextlib.contextmanager
def overlay(*lower: Path) -> Iterator[Path]:
    """A read-only overlay, topmost first."""
    with tempfile.TemporaryDirectory() as point:
        options = "lowerdir=" + ":".join(map(str, lower))
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", point], check=True)
        try:
            yield Path(point)
        finally:
            subprocess.run(["umount", point], check=True)
