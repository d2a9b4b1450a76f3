"""One connection to the runtime: bytes to answers, without a task or a queue of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec

from dsec.wire import frames
from dsec.wire.frames import FrameError, Splitter
from dsec.wire.values import Answer

_decode = msgspec.msgpack.Decoder(Answer).decode


class Link(asyncio.BufferedProtocol):
    """Receives into one buffer and hands each answer to `on_answer`.

    A `BufferedProtocol`: bytes go from the socket into the splitter's buffer and are decoded there, never copied.
    """

    def __init__(self, on_answer: Callable[[Answer], None], on_lost: Callable[[Link, Exception | None], None]) -> None:
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._splitter = Splitter()
        self._transport: asyncio.Transport | None = None
        self._error: FrameError | None = None
        self._drained: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.resume_writing()
        self._transport = None
        self._on_lost(self, self._error or exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._splitter.room()

    def buffer_updated(self, nbytes: int) -> None:
        splitter = self._splitter
        try:
            splitter.received(nbytes)
            while (body := splitter.next()) is not None:
                self._on_answer(_decode(body))
        except (FrameError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """The other side does not speak the protocol: give the connection up."""
        if not isinstance(error, FrameError):
            error = FrameError(f"an answer of the runtime does not decode: {error}")
        self._error = error
        self.close()

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    @property
    def alive(self) -> bool:
        """Whether frames can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: Any) -> None:
        """Send a request. Does nothing on a dead link: its loss is reported to `on_lost`."""
        self.send_frame(frames.encode(request))

    def send_frame(self, frame: bytearray) -> None:
        """Send a frame that is encoded already."""
        if self._transport is not None:
            self._transport.write(frame)

    @property
    def congested(self) -> bool:
        """Whether the runtime has not read what was sent, so that more should wait (`drain`)."""
        return self._drained is not None

    async def drain(self) -> None:
        """Wait until the runtime has read enough of what was sent."""
        if self._drained is not None:
            await asyncio.shield(self._drained)

    def close(self) -> None:
        """Close; what was received and not handed on is dropped."""
        if self._transport is not None:
            self._transport.abort()
