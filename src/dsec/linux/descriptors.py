"""The standard descriptors of a process."""

from __future__ import annotations

import os
import sys
from typing import Final

_NAMES: Final = ("stdin", "stdout", "stderr")


def open_standard() -> None:
    """Open those of the descriptors 0, 1 and 2 that we were started without, on nothing.

    The next that is opened would get such a number, a connection for instance, and whatever is written to "standard
    output" would be said on it. To be called before anything else is opened.
    """
    for fd, name in enumerate(_NAMES):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest that is free: those before it are open by now.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - it stays
