"""The server's side of one WebSocket: what is sent waits for a client that does not read, what comes is bounded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from dsec.model.errors import DsecError, InvalidSpec
from dsec.model.limits import KIB, MIB
from dsec.node.http import codec
from dsec.node.http.bodies import Bodies
from dsec.node.http.exchange import HEARTBEAT_S, Exchange, Message, Receive, Send, Vanished
from dsec.node.steps import WireError
from dsec.wire import attach as wire
from dsec.wire import websocket

log = logging.getLogger("dsec.node.http")

# Of one message from a client: a piece of input and what stands before it.
MESSAGE_MAX_BYTES: Final = 1 * MIB + 64
# A frame that has begun is whole after this long: whoever drips bytes is cut off.
FRAME_DEADLINE_S: Final = 60.0
# A connection over which nothing came for so long, not even the answer to a ping, is given up; the query's `silence_s`
# asks for more where a client cannot answer while its caller does something else.
SILENCE_S: Final = 60.0
SILENCE_MAX_S: Final = 3600.0
# After our close frame has left: for the client's, or its end.
CLOSE_S: Final = 5.0
SILENT: Final = websocket.OWN_CODES + 408
_WAITING_MAX_BYTES: Final = 256 * KIB  # what is sent and not taken by the kernel, before the next waits
_FRAMES_AT_ONCE: Final = 64  # a hundred microseconds of the event loop
_VERSION: Final = b"13"

OnMessage = Callable[[memoryview], None]


class Socket(asyncio.Protocol):
    """One connection after the request that asked for a WebSocket; HTTP up to `accept`, then messages."""

    def __init__(self, transport: asyncio.Transport, connections: set[Any]) -> None:
        self.transport = transport
        self._loop = asyncio.get_running_loop()
        self._connections = connections
        self._messages = websocket.Messages(from_client=True, max_bytes=MESSAGE_MAX_BYTES)
        self._on_message: OnMessage | None = None
        self._drained: asyncio.Future[None] | None = None
        self._closing = False
        self._begun_at = self._loop.time()  # of what is to come to its end: the handshake, a frame, the close
        self._pending = True
        self._paused = False
        self._heard_at = self._begun_at
        self._sent_at = self._begun_at
        self.silence_s = SILENCE_S
        # Done once nothing more will come from the client.
        self.gone: asyncio.Future[None] = self._loop.create_future()
        connections.add(self)

    # What the event loop calls.

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if self._closing:
            self._take_closing(data)
            return
        if self._on_message is None:
            # A client waits for our answer to its handshake.
            self._fail(websocket.ProtocolError(websocket.PROTOCOL_ERROR, "a frame before the handshake was over"))
            return
        self._messages.feed(data)
        self._work()

    def _work(self) -> None:
        """Some of the frames that have come; the rest in turns, so that who sends tiny ones holds nobody else up."""
        try:
            for _ in range(_FRAMES_AT_ONCE):
                message = None if self._closing else self._messages.step()
                if message is None:
                    break
                if message is not websocket.PART:
                    self._dispatch(message)
            else:
                self._pause()
                self._loop.call_soon(self._work)
                return
        except websocket.ProtocolError as error:
            self._fail(error)
            return
        self._go_on()
        if not self._closing:
            self._note_partial()

    def _pause(self) -> None:
        if not self._paused and not self.transport.is_closing():
            self.transport.pause_reading()
            self._paused = True

    def _go_on(self) -> None:
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def eof_received(self) -> None:
        # Whoever goes on reading is to hear whose fault it is that nothing more comes.
        if self._on_message is not None:
            self.close(websocket.PROTOCOL_ERROR, "your side ended without a close frame")
        self._lost()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._closing = True
        self._lost()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # What the listener calls.

    def shutdown(self) -> None:
        """The agent ends: the client may come again, to the next one."""
        self.close(websocket.RESTART, "the agent ends; connect again")

    def stalled(self, now: float) -> bool:
        """Looks after the connection; whether it is to be cut off."""
        if self._closing:
            # Until then the client may be reading what was sent before.
            if self.transport.get_write_buffer_size():
                self._begun_at = now
            return now - self._begun_at > CLOSE_S or now - self._heard_at > self.silence_s + CLOSE_S
        if self._pending and now - self._begun_at > FRAME_DEADLINE_S:
            return True
        if self._on_message is None:
            return False
        if now - self._heard_at > self.silence_s:
            self.close(SILENT, f"nothing came from you for {self.silence_s:g} s, no answer to a ping either")
        elif self._drained is None and now - self._sent_at >= HEARTBEAT_S / 2:
            self._write(websocket.PING, b"")
        return False

    # What the call's handler uses.

    def accept(self, key: bytes, protocol: bytes, request_id: str, on_message: OnMessage) -> None:
        """The end of the handshake; from now on messages go to `on_message`."""
        head = (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: %b\r\nSec-WebSocket-Protocol: %b\r\nX-Request-Id: %b\r\n\r\n"
        )
        if self.transport.is_closing():
            raise Vanished
        self._on_message = on_message
        self._pending = False
        self.transport.set_write_buffer_limits(_WAITING_MAX_BYTES)
        self.transport.write(head % (websocket.accept_key(key), protocol, request_id.encode()))

    def refuse(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """An answer instead of a WebSocket."""
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, HTTPStatus(status).phrase.encode())]
        lines += [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join([*lines, b"connection: close\r\n\r\n", body]))
        self._closing = True
        self.transport.close()

    async def send(self, lead: bytes, data: bytes = b"") -> None:
        """One message, of both; waits while the client's side takes no more: this is the back-pressure."""
        while self._drained is not None:
            await asyncio.shield(self._drained)
        self._write(websocket.BINARY, lead, data)
        if self._drained is not None:
            await asyncio.shield(self._drained)

    def close(self, code: int, reason: str = "") -> None:
        """Nothing more is sent. What the client still sends is passed over until it closes as well.

        Closed at once, with bytes that nobody has read, TCP would throw away what the client has not received yet.
        """
        if self._closing:
            return
        if self._on_message is None:  # within the handshake
            self.transport.abort()
        else:
            self._write(websocket.CLOSE, websocket.closing(code, reason))
        self._closing = True
        self._go_on()
        self._begun_at = self._loop.time()
        self._messages = websocket.Messages(from_client=True, max_bytes=MESSAGE_MAX_BYTES)
        self._lost()
        self.resume_writing()

    def _write(self, opcode: int, lead: bytes, data: bytes = b"") -> None:
        if self._closing:
            return
        self._sent_at = self._loop.time()
        head = websocket.head(opcode, len(lead) + len(data)) + lead
        if data:
            self.transport.writelines((head, data))
        else:
            self.transport.write(head)

    def _dispatch(self, message: websocket.Message) -> None:
        if message.opcode == websocket.BINARY:
            assert self._on_message is not None
            self._on_message(message.data)
        elif message.opcode == websocket.PING:
            if self._drained is None:  # who asks and does not read gets no answers heaped up
                self._write(websocket.PONG, bytes(message.data))
        elif message.opcode == websocket.CLOSE:
            code, _ = websocket.closed(message.data)
            self.close(websocket.NORMAL if code == websocket.NO_CODE else code)
            self.transport.close()
        elif message.opcode == websocket.TEXT:
            raise websocket.ProtocolError(websocket.UNSUPPORTED_DATA, "messages are binary; channel 3 is for JSON")

    def _take_closing(self, data: bytes) -> None:
        """Between our close frame and the client's."""
        try:
            self._messages.feed(data)
            for _ in range(_FRAMES_AT_ONCE):
                message = self._messages.step()
                if message is None:
                    return
                if message.opcode == websocket.CLOSE:
                    self.transport.close()
        except websocket.ProtocolError:
            pass
        # More than are looked at, or we have begun in the middle of a frame: then its end will do.
        self._messages = websocket.Messages(from_client=True, max_bytes=MESSAGE_MAX_BYTES)

    def _note_partial(self) -> None:
        partial = self._messages.partial
        if partial and not self._pending:
            self._begun_at = self._loop.time()
        self._pending = partial

    def _fail(self, error: websocket.ProtocolError) -> None:
        log.debug("a WebSocket is closed: %d %s", error.code, error)
        self.close(error.code, str(error))

    def _lost(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)


