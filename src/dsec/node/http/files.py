"""The file calls: bytes in and out as they are, paths percent-encoded in the query."""

from __future__ import annotations

import asyncio
from typing import Final, Literal, TypeVar

import msgspec

from dsec.backends.base import Piece
from dsec.model.errors import InvalidSpec
from dsec.model.files import Entry, FileEvent, Listing, TreeReport, Written
from dsec.node import files as calls
from dsec.node.agent import Node
from dsec.node.http import codec
from dsec.node.http.codec import flag, number, one, path
from dsec.node.http.exchange import Exchange
from dsec.node.http.route import Empty, Route, S
from dsec.node.http.streams import until
from dsec.node.steps import WireError

T = TypeVar("T")

OCTETS = b"application/octet-stream"
TAR = b"application/x-tar"
# How large the file was when it was opened. Its bytes end earlier only if it was cut meanwhile.
SIZE_HEADER = b"x-dsec-size"


class TreeItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One item of a tree's stream: bytes of the tar archive, or what was in it."""

    data: bytes | None = None
    report: TreeReport | None = None
    error: WireError | None = None


class WatchItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One item of a watch: that nothing is missed from now on, a change, or why it is over."""

    ready: bool | None = None
    event: FileEvent | None = None
    ended: Literal["gone"] | None = None
    error: WireError | None = None


async def read_file(node: Node, ex: Exchange, _: None) -> None:
    async def opened(entry: Entry) -> None:
        await ex.open(OCTETS, ((SIZE_HEADER, b"%d" % entry.size),))

    async def sink(piece: Piece) -> None:
        await ex.data(bytes(piece))

    length = number(ex.fields, "length", -1, int)
    if length < 0 and "length" in ex.fields:
        raise InvalidSpec.field("length", length, "0 or more")
    await node.files.read(
        ex.params[0],
        path(ex.fields, "path"),
        offset=number(ex.fields, "offset", 0, int),
        length=None if length < 0 else length,
        opened=opened,
        sink=sink,
        user=one(ex.fields, "user"),
    )
    await ex.finish()


async def _do(node: Node, ex: Exchange, call: calls.Call[T]) -> None:
    done = await node.files.do(ex.params[0], call, user=one(ex.fields, "user"), key=ex.key)
    await ex.reply(200, Empty() if done is None else done)


async def write_file(node: Node, ex: Exchange, _: None) -> None:
    parents, exclusive = flag(ex.fields, "parents"), flag(ex.fields, "exclusive")
    where = path(ex.fields, "path")
    await _do(node, ex, calls.write(where, ex.pieces(), mode=_mode(ex), parents=parents, exclusive=exclusive))


async def append_file(node: Node, ex: Exchange, _: None) -> None:
    where, parents = path(ex.fields, "path"), flag(ex.fields, "parents")
    await _do(node, ex, calls.append(where, ex.pieces(), mode=_mode(ex), parents=parents))


async def stat_file(node: Node, ex: Exchange, _: None) -> None:
    follow = "follow" not in ex.fields or flag(ex.fields, "follow")
    await _do(node, ex, calls.stat(path(ex.fields, "path"), follow=follow))


async def list_files(node: Node, ex: Exchange, _: None) -> None:
    limit = number(ex.fields, "limit", 0, int) if "limit" in ex.fields else None
    cursor = path(ex.fields, "cursor") if "cursor" in ex.fields else None
    await _do(node, ex, calls.listing(path(ex.fields, "path"), cursor=cursor, limit=limit))


async def make_directory(node: Node, ex: Exchange, _: None) -> None:
    await _do(node, ex, calls.mkdir(path(ex.fields, "path"), parents=flag(ex.fields, "parents"), mode=_mode(ex)))


async def remove_file(node: Node, ex: Exchange, _: None) -> None:
    await _do(node, ex, calls.remove(path(ex.fields, "path"), recursive=flag(ex.fields, "recursive")))


async def move_file(node: Node, ex: Exchange, _: None) -> None:
    source, target = path(ex.fields, "source"), path(ex.fields, "target")
    await _do(node, ex, calls.move(source, target, replace=flag(ex.fields, "replace")))


async def change_mode(node: Node, ex: Exchange, _: None) -> None:
    mode = _mode(ex)
    if mode is None:
        raise InvalidSpec.field("mode", None, "permission bits in octal")
    await _do(node, ex, calls.chmod(path(ex.fields, "path"), mode))


async def read_tree(node: Node, ex: Exchange, _: None) -> None:
    """As a tar archive, or as items, of which the last says what was in it and what was left out."""
    items = ex.msgpack or codec.NDJSON in ex.headers.get(b"accept", b"")

    async def sink(piece: Piece) -> None:
        if items:
            await ex.item({"data": bytes(piece)})
            return
        if not ex.started:
            await ex.open(TAR)
        await ex.data(bytes(piece))

    report = await node.files.tree_out(ex.params[0], path(ex.fields, "path"), sink, user=one(ex.fields, "user"))
    if items:
        await ex.item({"report": report})
    await ex.finish()


async def write_tree(node: Node, ex: Exchange, _: None) -> None:
    parents, owners = flag(ex.fields, "parents"), flag(ex.fields, "owners")
    await _do(node, ex, calls.tree_in(path(ex.fields, "path"), ex.pieces(), parents=parents, owners=owners))


async def watch_files(node: Node, ex: Exchange, _: None) -> None:
    """Ends when what is watched is gone; a client that has enough hangs up."""

    async def sink(event: FileEvent | None) -> None:
        await ex.item({"ready": True} if event is None else {"event": event})

    watching = asyncio.ensure_future(
        node.files.watch(
            ex.params[0],
            path(ex.fields, "path"),
            sink,
            recursive=flag(ex.fields, "recursive"),
            user=one(ex.fields, "user"),
        )
    )
    gone = asyncio.ensure_future(ex.gone())
    try:
        if not await until(ex, gone, (watching,)):
            return
        await ex.item({"ended": watching.result()})
        await ex.finish()
    finally:
        watching.cancel()
        gone.cancel()


def _mode(ex: Exchange) -> int | None:
    text = one(ex.fields, "mode")
    if text is None:
        return None
    if not 1 <= len(text) <= 5 or text.strip("01234567"):
        raise InvalidSpec.field("mode", text, "permission bits in octal, as 644")
    return int(text, 8)


_USER = ("user", str)
_PATH = ("path", bytes)
_FLAG = Literal["0", "1"]
_F: Final = f"{S}/{{ref}}/files"
_OCTETS: Final = OCTETS.decode()
_TAR: Final = TAR.decode()

FILE_ROUTES: tuple[Route, ...] = (
    Route(
        "GET",
        _F,
        read_file,
        "The bytes of a file",
        octets_out=_OCTETS,
        query=(_PATH, ("offset", int), ("length", int), _USER),
    ),
    Route(
        "PUT",
        _F,
        write_file,
        "Write a whole file",
        octets_in=_OCTETS,
        answer=Written,
        query=(_PATH, ("mode", str), ("parents", _FLAG), ("exclusive", _FLAG), _USER),
        keyed=True,
    ),
    Route(
        "POST",
        f"{_F}:append",
        append_file,
        "Add to the end of a file",
        octets_in=_OCTETS,
        answer=Entry,
        query=(_PATH, ("mode", str), ("parents", _FLAG), _USER),
        keyed=True,
    ),
    Route("GET", f"{_F}:stat", stat_file, "One file", answer=Entry, query=(_PATH, ("follow", _FLAG), _USER)),
    Route(
        "GET",
        f"{_F}:list",
        list_files,
        "A directory, page by page",
        answer=Listing,
        query=(_PATH, ("cursor", bytes), ("limit", int), _USER),
    ),
    Route(
        "POST",
        f"{_F}:mkdir",
        make_directory,
        "Make a directory",
        answer=Entry,
        query=(_PATH, ("parents", _FLAG), ("mode", str), _USER),
        keyed=True,
    ),
    Route(
        "POST",
        f"{_F}:remove",
        remove_file,
        "Remove a file or a tree",
        answer=Empty,
        query=(_PATH, ("recursive", _FLAG), _USER),
        keyed=True,
    ),
    Route(
        "POST",
        f"{_F}:move",
        move_file,
        "Give a file another place",
        answer=Entry,
        query=(("source", bytes), ("target", bytes), ("replace", _FLAG), _USER),
        keyed=True,
    ),
    Route(
        "POST",
        f"{_F}:chmod",
        change_mode,
        "Set permission bits",
        answer=Entry,
        query=(_PATH, ("mode", str), _USER),
        keyed=True,
    ),
    Route(
        "GET",
        f"{_F}:tree",
        read_tree,
        "A tree as a tar archive",
        item=TreeItem,
        octets_out=_TAR,
        query=(_PATH, _USER),
    ),
    Route(
        "PUT",
        f"{_F}:tree",
        write_tree,
        "Unpack a tar archive",
        octets_in=_TAR,
        answer=TreeReport,
        query=(_PATH, ("parents", _FLAG), ("owners", _FLAG), _USER),
        keyed=True,
    ),
    Route(
        "GET",
        f"{_F}:watch",
        watch_files,
        "Changes as they happen",
        item=WatchItem,
        query=(_PATH, ("recursive", _FLAG), _USER),
    ),
)
