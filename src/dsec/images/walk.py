"""A directory tree as entries: sorted, by descriptors, following nothing, on one file system."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import Final

from dsec.images import tarstream
from dsec.images.tarstream import Entry, TarError

_TYPES: Final = {
    stat.S_IFREG: tarstream.REGULAR,
    stat.S_IFLNK: tarstream.SYMLINK,
    stat.S_IFDIR: tarstream.DIRECTORY,
    stat.S_IFIFO: tarstream.FIFO,
    stat.S_IFCHR: tarstream.CHARDEV,
    stat.S_IFBLK: tarstream.BLOCKDEV,
}
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
DEPTH_MAX: Final = 512  # a descriptor is open for each level
_OPAQUE_XATTRS: Final = (b"trusted.overlay.opaque", b"user.overlay.opaque")

Item = tuple[Entry, Iterator[bytes] | None]
Drop = Callable[[str, bytes], None]


def walk(root: bytes, *, whiteouts: bool, drop: Drop) -> Iterator[Item]:
    """Entries below `root`, parents first. With `whiteouts`, overlayfs's own marks become `.wh.` names."""
    top = os.open(root, _OPEN | os.O_DIRECTORY)
    try:
        info = os.fstat(top)
        walker = _Walker(info.st_dev, whiteouts, drop)
        yield walker.entry(b"", info, top), None
        yield from walker.below(top, b"", 1)
    finally:
        os.close(top)


class _Walker:
    def __init__(self, device: int, whiteouts: bool, drop: Drop) -> None:
        self._device = device
        self._whiteouts = whiteouts
        self._drop = drop
        self._linked: dict[int, bytes] = {}

    def below(self, directory: int, prefix: bytes, depth: int) -> Iterator[Item]:
        if depth > DEPTH_MAX:
            raise TarError(f"{tarstream.show(prefix)}: more than {DEPTH_MAX} directories deep")
        with os.scandir(directory) as found:  # by descriptor: names are str with surrogates
            names = sorted(os.fsencode(item.name) for item in found)
        for name in names:
            path = prefix + b"/" + name if prefix else name
            info = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                yield from self._directory(directory, name, path, depth)
            else:
                yield from self._other(directory, name, path, info)

    def _directory(self, parent: int, name: bytes, path: bytes, depth: int) -> Iterator[Item]:
        opened = os.open(name, _OPEN | os.O_DIRECTORY, dir_fd=parent)
        try:
            info = os.fstat(opened)
            yield self.entry(path, info, opened), None
            if info.st_dev != self._device:
                self._drop("contents of mounts", path)
                return
            if self._whiteouts and _opaque(opened):
                yield Entry(path + b"/.wh..wh..opq", tarstream.REGULAR), None
            yield from self.below(opened, path, depth + 1)
        finally:
            os.close(opened)

    def _other(self, parent: int, name: bytes, path: bytes, info: os.stat_result) -> Iterator[Item]:
        if stat.S_ISSOCK(info.st_mode):
            self._drop("sockets", path)
        elif self._whiteouts and stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            head, slash, tail = path.rpartition(b"/")
            yield Entry(head + slash + b".wh." + tail, tarstream.REGULAR), None
        elif info.st_nlink > 1 and info.st_ino in self._linked:
            entry = self.entry(path, info, None)
            entry.type, entry.link, entry.size = tarstream.HARDLINK, self._linked[info.st_ino], 0
            yield entry, None
        elif stat.S_ISREG(info.st_mode):
            yield from self._file(parent, name, path)
        else:
            entry = self.entry(path, info, None)
            if stat.S_ISLNK(info.st_mode):
                entry.link = os.readlink(name, dir_fd=parent)
            if entry.type not in (tarstream.CHARDEV, tarstream.BLOCKDEV):  # those are dropped, links too
                self._remember(path, info)
            yield entry, None

    def _file(self, parent: int, name: bytes, path: bytes) -> Iterator[Item]:
        # O_NONBLOCK: should a FIFO take the file's place meanwhile, opening it must not hang.
        opened = os.open(name, _OPEN | os.O_NONBLOCK, dir_fd=parent)
        try:
            info = os.fstat(opened)
            if not stat.S_ISREG(info.st_mode):
                raise TarError(f"{tarstream.show(path)} changed while it was read")
            self._remember(path, info)
            yield self.entry(path, info, opened), _content(opened, path, info.st_size)
        finally:
            os.close(opened)

    def _remember(self, path: bytes, info: os.stat_result) -> None:
        if info.st_nlink > 1:
            self._linked[info.st_ino] = path

    def entry(self, path: bytes, info: os.stat_result, opened: int | None) -> Entry:
        kind = _TYPES[stat.S_IFMT(info.st_mode)]
        return Entry(
            name=path,
            type=kind,
            mode=stat.S_IMODE(info.st_mode),
            uid=info.st_uid,
            gid=info.st_gid,
            mtime_ns=info.st_mtime_ns,
            size=info.st_size if kind == tarstream.REGULAR else 0,
            device=(os.major(info.st_rdev), os.minor(info.st_rdev)),
            xattrs={} if opened is None else _xattrs(opened),
        )


def _content(opened: int, path: bytes, size: int) -> Iterator[bytes]:
    left = size
    while left:
        chunk = os.read(opened, min(left, tarstream.CHUNK_BYTES))
        if not chunk:
            raise TarError(f"{tarstream.show(path)} changed while it was read")
        left -= len(chunk)
        yield chunk


def _xattrs(opened: int) -> dict[bytes, bytes]:
    # Overlayfs's private attributes describe one overlay, not the files; opacity is taken up separately.
    return {
        os.fsencode(key): os.getxattr(opened, key)
        for key in sorted(os.listxattr(opened))
        if not key.startswith(("trusted.overlay.", "user.overlay."))
    }


def _opaque(opened: int) -> bool:
    names = os.listxattr(opened)
    return any(os.fsdecode(key) in names and os.getxattr(opened, key) in (b"y", b"x") for key in _OPAQUE_XATTRS)
