"""Local files that are made of what a sandbox sends, which is not trusted."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
import tarfile
import threading
from collections import deque
from pathlib import Path
from tarfile import ReadError
from types import TracebackType
from typing import BinaryIO, Final, Self, cast

import msgspec

from dsec.model.errors import FileError
from dsec.model.files import Skipped, SkippedEntry, TreeReport
from dsec.sdk.bodies import PIECE_BYTES, Progress

# Of files that are not whole yet.
PART_PREFIX: Final = ".dsec-"
_NAMED_MAX: Final = 100
# Of what comes, so much waits for the unpacking to take it.
_WAITING_MAX: Final = 8


class File:
    """One file: under a name of its own until it is whole."""

    def __init__(self, path: Path, on_progress: Progress | None) -> None:
        self._path = path
        self._on_progress = on_progress
        self._total: int | None = None
        self._done = 0

    def __enter__(self) -> Self:
        if self._path.is_dir():
            raise IsADirectoryError(f"{self._path} is a directory; name the file to be made")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Nothing of its own name: with that it could be longer than a name may be.
        self._temp = self._path.with_name(PART_PREFIX + secrets.token_hex(8))
        try:
            # With the mode of any new file: whoever asks for the umask changes it, for all threads.
            handle = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:  # says a name that nobody has given
            raise OSError(error.errno, error.strerror, str(self._path.parent)) from error
        self._file = os.fdopen(handle, "wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temp.unlink(missing_ok=True)

    def expect(self, size: int | None) -> None:
        """So many bytes will come."""
        self._total = size

    def write(self, data: bytes) -> None:
        """More of it."""
        self._file.write(data)
        self._done += len(data)
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)

    def done(self) -> TreeReport:
        """That was all: it gets its name."""
        self._file.close()
        self._temp.replace(self._path)
        return TreeReport(entries=1, bytes=self._done)


class Tree:
    """A directory, unpacked from a tar archive as it comes, by a thread of its own."""

    def __init__(self, root: Path, on_progress: Progress | None) -> None:
        self._root = root
        self._on_progress = on_progress
        self._pipe = _Pipe()
        # One at a time; by this name nothing of the archive is.
        self._part = PART_PREFIX + secrets.token_hex(8)
        self._error: BaseException | None = None
        self._left_out: list[SkippedEntry] = []
        self._left_out_count = 0
        self._bytes = 0
        self._thread = threading.Thread(target=self._unpack, name="dsec-download", daemon=True)
        self._thread.start()

    def feed(self, data: bytes) -> None:
        """More of the archive; waits while the disk is behind."""
        if not self._pipe.put(data):
            self._raise()

    def done(self, report: TreeReport) -> TreeReport:
        """That was all. What was sent and what of it is here."""
        self.close()
        self._raise()
        sent = report.skipped
        named = (*sent.named, *self._left_out)[:_NAMED_MAX]
        skipped = Skipped(count=sent.count + self._left_out_count, named=named)
        return msgspec.structs.replace(report, skipped=skipped)

    def close(self) -> None:
        """Nothing more comes."""
        self._pipe.end()
        self._thread.join()

    def _raise(self) -> None:
        if isinstance(self._error, tarfile.TarError):
            raise FileError(f"what the sandbox sent is no tar archive: {self._error}") from self._error
        if self._error is not None:
            raise self._error

    def _unpack(self) -> None:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            modes: list[tuple[Path, int]] = []
            with tarfile.open(fileobj=self._pipe, mode="r|", bufsize=PIECE_BYTES, tarinfo=_Member) as archive:  # type: ignore[call-overload]  # it reads, no more is asked of it
                for member in archive:
                    self._place(archive, member, modes)
            # Last, and the deepest first: one that may not be written would be in the way of what is below it.
            for path, mode in reversed(modes):
                path.chmod(mode)
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: whatever it is, its caller's thread raises it
            self._error = error
        finally:
            self._pipe.refuse()

    def _place(self, archive: tarfile.TarFile, member: tarfile.TarInfo, modes: list[tuple[Path, int]]) -> None:
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if member.name.startswith("/") or ".." in parts or not all(map(_plain, parts)):
            return self._leave_out(member, "outside")
        path = self._root.joinpath(*parts)
        if not self._parents(parts[:-1]):
            return self._leave_out(member, "outside")
        if member.isdir():
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                path.unlink()
            path.mkdir(exist_ok=True)
            if parts:
                modes.append((path, member.mode & 0o777))
        elif member.isreg():
            self._write(archive, member, path)
        elif member.islnk():
            self._link(member, path)
        elif member.issym():
            self._symlink(member, path, parts)
        else:
            self._leave_out(member, "device")
        return None

    def _parents(self, parts: list[str]) -> bool:
        """Whether the directories above are directories: never through a link that an archive has put there."""
        path = self._root
        for part in parts:
            path = path / part
            try:
                if not stat.S_ISDIR(path.lstat().st_mode):
                    return False
            except FileNotFoundError:
                path.mkdir()
        return True

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            raise IsADirectoryError(f"{path} is a directory, and a file in the sandbox")
        part = path.with_name(self._part)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(part, flags, 0o600), "wb") as file:
                self._fill(archive, member, file, path)
                os.fchmod(file.fileno(), member.mode & 0o777)
            os.utime(part, (member.mtime, member.mtime))
            part.replace(path)
        except BaseException:  # whatever it is, also what a progress raised: half a file does not stay
            part.unlink(missing_ok=True)
            raise

    def _fill(self, archive: tarfile.TarFile, member: tarfile.TarInfo, file: BinaryIO, path: Path) -> None:
        """Only what came is written: a hole, which costs the sandbox nothing, is one here, too."""
        pieces = [(0, member.size)]
        if member.issparse():
            size, pieces = _map_of(archive, member)
            _set_size(file, size, path)
            # As tarfile reads it now: the pieces, one behind the other. By itself it would make zeros of the holes.
            member.sparse, member.size = None, sum(length for _, length in pieces)
        content = archive.extractfile(member)
        if content is None:
            raise ReadError(f"{member.name!r} is a file and has no content")
        for start, length in pieces:
            file.seek(start)
            # Of an archive that ends early the last read raises.
            left = length
            while left > 0 and (data := content.read(min(left, PIECE_BYTES))):
                file.write(data)
                left -= len(data)
                self._bytes += len(data)
                if self._on_progress is not None:
                    self._on_progress(self._bytes, None)

    def _link(self, member: tarfile.TarInfo, path: Path) -> None:
        parts = [part for part in member.linkname.split("/") if part not in ("", ".")]
        source = self._root.joinpath(*parts)
        inside = ".." not in parts and all(map(_plain, parts)) and self._parents(parts[:-1])
        if not inside or not source.is_file() or source.is_symlink():
            return self._leave_out(member, "outside")
        _clear(path)
        path.hardlink_to(source)
        return None

    def _symlink(self, member: tarfile.TarInfo, path: Path, parts: list[str]) -> None:
        # Kept when it leads somewhere inside the tree; one that leads out of it would mean a file of this machine.
        steps = [part for part in member.linkname.split("/") if part not in ("", ".")]
        up = sum(part == ".." for part in steps)
        # Up first, then down: behind a name that is a link itself `..` would lead anywhere.
        straight = all(part == ".." for part in steps[:up])
        if member.linkname.startswith("/") or up > len(parts) - 1 or not straight:
            return self._leave_out(member, "outside")
        _clear(path)
        path.symlink_to(member.linkname)
        return None

    def _leave_out(self, member: tarfile.TarInfo, why: str) -> None:
        self._left_out_count += 1
        if len(self._left_out) < _NAMED_MAX:
            self._left_out.append(SkippedEntry(path=member.name, why=why))


class _Member(tarfile.TarInfo):
    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except ValueError as error:  # of a number or a map of holes that is none
            raise ReadError(f"a damaged header: {error}") from error


def _map_of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[int, list[tuple[int, int]]]:
    """Size of a sparse file, and offset and length of the pieces that hold data. Raises TarError: they contradict."""
    pieces = cast("list[tuple[int, int]]", member.sparse)
    size = int(member.pax_headers.get("GNU.sparse.realsize", member.size))
    end = stored = 0
    for start, length in pieces:
        if start < end or length < 0:
            raise ReadError(f"the pieces of {member.name!r} overlap")
        end, stored = start + length, stored + length
    following = member.offset_data + stored + -stored % tarfile.BLOCKSIZE
    if "size" in member.pax_headers:
        # Of more than 8 GiB. tarfile takes this size, which counts the map, from behind the map on.
        archive.offset = following
    if end > size or following > archive.offset:
        raise ReadError(f"the pieces of {member.name!r} are more than there is of it")
    return size, pieces


def _set_size(file: BinaryIO, size: int, path: Path) -> None:
    try:
        if size > sys.maxsize:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        file.truncate(size)
    except OSError as error:  # says no name, and its own is one that nobody has given
        raise OSError(error.errno, f"{error.strerror} ({size} bytes)", str(path)) from error


def _plain(part: str) -> bool:
    return "\0" not in part


def _clear(path: Path) -> None:
    try:
        path.unlink()
    except FileNotFoundError:
        return


class _Pipe:
    """Bytes from one thread to another, few at a time. The reading side is a file for tarfile."""

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()
        self._rest = b""
        self._ended = False
        self._refused = False
        self._changed = threading.Condition()

    def put(self, data: bytes) -> bool:
        """False: nobody reads it any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._refused or len(self._parts) < _WAITING_MAX)
            if not self._refused:
                self._parts.append(data)
                self._changed.notify_all()
            return not self._refused

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def refuse(self) -> None:
        with self._changed:
            self._refused = True
            self._parts.clear()
            self._changed.notify_all()

    def read(self, size: int) -> bytes:
        out = []
        while size and (piece := self._some(size)):
            out.append(piece)
            size -= len(piece)
        return b"".join(out)

    def _some(self, size: int) -> bytes:
        if not self._rest:
            with self._changed:
                self._changed.wait_for(lambda: self._parts or self._ended)
                if not self._parts:
                    return b""
                self._rest = self._parts.popleft()
                self._changed.notify_all()
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece
