"""The way to an exposed port: who may, what is passed on, and what comes back. Real sockets on both sides."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from dsec.model.errors import InvalidState, SandboxLost, Unavailable
from dsec.node import door
from dsec.node.door import Door

TOKEN = "t0ken-of-the-port"
BASIC = b"Authorization: Basic " + base64.b64encode(b"dsec:" + TOKEN.encode())
GET = b"GET /path?a=1 HTTP/1.1\r\nHost: here:80\r\n"
PATIENCE_S = 30.0
ENDS = (
    (InvalidState("nothing listens on it"), b"502"),
    (SandboxLost("it has ended"), b"410"),
    (Unavailable("what listens accepts nothing"), b"503"),
)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class World:
    """A door, and what listens behind it."""

    def __init__(self) -> None:
        self.heard = b""
        self.going_on = 0
        self.most = 0
        self.failure: Exception | None = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.going_on += 1
        self.most = max(self.most, self.going_on)
        try:
            yield
        finally:
            self.going_on -= 1


def through(
    talk: Callable[[World, Door, int], Awaitable[None]], serve: Serve | None = None, answer: bytes = b""
) -> World:
    """What `talk` says to a door's port; behind it `serve`, or what hears a head and says `answer`."""

    async def body() -> None:
        async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            world.heard += await reader.readuntil(b"\r\n\r\n")
            writer.write(answer or b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()
            writer.close()

        inner = await asyncio.start_server(serve or plain, "127.0.0.1", 0)
        place = inner.sockets[0].getsockname()

        async def dial() -> socket.socket:
            if world.failure is not None:
                raise world.failure
            sock = socket.create_connection(place)
            sock.setblocking(False)
            return sock

        made = Door(8000, TOKEN, dial, world.busy)
        outer = await asyncio.start_server(made.connected, "127.0.0.1", 0, limit=Door.HEAD_MAX_BYTES)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await talk(world, made, outer.sockets[0].getsockname()[1])
        finally:
            made.close()
            outer.close()
            inner.close()

    world = World()
    asyncio.run(body())
    assert not world.going_on
    return world


async def asked(port: int, request: bytes) -> bytes:
    """All of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()


async def until(what: Callable[[], object]) -> None:
    """Within the patience of `through`."""
    while not what():  # noqa: ASYNC110 - what is looked at tells nobody
        await asyncio.sleep(0.01)


def one(request: bytes, answer: bytes = b"") -> tuple[bytes, bytes]:
    """What a request is answered, and what of it was heard inside."""
    got = b""

    async def talk(world: World, _: Door, port: int) -> None:
        nonlocal got
        got = await asked(port, request)

    heard = through(talk, answer=answer).heard
    return got, heard


@pytest.mark.parametrize(
    "proof",
    [
        BASIC,
        b"authorization: bearer " + TOKEN.encode(),
        b"X-Dsec-Token: " + TOKEN.encode(),
        b"Cookie: a=1; dsec_token_8000=" + TOKEN.encode() + b"; b=2",
    ],
)
def test_who_has_the_token_is_let_through_and_it_stays_outside(proof: bytes) -> None:
    got, heard = one(GET + proof + b"\r\nX-Own: yes\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200 OK\r\n") and got.endswith(b"\r\n\r\nok")
    assert heard.startswith(b"GET /path?a=1 HTTP/1.1\r\nhost: here:80\r\n")
    assert (
        b"x-own: yes\r\n" in heard and b"x-forwarded-host: here:80\r\n" in heard and b"connection: close\r\n" in heard
    )
    assert TOKEN.encode() not in heard and base64.b64encode(TOKEN.encode())[:8] not in heard
    if proof.startswith(b"Cookie"):
        assert b"cookie: a=1; b=2\r\n" in heard


def test_what_is_the_programs_own_comes_inside() -> None:
    own = b"Authorization: Bearer of-the-program\r\nX-Dsec-Token: " + TOKEN.encode()
    _, heard = one(GET + own + b"\r\nCookie: mine=1; dsec_token_9=x\r\n\r\n")
    assert b"authorization: Bearer of-the-program\r\n" in heard and b"cookie: mine=1; dsec_token_9=x\r\n" in heard


@pytest.mark.parametrize(
    "proof",
    [
        b"X-Nothing: 1",
        b"X-Dsec-Token: wrong",
        b"X-Dsec-Token: ",
        b"Authorization: Bearer",
        b"Authorization: Basic !!!",
        b"Authorization: Basic " + base64.b64encode(TOKEN.encode()),
        b"Authorization: Digest " + TOKEN.encode(),
        b"Cookie: dsec_token_80=" + TOKEN.encode(),
    ],
)
def test_who_has_not_is_told_and_nothing_inside_hears_of_it(proof: bytes) -> None:
    got, heard = one(GET + proof + b"\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 401 ") and b"www-authenticate: Basic" in got and not heard


def test_a_page_with_the_token_in_its_address_gets_the_cookie() -> None:
    got, heard = one(b"GET //evil.example/x?b=%20&dsec_token=" + TOKEN.encode() + b"&c HTTP/1.1\r\nHost: h\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 303 ") and b"\r\nlocation: /evil.example/x?b=+&c=\r\n" in got and not heard
    assert b"set-cookie: dsec_token_8000=" + TOKEN.encode() + b"; Path=/; HttpOnly; SameSite=Strict\r\n" in got
    got, _ = one(b"POST /?dsec_token=" + TOKEN.encode() + b" HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "request_",
    [
        b"GET http://other/ HTTP/1.1\r\nHost: other\r\n",
        b"GET / HTTP/2.0\r\nHost: h\r\n",
        b"GET /\r\n",
        b"G\x00T / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nHost : h\r\n",
        b"GET / HTTP/1.1\r\nA: 1\r\n folded\r\n",
        b"GET / HTTP/1.1\r\nA: 1\n B: 2\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: identity\r\n",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: +1\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 9999999999999999999\r\n",
    ],
)
def test_what_two_sides_could_read_differently_goes_nowhere(request_: bytes) -> None:
    got, heard = one(request_ + BASIC + b"\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 400 ") and not heard


def test_a_head_without_end_is_refused() -> None:
    got, heard = one(b"GET / HTTP/1.1\r\n" + b"X: 1234567890\r\n" * 20_000)
    assert got.startswith(b"HTTP/1.1 431 ") and not heard


def test_nothing_behind_the_body_comes_inside() -> None:
    heard = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard = await reader.readuntil(b"end")
        await asyncio.sleep(0.1)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\nKeep-Alive: 5\r\n\r\n")
        await writer.drain()
        heard += await asyncio.wait_for(reader.read(), PATIENCE_S)

    async def talk(world: World, _: Door, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: 6\r\n" + BASIC + b"\r\n\r\nhayend" + GET + b"\r\n")
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" in answer and b"eep-" not in answer
        writer.close()

    monkey = pytest.MonkeyPatch()
    monkey.setattr(door, "LEFT_S", 0.05)
    try:
        through(talk, serve)
    finally:
        monkey.undo()
    assert heard.endswith(b"\r\n\r\nhayend")


def test_chunks_are_passed_on_without_extensions_and_trailers() -> None:
    heard = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard = await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    async def talk(world: World, _: Door, port: int) -> None:
        head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + BASIC + b"\r\n\r\n"
        got = await asked(port, head + b"3;x=y\r\nabc\r\n0A \r\n0123456789\r\n0\r\nX-Dsec-Token: sly\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 204 ")

    through(talk, serve)
    assert heard.endswith(
        b"transfer-encoding: chunked\r\nconnection: close\r\nx-forwarded-proto: http\r\n\r\n"
        b"3\r\nabc\r\na\r\n0123456789\r\n0\r\n\r\n"
    )


@pytest.mark.parametrize("body", [b"zz\r\n", b"-1\r\n", b"3\r\nabcd\r\n"])
def test_a_broken_body_is_not_taken_for_whole(body: bytes) -> None:
    whole: list[bool] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"0\r\n\r\n")
            whole.append(True)
        except (ConnectionError, asyncio.IncompleteReadError):
            whole.append(False)

    async def talk(world: World, _: Door, port: int) -> None:
        head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + BASIC + b"\r\n\r\n"
        assert (await asked(port, head + body)).startswith(b"HTTP/1.1 502 ")
        await until(lambda: whole)

    through(talk, serve)
    assert whole == [False]


def test_what_comes_back_comes_at_once_and_its_cookies_are_its_own() -> None:
    go_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Set-Cookie: a=1; Domain=.example; Path=/; domain = x\r\nSet-Cookie: b=2\r\n\r\n")
        for number in range(3):
            writer.write(b"data: %d\n\n" % number)
            await go_on.wait()
            go_on.clear()
        writer.close()

    async def talk(world: World, _: Door, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + BASIC + b"\r\nExpect: 100-continue\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"set-cookie: a=1; Path=/\r\nset-cookie: b=2\r\n" in head
        for number in range(3):
            assert await reader.readuntil(b"\n\n") == b"data: %d\n\n" % number
            assert world.going_on == 1
            go_on.set()
        assert await reader.read() == b""
        writer.close()

    through(talk, serve)


def test_both_ways_after_an_upgrade_and_each_end_by_itself() -> None:
    heard = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        data = await reader.read()
        writer.write(data[::-1])
        writer.close()

    async def talk(world: World, _: Door, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + BASIC + b"\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\nearly")
        assert b"connection: upgrade\r\nupgrade: websocket\r\n" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"-late")
        writer.write_eof()
        assert await reader.read() == b"early-late"[::-1]
        writer.close()

    through(talk, serve)
    assert b"connection: upgrade\r\nupgrade: websocket\r\n" in heard and b"sec-" not in heard


def test_raw_tcp_by_connect() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello ")  # who speaks first is inside, as with a database
        writer.write(await reader.read())
        writer.close()

    async def talk(world: World, _: Door, port: int) -> None:
        for target, proof, status in (
            (b"sandbox:8000", b"X: 1", b"407"),
            (b"sandbox:8001", b"Proxy-" + BASIC, b"403"),
            (b"sandbox", b"Proxy-" + BASIC, b"403"),
        ):
            got = await asked(port, b"CONNECT " + target + b" HTTP/1.1\r\n" + proof + b"\r\n\r\n")
            assert got.startswith(b"HTTP/1.1 " + status)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"CONNECT sandbox:8000 HTTP/1.1\r\nProxy-" + BASIC + b"\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await reader.readexactly(6) == b"hello "
        writer.write(b"\0raw\xff")
        writer.write_eof()
        assert await reader.read() == b"\0raw\xff"
        writer.close()

    through(talk, serve)


def test_what_is_not_there_is_told() -> None:
    for failure, status in ENDS:

        async def talk(world: World, _: Door, port: int, failure: Exception = failure, status: bytes = status) -> None:
            world.failure = failure
            got = await asked(port, GET + BASIC + b"\r\n\r\n")
            assert got.startswith(b"HTTP/1.1 " + status) and str(failure).encode() in got

        through(talk)
    for answer in (b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nno end", b"HTTP/1.1 101 Sly\r\n\r\n", b"\r\n\r\n"):
        assert one(GET + BASIC + b"\r\n\r\n", answer)[0].startswith(b"HTTP/1.1 502 ")


def test_who_has_gone_does_not_keep_what_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "LEFT_S", 0.05)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.read()

    async def talk(world: World, _: Door, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + BASIC + b"\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert world.going_on == 1
        writer.close()
        await until(lambda: not world.going_on)

    through(talk, serve)


def test_no_more_than_so_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Door, "CONNECTIONS_MAX", 2)

    async def talk(world: World, made: Door, port: int) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await until(lambda: len(made._tasks) == 2)
        with pytest.raises(ConnectionError):
            assert await asked(port, GET + BASIC + b"\r\n\r\n") == b""
            raise ConnectionResetError
        for _, writer in held:
            writer.close()
        await until(lambda: not made._tasks)
        assert (await asked(port, GET + BASIC + b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")

    through(talk)
