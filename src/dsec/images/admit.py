"""What may enter a layer: every entry of a hostile archive or directory passes `Admission.admit`.

Refused (the import ends): names with `..`, absolute names, names through something that is no directory, hard
links to what is not in the layer, too many entries or bytes. Dropped and reported: device nodes, sockets, extended
attributes that mean something to the host's kernel. Symbolic links may point anywhere: they are followed inside a
sandbox only.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from dsec.images import tarstream
from dsec.images.tarstream import DIRECTORY, HARDLINK, REGULAR, SYMLINK, Entry, TarError
from dsec.model import limits

ENTRIES_MAX: Final = 4_000_000
# mkfs.erofs looks for each name of a tar stream among all before it in its directory: 20,000 in one take it 1.2 s,
# 100,000 take 80 s. Content of this many is minutes of work; more would run into the limit of CPU time instead.
DIRECTORY_ENTRIES_MAX: Final = 200_000
CONTENT_MAX_BYTES: Final = 256 * limits.GIB
NAME_MAX_BYTES: Final = 255
PATH_MAX_BYTES: Final = limits.PATH_MAX_BYTES
# EROFS keeps a file's attributes in 16-bit units behind its inode.
XATTRS_MAX_BYTES: Final = 64 * limits.KIB
ID_MAX: Final = 65_535  # what a sandbox's user namespace maps; a higher owner could not be shown inside
MTIME_MAX_S: Final = 2**34  # as far as ext4 goes, so that a copy-up keeps it
REPORTED_MAX: Final = 20
WHITEOUT: Final = b".wh."
OPAQUE: Final = b".wh..wh..opq"
_XATTRS: Final = (b"user.", b"security.capability", b"system.posix_acl_")


class Report(msgspec.Struct, omit_defaults=True):
    """What an import took, and what it left out and why (the first names of each kind)."""

    entries: int = 0
    content_bytes: int = 0
    dropped: dict[str, int] = {}
    examples: dict[str, list[str]] = {}


class Admission:
    """Checks and cleans entries in order; remembers what is there."""

    def __init__(self, *, whiteouts: bool, content_max_bytes: int = CONTENT_MAX_BYTES) -> None:
        self._whiteouts = whiteouts
        self._content_max = content_max_bytes
        self._types: dict[bytes, bytes] = {}
        self._children: Counter[bytes] = Counter()
        self._dropped: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}
        self._content = 0

    def admit(self, entry: Entry) -> list[Entry]:
        """What to write for this entry: nothing, or missing parent directories and then the entry."""
        name = self._name(entry.name)
        if entry.type in (tarstream.CHARDEV, tarstream.BLOCKDEV):
            self.drop("device nodes", name)
            return []
        entry.name = name
        if not name and entry.type != DIRECTORY:
            raise TarError("the root of the archive is not a directory")
        self._owner(entry)
        entry.mtime_ns = min(max(entry.mtime_ns, -MTIME_MAX_S * 10**9), MTIME_MAX_S * 10**9)
        self._xattrs(entry)
        if entry.type == HARDLINK:
            self._hardlink(entry)
        elif entry.type == SYMLINK and not 0 < len(entry.link) <= PATH_MAX_BYTES:
            raise TarError(f"symbolic link {tarstream.show(name)}: its target is empty or too long")
        parents = self._parents(name)
        self._remember(name, entry)
        return [*parents, entry]

    def report(self) -> Report:
        """What was taken and dropped so far."""
        return Report(len(self._types), self._content, dict(self._dropped), self._examples)

    def drop(self, kind: str, name: bytes) -> None:
        """Something is left out: count it and remember the first names."""
        self._dropped[kind] += 1
        if self._dropped[kind] <= REPORTED_MAX:
            self._examples.setdefault(kind, []).append(tarstream.show(name))

    def _name(self, raw: bytes) -> bytes:
        if raw.startswith(b"/"):
            raise TarError(f"{tarstream.show(raw)} is absolute")
        if b"\0" in raw or len(raw) > PATH_MAX_BYTES:
            raise TarError(f"{tarstream.show(raw)}: a NUL in it, or longer than {PATH_MAX_BYTES} bytes")
        parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise TarError(f"{tarstream.show(raw)} leads out of the archive")
        if any(len(part) > NAME_MAX_BYTES for part in parts):
            raise TarError(f"{tarstream.show(raw)}: a part longer than {NAME_MAX_BYTES} bytes")
        return b"/".join(parts)

    def _owner(self, entry: Entry) -> None:
        if not (0 <= entry.uid <= ID_MAX and 0 <= entry.gid <= ID_MAX):
            raise TarError(
                f"{tarstream.show(entry.name)} belongs to {entry.uid}:{entry.gid}; ids in a layer are 0 to {ID_MAX}"
            )

    def _xattrs(self, entry: Entry) -> None:
        kept: dict[bytes, bytes] = {}
        for key, value in entry.xattrs.items():
            if key.startswith(_XATTRS) and b"=" not in key and len(key) <= NAME_MAX_BYTES:
                kept[key] = value
            else:
                self.drop("extended attributes", entry.name + b" " + key)
        if sum(len(k) + len(v) + 8 for k, v in kept.items()) > XATTRS_MAX_BYTES:
            raise TarError(f"{tarstream.show(entry.name)}: over {XATTRS_MAX_BYTES} bytes of extended attributes")
        entry.xattrs = kept

    def _hardlink(self, entry: Entry) -> None:
        target = self._name(entry.link)
        if self._types.get(target) in (None, DIRECTORY):
            raise TarError(
                f"hard link {tarstream.show(entry.name)} -> {tarstream.show(entry.link)}: "
                "no such file before it in the archive"
            )
        if target == entry.name:
            raise TarError(f"hard link {tarstream.show(entry.name)} to itself")
        entry.link = target
        entry.xattrs = {}

    def _parents(self, name: bytes) -> list[Entry]:
        """Directories the archive uses but does not have."""
        made: list[Entry] = []
        cut = name.find(b"/")
        while cut > 0:
            parent = name[:cut]
            kind = self._types.get(parent)
            if kind is None:
                made.append(Entry(parent, DIRECTORY, mode=0o755))
                self._remember(parent, made[-1])
            elif kind != DIRECTORY:
                raise TarError(f"{tarstream.show(name)} passes through {tarstream.show(parent)}, which is no directory")
            cut = name.find(b"/", cut + 1)
        return made

    def _remember(self, name: bytes, entry: Entry) -> None:
        before = self._types.get(name)
        if before is not None and (before == DIRECTORY) != (entry.type == DIRECTORY):
            raise TarError(f"{tarstream.show(name)} occurs as a directory and as something else")
        if self._whiteouts:
            self._check_whiteout(name, entry)
        if len(self._types) >= ENTRIES_MAX:
            raise TarError(f"more than {ENTRIES_MAX} entries")
        if before is None and name:
            self._count(name.rpartition(b"/")[0])
        self._types[name] = entry.type
        self._content += entry.size
        if self._content > self._content_max:
            raise TarError(f"more than {self._content_max} bytes of files")

    def _count(self, directory: bytes) -> None:
        self._children[directory] += 1
        if self._children[directory] > DIRECTORY_ENTRIES_MAX:
            shown = tarstream.show(directory) if directory else "the root of the layer"
            raise TarError(
                f"{shown} has more than {DIRECTORY_ENTRIES_MAX} entries, the most one directory of a layer may have; "
                "spread them over several directories"
            )

    def _check_whiteout(self, name: bytes, entry: Entry) -> None:
        last = name.rpartition(b"/")[2]
        if not last.startswith(WHITEOUT):
            return
        if entry.type not in (REGULAR, HARDLINK) or last == WHITEOUT:
            raise TarError(f"{tarstream.show(name)} is no whiteout: it must be a regular file")
        if name == OPAQUE:
            raise TarError("the root of a layer cannot be opaque: it would hide every layer below")
