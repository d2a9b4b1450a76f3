"""WebSockets to programs against a server that really listens, by another's client and by hand."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from dsec.model.errors import Conflict, InvalidSpec
from dsec.model.processes import InputState
from dsec.node.http import attach, auth, server, socket
from dsec.node.http.exchange import Vanished
from dsec.wire import websocket
from dsec.wire.attach import WINDOW_BYTES
from tests.kit.aio import until
from tests.kit.simserver import SimServer

Scenario = Callable[[SimServer], Awaitable[None]]
PROTOCOLS = ("dsec.v1",)
CLOSED = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED)


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., None]:
    def run(scenario: Scenario, guard: auth.Guard | None = None) -> None:
        async def main() -> None:
            async with SimServer(tmp_path, guard) as s, asyncio.timeout(60):
                await scenario(s)

        uvloop.run(main())

    return run


async def spawn(s: SimServer, *argv: str, **spec: Any) -> str:
    """The path of a program's WebSocket."""
    if "a" not in s.node.core.names:
        status, body = await s.call("POST", "/v1/sandboxes", {"name": "a"})
        assert status == 201, body
    status, program = await s.call("POST", "/v1/sandboxes/a/processes", {"command": list(argv), **spec})
    assert status == 201, program
    return f"/v1/sandboxes/a/processes/{program['id']}/attach"


def piece(offset: int, data: bytes) -> bytes:
    return struct.pack(">BQ", 0, offset) + data


def control(**what: Any) -> bytes:
    return b"\3" + json.dumps(what).encode()


