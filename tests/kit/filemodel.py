"""A tree of files as a value, and what each file call makes of it: the model a sandbox's answers are held against.

It knows what lies below `TOP` and nothing else of the sandbox: whoever asks beyond it gets `Outside`. Written from the
calls' documentation and from what a kernel answers root, not from the helper's code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["file", "directory", "symlink", "fifo"]

TOP: Final = b"m"
LINKS_MAX: Final = 40
NAME_MAX: Final = 255
SETUID: Final = 0o4000
# Last names that only a directory has.
NO_FILE: Final = (b"", b".", b"..")


class Refused(Exception):
    """What the call is answered with: the kernel's name of the error, or what is there instead of a regular file."""

    def __init__(self, errno: str = "", kind: Kind | None = None) -> None:
        super().__init__(errno or f"it is a {kind}")
        self.errno = errno
        self.kind = kind


class Outside(Exception):
    """The model does not know."""


@dataclass(eq=False)
class Node:
    """One file. `data` of a link is where it leads; `mtime` None is one that nobody was told yet."""

    kind: Kind
    mode: int = 0o644
    data: bytes = b""
    mtime: float | None = None
    names: dict[bytes, Node] = field(default_factory=dict)

    def copy(self) -> Node:
        names = {name: node.copy() for name, node in self.names.items()}
        return Node(self.kind, self.mode, self.data, self.mtime, names)

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class Seen:
    """One path as whoever looks from outside sees it."""

    kind: str
    mode: int
    content: str
    mtime: float | None

    def fits(self, other: Seen) -> bool:
        """The same; a time is that of the last change of content, told to the nanosecond by one and not by another."""
        if (self.kind, self.mode, self.content) != (other.kind, other.mode, other.content):
            return False
        return self.mtime is None or other.mtime is None or abs(self.mtime - other.mtime) < 1e-5


def content_of(kind: str, data: bytes) -> str:
    """What stands for the content of a file in `Seen`."""
    if kind == "file":
        return hashlib.sha256(data).hexdigest()
    return data.hex() if kind == "symlink" else ""


def split(path: bytes) -> tuple[bytes, bytes]:
    """Directory and last name."""
    parent, slash, name = path.rpartition(b"/")
    return (parent or b"/" if slash else b"."), name


