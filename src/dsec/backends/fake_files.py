"""Files of the fake backend: a small tree in memory with a kernel's answers.

Symbolic links are not made in it (nothing there could make one but a tree that is unpacked, where they are kept as they
come), users own what they write, and permissions are kept but not enforced.
"""

from __future__ import annotations

import asyncio
import errno
import io
import posixpath
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from dsec.backends.base import DataSink, Piece
from dsec.backends.fake_programs import USERS
from dsec.model.errors import (
    DsecError,
    FileError,
    FileExists,
    FileNotFound,
    InvalidSpec,
    IsADirectory,
    NoSpace,
    ProgramNotStarted,
)
from dsec.model.files import (
    DiffReport,
    Entry,
    FileChange,
    FileEvent,
    FileType,
    Listing,
    Skipped,
    SkippedEntry,
    TreeReport,
    Written,
    shown,
)
from dsec.model.limits import DIFF_MAX, KIB

NAME_MAX: Final = 255
LIST_DEFAULT: Final = 1000
PIECE_BYTES: Final = 256 * KIB
# As if something were mounted there.
MOUNTS: Final = (b"/dev", b"/proc", b"/sys")
CHANGES_AT_ONCE: Final = 256


@dataclass
class Node:
    """One file."""

    type: FileType
    mode: int
    uid: int = 0
    mtime: float = 0.0
    data: bytes = b""
    target: bytes | None = None


@dataclass
class Tree:
    """The files of one sandbox. `directories` is where its programs look too."""

    directories: set[str]
    now: Callable[[], float]
    size_max: int
    nodes: dict[bytes, Node] = field(default_factory=dict)
    watchers: list[asyncio.Queue[FileEvent]] = field(default_factory=list)
    before: dict[bytes, Node] = field(default_factory=dict)  # its layers

    def __post_init__(self) -> None:
        self.before = {one.encode(): Node("directory", 0o755) for one in self.directories}

    def changes(self, where: bytes) -> Iterator[FileChange]:
        """What at a path and below is not as in the layers."""
        known = {*self.nodes, *(text.encode("utf-8", "surrogateescape") for text in self.directories)}
        for path in sorted(known | self.before.keys()):
            if path != where and not path.startswith(where.rstrip(b"/") + b"/"):
                continue
            if any(path == mount or path.startswith(mount + b"/") for mount in MOUNTS):
                continue
            now, before = self.find(path, "diff") if path in known else None, self.before.get(path)
            change = _change(path, before, now)
            if change is not None:
                yield change

    def find(self, path: bytes, doing: str) -> Node:
        """What is at an absolute path. Raises FileNotFound, and FileError below what is no directory."""
        if path in self.nodes:
            return self.nodes[path]
        if path.decode("utf-8", "surrogateescape") in self.directories:
            return self.nodes.setdefault(path, Node("directory", 0o755, mtime=self.now()))
        if path != b"/" and self.find(posixpath.dirname(path), doing).type != "directory":
            raise refused(FileError, doing, path, errno.ENOTDIR)
        raise refused(FileNotFound, doing, path, errno.ENOENT)

    def below(self, path: bytes) -> list[bytes]:
        """All paths under a directory, parents first."""
        prefix = path.rstrip(b"/") + b"/"
        known = {*self.nodes, *(text.encode("utf-8", "surrogateescape") for text in self.directories)}
        return sorted(one for one in known if one.startswith(prefix) and one != prefix)

    def put(self, path: bytes, node: Node) -> None:
        """Something is there from now on."""
        used = sum(len(one.data) for key, one in self.nodes.items() if key != path)
        if used + len(node.data) > self.size_max:
            raise refused(NoSpace, "write", path, errno.ENOSPC, resource="disk")
        kind = "modified" if path in self.nodes else "created"
        self.nodes[path] = node
        if node.type == "directory":
            self.directories.add(path.decode("utf-8", "surrogateescape"))
        self.tell(kind, path)

    def drop(self, path: bytes) -> Node:
        """It is there no more."""
        node = self.find(path, "remove")
        self.nodes.pop(path, None)
        self.directories.discard(path.decode("utf-8", "surrogateescape"))
        self.tell("deleted", path)
        return node

    def tell(self, kind: str, path: bytes) -> None:
        """Whoever watches hears of it."""
        text, raw = shown(path)
        for queue in self.watchers:
            queue.put_nowait(FileEvent(kind=kind, path=text, raw_path=raw))  # type: ignore[arg-type]  # one of Change


