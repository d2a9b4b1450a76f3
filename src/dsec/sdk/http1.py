"""HTTP/1.1 as bytes, without I/O: requests out, response heads and bodies in.

Why not the standard library's: `http.client` imports the e-mail parser (a third of what `dsec ps` may take) and spends
most of a small request in it; and it knows one way of waiting only. Here the sync and the async client share every
decision about what came over the wire. See docs/adr/0005 for the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

HEAD_MAX_BYTES: Final = 64 * 1024
_CHUNK_LINE_MAX_BYTES: Final = 1024
_NO_BODY: Final = (204, 304)
SWITCHING: Final = 101


class Broken(Exception):
    """The connection failed or ended before the answer was complete. Repeating the call under its key is safe."""


class Garbage(Exception):
    """What came back is not HTTP/1.1, or not what a dsec server says."""


class TooMuch(Garbage):
    """An answer that is larger than what is taken at once."""


class Late(Exception):
    """The caller's own time is over; nothing is wrong with the connection."""


LAST_CHUNK: Final = b"0\r\n\r\n"


def head(method: str, path: str, common: bytes, headers: Mapping[str, str], size: int | None) -> bytes:
    """The head of a request whose body follows: so many bytes, or chunks up to `LAST_CHUNK`."""
    framing = b"Transfer-Encoding: chunked\r\n" if size is None else b"Content-Length: %d\r\n" % size
    lines = [f"{method} {path} HTTP/1.1\r\n".encode("ascii"), common, framing]
    lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items()]
    return b"".join([*lines, b"\r\n"])


