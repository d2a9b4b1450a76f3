"""The client of the file helper against a helper that misbehaves."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.model.errors import (
    FileError,
    FileNotFound,
    InvalidSpec,
    NoSpace,
    ProgramNotStarted,
    SandboxLost,
    Unavailable,
    Unsupported,
)
from dsec.model.files import Entry, FileChange, FileEvent
from dsec.wire.files import DATA, FileClient, HelperGone
from tests.kit.aio import asynchronous, until

pytestmark = pytest.mark.unit

ENTRY = {
    "name": b"f",
    "path": b"/f",
    "type": "file",
    "size": 6,
    "mode": 0o644,
    "uid": 0,
    "gid": 0,
    "mtime_ns": 1_500_000_000,
    "nlink": 1,
    "target": None,
}


class Peer:
    """The other end: what it reads, and the frames it is told to send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def frame(self) -> tuple[bool, bytes]:
        raw = int.from_bytes(await self.reader.readexactly(4), "big")
        return bool(raw & DATA), await self.reader.readexactly(raw & ~DATA)

    async def request(self) -> dict[str, Any]:
        data, body = await self.frame()
        assert not data
        found: dict[str, Any] = msgspec.msgpack.decode(body)
        return found

    def say(self, **fields: Any) -> None:
        body = msgspec.msgpack.encode(fields)
        self.writer.write(len(body).to_bytes(4, "big") + body)

    def data(self, data: bytes) -> None:
        self.writer.write((len(data) | DATA).to_bytes(4, "big") + data)

    async def greet(self) -> None:
        hello = await self.request()
        self.say(id=hello["id"], ok={"protocol": 1})
        files = await self.request()
        assert (files["op"], files["args"]["user"]) == ("files", "root")
        self.say(id=files["id"], ok={})


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def helper(tmp_path: Path, script: Script, *, greet: bool = True) -> AsyncIterator[FileClient]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        if greet:
            await peer.greet()
        await script(peer)
        writer.close()

    path = tmp_path / "s"
    server = await asyncio.start_unix_server(serve, str(path))
    try:
        client = await FileClient.open(path, "sbx-1", user="root", cwd="/")
        try:
            yield client
        finally:
            client.close()
    finally:
        server.close()


async def nothing(entry: Entry) -> None:
    return None


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@asynchronous
async def test_bytes_come_in_pieces_of_any_size(tmp_path: Path) -> None:
    whole = os.urandom(700_000)

    async def script(peer: Peer) -> None:
        request = await peer.request()
        assert request["args"] == {"path": b"/f", "offset": 0}
        peer.say(id=request["id"], ev="file", entry=ENTRY)
        for start in range(0, len(whole), 123_457):
            peer.data(whole[start : start + 123_457])
        peer.say(id=request["id"], ok={"bytes": len(whole), "eof": True})
        await peer.writer.drain()
        await peer.reader.read()

    got = bytearray()
    opened: list[Entry] = []

    async def sink(piece: bytes | memoryview) -> None:
        got.extend(piece)

    async def seen(entry: Entry) -> None:
        opened.append(entry)

    async with helper(tmp_path, script) as client:
        await client.read(b"/f", offset=0, length=None, opened=seen, sink=sink)
        assert client.usable
    assert bytes(got) == whole
    assert (opened[0].path, opened[0].mtime) == ("/f", 1.5)


@pytest.mark.parametrize(
    ("code", "detail", "kind"),
    [
        ("file_not_found", {"path": b"/f", "errno": "ENOENT"}, FileNotFound),
        ("no_space", {"resource": "disk"}, NoSpace),
        ("file_error", {"errno": "ENOTDIR"}, FileError),
        ("bad_request", {"field": "path"}, InvalidSpec),
        ("bad_request", {"field": "op"}, Unsupported),
        ("something_new", {}, FileError),
        ("internal", {}, Unavailable),
    ],
)
@asynchronous
async def test_a_refusal_has_its_class_and_the_helper_serves_on(
    tmp_path: Path, code: str, detail: dict[str, Any], kind: type[Exception]
) -> None:
    async def script(peer: Peer) -> None:
        first = await peer.request()
        peer.say(id=first["id"], err={"code": code, "message": "no", "detail": detail})
        second = await peer.request()
        peer.say(id=second["id"], ok={"entry": ENTRY})
        await peer.reader.read()

    async with helper(tmp_path, script) as client:
        with pytest.raises(kind):
            await client.stat(b"/f")
        assert (await client.stat(b"/f")).size == 6


