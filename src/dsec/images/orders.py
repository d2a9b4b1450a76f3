"""What the agent and the worker that makes an image say to each other."""

from __future__ import annotations

from typing import Final

import msgspec

from dsec.images.admit import CONTENT_MAX_BYTES, Report

IMAGE_NAME: Final = "layer.erofs"
# Who reads hostile bytes. No file of ours belongs to it but the staging directory of an import.
NOBODY: Final = 65_534


class Order(msgspec.Struct):
    """What to make: of the directory, or of the archive that is open as `archive_fd`."""

    mkfs: str
    options: list[str]
    directory: str | None = None
    archive_fd: int = -1
    whiteouts: bool = False
    image_max_bytes: int = CONTENT_MAX_BYTES


class Message(msgspec.Struct, omit_defaults=True):
    """A line of the worker's output: progress, or the end (`report`, `refused` or `failed`)."""

    entries: int = 0
    content_bytes: int = 0
    report: Report | None = None
    refused: str = ""
    failed: str = ""