class Client:
    """What came on a WebSocket, put together."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws
        self.out = {1: b"", 2: b""}
        self.told: list[dict[str, Any]] = []

    async def more(self) -> bool:
        """Take one message; False: it was the last."""
        message = await self.ws.receive()
        if message.type in CLOSED:
            return False
        assert message.type == aiohttp.WSMsgType.BINARY, message
        if message.data[0] == 3:
            self.told.append(json.loads(message.data[1:]))
            return True
        stream, offset = struct.unpack(">BQ", message.data[:9])
        assert offset == len(self.out[stream])
        self.out[stream] += message.data[9:]
        return True

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            assert await self.more(), (self.ws.close_code, self.told)

    async def end(self) -> tuple[int | None, dict[str, Any]]:
        """The close code, and the last that was told."""
        while await self.more():
            pass
        return self.ws.close_code, self.told[-1]


def test_input_output_and_the_end_over_one_connection(serve):
    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "cat")
        async with s.http.ws_connect(path, protocols=PROTOCOLS) as ws:
            client = Client(ws)
            await client.until(lambda: len(client.told) == 1)
            assert client.told[0]["offsets"] == [0, 0] and client.told[0]["input"] == {"size": 0}
            await ws.send_bytes(piece(0, b"one "))
            await client.until(lambda: client.out[1] == b"one ")
            await ws.send_bytes(piece(2, b"e two"))  # from where it is not known to have come
            await ws.send_bytes(piece(0, b"one two"))  # all of it again
            await client.until(lambda: client.out[1] == b"one two")
            await ws.send_bytes(control(eof=7, key="k"))
            code, last = await client.end()
            assert (code, last["result"]["exit_code"]) == (1000, 0)
            assert {"done": "k", "input": {"size": 7, "closed": True}} in client.told
        assert client.out == {1: b"one two", 2: b""}
        async with s.http.ws_connect(f"{path}?stdout_offset=4", protocols=PROTOCOLS) as ws:
            message = await ws.receive_bytes()
            assert json.loads(message[1:])["offsets"] == [4, 0]
            assert await ws.receive_bytes() == struct.pack(">BQ", 1, 4) + b"two"
            assert json.loads((await ws.receive_bytes())[1:])["result"]["exit_code"] == 0

    serve(scenario)


def test_input_is_its_writers_who_comes_again(serve):
    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "cat")
        mine, hers, stdin = f"{path}?writer=mine", f"{path}?writer=hers", path.replace("attach", "stdin")

        async def give(query: str, data: bytes) -> int:
            async with s.http.post(f"{stdin}?{query}", data=data) as answer:
                return answer.status

        for began, at in ((b"one", 0), (b"onetwo", 0)):  # the second time it is not known what was taken
            async with s.http.ws_connect(mine, protocols=PROTOCOLS) as ws:
                client = Client(ws)
                await ws.send_bytes(piece(at, began))
                await client.until(lambda said=began, client=client: client.out[1] == said)
                assert client.told[0]["own"] == 0
        for other in (path, hers):  # one without a name, one with another
            async with s.http.ws_connect(other, protocols=PROTOCOLS) as ws:
                client = Client(ws)
                await client.until(lambda client=client: bool(client.told))
                assert client.told[0]["own"] == 6
                await ws.send_bytes(piece(3, b"two"))
                code, last = await client.end()
                assert (code, last["error"]["code"], last["error"]["detail"]["input_size"]) == (4409, "conflict", 6)
        async with s.http.ws_connect(mine, protocols=PROTOCOLS) as ws:
            client = Client(ws)
            await client.until(lambda: client.out[1] == b"onetwo")
            assert await give("offset=6&writer=hers", b"XY") == 200
            await ws.send_bytes(piece(6, b"three"))
            code, last = await client.end()
            assert (code, last["error"]["detail"]["input_size"]) == (4409, 8)
        async with s.http.ws_connect(hers, protocols=PROTOCOLS) as ws:
            client = Client(ws)
            await ws.send_bytes(piece(6, b"XYZ"))
            await client.until(lambda: client.out[1] == b"onetwoXYZ")
            assert client.told[0]["own"] == 6
        for query, wanted in {
            "offset=0&writer=mine": 409,
            "offset=8": 409,
            "offset=6&writer=hers": 200,
            "offset=9&writer=": 400,
            "offset=9&writer=a%20b": 400,
        }.items():
            assert await give(query, b"X") == wanted, query
        assert await refused(s, f"{path}?writer={'x' * 200}") == 400

    serve(scenario)


def test_signals_and_what_cannot_be_carried_out(serve):
    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "sleep", "1000")
        async with s.http.ws_connect(path, protocols=PROTOCOLS) as ws:
            client = Client(ws)
            await ws.send_bytes(control(resize={"rows": 3, "cols": 4}, key="r"))
            await client.until(lambda: "done" in client.told[-1:][0] if client.told else False)
            assert client.told[-1]["done"] == "r" and client.told[-1]["error"]["code"] == "invalid_state"
            await ws.send_bytes(control(signal=15, key="s"))
            code, last = await client.end()
            assert (code, last["result"]["signal"]) == (1000, 15)
            assert {"done": "s"} in client.told

    serve(scenario)


@pytest.mark.parametrize(
    ("message", "code", "error"),
    [
        (b"", 4400, "invalid_spec"),
        (b"\7x", 4400, "invalid_spec"),
        (b"\0\0", 4400, "invalid_spec"),
        (b"\3{", 4400, "invalid_spec"),
        (control(nonsense=1), 4400, "invalid_spec"),
        (control(resize={"rows": 0, "cols": 1}), 4400, "invalid_spec"),
        (control(signal=1000), 4400, "invalid_spec"),
        (control(eof=5), 4400, "invalid_spec"),
        (control(locate=True, key="a\0b"), 4400, "invalid_spec"),
        (piece(1, b"x"), 4400, "invalid_spec"),
        (piece(0, bytes(WINDOW_BYTES + 1)), 4400, "invalid_spec"),
        ("text", websocket.UNSUPPORTED_DATA, None),
        (bytes(socket.MESSAGE_MAX_BYTES + 1), websocket.TOO_BIG, None),
    ],
)
def test_what_is_not_allowed_ends_the_connection_with_its_reason(serve, message, code, error):
    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "cat")
        async with s.http.ws_connect(path, protocols=PROTOCOLS) as ws:
            client = Client(ws)
            await (ws.send_str(message) if isinstance(message, str) else ws.send_bytes(message))
            got, last = await client.end()
            assert got == code
            if error is not None:
                assert (last["error"]["code"], bool(last["error"]["request_id"])) == (error, True)
        # Nobody else is harmed, nor is the program.
        async with s.http.ws_connect(path, protocols=PROTOCOLS) as ws:
            client = Client(ws)
            await ws.send_bytes(piece(0, b"well"))
            await client.until(lambda: client.out[1] == b"well")

    serve(scenario)


async def refused(s: SimServer, path: str, **options: Any) -> int:
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await s.http.ws_connect(path, **{"protocols": PROTOCOLS, **options})
    return caught.value.status


def test_refusals_before_it_is_accepted_are_plain_http(serve, tmp_path):
    guard, key = auth.load_tokens(tmp_path / "tokens")

    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "cat")
        assert await refused(s, path, protocols=()) == 400
        assert await refused(s, path.replace("/p-", "/q-")) == 404
        assert await refused(s, path.replace("/a/", "/b/")) == 404
        assert await refused(s, f"{path}?stdout_offset=-1") == 400
        assert await refused(s, f"{path}?silence_s=1") == 400
        assert await refused(s, f"{path}?nonsense=1") == 400
        assert await refused(s, "/v1/health") == 400
        status, body = await s.call("GET", path)
        assert (status, body["code"]) == (426, "unsupported")
        url = f"http://127.0.0.1:{s.port}{path}"
        async with aiohttp.ClientSession() as http:
            for headers, wanted in (({}, 401), ({"Authorization": "Bearer wrong"}, 401)):
                with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                    await http.ws_connect(url, protocols=PROTOCOLS, headers=headers)
                assert caught.value.status == wanted
            async with http.ws_connect(url, protocols=PROTOCOLS, headers={"Authorization": f"Bearer {key}"}) as ws:
                assert (await ws.receive_bytes())[0] == 3

    serve(scenario, guard)


def handshake(path: str, **changes: str) -> bytes:
    headers = {
        "Host": "x",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(bytes(16)).decode(),
        "Sec-WebSocket-Protocol": "dsec.v1",
        **changes,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode()


def test_handshakes_that_are_none(serve):
    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "cat")
        got = await s.raw(handshake(path, **{"Sec-WebSocket-Version": "12"}))
        assert got.startswith(b"HTTP/1.1 426 ") and b"sec-websocket-version: 13\r\n" in got
        assert (await s.raw(handshake(path, **{"Sec-WebSocket-Key": "short"}))).startswith(b"HTTP/1.1 400 ")
        assert (await s.raw(handshake(path, **{"X-Long": "y" * 40_000}))).startswith(b"HTTP/1.1 400 ")
        # More than the handshake before it was answered; a handshake before the answer to what was asked before.
        assert (await s.raw(handshake(path) + b"\x82\x80")).startswith(b"HTTP/1.1 400 ")
        asked = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % path.replace("attach", "wait").encode()
        assert b"HTTP/1.1 400 " in await s.raw(asked + handshake(path))
        # What could be read as something else by whoever stands between.
        for name, value in (("Content-Length", "5"), ("Transfer-Encoding", "chunked")):
            assert (await s.raw(handshake(path, **{name: value}))).startswith(b"HTTP/1.1 400 ")
        # HTTP/1.0 has none, and a POST is none: what is asked is answered.
        older = handshake(path).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        assert (await s.raw(older)).startswith(b"HTTP/1.1 426 ")
        post = handshake(path).replace(b"GET", b"POST", 1)
        assert (await s.raw(post)).startswith(b"HTTP/1.1 405 ")
        assert (await s.call("GET", "/v1/health"))[0] == 200

    serve(scenario)


async def by_hand(s: SimServer, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection after its handshake, on which nobody reads but we."""
    reader, writer = await asyncio.open_unix_connection(str(s.path), limit=1024)
    writer.write(handshake(path))
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


