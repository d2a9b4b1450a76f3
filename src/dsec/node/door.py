"""The way to one exposed port: HTTP/1.1 of whoever has its token, relayed to what listens inside.

A connection has one request. Heads are read and written anew, so that both sides mean the same by them and nothing of
ours (token, cookie) gets inside; bodies, and all that comes after an upgrade or CONNECT, are relayed as they come.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Final
from urllib.parse import parse_qsl, urlencode

from dsec.model.errors import DsecError, InvalidState, SandboxLost
from dsec.model.limits import KIB
from dsec.model.ports import TOKEN_HEADER

_TOKEN: Final = TOKEN_HEADER.lower().encode()
# In a query, from which a page's address gets rid of it: it becomes the cookie.
QUERY: Final = "dsec_token"
_HEAD_S: Final = 30.0
_LINGER_S: Final = 2.0
# Without a piece of the answer, after the end of what was asked, which whoever has gone says, too.
LEFT_S: Final = 60.0
_PIECE_BYTES: Final = 64 * KIB
# RFC 9110, 5.6.2 and 5.5; RFC 9112, 3 and 5.
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_LINE: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) ([\x21-\x7e\x80-\xff]+) HTTP/1\.([01])")
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n\0]*)?")
_BAD_VALUE: Final = re.compile(rb"[\0\r\n]")
_DOMAIN: Final = re.compile(rb";\s*domain\s*=[^;]*", re.IGNORECASE)
# Of this connection, which is not the one inside.
_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authorization",
        b"proxy-authenticate",
        b"te",
        b"upgrade",
    )
)
_ONCE: Final = frozenset((b"host", b"content-length", b"transfer-encoding", b"authorization", _TOKEN))
_SWITCHING: Final = 101
_SUCCESS: Final = 200

Header = tuple[bytes, bytes]
Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[], Awaitable[socket.socket]]


class Refused(Exception):
    """What is answered instead of asking inside."""

    def __init__(self, status: bytes, text: str, *more: Header) -> None:
        super().__init__(text)
        self.status = status
        self.more = more


class Head:
    """The head of a request, checked: method, target, minor version, headers with lower-case names."""

    def __init__(self, raw: bytes) -> None:
        first, *lines = raw[:-4].split(b"\r\n")
        line = _LINE.fullmatch(first)
        if line is None:
            raise _bad("its first line is none of HTTP/1.1")
        self.method, self.target, self.minor = line[1], line[2], int(line[3])
        self.headers = [_header(line) for line in lines]
        names = [name for name, _ in self.headers]
        for name in _ONCE:
            if names.count(name) > 1:
                raise _bad(f"the header {name.decode()} stands there more than once")

    def get(self, name: bytes) -> bytes | None:
        """The value of a header, the first of it."""
        return next((value for known, value in self.headers if known == name), None)

    def words(self, name: bytes) -> set[bytes]:
        """What is listed in all headers of a name, in lower case."""
        values = (value for known, value in self.headers if known == name)
        return {word.strip().lower() for value in values for word in value.split(b",")}

    @property
    def upgrades(self) -> bool:
        """Whether another protocol is asked for on this connection."""
        return self.minor == 1 and b"upgrade" in self.words(b"connection") and self.get(b"upgrade") is not None

    def body(self) -> int | None:
        """How long the body is, or None: it is chunked."""
        coding, length = self.get(b"transfer-encoding"), self.get(b"content-length")
        if coding is not None:
            if length is not None or coding.lower() != b"chunked" or not self.minor:
                raise _bad("its body's length cannot be told")
            return None
        if length is None:
            return 0
        if not length.isdigit() or len(length) > 18:
            raise _bad("its content-length is no number")
        return int(length)


def _header(line: bytes) -> Header:
    name, colon, value = line.partition(b":")
    value = value.strip(b" \t")
    if not colon or not _NAME.fullmatch(name) or _BAD_VALUE.search(value):
        raise _bad("a header is none")
    return name.lower(), value


def _bad(why: str) -> Refused:
    return Refused(b"400 Bad Request", f"This is no request that can be passed on: {why}.")


class Door:
    """One exposed port."""

    HEAD_MAX_BYTES: Final = 64 * KIB
    CONNECTIONS_MAX: Final = 1024

    def __init__(self, port: int, token: str, dial: Dial, going_on: Callable[[], AbstractContextManager[None]]) -> None:
        self._port = port
        self._token = token
        self._cookie = f"dsec_token_{port}".encode()
        self._dial = dial
        self._going_on = going_on
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """End all connections."""
        for task in list(self._tasks):
            task.cancel()

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until its end, in a task."""
        if len(self._tasks) >= self.CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._one(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
            writer.close()
            await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError, TimeoutError, SandboxLost):
            return  # one of the two has gone
        finally:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_S):
                head = Head(await _head_of(reader))
            self._check(head)
            length = 0 if head.method == b"CONNECT" else head.body()
            with self._going_on():
                inside = await self._inside()
                try:
                    await _Relay(head, length, (reader, writer), inside).run(self._passed_on(head))
                    await _end(inside[1])
                finally:
                    inside[1].transport.abort()
        except Refused as refused:
            await _answer(reader, writer, refused)

    async def _inside(self) -> Side:
        try:
            sock = await self._dial()
        except InvalidState as error:
            raise Refused(b"502 Bad Gateway", f"{error.message}.") from error
        except SandboxLost as error:
            raise Refused(b"410 Gone", f"{error.message}.") from error
        except DsecError as error:
            raise Refused(b"503 Service Unavailable", f"{error.message}.") from error
        return await asyncio.open_connection(sock=sock, limit=self.HEAD_MAX_BYTES)

    def _check(self, head: Head) -> None:
        """Raises Refused for who may not."""
        if head.method == b"CONNECT":
            if not self._ours(head.get(b"proxy-authorization")) and not self._is_token(head.get(_TOKEN)):
                proof = (b"proxy-authenticate", b'Basic realm="dsec"')
                raise Refused(b"407 Proxy Authentication Required", "The token of this port is missing.", proof)
            if head.target.rpartition(b":")[2] != b"%d" % self._port:
                raise Refused(b"403 Forbidden", f"Only port {self._port} can be reached here.")
            return
        if not head.target.startswith(b"/"):
            raise _bad("its target is no path")
        known = self._ours(head.get(b"authorization")) or self._is_token(head.get(_TOKEN))
        if known or any(self._is_token(value) for name, value in _cookies(head) if name == self._cookie):
            return
        if (moved := self._moved(head)) is not None:
            raise moved
        proof = (b"www-authenticate", b'Basic realm="dsec"')
        raise Refused(b"401 Unauthorized", "The token of this port is missing.", proof)

    def _moved(self, head: Head) -> Refused | None:
        """For a page's address with the token in its query: the same without, and a cookie."""
        path, _, query = head.target.decode("latin-1").partition("?")
        fields = parse_qsl(query, keep_blank_values=True)
        if head.method != b"GET" or not any(n == QUERY and self._is_token(v.encode()) for n, v in fields):
            return None
        left = urlencode([(name, value) for name, value in fields if name != QUERY])
        # `//x` would be another host.
        where = "/" + path.lstrip("/\\") + (f"?{left}" if left else "")
        cookie = self._cookie + b"=" + self._token.encode() + b"; Path=/; HttpOnly; SameSite=Strict"
        return Refused(b"303 See Other", "", (b"location", where.encode("latin-1")), (b"set-cookie", cookie))

    def _is_token(self, given: bytes | None) -> bool:
        return given is not None and hmac.compare_digest(given, self._token.encode())

    def _ours(self, authorization: bytes | None) -> bool:
        """Whether these credentials are the token: as bearer, or as any user's password."""
        scheme, _, value = (authorization or b"").partition(b" ")
        value = value.strip()
        if scheme.lower() == b"bearer":
            return self._is_token(value)
        if scheme.lower() != b"basic":
            return False
        try:
            _, colon, password = base64.b64decode(value, validate=True).partition(b":")
        except binascii.Error:
            return False
        return bool(colon) and self._is_token(password)

    def _passed_on(self, head: Head) -> bytes:
        """The head as it is sent inside; nothing for CONNECT."""
        if head.method == b"CONNECT":
            return b""
        dropped = _HOP | head.words(b"connection") | {_TOKEN, b"x-forwarded-proto", b"x-forwarded-host"}
        dropped -= {b"content-length", b"transfer-encoding", b"host"}
        if self._ours(head.get(b"authorization")):
            dropped |= {b"authorization"}
        lines = [b"%b %b HTTP/1.%d" % (head.method, head.target, head.minor)]
        for name, value in head.headers:
            if name == b"cookie":
                kept = [one for one in _split_cookies(value) if one.partition(b"=")[0].strip() != self._cookie]
                if kept:
                    lines.append(b"cookie: " + b"; ".join(kept))
            elif name not in dropped:
                lines.append(name + b": " + value)
        if head.upgrades:
            lines += [b"connection: upgrade", b"upgrade: " + (head.get(b"upgrade") or b"")]
        else:
            lines.append(b"connection: close")
        host = head.get(b"host")
        lines.append(b"x-forwarded-proto: http")
        if host is not None:
            lines.append(b"x-forwarded-host: " + host)
        return b"\r\n".join([*lines, b"", b""])