class Tree:
    """The files below `TOP`. Relative paths begin there."""

    def __init__(self, top: Node | None = None) -> None:
        self.root = Node("directory", 0o755, names={TOP: top or Node("directory", 0o755)})
        # What it was after each single change of a call that makes several.
        self.between: list[dict[bytes, Seen]] = []

    @property
    def top(self) -> Node:
        return self.root.names[TOP]

    def copy(self) -> Tree:
        return Tree(self.top.copy())

    def walk(self) -> Iterator[tuple[bytes, Node]]:
        """Every path relative to the top, which is itself the empty one."""

        def below(path: bytes, node: Node) -> Iterator[tuple[bytes, Node]]:
            yield path, node
            for name, child in sorted(node.names.items()):
                yield from below(path + b"/" + name if path else name, child)

        return below(b"", self.top)

    def flat(self) -> dict[bytes, Seen]:
        return {
            path: Seen(
                node.kind,
                node.mode,
                content_of(node.kind, node.data),
                node.mtime if node.kind in ("file", "symlink") else None,
            )
            for path, node in self.walk()
        }

    # How paths lead

    def _start(self) -> list[Node]:
        return [self.root, self.top]

    def _child(self, directory: Node, name: bytes) -> Node | None:
        if len(name) > NAME_MAX:
            raise Refused("ENAMETOOLONG")
        if directory is self.root and name != TOP:
            raise Outside
        return directory.names.get(name)

    def _step(self, trail: list[Node], name: bytes, links: list[None]) -> list[Node]:
        if name in (b"", b"."):
            return trail
        if name == b"..":
            return trail[:-1] or trail
        node = self._child(trail[-1], name)
        if node is None:
            raise Refused("ENOENT")
        if node.kind == "symlink":
            return self._open(trail, self._followed(node, links), links)
        if node.kind != "directory":
            raise Refused("ENOTDIR")
        return [*trail, node]

    @staticmethod
    def _followed(node: Node, links: list[None]) -> bytes:
        links.append(None)
        if len(links) > LINKS_MAX:
            raise Refused("ELOOP")
        return node.data

    def _open(self, trail: list[Node], path: bytes, links: list[None]) -> list[Node]:
        """The directory at a path, with those above it."""
        if path.startswith(b"/"):
            trail = [self.root]
        for name in path.split(b"/"):
            trail = self._step(trail, name, links)
        return trail

    def look(self, path: bytes, *, follow: bool = True) -> Node:
        """What is at a path."""
        node = self._look(self._start(), path, [], follow=follow)[2]
        if node is None:
            raise Refused("ENOENT")
        if node is self.root:
            raise Outside
        return node

    def _look(
        self, trail: list[Node], path: bytes, links: list[None], *, follow: bool
    ) -> tuple[list[Node], bytes, Node | None]:
        parent, name = split(path)
        trail = self._open(trail, parent, links)
        if name in (b"", b".", b".."):
            trail = self._step(trail, name, links)
            return trail[:-1], name, trail[-1]
        node = self._child(trail[-1], name)
        if node is not None and node.kind == "symlink" and follow:
            return self._look(trail, self._followed(node, links), links, follow=True)
        return trail, name, node

    def _place(self, path: bytes) -> tuple[list[Node], bytes]:
        """Where a last name lies, whatever slashes follow it; a link there is meant itself."""
        parent, name = split(path.rstrip(b"/"))
        if name in NO_FILE:
            raise Refused("EBUSY")
        return self._open(self._start(), parent, []), name

    def _place_of_file(self, path: bytes, *, parents: bool) -> tuple[Node, bytes, Node | None]:
        slash, (parent, name) = path.endswith(b"/"), split(path.rstrip(b"/"))
        try:
            trail = self._open(self._start(), parent, [])
        except Refused as refused:
            if refused.errno != "ENOENT" or not parents or slash or name in NO_FILE:
                raise
            self._make_all(parent, None)
            trail = self._open(self._start(), parent, [])
        for _ in range(LINKS_MAX):
            if slash or name in NO_FILE:
                raise Refused("EISDIR")
            node = self._child(trail[-1], name)
            if node is None or node.kind != "symlink":
                return trail[-1], name, node
            slash, (parent, name) = node.data.endswith(b"/"), split(node.data.rstrip(b"/"))
            trail = self._open(trail, parent, [])
        raise Refused("ELOOP")

    # What changes it

    def _mkdir(self, path: bytes, mode: int | None) -> None:
        parent, name = split(path)
        trail = self._open(self._start(), parent, [])
        if name in (b"", b".", b".."):
            raise Refused("EEXIST")
        if self._child(trail[-1], name) is not None:
            raise Refused("EEXIST")
        trail[-1].names[name] = Node("directory", 0o755 if mode is None else mode)
        self.between.append(self.flat())

    def _make_all(self, path: bytes, mode: int | None) -> bool:
        parts = path.split(b"/")
        made = False
        for end in range(1, len(parts) + 1):
            part = b"/".join(parts[:end])
            if part in (b"", b"/"):
                continue
            try:
                self._mkdir(part, mode if end == len(parts) else None)
                made = True
            except Refused as refused:
                if refused.errno != "EEXIST":
                    raise
                made = False
        return made

    def mkdir(self, path: bytes, *, parents: bool, mode: int | None) -> Node:
        path = path.rstrip(b"/")
        if not parents:
            self._mkdir(path, mode)
        elif not self._make_all(path, mode):
            try:
                self._open(self._start(), path, [])
            except Refused:
                raise Refused("EEXIST") from None
        return self.look(path)

    def write(self, path: bytes, data: bytes, *, mode: int | None, parents: bool, exclusive: bool) -> Node:
        directory, name, old = self._place_of_file(path, parents=parents)
        if old is not None and old.kind != "file":
            raise Refused(kind=old.kind)
        if old is not None and exclusive:
            raise Refused("EEXIST")
        if mode is None:
            mode = 0o644 if old is None else old.mode
        made = directory.names[name] = Node("file", mode, data)
        return made

    def append(self, path: bytes, data: bytes, *, mode: int | None, parents: bool) -> Node:
        directory, name, old = self._place_of_file(path, parents=parents)
        if old is None:
            made = directory.names[name] = Node("file", 0o644 if mode is None else mode, data)
            return made
        if old.kind != "file":
            raise Refused(kind=old.kind)
        if data:
            # Who is no root outside loses set-id bits by writing, as everywhere.
            old.data, old.mtime, old.mode = old.data + data, None, old.mode & ~SETUID
        return old

    def remove(self, path: bytes, *, recursive: bool) -> None:
        trail, name = self._place(path)
        node = self._child(trail[-1], name)
        if node is None:
            raise Refused("ENOENT")
        if trail[-1] is self.root:
            raise Outside
        if path.endswith(b"/") and node.kind != "directory":
            raise Refused("ENOTDIR")
        if node.names and not recursive:
            raise Refused("ENOTEMPTY")
        del trail[-1].names[name]

    def move(self, source: bytes, target: bytes, *, replace: bool) -> Node:
        (from_, old), (to, new) = self._place(source), self._place(target)
        node = self._child(from_[-1], old)
        if node is None:
            raise Refused("ENOENT")
        there = self._child(to[-1], new)
        if self.root in (from_[-1], to[-1]):
            raise Outside
        if there is not None and not replace:
            raise Refused("EEXIST")
        if node.kind != "directory" and b"/" in (source[-1:], target[-1:]):
            raise Refused("ENOTDIR")
        if node in to:
            raise Refused("EINVAL")
        if there is not None and there in from_:
            raise Refused("ENOTEMPTY")
        if there is node:
            return node
        if there is not None:
            _replaceable(node, there)
        del from_[-1].names[old]
        to[-1].names[new] = node
        return node

    def chmod(self, path: bytes, mode: int) -> Node:
        node = self.look(path)
        node.mode = mode
        return node

    def put(self, path: bytes, node: Node) -> None:
        """Something that no file call makes: a link, a FIFO."""
        trail, name = self._place(path)
        if self._child(trail[-1], name) is not None:
            raise Refused("EEXIST")
        if trail[-1] is self.root:
            raise Outside
        trail[-1].names[name] = node

    def unpack(self, path: bytes, tree: Node) -> None:
        """A tree that is uploaded: only where nothing of another kind is in its way, else `Outside`."""
        try:
            node = self.look(path)
        except Refused as refused:
            if refused.errno != "ENOENT":
                raise Outside from refused
            made = self._make_all(path.rstrip(b"/"), None)
            node = self.look(path)
            if made:
                node.mode = tree.mode
        _merge(node, tree)

    # What only looks

    def read(self, path: bytes, *, offset: int = 0, length: int | None = None) -> bytes:
        node = self.look(path)
        if node.kind != "file":
            raise Refused(kind=node.kind)
        return node.data[offset : None if length is None else offset + length]

    def list(self, path: bytes) -> dict[bytes, Node]:
        node = self.look(path)
        if node.kind != "directory":
            raise Refused("ENOTDIR")
        return dict(sorted(node.names.items()))


def _replaceable(node: Node, there: Node) -> None:
    if node.kind == "directory" and there.kind != "directory":
        raise Refused("ENOTDIR")
    if node.kind != "directory" and there.kind == "directory":
        raise Refused("EISDIR")
    if there.names:
        raise Refused("ENOTEMPTY")


def _merge(into: Node, tree: Node) -> None:
    if into.kind != "directory":
        raise Outside
    for name, node in tree.names.items():
        there = into.names.get(name)
        if there is not None and "directory" in (there.kind, node.kind) and there.kind != node.kind:
            raise Outside
        if node.kind != "directory" or there is None:
            into.names[name] = node.copy()
        else:
            there.mode = node.mode
            _merge(there, node)