class SocketExchange(Exchange):
    """The request that asks for a WebSocket, and what comes of it."""

    __slots__ = ("_key", "_protocols", "_version", "accepted", "socket")

    def __init__(self, scope: Message, receive: Receive, send: Send, bodies: Bodies) -> None:
        super().__init__(scope, receive, send, bodies)
        self.socket: Socket = scope["socket"]
        self.accepted = False
        headers = dict(scope["headers"])
        self._key: bytes = headers.get(b"sec-websocket-key", b"")
        self._version: bytes = headers.get(b"sec-websocket-version", b"")
        offered: bytes = headers.get(b"sec-websocket-protocol", b"")
        self._protocols = [name.strip() for name in offered.split(b",")]

    async def offered(self, protocol: bytes) -> bool:
        """Whether this is a handshake for a protocol of ours; one of another version has been answered. InvalidSpec."""
        if self._version != _VERSION:
            error = InvalidSpec.field("Sec-WebSocket-Version", self._version.decode("latin-1"), _VERSION.decode())
            await self.refuse(error, HTTPStatus.UPGRADE_REQUIRED, ((b"sec-websocket-version", _VERSION),))
            return False
        if not websocket.is_key(self._key):
            raise InvalidSpec.field("Sec-WebSocket-Key", self._key.decode("latin-1"), "16 bytes in base64")
        if protocol not in self._protocols:
            shown = b", ".join(self._protocols).decode("latin-1")
            raise InvalidSpec.field("Sec-WebSocket-Protocol", shown, protocol.decode())
        return True

    def accept(self, protocol: bytes, on_message: OnMessage) -> None:
        """It is one, and is carried out from now on."""
        self.accepted = True
        self.socket.accept(self._key, protocol, self.request_id, on_message)

    async def reply_bytes(
        self, status: int, body: bytes, msgpack: bool, extra: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        headers = [
            (b"content-type", codec.MSGPACK if msgpack else codec.JSON),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.request_id.encode()),
            *extra,
        ]
        self.socket.refuse(status, headers, body)

    async def refuse(
        self, error: DsecError, status: int | None = None, extra: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        if not self.accepted:
            await super().refuse(error, status, extra)
            return
        error.request_id = self.request_id
        await self.socket.send(wire.CONTROL_BYTE + codec.encode_json({"error": WireError.of(error)}))
        self.socket.close(websocket.OWN_CODES + error.status, error.code)

    async def gone(self) -> None:
        await asyncio.shield(self.socket.gone)

    async def heartbeat(self) -> None:
        return  # the listener sends pings
