"""Files of a sandbox as values: entries, pages of a directory, what changed.

Names in a sandbox are bytes. Where one is UTF-8 the text says all; where it is not, the text has replacements and the
exact bytes stand beside it (`raw_path`), so that every name crosses JSON unharmed.
"""

from __future__ import annotations

import os
from typing import Any, Literal, Self

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
    def of(cls, path: bytes, *, target: bytes | None = None, **fields: Any) -> Self:
        """An entry from the kernel's bytes."""
        text, raw = shown(path)
        target_text, target_raw = shown(target) if target is not None else (None, None)
        name, _ = shown(path.rstrip(b"/").rpartition(b"/")[2] or path)
        return cls(name=name, path=text, raw_path=raw, target=target_text, raw_target=target_raw, **fields)

    def exact(self) -> Self:
        """The same with surrogate escapes for what is not UTF-8, as `os.fsdecode` gives: its path can be used again."""
        path = _native(self.path, self.raw_path)
        target = None if self.target is None else _native(self.target, self.raw_target)
        if path is self.path and target is self.target:
            return self
        name = path.rstrip("/").rpartition("/")[2] or path
        return msgspec.structs.replace(self, path=path, name=name, target=target)


class Written(Entry, frozen=True, kw_only=True, omit_defaults=True):
    """A file that was written.

    `atomic`: its content was there at once, in the place of the old. Else it was overwritten where it is, because it
    cannot be replaced: it is a mount point, its directory is not writable, or its owner is somebody else. Who read it
    meanwhile may have seen a part.
    """

    atomic: bool = True


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


Difference = Literal["content", "mode", "owner", "mtime", "xattrs", "type"]


class FileState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a file is, or was; as in `Entry`."""

    type: FileType
    size: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime: float = 0.0
    target: str | None = None
    raw_target: bytes | None = None


class FileChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One path that is not as it was in the sandbox's layers.

    `before`: in the layers, None for what was added. `now`: None for what was deleted. `what`: in what a changed file
    differs; `content` of a symbolic link is where it leads; `type`: it is another kind of file by now, and the rest is
    not compared. `unsure`: its content could not be compared: the kernel's name of the error, or `size`.
    """

    kind: Literal["added", "changed", "deleted"]
    path: str
    before: FileState | None = None
    now: FileState | None = None
    what: tuple[Difference, ...] = ()
    unsure: str | None = None
    raw_path: bytes | None = None  # when the path is not UTF-8

    @property
    def type(self) -> FileType:
        """What it is; of what was deleted, what it was."""
        state = self.now or self.before
        return state.type if state is not None else "unknown"

    @property
    def size(self) -> int:
        """Its bytes; of what was deleted, those it had."""
        state = self.now or self.before
        return state.size if state is not None else 0

    def exact(self) -> FileChange:
        """The same with surrogate escapes for what is not UTF-8, as `os.fsdecode` gives: its path can be used again."""
        path = _native(self.path, self.raw_path)
        return msgspec.structs.replace(self, path=path, before=_exact(self.before), now=_exact(self.now))


def _exact(state: FileState | None) -> FileState | None:
    if state is None or state.target is None:
        return state
    return msgspec.structs.replace(state, target=_native(state.target, state.raw_target))


def _native(text: str, raw: bytes | None) -> str:
    """A name as this process has names, which is not UTF-8 under every locale."""
    if raw is None and text.isascii():
        return text
    return os.fsdecode(text.encode("utf-8") if raw is None else raw)


class DiffReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many changes a diff has told. `skipped`: what is mounted inside (`mount`), or could not be looked at.

    `more`: there are more than were asked for.
    """

    added: int = 0
    changed: int = 0
    deleted: int = 0
    skipped: Skipped = Skipped()
    more: bool = False
