"""Files of a sandbox as values: entries, pages of a directory, what changed.

Names in a sandbox are bytes. Where one is UTF-8 the text says all; where it is not, the text has replacements and the
exact bytes stand beside it (`raw_path`), so that every name crosses JSON unharmed.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import msgspec

FileType = Literal["file", "directory", "symlink", "fifo", "socket", "char", "block", "unknown"]
Change = Literal["created", "modified", "attributes", "deleted", "overflow"]


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file of any type. `size` is bytes, `mode` the permission bits, `mtime` seconds since the epoch.

    `target` is where a symbolic link points.
    """

    name: str
    path: str
    type: FileType
    size: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime: float = 0.0
    target: str | None = None
    raw_path: bytes | None = None  # when the path is not UTF-8
    raw_target: bytes | None = None

    @classmethod
    def of(cls, path: bytes, *, target: bytes | None = None, **fields: Any) -> Entry:
        """An entry from the kernel's bytes."""
        text, raw = shown(path)
        target_text, target_raw = shown(target) if target is not None else (None, None)
        name, _ = shown(path.rstrip(b"/").rpartition(b"/")[2] or path)
        return cls(name=name, path=text, raw_path=raw, target=target_text, raw_target=target_raw, **fields)

    def exact(self) -> Entry:
        """The same with surrogate escapes for what is not UTF-8, as `os.fsdecode` gives: its path can be used again."""
        if self.raw_path is None and self.raw_target is None:
            return self
        path = self.path if self.raw_path is None else os.fsdecode(self.raw_path)
        target = self.target if self.raw_target is None else os.fsdecode(self.raw_target)
        name = path.rstrip("/").rpartition("/")[2] or path
        return msgspec.structs.replace(self, path=path, name=name, target=target)


class Listing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of a directory in the byte order of its names, and where to go on."""

    items: tuple[Entry, ...] = ()
    next_cursor: bytes | None = None


def shown(raw: bytes) -> tuple[str, bytes | None]:
    """Bytes as text, and the bytes themselves when the text does not say all."""
    try:
        return raw.decode(), None
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace"), raw


class SkippedEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file that a tree transfer left out. `why`: `mount`, its type, or the kernel's name of the error."""

    path: str
    why: str
    raw_path: bytes | None = None


class Skipped(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many files a tree transfer left out, and the first of them by name."""

    count: int = 0
    named: tuple[SkippedEntry, ...] = ()


class TreeReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tree transfer moved. `bytes` is content alone.

    `changed`: files that changed while they were read; they have the size they began with, cut or padded with zeros.
    """

    entries: int = 0
    bytes: int = 0
    skipped: Skipped = Skipped()
    changed: Skipped = Skipped()


class FileEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change under a watched directory; changes of one path shortly after each other are one.

    `overflow` has no path: something was missed, look at the directory itself.
    """

    kind: Change
    path: str = ""
    raw_path: bytes | None = None