def sockets(s: SimServer) -> list[socket.Socket]:
    return [found for found in s.connections() if isinstance(found, socket.Socket)]


def test_a_reader_that_does_not_read_holds_itself(serve):
    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "yes")
        _, slow = await by_hand(s, path)
        (held,) = sockets(s)
        await until(lambda: held._drained is not None)
        # It is sent no more than what the kernel and one buffer hold, however long it takes.
        waiting = held.transport.get_write_buffer_size()
        for _ in range(20):
            status, result = await s.call("POST", "/v1/sandboxes/a/run", {"command": ["true"]})
            assert (status, result["exit_code"]) == (200, 0)
        assert held.transport.get_write_buffer_size() == waiting < 1 << 20
        # What it asks for gets through meanwhile, also what is to be answered.
        for number in range(10):
            slow.write(websocket.masked(websocket.BINARY, control(locate=True, key=f"k{number}")))
        slow.write(websocket.masked(websocket.BINARY, control(signal=9, key="last")))
        await until(lambda: not s.node.core.boxes[s.node.core.names["a"]].programs)
        slow.close()
        await until(lambda: not sockets(s))

    serve(scenario)


def test_clients_that_vanish_leave_nothing(serve):
    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "cat")
        frame = websocket.masked(websocket.BINARY, piece(0, b"half of it"))
        for said in (b"", frame[:1], frame[:5], frame[:-3], frame[:-3]):
            _, writer = await by_hand(s, path)
            writer.write(said)
            writer.close()
            await until(lambda: not sockets(s))
        async with s.http.ws_connect(path, protocols=PROTOCOLS) as ws:
            client = Client(ws)
            await client.until(lambda: len(client.told) == 1)
            assert client.told[0]["input"] == {"size": 0}, "half a frame was taken"
        await until(lambda: not sockets(s))
        assert (await s.call("GET", path.removesuffix("/attach")))[1]["state"] == "running"

    serve(scenario)


