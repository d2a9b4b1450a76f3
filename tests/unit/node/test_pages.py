"""Requests of web pages, and requests with a wish for another protocol, against a server that really listens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import uvloop

from dsec.node.http import auth
from tests.kit.simserver import ORIGIN, SimServer

Scenario = Callable[[SimServer, str], Awaitable[None]]
FOREIGN = ("https://evil.example", "http://127.0.0.1:8080", "null", "", f"{ORIGIN}.evil.example", ORIGIN.rstrip("43"))


@pytest.fixture
def serve(tmp_path: Path) -> Callable[[Scenario], None]:
    guard, key = auth.load_tokens(tmp_path / "tokens")

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            async with SimServer(tmp_path, guard) as s:
                status, _ = await s.call("POST", "/v1/sandboxes", {"name": "a"})
                assert status == 201
                await scenario(s, str(key))

        uvloop.run(main())

    return run


def test_no_page_is_answered_but_ours(serve):
    async def scenario(s: SimServer, key: str) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as tcp:
            for http, base in ((s.http, ""), (tcp, f"http://127.0.0.1:{s.port}")):
                # Also what is open to everybody, and what is not there.
                for method, path in (("GET", "/v1/health"), ("POST", "/v1/sandboxes/a/run"), ("GET", "/v1/none")):
                    for origin in FOREIGN:
                        headers = {"Origin": origin}
                        async with http.request(method, base + path, headers=headers, data=b"{}") as answer:
                            body = await answer.json()
                        assert (answer.status, body["code"], body["detail"]["header"]) == (403, "denied", "Origin")
                        assert not any(name.lower().startswith("access-control") for name in answer.headers)
                for origin in (ORIGIN, ORIGIN.upper()):
                    async with http.get(f"{base}/v1/sandboxes", headers={"Origin": origin}) as answer:
                        assert answer.status == 200
        # It is no key.
        async with aiohttp.ClientSession() as tcp:
            url = f"http://127.0.0.1:{s.port}/v1/sandboxes"
            async with tcp.get(url, headers={"Origin": ORIGIN}) as answer:
                assert answer.status == 401

    serve(scenario)


def test_what_names_somebody_stands_in_the_head_and_once(serve):
    async def raw(s: SimServer, head: bytes, body: bytes = b"") -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(head + b"\r\n\r\n" + body)
        await writer.drain()
        answer = await reader.readuntil(b"\r\n")
        writer.close()
        return answer

    async def scenario(s: SimServer, key: str) -> None:
        get, post = b"GET /v1/sandboxes HTTP/1.1", b"POST /v1/sandboxes HTTP/1.1"
        host, who = b"\r\nHost: localhost", b"\r\nAuthorization: Bearer " + key.encode()
        assert b" 200 " in await raw(s, get + host + who)
        for twice in (b"\r\nHOST: localhost", b"\r\nHost: evil", who):
            assert b" 400 " in await raw(s, get + host + who + twice)
        assert b" 400 " in await raw(s, get + host + who + b"\r\nOrigin: null" * 2)
        # Trailers say nothing of that.
        chunked = b"\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json"
        name = b'{"name": "t"}'
        body = b"%x\r\n%b\r\n0\r\n" % (len(name), name)
        assert b" 403 " in await raw(s, post + b"\r\nHost: evil" + who + chunked, body + host[2:] + b"\r\n\r\n")
        assert b" 401 " in await raw(s, post + host + chunked, body + who[2:] + b"\r\n\r\n")
        assert b" 201 " in await raw(s, post + host + who + chunked, body + b"Origin: http://evil\r\n\r\n")
        # However it comes, also in one piece.
        assert b" 400 " in await raw(s, get + host + who + b"\r\nX: " + b"x" * 40_000)

    serve(scenario)


def test_no_page_has_a_websocket_but_ours(serve):
    async def scenario(s: SimServer, key: str) -> None:
        status, program = await s.call("POST", "/v1/sandboxes/a/processes", {"command": ["cat"]})
        assert status == 201
        path = f"/v1/sandboxes/a/processes/{program['id']}/attach"
        for origin in FOREIGN:
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await s.http.ws_connect(path, protocols=("dsec.v1",), headers={"Origin": origin})
            assert caught.value.status == 403
        async with s.http.ws_connect(path, protocols=("dsec.v1",), headers={"Origin": ORIGIN}) as ws:
            assert (await ws.receive_bytes())[0] == 3
        async with s.http.ws_connect(path, protocols=("dsec.v1",)) as ws:
            assert (await ws.receive_bytes())[0] == 3

    serve(scenario)


def test_a_name_that_points_here_is_not_ours(serve):
    async def scenario(s: SimServer, key: str) -> None:
        url = f"http://127.0.0.1:{s.port}/v1/sandboxes"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
            for host, wanted in (
                ("evil.example", 403),
                (f"evil.example:{s.port}", 403),
                ("localhost.evil.example", 403),
                ("127.0.0.1.evil.example", 403),
                ("evil.example:8443", 403),
                ("ui.example", 403),
                ("", 403),
                ("ui.example:8443", 200),  # a proxy that serves what is ours
                ("localhost", 200),
                (f"LocalHost:{s.port}", 200),
                ("127.0.0.1", 200),
                ("127.8.8.8:1", 200),
                ("[::1]:7700", 200),
                ("[::1]", 200),
            ):
                async with http.get(url, headers={"Host": host}) as answer:
                    assert answer.status == wanted, host
                    if wanted != 200:
                        assert (await answer.json())["detail"]["header"] == "Host"
        # The name of a Unix socket is nobody's.
        async with s.http.get("/v1/sandboxes", headers={"Host": "anything.example"}) as answer:
            assert answer.status == 200

    serve(scenario)


@pytest.mark.parametrize("wish", ["h2c", "websocket", "nonsense"])
def test_a_wish_for_another_protocol_is_passed_over(serve, wish):
    async def scenario(s: SimServer, key: str) -> None:
        extra = f"Connection: Upgrade\r\nUpgrade: {wish}\r\n"
        body = json.dumps({"command": ["echo", "done"]})
        head = f"POST /v1/sandboxes/a/run HTTP/1.1\r\nHost: localhost\r\n{extra}"
        # What comes behind it is no request: whoever stands between may have taken it for the other protocol.
        behind = b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
        chunked = f"Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n"
        for rest in (f"Content-Length: {len(body)}\r\n\r\n{body}", chunked):
            got = await s.raw(head.encode() + rest.encode() + behind, until_closed=False)
            assert got.startswith(b"HTTP/1.1 200 ") and b"connection: close\r\n" in got
            assert got.count(b"HTTP/1.1 ") == 1
        assert (await s.call("GET", "/v1/sandboxes"))[1]["items"][1:] == []

    serve(scenario)


def test_a_wish_without_a_body_and_one_that_comes_in_pieces(serve):
    async def scenario(s: SimServer, key: str) -> None:
        got = await s.raw(
            b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n\r\n"
        )
        assert got.startswith(b"HTTP/1.1 200 ") and b"connection: close\r\n" in got
        body = json.dumps({"command": ["echo", "done"]}).encode()
        reader, writer = await asyncio.open_unix_connection(str(s.path))
        whole = (
            b"POST /v1/sandboxes/a/run HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        for at in range(len(whole)):
            writer.write(whole[at : at + 1])
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            got = await reader.read()
        assert got.startswith(b"HTTP/1.1 200 ") and got.count(b"HTTP/1.1 ") == 1
        writer.close()

    serve(scenario)
