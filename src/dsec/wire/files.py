"""The client of the file helper, which serves one sandbox's files from inside it.

A connection to the runtime that asked for `files` is the helper's from then on. Requests go one after the other, bulk
bytes in frames of their own; `docs/reference/files-protocol.md` has it all. Whoever gives up in the middle of a request
closes the connection: the helper then undoes what was half done, as for any client that vanishes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from dsec.model import limits
from dsec.model.errors import (
    DsecError,
    FileError,
    InvalidSpec,
    NodeFull,
    SandboxLost,
    Unavailable,
    Unsupported,
    from_wire,
)
from dsec.model.files import (
    DiffReport,
    Entry,
    FileChange,
    FileEvent,
    Listing,
    Skipped,
    SkippedEntry,
    TreeReport,
    Written,
    shown,
)
from dsec.wire import diffs, faults
from dsec.wire import values as v
from dsec.wire.knock import connect

# The bit of a frame's length that says: raw bytes.
DATA: Final = 1 << 31
HEADER_BYTES: Final = 4
FRAME_MAX_BYTES: Final = 1 * limits.MIB
# Read at once; also the largest piece of bulk data that is handed on.
BUFFER_BYTES: Final = 256 * limits.KIB
# Between the request for a helper and its first answer: a process is started in the sandbox.
OPEN_DEADLINE_S: Final = 30.0

Piece = bytes | memoryview
DataSink = Callable[[Piece], Awaitable[None]]
T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode


class _Fault(msgspec.Struct, frozen=True):
    code: str
    message: str
    detail: dict[str, Any] = {}


class _Answer(msgspec.Struct):
    id: int = 0
    ok: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    err: _Fault | None = None
    ev: str | None = None
    entry: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Change(msgspec.Struct, frozen=True):
    path: bytes
    kind: Literal["created", "modified", "attributes", "deleted"]

    def event(self) -> FileEvent:
        text, raw = shown(self.path)
        return FileEvent(kind=self.kind, path=text, raw_path=raw)


class _Watched(_Answer):
    changes: tuple[_Change, ...] = ()


class _Differs(_Answer):
    changes: tuple[diffs.Change, ...] = ()


class _WireEntry(msgspec.Struct, frozen=True):
    name: bytes
    path: bytes
    type: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    target: bytes | None = None

    def entry(self) -> Entry:
        return Entry.of(self.path, **self._fields())

    def written(self, *, atomic: bool) -> Written:
        return Written.of(self.path, atomic=atomic, **self._fields())

    def _fields(self) -> dict[str, Any]:
        known = {name: getattr(self, name) for name in ("target", "type", "size", "mode", "uid", "gid")}
        return {**known, "mtime": self.mtime_ns / 1e9}


class _OfEntry(msgspec.Struct, frozen=True):
    entry: _WireEntry


class _Written(msgspec.Struct, frozen=True):
    entry: _WireEntry
    atomic: bool = True


class _Listed(msgspec.Struct, frozen=True):
    entries: tuple[_WireEntry, ...]
    cursor: bytes | None = None


class _Ended(msgspec.Struct, frozen=True):
    reason: str


class _Named(msgspec.Struct, frozen=True):
    path: bytes
    why: str


class _Skipped(msgspec.Struct, frozen=True):
    count: int = 0
    named: tuple[_Named, ...] = ()

    def skipped(self) -> Skipped:
        entries = []
        for one in self.named:
            text, raw = shown(one.path)
            entries.append(SkippedEntry(path=text, raw_path=raw, why=one.why))
        return Skipped(count=self.count, named=tuple(entries))


class _Tree(msgspec.Struct, frozen=True):
    entries: int = 0
    bytes: int = 0
    skipped: _Skipped = _Skipped()
    changed: _Skipped = _Skipped()

    def report(self) -> TreeReport:
        return TreeReport(
            entries=self.entries,
            bytes=self.bytes,
            skipped=self.skipped.skipped(),
            changed=self.changed.skipped(),
        )


class _Told(msgspec.Struct, frozen=True):
    added: int = 0
    changed: int = 0
    deleted: int = 0
    skipped: _Skipped = _Skipped()
    more: bool = False

    def report(self) -> DiffReport:
        return DiffReport(
            added=self.added,
            changed=self.changed,
            deleted=self.deleted,
            skipped=self.skipped.skipped(),
            more=self.more,
        )


A = TypeVar("A", bound=_Answer)

_answers = msgspec.msgpack.Decoder(_Answer)
_watched = msgspec.msgpack.Decoder(_Watched)
_differs = msgspec.msgpack.Decoder(_Differs)


def _decode(body: bytes, decoder: msgspec.msgpack.Decoder[A]) -> A:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unavailable(f"an answer of the file helper does not decode: {error}") from error


def _as(raw: msgspec.Raw, to: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(raw, type=to)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unavailable(f"an answer of the file helper does not decode: {error}") from error


class FileClient:
    """One connection to a helper. `usable` says whether another request can be sent on it."""

    def __init__(self, sock: socket.socket, sandbox_id: str) -> None:
        self._sock = sock
        self._sandbox_id = sandbox_id
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._busy = False
        self._closed = False
        self._next = 0

    @classmethod
    async def open(cls, path: Path, sandbox_id: str, *, user: str, cwd: str, diff: bool = False) -> FileClient:
        """A helper in a sandbox, with the rights of a user; relative paths begin at `cwd`. `diff`: also for that.

        Raises SandboxLost, NotFound, and ProgramNotStarted for a user that the sandbox does not have.
        """
        sock = await connect(path)
        client = cls(sock, sandbox_id)
        try:
            async with asyncio.timeout(OPEN_DEADLINE_S):
                await client._ask_runtime("hello", v.HelloArgs())
                where = cwd.encode("utf-8", "surrogateescape")
                args = {"sandbox": sandbox_id, "user": user, "cwd": where, "diff": diff}
                await client._ask_runtime("files", args)
        except TimeoutError:
            client.close()
            raise Unavailable(f"the runtime did not start a file helper within {OPEN_DEADLINE_S:g} s") from None
        except BaseException:  # also cancelled: the helper ends with the connection
            client.close()
            raise
        return client

    @property
    def usable(self) -> bool:
        """Whether it waits for a request: nothing is half done, and nothing, not even its end, has come unasked."""
        return not self._closed and not self._busy and not self._said_something()

    def close(self) -> None:
        """End the helper. What it was doing is undone or, if it had been done, stays."""
        if not self._closed:
            self._closed = True
            self._sock.close()

    # Operations. Paths are bytes, absolute or relative to the helper's directory.

    async def stat(self, path: bytes, *, follow: bool = True) -> Entry:
        """One file."""
        raw = await self._call("stat", {"path": path, "follow": follow})
        return _as(raw, _OfEntry).entry.entry()

    async def list(self, path: bytes, *, cursor: bytes | None = None, limit: int | None = None) -> Listing:
        """A page of a directory."""
        raw = await self._call("list", {"path": path, "cursor": cursor, "limit": limit})
        found = _as(raw, _Listed)
        return Listing(items=tuple(one.entry() for one in found.entries), next_cursor=found.cursor)

    async def mkdir(self, path: bytes, *, parents: bool, mode: int | None = None) -> Entry:
        """Make a directory: with `parents` one that is there is as good."""
        raw = await self._call("mkdir", {"path": path, "parents": parents, "mode": mode})
        return _as(raw, _OfEntry).entry.entry()

    async def remove(self, path: bytes, *, recursive: bool) -> None:
        """Remove a file, a link itself, or a directory: an empty one, or with all below it."""
        await self._call("remove", {"path": path, "recursive": recursive})

    async def move(self, source: bytes, target: bytes, *, replace: bool) -> Entry:
        """Give it another place. What was moved, also if it is gone from there again."""
        raw = await self._call("move", {"source": source, "target": target, "replace": replace})
        return _as(raw, _OfEntry).entry.entry()

    async def chmod(self, path: bytes, mode: int) -> Entry:
        """Set its permission bits."""
        raw = await self._call("chmod", {"path": path, "mode": mode})
        return _as(raw, _OfEntry).entry.entry()

    async def read(
        self,
        path: bytes,
        *,
        offset: int,
        length: int | None,
        opened: Callable[[Entry], Awaitable[None]],
        sink: DataSink,
    ) -> None:
        """The bytes of a regular file, from an offset on, at most `length` of them."""
        await self._fetch("read", {"path": path, "offset": offset, "len": length}, sink, opened)

    async def write(
        self, path: bytes, pieces: AsyncIterator[Piece], *, mode: int | None, parents: bool, exclusive: bool
    ) -> Written:
        """A whole file, or nothing."""
        args = {"path": path, "mode": mode, "parents": parents, "exclusive": exclusive}
        made = _as(await self._upload("write", args, pieces), _Written)
        return made.entry.written(atomic=made.atomic)

    async def append(self, path: bytes, pieces: AsyncIterator[Piece], *, mode: int | None, parents: bool) -> Entry:
        """More at the end of a file, which is made when it is not there."""
        raw = await self._upload("append", {"path": path, "mode": mode, "parents": parents}, pieces)
        return _as(raw, _OfEntry).entry.entry()

    async def tree_out(self, path: bytes, sink: DataSink) -> TreeReport:
        """A directory with all below it, or one file, as a tar stream."""
        raw = await self._fetch("tree.out", {"path": path}, sink, None)
        return _as(raw, _Tree).report()

    async def tree_in(self, path: bytes, pieces: AsyncIterator[Piece], *, parents: bool, owners: bool) -> TreeReport:
        """Unpack a tar stream below a directory."""
        raw = await self._upload("tree.in", {"path": path, "parents": parents, "owners": owners}, pieces)
        return _as(raw, _Tree).report()

    async def watch(self, path: bytes, *, recursive: bool, sink: Callable[[FileEvent | None], Awaitable[None]]) -> str:
        """Changes, until what is watched is gone (then it returns why) or the call is cancelled.

        The sink first gets None, when nothing is missed any more.
        """
        async with _Request(self, "watch", {"path": path, "recursive": recursive}):
            while True:
                answer = self._checked(await self._said(_watched))
                if answer.ev is None:
                    return _as(_ok(answer), _Ended).reason
                if answer.ev == "watching":
                    await sink(None)
                elif answer.ev == "overflow":
                    await sink(FileEvent(kind="overflow"))
                for change in answer.changes:
                    await sink(change.event())

    async def diff(
        self, path: bytes, *, limit: int | None, sink: Callable[[tuple[FileChange, ...]], Awaitable[None]]
    ) -> DiffReport:
        """What is not as it was in the layers, some at a time."""
        async with _Request(self, "diff", {"path": path, "limit": limit}):
            while True:
                answer = self._checked(await self._said(_differs))
                if answer.ev is None:
                    return _as(_ok(answer), _Told).report()
                await sink(tuple(change.change() for change in answer.changes))

    # Requests.

    async def _call(self, op: str, args: Mapping[str, object]) -> msgspec.Raw:
        async with _Request(self, op, args):
            return _ok(self._checked(await self._control()))

    async def _fetch(
        self,
        op: str,
        args: Mapping[str, object],
        sink: DataSink,
        opened: Callable[[Entry], Awaitable[None]] | None,
    ) -> msgspec.Raw:
        async with _Request(self, op, args):
            while True:
                size, data = await self._header()
                if data:
                    while size:
                        piece = await self._some(size)
                        size -= len(piece)
                        await sink(piece)
                    continue
                answer = self._checked(_decode(await self._exactly(size), _answers))
                if answer.ev is None:
                    return _ok(answer)
                if opened is not None and not isinstance(answer.entry, msgspec.UnsetType):
                    await opened(_as(answer.entry, _WireEntry).entry())

    async def _upload(self, op: str, args: Mapping[str, object], pieces: AsyncIterator[Piece]) -> msgspec.Raw:
        async with _Request(self, op, args):
            async for piece in pieces:
                view = memoryview(piece)
                for start in range(0, len(view), FRAME_MAX_BYTES):
                    part = view[start : start + FRAME_MAX_BYTES]
                    await self._send((len(part) | DATA).to_bytes(HEADER_BYTES, "big"), part)
                if self._said_something():
                    self._checked(await self._control())  # it refused: the rest need not be sent
                    raise Unavailable("the file helper answered before it had everything")
            await self._send(DATA.to_bytes(HEADER_BYTES, "big"))
            return _ok(self._checked(await self._control()))

    def _checked(self, answer: A) -> A:
        if answer.err is not None:
            raise _Refused(_error(answer.err, self._sandbox_id))
        return answer

    async def _ask_runtime(self, op: str, args: Any) -> None:
        self._next += 1
        body = _encode(v.Request(self._next, op, args))
        await self._send(len(body).to_bytes(HEADER_BYTES, "big"), body)
        size, _ = await self._header()
        answer = msgspec.msgpack.decode(await self._exactly(size), type=v.Answer)
        if answer.err is not None:
            raise faults.translate(answer.err, op=op, sandbox_id=self._sandbox_id)

    # Bytes.

    async def _send(self, *parts: Piece) -> None:
        for part in parts:
            try:
                await self._loop.sock_sendall(self._sock, part)
            except OSError as error:
                # What it said before it went tells more.
                await self._last_words()
                raise self._lost(error) from error

    async def _last_words(self) -> None:
        try:
            self._checked(await self._control())
        except OSError as error:
            raise self._lost(error) from error

    def _said_something(self) -> bool:
        if self._end == self._start:
            try:
                self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True
        return True  # also its end

    async def _control(self) -> _Answer:
        return await self._said(_answers)

    async def _said(self, decoder: msgspec.msgpack.Decoder[A]) -> A:
        size, data = await self._header()
        if data:
            raise Unavailable("the file helper sent data where an answer belongs")
        return _decode(await self._exactly(size), decoder)

    async def _header(self) -> tuple[int, bool]:
        raw = int.from_bytes(await self._exactly(HEADER_BYTES), "big")
        size = raw & ~DATA
        if size > FRAME_MAX_BYTES:
            raise Unavailable(f"the file helper sent a frame of {size} bytes; at most {FRAME_MAX_BYTES} are allowed")
        return size, raw != size

    async def _exactly(self, count: int) -> bytes:
        if count <= self._end - self._start:
            self._start += count
            return bytes(self._view[self._start - count : self._start])
        parts = []
        while count:
            piece = await self._some(count)
            parts.append(bytes(piece))
            count -= len(piece)
        return b"".join(parts)

    async def _some(self, most: int) -> memoryview:
        """Some of the bytes that come next; valid until the next call."""
        if self._start == self._end:
            try:
                got = await self._loop.sock_recv_into(self._sock, self._buffer)
            except OSError as error:
                raise self._lost(error) from error
            if not got:
                raise self._lost(None)
            self._start, self._end = 0, got
        count = min(most, self._end - self._start)
        self._start += count
        return self._view[self._start - count : self._start]

    def _lost(self, error: OSError | None) -> Unavailable:
        self.close()
        return HelperGone(
            f"the file helper of {self._sandbox_id} ended in the middle of a request ({error or 'closed'})",
            sandbox_id=self._sandbox_id,
        )


class HelperGone(Unavailable):
    """A helper ended while it was asked. Whether what it was asked for took effect is known only for what reads, and if
    `detail["asked"]` is False.
    """


class _Refused(Exception):
    """The helper said no and serves on."""

    def __init__(self, error: DsecError) -> None:
        super().__init__(error)
        self.error = error


class _Request:
    """One request. After an answer, whatever it was, the connection serves again; after anything else it is closed."""

    def __init__(self, client: FileClient, op: str, args: Mapping[str, object]) -> None:
        self._client = client
        self._op = op
        self._args = {name: value for name, value in args.items() if value is not None}

    async def __aenter__(self) -> None:
        client = self._client
        if not client.usable:  # it has died since it was looked at last
            client.close()
            raise HelperGone("the file helper had ended before it was asked", detail={"asked": False})
        client._busy = True
        client._next += 1
        body = _encode({"id": client._next, "op": self._op, "args": self._args})
        if len(body) > FRAME_MAX_BYTES:
            client._busy = False
            raise InvalidSpec.field("path", f"{len(body)} bytes", f"at most {FRAME_MAX_BYTES} bytes in a request")
        try:
            await client._send(len(body).to_bytes(HEADER_BYTES, "big") + body)
        except BaseException as error:  # also cancelled: half a request may have been sent
            client.close()
            if isinstance(error, _Refused):
                raise error.error from None
            raise

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._client._busy = False
            return
        if isinstance(error, _Refused):
            # In an upload it may still wait for the rest; a new helper costs less than sending that.
            if self._op in _UPLOADS:
                self._client.close()
            self._client._busy = False
            raise error.error from None
        self._client.close()


_UPLOADS: Final = frozenset({"write", "append", "tree.in"})


def _ok(answer: _Answer) -> msgspec.Raw:
    if isinstance(answer.ok, msgspec.UnsetType):
        raise Unavailable("the file helper sent an answer with neither ok nor err")
    return answer.ok


def _error(fault: _Fault, sandbox_id: str) -> DsecError:
    detail = {name: _text(value) for name, value in fault.detail.items()}
    message = _in_words(fault.message, detail.get("errno"))
    if fault.code == "is_a_directory" and message.startswith(("write ", "append ")):
        message += "; name the file to be made"
    match fault.code:
        case "bad_request" if detail.get("field") == "op":
            # A runtime that was started before this agent was installed.
            made: DsecError = Unsupported.lacks("this file call", "the runtime's file helper", fault.message)
        case "bad_request":
            made = InvalidSpec(fault.message, detail=detail)
        case "limit":
            made = NodeFull(fault.message, detail=detail)
        case "internal" | "cancelled":
            made = Unavailable(f"the file helper failed: {fault.message}", detail=detail)
        case code:
            made = from_wire(code, message, detail)
            if not isinstance(made, FileError | SandboxLost):
                made = FileError(message, detail=detail)
    made.sandbox_id = sandbox_id
    return made


def _in_words(message: str, name: object) -> str:
    """`stat /a: ENOENT` with what that means before it."""
    number = getattr(errno, name, None) if isinstance(name, str) else None
    if not isinstance(number, int) or not message.endswith(f": {name}"):
        return message
    return f"{message.removesuffix(f'{name}')}{os.strerror(number)} ({name})"


def _text(value: object) -> object:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