def refused(kind: type[FileError], doing: str, path: bytes, number: int, **detail: object) -> FileError:
    """The error for what a kernel would refuse."""
    name = errno.errorcode[number]
    text, _ = shown(path)
    return kind(f"{doing} {text}: {name}", detail={"path": text, "errno": name, **detail})


class FakeFiles:
    """The `Files` of a sandbox of the fake."""

    def __init__(self, tree: Tree, *, user: str, cwd: str, visit: Callable[[], Awaitable[None]]) -> None:
        self._tree = tree
        self._uid = USERS.get(user) if user in USERS else int(user.partition(":")[0])
        self._cwd = cwd.encode("utf-8", "surrogateescape")
        self._visit = visit
        self._closed = False

    @property
    def usable(self) -> bool:
        return not self._closed

    def close(self) -> None:
        self._closed = True

    def _path(self, path: bytes) -> bytes:
        full = posixpath.normpath(posixpath.join(self._cwd, path))
        if not path:
            raise refused(FileNotFound, "find", path, errno.ENOENT)
        if path.endswith(b"/") and (there := self._there(full)) is not None and there.type != "directory":
            raise refused(FileError, "find", full, errno.ENOTDIR)
        if any(len(part) > NAME_MAX for part in full.split(b"/")):
            raise refused(FileError, "find", path, errno.ENAMETOOLONG)
        return b"/" + full.lstrip(b"/")

    def _path_of_file(self, path: bytes, doing: str) -> bytes:
        if not path.endswith(b"/"):
            return self._path(path)
        above = posixpath.dirname(self._path(path.rstrip(b"/") or b"/"))
        if self._tree.find(above, doing).type != "directory":
            raise refused(FileError, doing, path, errno.ENOTDIR)
        raise refused(IsADirectory, doing, path, errno.EISDIR)

    def _entry(self, path: bytes) -> Entry:
        node = self._tree.find(path, "stat")
        size = len(node.target or node.data)
        owner = {"mode": node.mode, "uid": node.uid, "gid": node.uid, "mtime": node.mtime}
        return Entry.of(path, target=node.target, type=node.type, size=size, **owner)

    async def stat(self, path: bytes, *, follow: bool = True) -> Entry:
        await self._visit()
        return self._entry(self._path(path))

    async def list(self, path: bytes, *, cursor: bytes | None = None, limit: int | None = None) -> Listing:
        await self._visit()
        where = self._path(path)
        if self._tree.find(where, "list").type != "directory":
            raise refused(FileError, "list", where, errno.ENOTDIR)
        names = [one for one in self._tree.below(where) if posixpath.dirname(one) == where]
        names = [one for one in names if cursor is None or posixpath.basename(one) > cursor]
        page = names[: limit or LIST_DEFAULT]
        more = posixpath.basename(page[-1]) if len(page) < len(names) else None
        return Listing(items=tuple(self._entry(one) for one in page), next_cursor=more)

    async def mkdir(self, path: bytes, *, parents: bool, mode: int | None = None) -> Entry:
        await self._visit()
        where = self._path(path)
        try:
            there = self._tree.find(where, "mkdir")
        except FileNotFound:
            self._above(where, parents=parents)
            self._tree.put(where, self._new("directory", 0o755 if mode is None else mode))
            return self._entry(where)
        if parents and there.type == "directory":
            return self._entry(where)
        raise refused(FileExists, "mkdir", where, errno.EEXIST)

    def _above(self, path: bytes, *, parents: bool) -> None:
        above = posixpath.dirname(path)
        try:
            there = self._tree.find(above, "open")
        except FileNotFound:
            if not parents:
                raise
            self._above(above, parents=True)
            self._tree.put(above, self._new("directory", 0o755))
            return
        if there.type != "directory":
            raise refused(FileError, "open", above, errno.ENOTDIR)

    def _new(self, kind: FileType, mode: int, **fields: bytes) -> Node:
        return Node(kind, mode, self._uid or 0, self._tree.now(), **fields)

    async def remove(self, path: bytes, *, recursive: bool) -> None:
        await self._visit()
        where = self._path(path)
        if where == b"/":
            raise refused(FileError, "remove", where, errno.EBUSY)
        self._tree.find(where, "remove")
        below = self._tree.below(where)
        if below and not recursive:
            raise refused(FileError, "remove", where, errno.ENOTEMPTY)
        for one in (*reversed(below), where):
            self._tree.drop(one)

    async def move(self, source: bytes, target: bytes, *, replace: bool) -> Entry:
        await self._visit()
        from_, to = self._path(source), self._path(target)
        for where in (from_, to):
            if where == b"/":
                raise refused(FileError, "move", where, errno.EBUSY)
        moved = self._tree.find(from_, "move")
        self._above(to, parents=False)
        if target.endswith(b"/") and moved.type != "directory":
            raise refused(FileError, "move", to, errno.ENOTDIR)
        if to.startswith(from_ + b"/"):
            raise refused(FileError, "move", to, errno.EINVAL)
        if to in self._tree.nodes or to in self._tree.below(b"/"):
            if not replace:
                raise refused(FileExists, "move", to, errno.EEXIST)
            if self._tree.below(to):
                raise refused(FileError, "move", to, errno.ENOTEMPTY)
        for one in (from_, *self._tree.below(from_)):
            self._tree.put(to + one[len(from_) :], self._tree.drop(one))
        return self._entry(to)

    async def chmod(self, path: bytes, mode: int) -> Entry:
        await self._visit()
        where = self._path(path)
        self._tree.find(where, "chmod").mode = mode
        self._tree.tell("attributes", where)
        return self._entry(where)

    async def read(
        self,
        path: bytes,
        *,
        offset: int,
        length: int | None,
        opened: Callable[[Entry], Awaitable[None]],
        sink: DataSink,
    ) -> None:
        await self._visit()
        where = self._path(path)
        node = self._regular(where, "read")
        await opened(self._entry(where))
        data = node.data[offset : None if length is None else offset + length]
        for piece in _pieces(data):
            await sink(piece)

    def _regular(self, path: bytes, doing: str) -> Node:
        node = self._tree.find(path, doing)
        if node.type == "directory":
            raise refused(IsADirectory, doing, path, errno.EISDIR, type="directory")
        if node.type != "file":
            raise refused(FileError, doing, path, errno.EINVAL, type=node.type)
        return node

    async def write(
        self, path: bytes, pieces: AsyncIterator[Piece], *, mode: int | None, parents: bool, exclusive: bool
    ) -> Written:
        await self._visit()
        where = self._path_of_file(path, "write")
        before = self._there(where)
        if before is not None and exclusive:
            raise refused(FileExists, "write", where, errno.EEXIST)
        if before is not None:
            self._regular(where, "write")
        self._above(where, parents=parents)
        data = b"".join([bytes(piece) async for piece in pieces])
        kept = before.mode if before is not None else 0o644
        self._tree.put(where, self._new("file", kept if mode is None else mode, data=data))
        return Written(**msgspec.structs.asdict(self._entry(where)))

    async def append(self, path: bytes, pieces: AsyncIterator[Piece], *, mode: int | None, parents: bool) -> Entry:
        await self._visit()
        where = self._path_of_file(path, "append")
        before = self._regular(where, "append") if self._there(where) is not None else None
        self._above(where, parents=parents)
        data = b"".join([bytes(piece) async for piece in pieces])
        kept = before.mode if before is not None else 0o644 if mode is None else mode
        self._tree.put(where, self._new("file", kept, data=(before.data if before else b"") + data))
        return self._entry(where)

    def _there(self, path: bytes) -> Node | None:
        try:
            return self._tree.find(path, "stat")
        except FileNotFound:
            return None

    async def tree_out(self, path: bytes, sink: DataSink) -> TreeReport:
        await self._visit()
        where = self._path(path)
        self._tree.find(where, "pack")
        out, entries, size = io.BytesIO(), 0, 0
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for one in (where, *self._tree.below(where)):
                node = self._tree.find(one, "pack")
                tar.addfile(_member(one[len(where) :].lstrip(b"/") or b".", node), io.BytesIO(node.data))
                entries, size = entries + 1, size + len(node.data)
        for piece in _pieces(out.getvalue()):
            await sink(piece)
        return TreeReport(entries=entries, bytes=size)

    async def tree_in(self, path: bytes, pieces: AsyncIterator[Piece], *, parents: bool, owners: bool) -> TreeReport:
        await self._visit()
        where = self._path(path)
        made = self._there(where) is None
        if made:
            await self.mkdir(path, parents=parents)
        raw = b"".join([bytes(piece) async for piece in pieces])
        entries, size, left_out = 0, 0, []
        try:
            with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
                for member in tar:
                    name = member.name.encode("utf-8", "surrogateescape")
                    node = self._unpacked(tar, member)
                    if node is None:
                        left_out.append(SkippedEntry(path=member.name, why="char" if member.ischr() else "block"))
                        continue
                    self._place(where, name, node, made=made)
                    entries, size = entries + 1, size + len(node.data)
        except tarfile.TarError as error:
            raise FileError(f"tar: {error}") from error
        return TreeReport(entries=entries, bytes=size, skipped=Skipped(count=len(left_out), named=tuple(left_out)))

    def _place(self, where: bytes, name: bytes, node: Node, *, made: bool) -> None:
        if name.startswith(b"/") or b".." in name.split(b"/"):
            raise FileError(f"tar entry {name!r}: leads out of the directory", detail={"entry": shown(name)[0]})
        target = posixpath.normpath(posixpath.join(where, name))
        if target != where:
            self._above(target, parents=True)
        if node.type != "directory" or self._there(target) is None or (made and target == where):
            self._tree.put(target, node)

    def _unpacked(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> Node | None:
        if member.isdir():
            return self._new("directory", member.mode)
        if member.issym():
            return self._new("symlink", 0o777, target=member.linkname.encode("utf-8", "surrogateescape"))
        content = tar.extractfile(member) if member.isreg() or member.islnk() else None
        return None if content is None else self._new("file", member.mode, data=content.read())

    async def watch(self, path: bytes, *, recursive: bool, sink: Callable[[FileEvent | None], Awaitable[None]]) -> str:
        await self._visit()
        where = self._path(path)
        self._tree.find(where, "watch")
        queue: asyncio.Queue[FileEvent] = asyncio.Queue()
        self._tree.watchers.append(queue)
        try:
            await sink(None)
            while True:
                event = await queue.get()
                changed = event.raw_path or event.path.encode()
                if changed == where and event.kind == "deleted":
                    return "gone"
                under = changed.startswith(where.rstrip(b"/") + b"/")
                if changed == where or (under and (recursive or posixpath.dirname(changed) == where)):
                    await sink(event)
        finally:
            self._tree.watchers.remove(queue)

    async def diff(
        self, path: bytes, *, limit: int | None, sink: Callable[[tuple[FileChange, ...]], Awaitable[None]]
    ) -> DiffReport:
        await self._visit()
        if b".." in path.split(b"/"):
            raise InvalidSpec.field("path", path, "no part ..")
        where = self._path(path)
        if where in MOUNTS:
            raise refused(FileError, "diff", where, errno.EXDEV)
        if where not in self._tree.before:
            self._tree.find(where, "diff")
        changes = list(self._tree.changes(where))
        told = changes[: limit or DIFF_MAX]
        for start in range(0, len(told), CHANGES_AT_ONCE):
            await sink(tuple(told[start : start + CHANGES_AT_ONCE]))
        counts = {kind: sum(change.kind == kind for change in told) for kind in ("added", "changed", "deleted")}
        named = tuple(SkippedEntry(path=one.decode(), why="mount") for one in MOUNTS if where == b"/")
        return DiffReport(**counts, skipped=Skipped(count=len(named), named=named), more=len(told) < len(changes))


def _change(path: bytes, before: Node | None, now: Node | None) -> FileChange | None:
    what: list[str] = []
    if before is not None and now is not None:
        if before.type != now.type:
            what = ["type"]
        else:
            pairs = (
                ("content", (before.data, before.target), (now.data, now.target)),
                ("mode", before.mode, now.mode),
                ("owner", before.uid, now.uid),
                ("mtime", before.mtime, now.mtime),
            )
            what = [name for name, old, new in pairs if old != new and (name, now.type) != ("mtime", "directory")]
        if not what:
            return None
    text, raw = shown(path)
    kind = "added" if before is None else "deleted" if now is None else "changed"
    states = {"before": _state(before), "now": _state(now)}
    return msgspec.convert({"kind": kind, "path": text, "raw_path": raw, "what": what, **states}, FileChange)


def _state(node: Node | None) -> dict[str, object] | None:
    if node is None:
        return None
    target, raw = shown(node.target) if node.target is not None else (None, None)
    owner = {"mode": node.mode, "uid": node.uid, "gid": node.uid, "mtime": node.mtime}
    return {"type": node.type, "size": len(node.target or node.data), "target": target, "raw_target": raw, **owner}


def check_user(user: str) -> DsecError | None:
    """Why a sandbox of the fake has no such user."""
    name = user.partition(":")[0]
    if name in USERS or name.isdigit():
        return None
    return ProgramNotStarted(f"user: no such user {name!r}", detail={"field": "user"})


def _member(name: bytes, node: Node) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
    kinds = {"directory": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE}
    member.type = kinds.get(node.type, tarfile.REGTYPE)
    member.mode, member.uid, member.mtime, member.size = node.mode, node.uid, node.mtime, len(node.data)
    member.linkname = (node.target or b"").decode("utf-8", "surrogateescape")
    return member


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))