def chunk(data: bytes) -> bytes:
    """One chunk of a body; not an empty one, which would end it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def request(method: str, path: str, common: bytes, headers: Mapping[str, str], body: bytes) -> bytes:
    """The bytes of one request. `common` are header lines that do not change between requests."""
    lines = [f"{method} {path} HTTP/1.1\r\n".encode("ascii"), common]
    lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items()]
    if body or method in ("POST", "PUT", "PATCH"):
        lines.append(b"Content-Length: %d\r\n" % len(body))
    lines += [b"\r\n", body]
    return b"".join(lines)


class Head:
    """Status and headers (names in lower case) of a response."""

    __slots__ = ("headers", "http10", "status")

    def __init__(self, raw: bytes) -> None:
        lines = raw.split(b"\r\n")
        version, _, rest = lines[0].partition(b" ")
        status = rest[:3]
        if version not in (b"HTTP/1.1", b"HTTP/1.0") or len(status) != 3 or not status.isdigit():
            raise Garbage(f"no HTTP/1.1 status line but {lines[0][:60]!r}")
        self.http10 = version == b"HTTP/1.0"
        self.status = int(status)
        self.headers: dict[bytes, bytes] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon or not name or name[-1:].isspace() or name[:1].isspace():
                raise Garbage(f"a malformed header line: {line[:60]!r}")
            self._add(name.lower(), value.strip())

    def _add(self, name: bytes, value: bytes) -> None:
        if name not in self.headers:
            self.headers[name] = value
        elif name == b"content-length":
            if value != self.headers[name]:
                raise Garbage("two different Content-Length headers")
        else:
            self.headers[name] += b", " + value

    @property
    def keep_alive(self) -> bool:
        """Whether the connection can carry another request."""
        return not self.http10 and b"close" not in self.headers.get(b"connection", b"").lower()

    @property
    def media_type(self) -> str:
        """The Content-Type without parameters."""
        return self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")


class Response:
    """Takes received bytes, gives the head and then the body's bytes. One per request.

    `upgrade`: the request asks for another protocol; status 101 ends the answer, and what comes behind it is that.
    """

    __slots__ = ("_at", "_chunked", "_data", "_left", "_upgrade", "done", "head")

    def __init__(self, *, upgrade: bool = False) -> None:
        self._upgrade = upgrade
        self.head: Head | None = None
        self.done = False
        # What was received, from `_at` on; never changed, so that taking from it is one copy at most.
        self._data = b""
        self._at = 0
        self._chunked = False
        # Bytes of the body (or of its present chunk) still to come; None: until the connection ends.
        self._left: int | None = 0

    def feed(self, data: bytes) -> None:
        """Bytes as received; none: the other side has closed."""
        if data:
            self._data = self._data[self._at :] + data if self._at < len(self._data) else data
            self._at = 0
        elif self.head is not None and self._left is None and not self._chunked:
            self.done = True
        elif not self.done:
            raise Broken(
                "the connection was closed in the middle of an answer" if self.started else "closed unanswered"
            )
        if self.head is None:
            self._parse_head()

    @property
    def started(self) -> bool:
        """Whether any byte of the answer has come."""
        return self.head is not None or self._there > 0

    @property
    def _there(self) -> int:
        return len(self._data) - self._at

    def take(self) -> bytes:
        """The body's bytes that are there; empty: feed more, unless `done`."""
        if self.head is None or (self.done and not self._there):
            return b""
        if self._chunked:
            return self._take_chunked()
        if self._left is None:
            return self._cut(self._there)
        data = self._cut(min(self._left, self._there))
        self._left -= len(data)
        self.done = not self._left
        return data

    @property
    def clean(self) -> bool:
        """Whether it is complete with nothing behind it: the connection can be used again."""
        return self.done and not self._there and self.head is not None and self.head.keep_alive

    def _parse_head(self) -> None:
        while self.head is None:
            end = self._data.find(b"\r\n\r\n", self._at)
            if end < 0:
                first = self._data[self._at : self._at + 60]
                if self._there > HEAD_MAX_BYTES:
                    raise Garbage(f"a response head of more than {HEAD_MAX_BYTES} bytes")
                if first and not b"HTTP/1.".startswith(first[:7]):
                    raise Garbage(f"no HTTP/1.1 status line but {first!r}")
                return
            head = Head(self._data[self._at : end])
            self._at = end + 4
            if head.status == SWITCHING and self._upgrade:
                self.head, self.done = head, True
            elif head.status >= 200:  # other 1xx only announce
                self.head = head
                self._frame(head)

    def rest(self) -> bytes:
        """What came behind the end of it."""
        return self._data[self._at :]

    def _frame(self, head: Head) -> None:
        encoding = head.headers.get(b"transfer-encoding")
        length = head.headers.get(b"content-length")
        if head.status in _NO_BODY:
            self.done = True
        elif encoding is not None:
            if encoding.lower() != b"chunked":
                raise Garbage(f"Transfer-Encoding {encoding[:60]!r}")
            self._chunked = True
        elif length is not None:
            if not length.isdigit() or len(length) > 18:
                raise Garbage(f"Content-Length {length[:60]!r}")
            self._left = int(length)
            self.done = self._left == 0
        else:
            self._left = None

    def _cut(self, n: int) -> bytes:
        data = self._data[self._at : self._at + n]
        self._at += n
        return data

    def _take_chunked(self) -> bytes:
        out = []
        while not self.done:
            if self._left is None or self._left <= 0:
                if not self._next_chunk():
                    break
                continue
            data = self._cut(min(self._left, self._there))
            if not data:
                break
            out.append(data)
            self._left -= len(data)
            if not self._left:
                self._left = None  # its CRLF comes next
        return out[0] if len(out) == 1 else b"".join(out)

    def _next_chunk(self) -> bool:
        """Past the end of one chunk and the size line of the next; False: more bytes are needed."""
        start = self._at
        if self._left is None:
            if self._there < 2:
                return False
            if self._data[start : start + 2] != b"\r\n":
                raise Garbage("a chunk without its end")
            start += 2
        end = self._data.find(b"\r\n", start)
        if end < 0:
            if self._there > _CHUNK_LINE_MAX_BYTES:
                raise Garbage("a chunk without its size")
            return False
        size = self._data[start:end].partition(b";")[0].strip()
        if not size or len(size) > 15 or size.strip(b"0123456789abcdefABCDEF"):
            raise Garbage(f"a chunk of size {size[:60]!r}")
        left = int(size, 16)
        if left:
            self._at = end + 2
            self._left = left
            return True
        return self._end_chunks(end)

    def _end_chunks(self, end: int) -> bool:
        # Trailers, which we do not use, end with an empty line.
        if self._data[end + 2 : end + 4] == b"\r\n":
            self._at = end + 4
        else:
            stop = self._data.find(b"\r\n\r\n", end + 2)
            if stop < 0:
                if self._there > HEAD_MAX_BYTES:
                    raise Garbage("trailers without an end")
                return False
            self._at = stop + 4
        self.done = True
        return True