def test_who_ends_its_side_without_a_word_is_told_so(serve):
    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "cat")
        frame = websocket.masked(websocket.BINARY, piece(0, b"half of it"))
        for said in (b"", frame[:5], frame):
            reader, writer = await by_hand(s, path)
            await reader.readuntil(b"}}")  # what it is told first
            writer.write(said)
            writer.write_eof()
            assert (1002).to_bytes(2, "big") + b"your side ended" in await reader.read()
            writer.close()
            await until(lambda: not sockets(s))

    serve(scenario)


def test_who_is_silent_is_asked_and_then_given_up(serve):
    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "cat")
        reader, writer = await by_hand(s, f"{path}?silence_s=100")
        (held,) = sockets(s)
        await reader.readuntil(b"}}")  # what it is told first
        now = asyncio.get_running_loop().time()
        assert not held.stalled(now + 50)
        assert await reader.readexactly(2) == websocket.head(websocket.PING, 0)
        before = held._heard_at = now - 10  # the loop's clock has milliseconds
        writer.write(websocket.masked(websocket.PONG, b""))
        await until(lambda: held._heard_at > before)
        now = held._heard_at
        assert not held.stalled(now + 99)
        assert not held._closing
        assert not held.stalled(now + 101)
        data = await reader.readuntil(b"either")
        assert socket.SILENT.to_bytes(2, "big") in data
        # It does not close either.
        assert held.stalled(now + 101 + socket.CLOSE_S + 1)

    serve(scenario)


def test_a_frame_that_does_not_end_is_cut_off(serve, monkeypatch):
    monkeypatch.setattr(socket, "FRAME_DEADLINE_S", 0.1)
    monkeypatch.setattr(server, "_SWEEP_S", 0.02)

    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "cat")
        reader, writer = await by_hand(s, path)
        writer.write(websocket.masked(websocket.BINARY, piece(0, b"never whole"))[:-1])
        async with asyncio.timeout(20):
            while await reader.read(1000):
                pass
        await until(lambda: not sockets(s))

    serve(scenario)


