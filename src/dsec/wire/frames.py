"""Frames: a length (u32, big endian) and a msgpack value, bounded on both sides."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dsec.model import limits
from dsec.model.errors import InvalidSpec, Unavailable

HEADER_BYTES: Final = 4
# Where a reader starts, and where it goes back to after a big frame: an idle connection must not hold megabytes. Twice
# the longest event of output, so that the buffer need not be made anew for what a program that floods writes.
BUFFER_BYTES: Final = 512 * limits.KIB
# With less room than this a read is not worth its system call.
ROOM_MIN_BYTES: Final = 16 * limits.KIB

_encode_into = msgspec.msgpack.Encoder().encode_into


class FrameError(Unavailable):
    """The other side does not speak the protocol: a frame that is too long or does not decode."""

    code = "bad_frame"


def encode(value: Any) -> bytearray:
    """A value as a frame. Raises InvalidSpec when it is too big for one."""
    frame = bytearray(HEADER_BYTES)
    _encode_into(value, frame, HEADER_BYTES)
    size = len(frame) - HEADER_BYTES
    if size > limits.FRAME_MAX_BYTES:
        raise InvalidSpec.field("request", f"{size} bytes", f"at most {limits.FRAME_MAX_BYTES} bytes in all")
    frame[:HEADER_BYTES] = size.to_bytes(HEADER_BYTES, "big")
    return frame


class Splitter:
    """Cuts a byte stream into frames.

    Bytes are received straight into its buffer (`room`, `received`), and bodies are views of it: decode a body before
    the next call.
    """

    def __init__(self, max_bytes: int = limits.FRAME_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray(BUFFER_BYTES)
        self._start = 0
        self._end = 0

    def room(self) -> memoryview:
        """Where the next bytes are to be written; never empty."""
        if len(self._buffer) - self._end < ROOM_MIN_BYTES:
            self._make_room()
        return memoryview(self._buffer)[self._end :]

    def received(self, count: int) -> None:
        """So many bytes have been written to `room`."""
        self._end += count

    def feed(self, data: bytes) -> None:
        """Copy bytes in, for those who have them already."""
        view = memoryview(data)
        while view:
            room = self.room()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            self.received(count)
            view = view[count:]

    def next(self) -> memoryview | None:
        """The body of the next whole frame. Raises FrameError when its length is not allowed."""
        have = self._end - self._start
        if have < HEADER_BYTES:
            self._rewind(have)
            return None
        begin = self._start + HEADER_BYTES
        size = self._size()
        if have < HEADER_BYTES + size:
            return None
        self._start = begin + size
        return memoryview(self._buffer)[begin : self._start]

    @property
    def partial(self) -> bool:
        """Whether there are bytes of a frame that is not whole yet."""
        return self._end > self._start

    def _size(self) -> int:
        size = int.from_bytes(self._buffer[self._start : self._start + HEADER_BYTES], "big")
        if size > self._max_bytes:
            raise FrameError(f"a frame of {size} bytes came; at most {self._max_bytes} are allowed")
        return size

    def _rewind(self, have: int) -> None:
        if have:
            return
        self._start = self._end = 0
        if len(self._buffer) > BUFFER_BYTES:
            self._buffer = bytearray(BUFFER_BYTES)

    def _make_room(self) -> None:
        """Move what is there to the front of a buffer that holds the frame that is arriving.

        A new buffer for another size: views of the old one may still be alive, and a bytearray with views cannot be
        resized.
        """
        have = self._end - self._start
        # What has come is whole frames that nobody has taken yet, or the beginning of one.
        wanted = max(BUFFER_BYTES, have + ROOM_MIN_BYTES)
        if have >= HEADER_BYTES:
            wanted = max(wanted, HEADER_BYTES + self._size() + ROOM_MIN_BYTES)
        buffer = self._buffer if wanted == len(self._buffer) else bytearray(wanted)
        buffer[:have] = memoryview(self._buffer)[self._start : self._end]
        self._buffer, self._start, self._end = buffer, 0, have
