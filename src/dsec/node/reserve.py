"""Room on the disk that the node keeps for itself: a file that is given up piece by piece when the disk is full.

A node whose disk is full must still come up, read, and note that sandboxes have ended: that is what makes room. Its
writable parts lie on the same disk, and take what is free before the node can; what the file holds they cannot take.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Final

from dsec.linux import proc

log = logging.getLogger("dsec.node.reserve")

NAME: Final = "reserve"
# A database is opened with some 100 KiB, and an end of a sandbox or of a run is 1 KiB: enough for 10,000 of them.
RESERVE_BYTES: Final = 16 << 20
# Given up at a time: the next step of the log has room in it, and what sandboxes take of it first is not much.
PIECE_BYTES: Final = 2 << 20
# Filled again only while so much is free besides: else it would take from the sandboxes what they were given.
FREE_BESIDES_BYTES: Final = 256 << 20


class Reserve:
    """The file in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / NAME
        self.short = False  # a piece was given up and is not back yet

    @property
    def held_bytes(self) -> int:
        """How much is left of it."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def spend(self) -> bool:
        """Give up a piece; False when there is none left."""
        held = self.held_bytes
        if not held:
            return False
        left = max(held - PIECE_BYTES, 0)
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.ftruncate(fd, left)
                os.fsync(fd)  # some file systems give the room back with their next commit only
            finally:
                os.close(fd)
        except OSError as error:
            log.warning("the reserve on the disk could not be given up: %s", error)
            return False
        self.short = True
        log.warning("the node's disk is full: a piece of the reserve was given up, %d MiB are left", left >> 20)
        return True

    def fill(self) -> None:
        """Make it whole while there is room; nothing to do when it is."""
        held = self.held_bytes
        if held >= RESERVE_BYTES or proc.disk(self._directory).available < RESERVE_BYTES - held + FREE_BESIDES_BYTES:
            return
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, RESERVE_BYTES)
                self.short = False
            finally:
                os.close(fd)
        except OSError as error:
            # Part of it may be there: it is not counted on.
            log.info("no reserve was made on the disk: %s", error)
            with contextlib.suppress(OSError):
                os.truncate(self.path, held)