def test_an_agent_that_ends_says_so_and_the_result_is_not_lost_to_input(serve):
    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "cat")
        async with s.http.ws_connect(path, protocols=PROTOCOLS) as ws:
            client = Client(ws)
            await client.until(lambda: len(client.told) == 1)
            await asyncio.gather(*(listener.close() for listener in s.listeners), client.end())
            assert ws.close_code == websocket.RESTART

    serve(scenario)


def test_pings_of_one_who_does_not_read_are_not_heaped_up(serve):
    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "yes")
        _, writer = await by_hand(s, path)
        (held,) = sockets(s)
        await until(lambda: held._drained is not None)
        waiting = held.transport.get_write_buffer_size()
        before = held._heard_at = held._heard_at - 10
        writer.write(websocket.masked(websocket.PING, b"x" * 125) * 1000)
        await until(lambda: held._heard_at > before and not held._pending)
        assert held.transport.get_write_buffer_size() == waiting
        writer.close()

    serve(scenario)


def test_many_tiny_frames_are_taken_in_turns_with_everybody_else(serve):
    async def scenario(s: SimServer) -> None:
        path = await spawn(s, "cat")
        _, writer = await by_hand(s, path)
        (held,) = sockets(s)
        # An empty piece of a message that never ends, and pings: nothing of either is a whole message.
        begun, goes_on = bytes((websocket.BINARY, 0x80)) + bytes(4), bytes((0, 0x80)) + bytes(4)
        held.data_received(begun + goes_on * 500 + websocket.masked(websocket.PING, b"x") * 500)
        assert held._paused and held._messages.partial, "all of it was worked through at once"
        await until(lambda: not held._paused)
        writer.close()
        await until(lambda: not sockets(s))

    serve(scenario)


class Closed(asyncio.Transport):
    """As uvloop's, once its connection is gone."""

    def is_closing(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        raise RuntimeError("the handler is closed")


def test_who_leaves_within_the_handshake_is_no_failure_of_the_node():
    async def scenario() -> None:
        left = socket.Socket(Closed(), set())
        with pytest.raises(Vanished):
            left.accept(websocket.new_key(), b"dsec.v1", "r-1", lambda _: None)

    asyncio.run(scenario())


# What waits of the input.


def given(offset: int, data: bytes) -> attach.Input:
    made = attach.Input()
    made.begin(InputState(size=10), 8)
    made.take(offset, memoryview(data))
    return made


def test_an_end_that_comes_while_the_last_piece_is_handed_on_is_handed_on_too():
    made = given(10, b"abc")
    assert made.next(100) == (10, b"abc", False)
    assert made.end(13)
    assert made.taken(InputState(size=13), eof=False)
    assert made.waiting and not made.ended
    assert made.next(100) == (13, b"", True)
    assert made.taken(InputState(size=13), eof=True) and made.ended and not made.waiting
    assert not made.end(13), "an end that is asked for again has been"


def test_input_is_taken_once_and_within_its_window():
    made = given(8, b"..abc")
    assert made.next(2) == (10, b"ab", False)
    assert made.taken(InputState(size=12), eof=False)
    made.take(10, memoryview(b"abcd"))
    assert made.next(100) == (12, b"cd", False)
    with pytest.raises(InvalidSpec):
        made.take(15, memoryview(b"beyond"))
    with pytest.raises(InvalidSpec):
        made.take(14, memoryview(bytes(WINDOW_BYTES - 1)))
    with pytest.raises(Conflict):
        made.taken(InputState(size=20), eof=False)


def test_input_that_nobody_reads_is_passed_over():
    made = given(10, b"abc")
    assert made.taken(InputState(size=13, closed=True), eof=False)
    made.take(99, memoryview(b"more"))
    assert not made.waiting and not made.end(103)
