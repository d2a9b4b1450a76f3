"""File calls as values: made up, done to a sandbox, and done to the model.

Made up from a `Random`, not drawn piece by piece: after a call of which nobody knows whether it was done there is one
state or the other, and hypothesis wants to be asked for the same things each time.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import dsec
from dsec.model.files import Entry
from tests.kit.filemodel import TOP, Node, Refused, Seen, Tree, content_of

COMMON: Final = (b"a", b"b", b"c")
ODD: Final = (
    b"d", b"new\nline", b"\xff\xfe", "ü".encode(), b"-rf", b"x" * 255, b"\xf0" * 255, b" ", b"*", b"%41+&?#=", b"..a",
    b"a" * 98, b"\t\\", b"\xed\xa0\x80",
)  # fmt: skip
WRONG: Final = (b".", b"..", b"y" * 256, b"")
MODES: Final = (0o600, 0o644, 0o755, 0o444, 0, 0o4755, 0o1777, 0o5000)
SIZES: Final = (0, 1, 2, 100, 4095, 4096, 65_536, 300_001)
PATH_MAX: Final = 4000
CHANGING: Final = ("write", "append", "mkdir", "remove", "move", "chmod")
LOOKING: Final = ("read", "read_text", "list", "stat", "exists")
# What a program gets of an error that the kernel has a name for.
ERRORS: Final = {"ENOENT": dsec.FileNotFound, "EEXIST": dsec.FileExists, "EISDIR": dsec.IsADirectory}


def name(rnd: random.Random) -> bytes:
    return rnd.choice(COMMON if rnd.random() < 0.6 else ODD)


def content(rnd: random.Random) -> bytes:
    return rnd.randbytes(rnd.choice(SIZES))


def some_mode(rnd: random.Random) -> int | None:
    return rnd.choice((None, *MODES))


def some_path(rnd: random.Random, tree: Tree) -> bytes:
    """A path: of what is there, beside or below it, or any."""
    there = [path for path, _ in tree.walk() if path]
    kind = rnd.randrange(10)
    if there and kind < 8:
        path = rnd.choice(there)
        if kind > 5:
            path = path.rpartition(b"/")[0] + b"/" + name(rnd)
        elif kind > 3:
            path += b"/" + name(rnd)
        path = path.lstrip(b"/")
    else:
        path = b"/".join(name(rnd) for _ in range(rnd.randrange(1, 4)))
    if kind == 9:
        parts = path.split(b"/")
        parts.insert(rnd.randrange(len(parts) + 1), rnd.choice(WRONG))
        path = b"/".join(parts)
    whole = b"/" + TOP + b"/" + path
    if len(whole) > PATH_MAX:
        return rnd.choice(COMMON)
    return whole if rnd.random() < 0.5 or path[:1] in (b"", b"/") else path


def some_target(rnd: random.Random, tree: Tree) -> bytes:
    """Where a link leads."""
    return rnd.choice(COMMON) if rnd.random() < 0.5 else some_path(rnd, tree).rstrip(b"/") or b"a"


def some_tree(rnd: random.Random, depth: int = 2) -> Node:
    """A directory with something in it."""
    made = Node("directory", rnd.choice((0o755, 0o700)))
    for _ in range(rnd.randrange(4)):
        kind = rnd.randrange(4)
        if kind == 0 and depth:
            node = some_tree(rnd, depth - 1)
        elif kind == 1:
            node = Node("symlink", 0o777, rnd.choice((*COMMON, b"/m/a", b"../b", b"\xff/c")))
        else:
            node = Node("file", rnd.choice((0o644, 0o755, 0o600)), content(rnd))
        made.names[name(rnd)] = node
    return made


@dataclass(frozen=True)
class Call:
    """One call of `sbx.files`: its name and arguments."""

    name: str
    args: dict[str, Any]

    def do(self, files: Any) -> Any:
        return getattr(files, self.name)(**self.args)

    def model(self, tree: Tree) -> Any:
        """Raises Refused, and Outside."""
        if self.name in ("stat", "exists"):
            try:
                node = tree.look(self.args["path"], follow=self.args.get("follow", True))
            except Refused as refused:
                if self.name == "exists" and refused.errno in ("ENOENT", "ENOTDIR", "ELOOP"):
                    return False
                raise
            return node if self.name == "stat" else True
        if self.name == "read_text":
            return tree.read(self.args["path"]).decode("utf-8", "surrogateescape")
        return getattr(tree, self.name)(**self.args)

    @property
    def asked(self) -> bytes:
        """The path its answer tells of, as the sandbox calls it."""
        path: bytes = self.args["target" if "target" in self.args else "path"]
        return path if path.startswith(b"/") else b"/" + TOP + b"/" + path

    @property
    def changes(self) -> bool:
        return self.name in CHANGING

    @property
    def in_parts(self) -> bool:
        """Whether it may be half done when it is cut short."""
        return (self.name == "remove" and self.args["recursive"]) or self.name == "move"


def some_call(rnd: random.Random, tree: Tree, *, changing: bool = False) -> Call:
    """Any call that can be asked for."""

    def path() -> bytes:
        return some_path(rnd, tree)

    def yes() -> bool:
        return rnd.random() < 0.5

    called = rnd.choice(CHANGING if changing else CHANGING + LOOKING)
    args: dict[str, Any] = {} if called == "move" else {"path": path()}
    match called:
        case "write":
            args |= {"data": content(rnd), "mode": some_mode(rnd), "parents": yes(), "exclusive": rnd.random() < 0.3}
        case "append":
            args |= {"data": content(rnd), "mode": some_mode(rnd), "parents": yes()}
        case "mkdir":
            args |= {"parents": yes(), "mode": some_mode(rnd)}
        case "remove":
            args |= {"recursive": yes()}
        case "move":
            args |= {"source": path(), "target": path(), "replace": yes()}
        case "chmod":
            args |= {"mode": rnd.choice(MODES)}
        case "read":
            args |= {"offset": rnd.choice((0, 0, 1, 4096, 1 << 40)), "length": rnd.choice((None, None, 0, 1, 5000))}
        case "read_text":
            args |= {"errors": "surrogateescape"}
        case "stat":
            args |= {"follow": yes()}
    return Call(called, args)


def is_answer(call: Call, refused: Refused | None, error: BaseException) -> bool:
    """Whether an error is what the model was refused with."""
    if refused is None or not isinstance(error, dsec.FileError):
        return False
    if refused.kind is not None:
        wanted = dsec.IsADirectory if refused.kind == "directory" else dsec.FileError
        return type(error) is wanted and error.detail.get("type") == refused.kind
    return type(error) is ERRORS.get(refused.errno, dsec.FileError) and error.detail.get("errno") == refused.errno


def check_answer(call: Call, wanted: Any, got: Any) -> None:
    """The answer of a call is the model's. What only the sandbox knows, a time, the model gets from it."""
    if call.name == "list":
        directory = call.asked
        assert [os.fsencode(entry.name) for entry in got] == list(wanted), call
        for entry, (name, node) in zip(got, wanted.items(), strict=True):
            check_entry(entry, directory.rstrip(b"/") + b"/" + name, node)
    elif isinstance(got, Entry):
        check_entry(got, call.asked, wanted)
    else:
        assert got == wanted, (call, got, wanted)


