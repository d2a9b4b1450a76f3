"""WebSocket (RFC 6455) as bytes, without I/O: the handshake's answer, frames out, messages in.

Ours and not a library's: what carries output must wait while the other side does not read, must not copy what it
carries more often than it has to, and is the same code for the server, the blocking client and the asyncio one.
docs/adr/0009 has the measurements.
"""

from __future__ import annotations

import base64
import hashlib
import os
from typing import Final, NamedTuple

TEXT: Final = 1
BINARY: Final = 2
CLOSE: Final = 8
PING: Final = 9
PONG: Final = 10

# Close codes of the RFC; what a DsecError stands for is 4000 + its HTTP status.
NORMAL: Final = 1000
GOING_AWAY: Final = 1001
PROTOCOL_ERROR: Final = 1002
UNSUPPORTED_DATA: Final = 1003
NO_CODE: Final = 1005
BAD_TEXT: Final = 1007
TOO_BIG: Final = 1009
INTERNAL: Final = 1011
RESTART: Final = 1012
OWN_CODES: Final = 4000
_CODES_SENT: Final = frozenset((*range(1000, 1004), *range(1007, 1015), *range(3000, 5000)))

_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUATION: Final = 0
_FIN: Final = 0x80
_RESERVED: Final = 0x70
_MASKED: Final = 0x80
_CONTROL_MAX_BYTES: Final = 125
_REASON_MAX_BYTES: Final = 123
_NO_MASK: Final = bytes(4)


class ProtocolError(Exception):
    """The other side does not keep to the protocol, or to the bounds; `code` is what to close with."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Message(NamedTuple):
    """A whole message, or a control frame. `data` is a view of what nobody changes any more."""

    opcode: int
    data: memoryview


PART: Final = Message(_CONTINUATION, memoryview(b""))


def new_key() -> bytes:
    """What a client sends as Sec-WebSocket-Key."""
    return base64.b64encode(os.urandom(16))


def accept_key(key: bytes) -> bytes:
    """What the server answers to it."""
    return base64.b64encode(hashlib.sha1(key + _GUID).digest())


def is_key(key: bytes) -> bool:
    """Whether that is 16 bytes in base64."""
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except ValueError:
        return False


def head(opcode: int, size: int, mask: bytes = b"") -> bytes:
    """What stands before a payload of so many bytes that is the whole message. `mask`: a client's."""
    bit = _MASKED if mask else 0
    first = _FIN | opcode
    if size < 126:
        return bytes((first, bit | size)) + mask
    if size < 1 << 16:
        return bytes((first, bit | 126)) + size.to_bytes(2, "big") + mask
    return bytes((first, bit | 127)) + size.to_bytes(8, "big") + mask


def masked(opcode: int, data: bytes, *, plain: bool = False) -> bytes:
    """A client's whole frame.

    `plain`: with a mask of zeros. The mask keeps a script from choosing the bytes that a proxy sees; on a Unix socket
    there is neither.
    """
    if plain:
        return head(opcode, len(data), _NO_MASK) + data
    mask = os.urandom(4)
    return head(opcode, len(data), mask) + exclusive_or(data, mask)


def exclusive_or(data: bytes | memoryview, mask: bytes) -> bytes:
    """The payload with its mask put on, or taken off."""
    size = len(data)
    # As two large numbers: some hundred times what a loop does.
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "little") ^ int.from_bytes(key, "little")).to_bytes(size, "little")


def closing(code: int, reason: str = "") -> bytes:
    """The payload of a close frame."""
    cut = reason.encode()[:_REASON_MAX_BYTES].decode(errors="ignore").encode()
    return code.to_bytes(2, "big") + cut


def closed(payload: memoryview) -> tuple[int, str]:
    """Code and reason of a close frame. ProtocolError for what may not stand in one."""
    if not payload:
        return NO_CODE, ""
    code = int.from_bytes(payload[:2], "big")
    if len(payload) == 1 or code not in _CODES_SENT:
        raise ProtocolError(PROTOCOL_ERROR, "a close frame without a code that may stand in one")
    try:
        return code, bytes(payload[2:]).decode()
    except UnicodeDecodeError:
        raise ProtocolError(BAD_TEXT, "a reason that is no UTF-8") from None