def _cookies(head: Head) -> list[tuple[bytes, bytes]]:
    ones = [one for name, value in head.headers if name == b"cookie" for one in _split_cookies(value)]
    return [(name.strip(), value.strip()) for name, _, value in (one.partition(b"=") for one in ones)]


def _split_cookies(value: bytes) -> list[bytes]:
    return [one.strip() for one in value.split(b";") if one.strip()]


class _Relay:
    """One request on its way inside, and what comes back."""

    def __init__(self, head: Head, length: int | None, outside: Side, inside: Side) -> None:
        self._head = head
        self._length = length
        self._reader, self._writer = outside
        self._inner_reader, self._inner_writer = inside
        self._pieces = 0  # of the answer, passed on

    async def run(self, passed_on: bytes) -> None:
        """Until what is inside has said all."""
        if self._head.method == b"CONNECT":
            self._writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await self._both_ways()
            return
        self._inner_writer.write(passed_on)
        sending = asyncio.ensure_future(self._send_body())
        try:
            if await self._answer_heads():
                await sending
                await self._both_ways()
                return
            answering = asyncio.ensure_future(_pour(self._inner_reader, self._writer, self._passed))
            leaving = asyncio.ensure_future(self._left(sending))
            try:
                await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answering.result()
            finally:
                for task in (answering, leaving):
                    task.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def _passed(self) -> None:
        self._pieces += 1

    async def _left(self, sending: asyncio.Future[None]) -> None:
        """Until whoever asked has gone: it says no more, and takes nothing for a while, be it that there is nothing."""
        await asyncio.wait((sending,))
        if await self._reader.read(1):
            await asyncio.Event().wait()  # more than one request: the rest is not read
        seen = -1
        while seen != self._pieces:
            seen = self._pieces
            await asyncio.sleep(LEFT_S)

    async def _send_body(self) -> None:
        """The body, and not a byte of what may stand behind it."""
        if self._length is None:
            await self._send_chunks()
            return
        left = self._length
        while left:
            data = await self._reader.read(min(left, _PIECE_BYTES))
            if not data:
                self._inner_writer.transport.abort()  # it left in the middle: nothing inside is to take it for whole
                return
            left -= len(data)
            self._inner_writer.write(data)
            await self._inner_writer.drain()

    async def _send_chunks(self) -> None:
        """Each anew: extensions and trailers are left out."""
        try:
            while size := await self._chunk_size():
                self._inner_writer.write(b"%x\r\n" % size)
                left = size
                while left:
                    data = await self._reader.read(min(left, _PIECE_BYTES))
                    if not data:
                        raise asyncio.IncompleteReadError(b"", left)
                    left -= len(data)
                    self._inner_writer.write(data)
                    await self._inner_writer.drain()
                if await self._reader.readexactly(2) != b"\r\n":
                    raise _bad("a chunk has no end")
                self._inner_writer.write(b"\r\n")
            while await self._reader.readuntil(b"\r\n") != b"\r\n":
                pass
            self._inner_writer.write(b"0\r\n\r\n")
            await self._inner_writer.drain()
        except (Refused, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            self._inner_writer.transport.abort()

    async def _chunk_size(self) -> int:
        line = (await self._reader.readuntil(b"\r\n"))[:-2].partition(b";")[0].strip(b" \t")
        if not re.fullmatch(rb"[0-9a-fA-F]{1,15}", line):
            raise _bad("a chunk has no size")
        return int(line, 16)

    async def _answer_heads(self) -> bool:
        """Pass on the heads of the answer; whether it is another protocol from here on."""
        while True:
            try:
                raw = await self._inner_reader.readuntil(b"\r\n\r\n")
                first, *lines = raw[:-4].split(b"\r\n")
                status = _STATUS.fullmatch(first)
                if status is None:
                    raise _none("its first line is none of HTTP/1.1")
                headers = [_header(line) for line in lines]
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, Refused) as error:
                raise _none(str(error) if isinstance(error, Refused) else "it ended, or its head has no end") from error
            code = int(status[1])
            switched = code == _SWITCHING and self._head.upgrades
            if code == _SWITCHING and not switched:
                raise _none("it changes to a protocol that nobody asked for")
            self._writer.write(_answered(first, headers, switched=switched))
            await self._writer.drain()
            if switched or code >= _SUCCESS:
                return switched

    async def _both_ways(self) -> None:
        """Bytes, until both have ended, or one is gone."""
        out = asyncio.ensure_future(_pour(self._inner_reader, self._writer))
        into = asyncio.ensure_future(_pour(self._reader, self._inner_writer))
        try:
            await asyncio.gather(out, into)
        finally:
            out.cancel()
            into.cancel()
            await asyncio.gather(out, into, return_exceptions=True)