def check_entry(entry: Entry, path: bytes, node: Node) -> None:
    if node.mtime is None:
        node.mtime = entry.mtime
    shown = (entry.type, entry.mode, entry.target)
    target = os.fsdecode(node.data) if node.kind == "symlink" else None
    assert shown == (node.kind, 0o777 if node.kind == "symlink" else node.mode, target), (path, entry, node)
    assert os.fsencode(entry.path) == path or os.fsencode(entry.path).replace(b"//", b"/") == path.replace(b"//", b"/")
    if node.kind in ("file", "symlink"):
        assert entry.size == node.size, (path, entry)
        assert abs(entry.mtime - node.mtime) < 1e-5, (path, entry, node.mtime)


def settle(call: Call, before: Tree, after: Tree, observed: dict[bytes, Seen]) -> bool:
    """Whether what is there now may be there, when nobody was told how a call ended.

    What begins with `.dsec-` is a copy that was not finished, as the protocol says of a helper that dies.
    """
    states = [before.flat(), *after.between, after.flat()]
    known = set().union(*states)
    observed = {path: seen for path, seen in observed.items() if path in known or b"/.dsec-" not in b"/" + path}
    if any(same(state, observed) for state in states):
        return True
    return call.in_parts and is_between(states[0], states[-1], observed)


def same(state: dict[bytes, Seen], observed: dict[bytes, Seen]) -> bool:
    return state.keys() == observed.keys() and all(seen.fits(observed[path]) for path, seen in state.items())


def is_between(before: dict[bytes, Seen], after: dict[bytes, Seen], observed: dict[bytes, Seen]) -> bool:
    """Each path by itself is as before or as after."""
    for path in before.keys() | after.keys() | observed.keys():
        told = [state.get(path) for state in (before, after)]
        found = observed.get(path)
        if not any(found is one or (one and found and one.fits(found)) for one in told):
            return False
    return True


def local(top: Path, tree: Node) -> None:
    """The same tree on this machine."""
    top.mkdir(exist_ok=True)
    for name, node in tree.names.items():
        path = top / os.fsdecode(name)
        if node.kind == "directory":
            local(path, node)
        elif node.kind == "symlink":
            path.symlink_to(os.fsdecode(node.data))
        else:
            path.write_bytes(node.data)
            path.chmod(node.mode)
        node.mtime = path.lstat().st_mtime
    top.chmod(tree.mode)


def kept_link(path: bytes, target: bytes) -> bool:
    """Whether a link inside a tree that is downloaded leads nowhere else: first up, but not out, and then down."""
    if target.startswith(b"/"):
        return False
    steps = [step for step in target.split(b"/") if step not in (b"", b".")]
    up = steps.count(b"..")
    return up <= path.count(b"/") and b".." not in steps[up:]


def of_local(top: Path) -> dict[bytes, tuple[str, int, str]]:
    """What lies below a directory of this machine: kind, permission bits, content."""
    found = {}
    for path in top.rglob("*"):
        name = os.fsencode(path.relative_to(top))
        if path.is_symlink():
            found[name] = ("symlink", 0o777, content_of("symlink", os.fsencode(path.readlink())))
        elif path.is_dir():
            found[name] = ("directory", path.stat().st_mode & 0o777, "")
        else:
            found[name] = ("file", path.stat().st_mode & 0o777, content_of("file", path.read_bytes()))
    return found


def downloaded(tree: Node) -> tuple[dict[bytes, tuple[str, int, str]], int]:
    """What a download of a directory makes, and how much of it is left out."""
    found: dict[bytes, tuple[str, int, str]] = {}
    left_out = 0
    for path, node in Tree(tree).walk():
        if not path:
            continue
        if node.kind == "fifo" or (node.kind == "symlink" and not kept_link(path, node.data)):
            left_out += 1
            continue
        mode = 0o777 if node.kind == "symlink" else node.mode & 0o777
        found[path] = (node.kind, mode, content_of(node.kind, node.data))
    return found, left_out