class Messages:
    """Cuts received bytes into messages: `feed`, then `take` until None.

    `from_client`: frames must be masked (else they must not be). `max_bytes`: of a message; more is refused before it
    is here, so at most that much waits for its end.
    """

    def __init__(self, *, from_client: bool, max_bytes: int) -> None:
        self._from_client = from_client
        self._max_bytes = max_bytes
        self._view = memoryview(b"")
        self._at = 0
        # The frame that is arriving: None while its head is.
        self._opcode: int | None = None
        self._fin = False
        self._mask = b""
        self._left = 0
        self._part = bytearray()
        # The message whose frames are arriving.
        self._kind: int | None = None
        self._whole = bytearray()

    @property
    def partial(self) -> bool:
        """Whether something has begun to come and is not whole."""
        return self._opcode is not None or self._kind is not None or self._at < len(self._view)

    def feed(self, data: bytes) -> None:
        """Bytes as received; only when `take` has given None."""
        if self._at < len(self._view):  # some bytes of a head
            data = bytes(self._view[self._at :]) + data
        self._view, self._at = memoryview(data), 0

    def take(self) -> Message | None:
        """The next whole one; None: feed more. Raises ProtocolError, after which nothing more can be read."""
        while (message := self.step()) is PART:
            pass
        return message

    def step(self) -> Message | None:
        """As `take`, but only one frame's work: `PART` for one that is not the last of its message."""
        if self._opcode is None and not self._head():
            return None
        data = self._payload()
        return None if data is None else self._framed(data)

    def _head(self) -> bool:
        view, at = self._view, self._at
        have = len(view) - at
        if have < 2:
            return False
        first, second = view[at], view[at + 1]
        size, at = second & 0x7F, at + 2
        wide = 2 if size == 126 else 8 if size == 127 else 0
        if have < 2 + wide + (4 if second & _MASKED else 0):
            return False
        if wide:
            size, at = int.from_bytes(view[at : at + wide], "big"), at + wide
        self._check(first, bool(second & _MASKED), size)
        self._mask = b""
        if second & _MASKED:
            self._mask, at = bytes(view[at : at + 4]), at + 4
        self._at, self._left = at, size
        self._opcode, self._fin = first & 0x0F, bool(first & _FIN)
        return True

    def _check(self, first: int, has_mask: bool, size: int) -> None:
        opcode = first & 0x0F
        if first & _RESERVED:
            raise ProtocolError(PROTOCOL_ERROR, "a reserved bit is set; no extension was agreed on")
        if has_mask != self._from_client:
            raise ProtocolError(PROTOCOL_ERROR, "a client's frames are masked, a server's are not")
        if opcode >= CLOSE:
            if opcode > PONG or size > _CONTROL_MAX_BYTES or not first & _FIN:
                raise ProtocolError(PROTOCOL_ERROR, "no such control frame")
            return
        if opcode not in (_CONTINUATION, TEXT, BINARY):
            raise ProtocolError(PROTOCOL_ERROR, f"no frame has the opcode {opcode}")
        if (opcode == _CONTINUATION) != (self._kind is not None):
            raise ProtocolError(PROTOCOL_ERROR, "a message begins within another, or goes on without a beginning")
        if size + len(self._whole) > self._max_bytes:
            raise ProtocolError(TOO_BIG, f"a message has at most {self._max_bytes} bytes")

    def _payload(self) -> memoryview | None:
        view, at = self._view, self._at
        there = view[at : at + self._left]
        self._at = at + len(there)
        self._left -= len(there)
        if self._left:
            self._part += there
            return None
        if self._part:
            self._part += there
            there, self._part = memoryview(self._part), bytearray()
        if self._mask in (b"", _NO_MASK):
            return there
        return memoryview(exclusive_or(there, self._mask))

    def _framed(self, data: memoryview) -> Message:
        opcode, self._opcode = self._opcode, None
        assert opcode is not None
        if opcode >= CLOSE:
            return Message(opcode, data)
        if self._fin and self._kind is None:
            return Message(opcode, data)
        self._kind = opcode if self._kind is None else self._kind
        self._whole += data
        if not self._fin:
            return PART
        kind, self._kind = self._kind, None
        whole, self._whole = memoryview(self._whole), bytearray()
        return Message(kind, whole)
