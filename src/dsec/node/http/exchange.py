"""One request and its answer, over ASGI."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final

from dsec.model.errors import DsecError, InvalidSpec, Unavailable
from dsec.model.limits import REQUEST_MAX_BYTES
from dsec.node.http import codec
from dsec.node.http.bodies import SMALL_BYTES, Bodies, Room
from dsec.node.steps import WireError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# A stream says at least this often that the server is there; clients ask elsewhere after 10 s of silence.
HEARTBEAT_S: Final = 5.0

# Unique without a system call per request: random per process, counted within.
_PREFIX: Final = f"r-{secrets.token_hex(6)}-"
_counter = itertools.count(1)

_WANTED: Final = frozenset(
    (b"content-type", b"content-length", b"accept", b"idempotency-key", b"authorization", b"origin", b"host")
)


class Exchange:
    """A request being answered."""

    __slots__ = (
        "_bodies",
        "_receive",
        "_send",
        "_sending",
        "bare",
        "caller",
        "fields",
        "headers",
        "params",
        "peer",
        "query",
        "request_id",
        "sent_at",
        "started",
    )

    def __init__(self, scope: Message, receive: Receive, send: Send, bodies: Bodies) -> None:
        self._bodies = bodies
        self._receive = receive
        self._send = send
        self._sending = asyncio.Lock()
        self.request_id = f"{_PREFIX}{next(_counter)}"
        self.headers: dict[bytes, bytes] = {name: value for name, value in scope["headers"] if name in _WANTED}
        self.query: bytes = scope["query_string"]
        self.peer = str(scope["client"][0]) if scope.get("client") else ""
        self.caller = ""  # who asks, once that is checked
        self.params: list[str] = []
        self.fields: dict[str, list[str]] = {}
        self.started = False
        self.bare = False
        self.sent_at = 0.0

    @property
    def msgpack(self) -> bool:
        """Whether the answer is msgpack."""
        return codec.MSGPACK in self.headers.get(b"accept", b"")

    @property
    def key(self) -> str | None:
        """The idempotency key, unchecked."""
        key = self.headers.get(b"idempotency-key")
        return None if key is None else key.decode("latin-1")

    async def body(self) -> bytes:
        """The whole body. Raises InvalidSpec when it is too large, Unavailable when there is no room for it."""
        length = self.headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 12 or int(length) > REQUEST_MAX_BYTES:
            raise _too_large()
        parts: list[bytes] = []
        if int(length) > SMALL_BYTES:
            async with self._bodies.room(int(length)) as room:
                await self._take(parts, REQUEST_MAX_BYTES, room)
                return b"".join(parts)
        if not await self._take(parts, SMALL_BYTES):
            # Chunked: nobody says how much more there is.
            async with self._bodies.room(REQUEST_MAX_BYTES) as room:
                await self._take(parts, REQUEST_MAX_BYTES, room)
                return b"".join(parts)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _take(self, parts: list[bytes], until: int, room: Room | None = None) -> bool:
        """Of the body; whether that was its end, else it is larger than `until`."""
        size = sum(map(len, parts))
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Vanished
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if room is not None:
                room.more(len(parts[-1]))
            if size > REQUEST_MAX_BYTES:
                raise _too_large()
            if not message.get("more_body"):
                return True
            if size > until:
                return False

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises BodyCut when the client leaves before its end."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise BodyCut("the client left before the body was whole")
            more = bool(message.get("more_body"))
            if piece := message.get("body", b""):
                yield piece

    async def gone(self) -> None:
        """Until the client has left."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(self, status: int, value: object) -> None:
        """The whole answer."""
        msgpack = self.msgpack
        await self.reply_bytes(status, codec.encode_msgpack(value) if msgpack else codec.encode_json(value), msgpack)

    async def reply_bytes(
        self, status: int, body: bytes, msgpack: bool, extra: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """The whole answer, encoded."""
        headers = [
            (b"content-type", codec.MSGPACK if msgpack else codec.JSON),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.request_id.encode()),
            *extra,
        ]
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(
        self, error: DsecError, status: int | None = None, extra: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """An error as the answer; within a stream, as its last item."""
        error.request_id = self.request_id
        wire = WireError.of(error)
        if self.bare:
            # There is no room for it among bytes. Without their end the client knows that they are not whole.
            raise Cut(str(error)) from error
        if self.started:
            await self.item({"error": wire})
            await self.finish()
            return
        msgpack = self.msgpack
        body = codec.encode_msgpack(wire) if msgpack else codec.encode_json(wire)
        await self.reply_bytes(status or error.status, body, msgpack, extra)

    async def item(self, value: object) -> None:
        """One item of a stream; returns once the client's side takes more: this is the back-pressure."""
        body = codec.encode_item(value, self.msgpack)
        async with self._sending:
            if not self.started:
                self.started = True
                headers = [
                    (b"content-type", codec.MSGPACK_SEQ if self.msgpack else codec.NDJSON),
                    (b"x-request-id", self.request_id.encode()),
                ]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            self.sent_at = time.monotonic()

    async def open(self, media_type: bytes, extra: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """The head of an answer of bytes, whose end is its proof of being whole: `data`, then `finish`, or `cut`."""
        self.started = self.bare = True
        headers = [(b"content-type", media_type), (b"x-request-id", self.request_id.encode()), *extra]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def data(self, data: bytes) -> None:
        """Some bytes of such an answer."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def heartbeat(self) -> None:
        """An empty item when nothing was sent for a while. A client that does not read, or reads bytes, gets none."""
        if self.bare:
            return
        if not self._sending.locked() and time.monotonic() - self.sent_at >= HEARTBEAT_S / 2:
            await self.item({})

    async def finish(self) -> None:
        """The end of a stream."""
        await self._send({"type": "http.response.body", "body": b""})


class BodyCut(Unavailable):
    """The client left in the middle of a body that is taken as it comes: what it was for is not done."""

    code = "body_cut"


class Cut(Exception):
    """An answer of bytes ends before it is whole: its connection is closed."""


class Vanished(Exception):
    """The client left before its request was whole; there is nobody to answer."""


def _too_large() -> InvalidSpec:
    return InvalidSpec(
        f"the body is larger than {REQUEST_MAX_BYTES} bytes", detail={"field": "body", "allowed": REQUEST_MAX_BYTES}
    )