def _none(why: str) -> Refused:
    return Refused(b"502 Bad Gateway", f"What listens in the sandbox gave no answer of HTTP/1.1: {why}.")


def _answered(first: bytes, headers: list[Header], *, switched: bool) -> bytes:
    """The head of an answer for outside: it is the last on its connection, and its cookies are of its own origin."""
    named = {word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")}
    lines = [first]
    for name, value in headers:
        if name == b"set-cookie":
            lines.append(name + b": " + _DOMAIN.sub(b"", value))
        elif name not in _HOP and (name not in named or name in (b"content-length", b"transfer-encoding")):
            lines.append(name + b": " + value)
    upgrade = next((value for name, value in headers if name == b"upgrade"), b"")
    lines += [b"connection: upgrade", b"upgrade: " + upgrade] if switched else [b"connection: close"]
    return b"\r\n".join([*lines, b"", b""])


async def _head_of(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise Refused(b"431 Request Header Fields Too Large", "The head of the request is too large.") from None


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, refused: Refused) -> None:
    body = f"{refused}\n".encode() if str(refused) else b""
    lines = [b"HTTP/1.1 " + refused.status, b"content-type: text/plain; charset=utf-8", b"cache-control: no-store"]
    lines += [b"content-length: %d" % len(body), b"connection: close"]
    lines += [name + b": " + value for name, value in refused.more]
    writer.write(b"\r\n".join([*lines, b"", b""]) + body)
    writer.write_eof()
    # A close with bytes that were not read would take the answer away from who has sent them.
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while await reader.read(_PIECE_BYTES):
                pass


async def _end(writer: asyncio.StreamWriter) -> None:
    """Close it once all is on its way, unless the other side takes it too slowly."""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            await writer.wait_closed()


async def _pour(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: Callable[[], object] = lambda: None
) -> None:
    """All that comes, as it comes; and its end."""
    while data := await reader.read(_PIECE_BYTES):
        writer.write(data)
        await writer.drain()
        passed()
    writer.write_eof()