@pytest.mark.parametrize(
    ("message", "code", "told"),
    [
        ("write /srv/: EISDIR", "is_a_directory", "write /srv/: Is a directory (EISDIR); name the file to be made"),
        ("append /srv: EISDIR", "is_a_directory", "append /srv: Is a directory (EISDIR); name the file to be made"),
        ("write /srv: it is a directory", "is_a_directory", "write /srv: it is a directory; name the file to be made"),
        ("read /srv: EISDIR", "is_a_directory", "read /srv: Is a directory (EISDIR)"),
        ("write /a/b: ENOTDIR", "file_error", "write /a/b: Not a directory (ENOTDIR)"),
    ],
)
@asynchronous
async def test_what_the_kernel_says_is_said_in_words(tmp_path: Path, message: str, code: str, told: str) -> None:
    async def script(peer: Peer) -> None:
        first = await peer.request()
        detail = {"errno": message.rpartition(" ")[2]}
        peer.say(id=first["id"], err={"code": code, "message": message, "detail": detail})
        await peer.reader.read()

    async with helper(tmp_path, script) as client:
        with pytest.raises(FileError) as caught:
            await client.stat(b"/f")
    assert caught.value.message == told


@pytest.mark.parametrize(
    "said", [b"", b"\x00\x00", b"\x00\x00\x00\x05ab", (FRAME := 5 << 20).to_bytes(4, "big"), b"\x80\x00\x00\x01x"]
)
@asynchronous
async def test_what_is_no_answer_ends_the_connection(tmp_path: Path, said: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.writer.write(said)

    async with helper(tmp_path, script) as client:
        with pytest.raises(Unavailable):
            await client.stat(b"/f")
        assert not client.usable


@asynchronous
async def test_one_that_ended_while_it_waited_is_seen_to_have(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        return None

    async with helper(tmp_path, script) as client:
        await until(lambda: not client.usable)
        with pytest.raises(HelperGone) as gone:
            await client.stat(b"/f")
        assert gone.value.detail == {"asked": False}


@asynchronous
async def test_an_upload_is_framed_and_ended(tmp_path: Path) -> None:
    got: list[tuple[bool, int]] = []

    async def script(peer: Peer) -> None:
        request = await peer.request()
        assert request["args"] == {"path": b"/f", "parents": True, "exclusive": False}
        while True:
            data, body = await peer.frame()
            got.append((data, len(body)))
            if not body:
                break
        peer.say(id=request["id"], ok={"entry": ENTRY, "atomic": True})
        await peer.reader.read()

    async with helper(tmp_path, script) as client:
        big = bytes((1 << 20) + 7)
        entry = await client.write(b"/f", pieces(b"abc", big), mode=None, parents=True, exclusive=False)
        assert entry.name == "f"
        assert client.usable
    assert got == [(True, 3), (True, 1 << 20), (True, 7), (True, 0)]


@asynchronous
async def test_an_upload_that_is_refused_stops(tmp_path: Path) -> None:
    sent = 0

    async def many() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 10_000:
            sent += 1
            yield bytes(10_000)
            await asyncio.sleep(0)

    async def script(peer: Peer) -> None:
        request = await peer.request()
        await peer.frame()
        peer.say(id=request["id"], err={"code": "no_space", "message": "full", "detail": {}})
        await peer.reader.read()

    async with helper(tmp_path, script) as client:
        with pytest.raises(NoSpace):
            await client.write(b"/f", many(), mode=None, parents=False, exclusive=False)
        assert not client.usable
    assert sent < 10_000


@asynchronous
async def test_an_upload_whose_source_fails_ends_the_connection(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def broken() -> AsyncIterator[bytes]:
        yield b"abc"
        raise KeyError("source")

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.reader.read()
        ended.set()

    async with helper(tmp_path, script) as client:
        with pytest.raises(KeyError):
            await client.append(b"/f", broken(), mode=None, parents=False)
        assert not client.usable
        await asyncio.wait_for(ended.wait(), 5)


@asynchronous
async def test_a_cancelled_call_ends_the_connection(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.reader.read()

    async with helper(tmp_path, script) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.stat(b"/f"), 0.05)
        assert not client.usable


@asynchronous
async def test_names_that_are_no_text_come_through(tmp_path: Path) -> None:
    odd = ENTRY | {"name": b"\xff\n", "path": b"/d/\xff\n", "type": "symlink", "target": b"\xfe"}

    async def script(peer: Peer) -> None:
        request = await peer.request()
        peer.say(id=request["id"], ok={"entries": [odd], "cursor": b"\xff\n"})
        await peer.reader.read()

    async with helper(tmp_path, script) as client:
        page = await client.list(b"/d")
    assert page.next_cursor == b"\xff\n"
    entry = page.items[0]
    assert (entry.path, entry.raw_path) == ("/d/\ufffd\n", b"/d/\xff\n")
    assert (entry.exact().path, entry.exact().name) == (os.fsdecode(b"/d/\xff\n"), os.fsdecode(b"\xff\n"))
    assert entry.exact().target == os.fsdecode(b"\xfe")
    assert msgspec.json.decode(msgspec.json.encode(entry), type=Entry) == entry


@asynchronous
async def test_a_watch_tells_its_beginning_its_changes_and_its_end(tmp_path: Path) -> None:
    seen: list[FileEvent | None] = []

    async def script(peer: Peer) -> None:
        request = await peer.request()
        id_ = request["id"]
        peer.say(id=id_, ev="watching", directories=1, skipped={"count": 0, "named": []})
        peer.say(id=id_, ev="changes", changes=[{"path": b"/d/a", "kind": "created"}])
        peer.say(id=id_, ev="overflow", reason="queue")
        peer.say(id=id_, ok={"reason": "gone"})
        await peer.reader.read()

    async def sink(event: FileEvent | None) -> None:
        seen.append(event)

    async with helper(tmp_path, script) as client:
        assert await client.watch(b"/d", recursive=True, sink=sink) == "gone"
        assert client.usable
    assert seen == [None, FileEvent(kind="created", path="/d/a"), FileEvent(kind="overflow")]


@pytest.mark.parametrize(("code", "kind"), [("no_user", ProgramNotStarted), ("gone", SandboxLost)])
@asynchronous
async def test_a_helper_that_cannot_be_had(tmp_path: Path, code: str, kind: type[Exception]) -> None:
    async def script(peer: Peer) -> None:
        hello = await peer.request()
        peer.say(id=hello["id"], ok={"protocol": 1})
        files = await peer.request()
        peer.say(id=files["id"], err={"code": code, "message": "no", "detail": {}})

    with pytest.raises(kind):
        async with helper(tmp_path, script, greet=False):
            pytest.fail("opened")


@asynchronous
async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be reached"):
        await FileClient.open(tmp_path / "none", "sbx-1", user="root", cwd="/")


@asynchronous
async def test_a_helper_that_goes_in_the_middle_of_data_is_no_end_of_file(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        request = await peer.request()
        peer.say(id=request["id"], ev="file", entry=ENTRY)
        peer.data(b"abc")

    async def sink(piece: bytes | memoryview) -> None:
        return None

    async with helper(tmp_path, script) as client:
        with pytest.raises(HelperGone):
            await client.read(b"/f", offset=0, length=None, opened=nothing, sink=sink)


def test_descriptors_are_closed(tmp_path: Path) -> None:
    async def main() -> None:
        left, right = socket.socketpair()
        left.setblocking(False)
        client = FileClient(left, "sbx-1")
        client.close()
        client.close()
        assert left.fileno() == -1
        right.close()

    asyncio.run(main())


STATE = {"type": "file", "size": 3, "mode": 0o644, "uid": 0, "gid": 0, "mtime_ns": 1_500_000_000, "target": None}
CHANGE = {"kind": "changed", "path": b"/\xff", "before": STATE, "now": {**STATE, "size": 4}, "what": ["content"]}


@asynchronous
async def test_a_diff_comes_in_parts_and_ends_with_its_counts(tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        request = await peer.request()
        assert request["args"] == {"path": b"/d", "limit": 2}
        deleted = {"kind": "deleted", "path": b"/l", "before": {**STATE, "type": "symlink", "target": b"\xfe"}}
        peer.say(id=request["id"], ev="changes", changes=[CHANGE])
        peer.say(id=request["id"], ev="changes", changes=[deleted])
        skipped = {"count": 1, "named": [{"path": b"/d/proc", "why": "mount"}]}
        peer.say(id=request["id"], ok={"changed": 1, "deleted": 1, "skipped": skipped, "more": True})
        await peer.reader.read()

    told: list[FileChange] = []

    async def sink(changes: tuple[FileChange, ...]) -> None:
        told.extend(changes)

    async with helper(tmp_path, script) as client:
        report = await client.diff(b"/d", limit=2, sink=sink)
        assert client.usable
    assert (report.changed, report.deleted, report.more, report.skipped.named[0].why) == (1, 1, True, "mount")
    changed, deleted = told
    assert (changed.raw_path, changed.size, changed.what) == (b"/\xff", 4, ("content",))
    assert deleted.before is not None
    assert (deleted.type, deleted.before.raw_target, deleted.now) == ("symlink", b"\xfe", None)


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "eaten"}, {"what": ["smell"]}, {"now": {**STATE, "type": "soup"}}, {"before": 5}, {"path": "text"}],
)
@asynchronous
async def test_a_change_without_sense_ends_the_connection(tmp_path: Path, wrong: dict[str, Any]) -> None:
    async def script(peer: Peer) -> None:
        request = await peer.request()
        peer.say(id=request["id"], ev="changes", changes=[{**CHANGE, **wrong}])
        await peer.reader.read()

    async def sink(changes: tuple[FileChange, ...]) -> None:
        raise AssertionError(changes)

    async with helper(tmp_path, script) as client:
        with pytest.raises(Unavailable):
            await client.diff(b"/", limit=None, sink=sink)
        assert not client.usable
