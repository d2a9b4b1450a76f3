"""Bodies and stream items in msgpack, and errors as they cross the wire."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from dsec.model import limits
from dsec.model.errors import DsecError, InvalidSpec, Retry, from_wire
from dsec.model.events import Event
from dsec.model.files import DiffReport, FileChange, FileEvent, TreeReport
from dsec.model.ports import Exposed
from dsec.model.states import LayerInfo, RunResult, SandboxInfo
from dsec.sdk.http1 import Garbage

MSGPACK: Final = "application/msgpack"
SEQUENCE: Final = "application/vnd.dsec.msgpack-seq"
OCTETS: Final = "application/octet-stream"
_LENGTH_BYTES: Final = 4
REPLY_MAX_BYTES: Final = 256 * limits.MIB

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


class Nothing(msgspec.Struct):
    """An answer without content."""


class ErrorBody(msgspec.Struct):
    """An error as a server sends it."""

    code: str
    message: str
    detail: dict[str, Any] | None = None
    retry: Retry | None = None
    request_id: str | None = None
    sandbox_id: str | None = None

    def error(self) -> DsecError:
        """The exception it stands for."""
        return from_wire(
            self.code,
            self.message,
            self.detail,
            self.retry,
            request_id=self.request_id,
            sandbox_id=self.sandbox_id,
        )


class RunItem(msgspec.Struct):
    """One item of a run's stream; an item with nothing in it only says that the server is there."""

    started: str | None = None
    step: int | None = None
    stream: int | None = None
    offset: int = 0
    data: bytes = b""
    result: RunResult | None = None
    error: ErrorBody | None = None


class BatchItem(msgspec.Struct):
    """One item of a batch's stream."""

    index: int | None = None
    sandbox: SandboxInfo | None = None
    error: ErrorBody | None = None
    done: bool = False
    created: int = 0
    failed: int = 0


class ImportItem(msgspec.Struct):
    """One item of an import's stream."""

    progress: str | None = None
    layer: LayerInfo | None = None
    error: ErrorBody | None = None


class TreeItem(msgspec.Struct):
    """One item of a tree's stream."""

    data: bytes = b""
    report: TreeReport | None = None
    error: ErrorBody | None = None


class WatchItem(msgspec.Struct):
    """One item of a watch."""

    ready: bool = False
    event: FileEvent | None = None
    ended: str | None = None
    error: ErrorBody | None = None


class DiffItem(msgspec.Struct):
    """One item of a diff."""

    changes: tuple[FileChange, ...] = ()
    report: DiffReport | None = None
    error: ErrorBody | None = None


class EventItem(msgspec.Struct):
    """One item of a stream of events."""

    event: Event | None = None
    done: bool = False
    error: ErrorBody | None = None


class ExposedPage(msgspec.Struct):
    """Ports of a sandbox that can be reached."""

    items: list[Exposed]


class SandboxPage(msgspec.Struct):
    """One page of a list of sandboxes."""

    items: tuple[SandboxInfo, ...]
    next_cursor: str | None = None


def encode(value: object) -> bytes:
    """A request's body. Raises InvalidSpec for text that UTF-8 cannot carry."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError as error:
        raise InvalidSpec.field("text", error.object, "text that can be encoded as UTF-8") from error
    except (TypeError, OverflowError) as error:
        raise InvalidSpec(f"a value that cannot be sent: {error}") from error


_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def _decoder(to: type[T]) -> msgspec.msgpack.Decoder[T]:
    # Made once for each of the dozen types: that costs more than decoding.
    decoder = _decoders.get(to)
    if decoder is None:
        decoder = _decoders[to] = msgspec.msgpack.Decoder(to)
    return decoder


def decode(data: bytes | memoryview, to: type[T]) -> T:
    """An answer's body. Raises Garbage when it is not what was agreed."""
    try:
        return _decoder(to).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Garbage(f"an answer that does not decode: {error}") from error


def decode_json(data: bytes, to: type[T]) -> T:
    """A message in JSON. Raises Garbage when it is not what was agreed."""
    try:
        return msgspec.json.decode(data, type=to)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Garbage(f"a message that does not decode: {error}") from error


def decode_error(data: bytes, media_type: str) -> DsecError:
    """The error in a response with an error status. Raises Garbage when it is none of ours (a proxy's page)."""
    try:
        if media_type == MSGPACK:
            return _decoder(ErrorBody).decode(data).error()
        return msgspec.json.decode(data, type=ErrorBody).error()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Garbage(f"an error without a code: {data[:120]!r}") from error


class Items:
    """Cuts a stream's bytes into items: each a length (u32, big endian) and that many bytes of msgpack."""

    def __init__(self) -> None:
        self._data = b""
        self._at = 0
        self._late: list[bytes] = []  # behind `_data`; put together once an item is whole
        self._have = 0
        self._need = _LENGTH_BYTES

    def feed(self, data: bytes) -> None:
        """More bytes of the body."""
        self._late.append(data)
        self._have += len(data)

    def take(self) -> memoryview | None:
        """The next whole item, or None."""
        while self._have >= self._need:
            view = self._view()
            if self._need > _LENGTH_BYTES:
                item = view[self._at + _LENGTH_BYTES : self._at + self._need]
                self._at += self._need
                self._have -= self._need
                self._need = _LENGTH_BYTES
                return item
            size = int.from_bytes(view[self._at : self._at + _LENGTH_BYTES], "big")
            if not 0 < size <= limits.FRAME_MAX_BYTES:
                raise Garbage(f"a stream item of {size} bytes (at most {limits.FRAME_MAX_BYTES})")
            self._need += size
        return None

    def _view(self) -> memoryview:
        if self._late:
            rest = memoryview(self._data)[self._at :]
            self._data = b"".join((rest, *self._late)) if rest or len(self._late) > 1 else self._late[0]
            self._at = 0
            self._late.clear()
        return memoryview(self._data)


_SAFE: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~")


def query(**fields: str | bytes | int | bool | None) -> str:
    """A query string; what is None or False is left out."""
    parts = []
    for name, value in fields.items():
        if value is None or value is False:
            continue
        text = "1" if value is True else str(value) if isinstance(value, int) else value
        parts.append(f"{name}={quote(text)}")
    return "?" + "&".join(parts) if parts else ""


def quote(text: str | bytes) -> str:
    """One path segment or query value, percent-encoded."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    if all(byte in _SAFE for byte in data):
        return data.decode("ascii")
    return "".join(chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in data)
