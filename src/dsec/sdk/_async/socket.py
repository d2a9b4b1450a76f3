"""A WebSocket to a program: what comes on it as items, what goes as messages."""

from __future__ import annotations

from typing import Final

import msgspec

from dsec.model import limits
from dsec.model.errors import InvalidSpec
from dsec.sdk import codec
from dsec.sdk._async.net import AsyncConn, AsyncLock
from dsec.sdk._async.transport import AsyncTransport
from dsec.sdk.http1 import Broken, Garbage
from dsec.sdk.programs import OutputItem
from dsec.wire import attach, websocket

# A result with the first and last of both streams, in base64.
_MESSAGE_MAX_BYTES: Final = limits.FRAME_MAX_BYTES
# For so long the server need not hear from us: a caller may do something else before it reads on.
SILENCE_S: Final = 3600

_encode = msgspec.json.Encoder().encode


class AsyncSocket:
    """One connection. `next` gives what comes; one task at a time may wait in it, while others send."""

    def __init__(self, transport: AsyncTransport, conn: AsyncConn, behind: bytes) -> None:
        self._transport = transport
        self._conn = conn
        self._plain = transport.target.scheme in ("unix", "ssh")
        self._sending = AsyncLock()
        self._messages = websocket.Messages(from_client=False, max_bytes=_MESSAGE_MAX_BYTES)
        self._messages.feed(behind)

    async def next(self, to: type[OutputItem], end: float | None = None) -> OutputItem:
        """The next item. Broken: it is closed, or cut; Late: the time `end` has come."""
        while True:
            try:
                message = self._messages.take()
                if message is not None and message.opcode == websocket.CLOSE:
                    code, reason = websocket.closed(message.data)
                    raise Broken(f"the server closed the connection: {code} {reason}")
            except websocket.ProtocolError as error:
                raise Garbage(f"no WebSocket as it should be: {error}") from error
            if message is None:
                data = await self._transport.received(self._conn, end)
                if not data:
                    raise Broken("the connection was closed without a word")
                self._messages.feed(data)
            elif message.opcode == websocket.BINARY:
                return _item(to, message.data)
            elif message.opcode == websocket.PING:
                await self._send(websocket.PONG, bytes(message.data))

    async def give(self, offset: int, data: bytes) -> None:
        """A piece of input."""
        await self._send(websocket.BINARY, attach.lead(attach.STDIN, offset) + data)

    async def control(self, value: object) -> None:
        """A word to the server."""
        await self._send(websocket.BINARY, attach.CONTROL_BYTE + _encode(value))

    async def drain(self) -> None:
        """Nothing comes behind the last item."""

    def close(self) -> None:
        """Let go of it."""
        self._conn.close()

    async def _send(self, opcode: int, data: bytes) -> None:
        timing = self._transport.timing
        frame = websocket.masked(opcode, data, plain=self._plain)
        try:
            async with self._sending:
                await self._conn.send(frame, timing.patience_s + timing.health_s)
        except TimeoutError as error:
            raise Broken("the server does not read what is sent") from error
        except Broken:
            raise
        except BaseException:  # a part of a frame may be on its way
            self._conn.close()
            raise


def _item(to: type[OutputItem], data: memoryview) -> OutputItem:
    try:
        if data and data[0] == attach.CONTROL:
            return codec.decode_json(bytes(data[1:]), to)
        offset, there = attach.piece(data)
        return to(stream=data[0], offset=offset, data=bytes(there))
    except InvalidSpec as error:
        raise Garbage(f"a message that does not decode: {error}") from error


async def connect(transport: AsyncTransport, program: str, query: str) -> AsyncSocket:
    """One try to attach to a program."""
    conn, behind = await transport.upgrade(f"{program}/attach{query}", attach.PROTOCOL.decode())
    return AsyncSocket(transport, conn, behind)
