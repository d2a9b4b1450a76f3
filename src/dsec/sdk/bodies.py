"""Bodies of requests that are sent as they are made: bytes, a local file, a local tree as a tar archive."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

from dsec.model.errors import InvalidSpec
from dsec.model.limits import KIB

PIECE_BYTES: Final = 256 * KIB

Progress = Callable[[int, int | None], object]


class Body(Protocol):
    """A body. `pieces` can be asked for again, when a connection broke."""

    @property
    def size(self) -> int | None:
        """Its bytes, where that is known before."""
        ...

    def pieces(self) -> Iterator[bytes]:
        """All of it, none of them empty."""
        ...


class Bytes:
    """Bytes that are there."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size: int | None = len(data)

    def pieces(self) -> Iterator[bytes]:
        if len(self._data) <= PIECE_BYTES:
            yield from (self._data,) if self._data else ()
            return
        view = memoryview(self._data)
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start : start + PIECE_BYTES])


class LocalFile:
    """A regular file of this machine, as large as it is when it is opened."""

    def __init__(self, path: Path, on_progress: Progress | None = None) -> None:
        self._path = path
        self._on_progress = on_progress
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InvalidSpec.field("local", str(path), "a regular file or a directory")
        self.mode = status.st_mode & 0o777
        self.size: int | None = status.st_size

    def pieces(self) -> Iterator[bytes]:
        size = self.size or 0
        left = size
        with self._path.open("rb") as file:
            while left:
                data = file.read(min(PIECE_BYTES, left))
                if not data:
                    raise InvalidSpec.field("local", str(self._path), "a file that stays as it is while it is sent")
                left -= len(data)
                yield data
                if self._on_progress is not None:
                    self._on_progress(size - left, size)


class LocalTree:
    """A directory of this machine with all below it, as a tar archive. Links are kept as links, nothing is followed."""

    size: int | None = None

    def __init__(self, path: Path, on_progress: Progress | None = None) -> None:
        if not path.is_dir():
            raise InvalidSpec.field("local", str(path), "a regular file or a directory")
        self._path = path
        self._on_progress = on_progress
        self.mode = path.stat().st_mode & 0o777

    def pieces(self) -> Iterator[bytes]:
        sent = _Sent()
        done = 0
        # tarfile writes into `sent`; after each piece of a file it is emptied.
        archive = tarfile.TarFile(fileobj=sent, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8")  # type: ignore[arg-type]  # it writes and asks where it is, no more
        for path, name in _walk(self._path):
            member = archive.gettarinfo(str(path), name)
            if member is None:  # a socket
                continue
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            # Not by `addfile`: since Python 3.13 it wants a file of which it reads all.
            header = member.tobuf(archive.format, archive.encoding, archive.errors)
            sent.write(header)
            archive.offset += len(header)
            if not member.isreg():
                continue
            for data in LocalFile(path).pieces() if member.size else ():
                sent.write(data)
                done += len(data)
                if sent.size >= PIECE_BYTES:
                    yield sent.take()
                if self._on_progress is not None:
                    self._on_progress(done, None)
            padding = -member.size % tarfile.BLOCKSIZE
            sent.write(bytes(padding))
            archive.offset += member.size + padding
        archive.close()
        if sent.size:
            yield sent.take()


def of_local(path: Path, on_progress: Progress | None) -> LocalFile | LocalTree:
    """What is to be sent of a path of this machine: links are followed here. Raises OSError, and InvalidSpec."""
    return LocalTree(path, on_progress) if path.is_dir() else LocalFile(path, on_progress)


class _Sent:
    """A file to write to, from which what was written is taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._total = 0
        self.size = 0

    def write(self, data: bytes) -> int:
        self._parts.append(data)
        self.size += len(data)
        self._total += len(data)
        return len(data)

    def tell(self) -> int:
        return self._total

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        self.size = 0
        return data


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    """All files below a directory with their names in the archive, parents first."""
    pending = [(root, "")]
    yield root, "."
    while pending:
        directory, prefix = pending.pop()
        with os.scandir(directory) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            name = prefix + entry.name
            yield Path(entry.path), name
            if entry.is_dir(follow_symlinks=False):
                pending.append((Path(entry.path), name + "/"))
