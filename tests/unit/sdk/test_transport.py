"""What can happen between a client and a server: breaks, silence, garbage, slowness; both clients."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest
from msgspec.structs import replace

import dsec
from dsec.model import limits
from dsec.sdk.options import tls_context
from tests.kit.scripted import Request, Server, Wire
from tests.unit.sdk.conftest import HASTY, INFO, PATIENT, Kit, get, result

Serve = Callable[..., Server]


def health_is_fine(request: Request, wire: Wire) -> bool:
    if request.path == "/v1/health":
        wire.answer({"status": "ok"})
        return True
    return False


def test_one_connection_serves_many_calls(kit: Kit, serve: Serve) -> None:
    server = serve(lambda request, wire: wire.answer(result(3, b"hi")))

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        for _ in range(5):
            got = await get(sbx.run("exit 3"))
            assert (got.exit_code, got.stdout, got.ok) == (3, "hi", False)

    kit.run(body())
    assert server.connections == 1
    assert len({request.key for request in server.requests}) == 5


def test_no_server_fails_at_once_and_says_what_to_do(kit: Kit, tmp_path: object) -> None:
    client = kit.client(f"unix://{tmp_path}/none.sock", timing=replace(PATIENT, reconnect_s=3600.0))
    with pytest.raises(dsec.NodeUnreachable, match=r"dsec up") as caught:
        kit.run(get_in_loop(client))
    assert isinstance(caught.value, ConnectionError)


def test_a_socket_that_is_not_ours_to_use_is_said_to_be_so(
    kit: Kit, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may connect to every socket, so it is the kernel's answer that is made up.
    def denied(sock: socket.socket, where: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", denied)
    with pytest.raises(dsec.NodeUnreachable, match=r"root, only: sudo") as caught:
        kit.run(get_in_loop(kit.client(f"unix://{tmp_path}/roots.sock")))
    assert "dsec up" not in str(caught.value)


def test_a_file_of_certificates_that_is_not_there_is_an_error(
    kit: Kit, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", f"{tmp_path}/none.pem")
    tls_context.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = kit.client(f"https://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(dsec.InvalidSpec, match=r"SSL_CERT_FILE=.*none\.pem.*No such file"):
            kit.run(get_in_loop(client))


def test_plain_http_to_a_server_that_wants_tls_is_told_so(kit: Kit) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            while True:
                try:
                    with listening.accept()[0] as conn:
                        conn.recv(65_536)  # else the close would be a reset
                except OSError:
                    return

        thread = threading.Thread(target=hang_up)
        thread.start()
        client = kit.client(f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(dsec.NodeUnreachable, match="https://"):
            kit.run(get_in_loop(client))
        listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        thread.join()


async def get_in_loop(client: object) -> object:
    return await get(client.node())  # type: ignore[attr-defined] # either kind of client


@pytest.mark.parametrize("cut", ["before", "head", "body"])
def test_broken_connection_repeats_the_same_key_and_body(kit: Kit, serve: Serve, cut: str) -> None:
    runs: list[Request] = []

    def script(request: Request, wire: Wire) -> None:
        if request.method == "GET":
            wire.answer(INFO)
            return
        runs.append(request)
        if len(runs) <= 3:
            if cut == "head":
                wire.raw(b"HTTP/1.1 200 OK\r\nContent-Le")
            if cut == "body":
                wire.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
            wire.drop()
        wire.answer(result(0, b"once"))

    server = serve(script)

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        await get(sbx.info())
        assert (await get(sbx.run("x", stdin="in"))).stdout == "once"

    kit.run(body())
    assert len(runs) == 4
    assert len({(run.key, run.body) for run in runs}) == 1


def test_restarting_server_is_waited_for(kit: Kit, serve: Serve) -> None:
    arrived = threading.Event()
    again = threading.Event()

    def script(request: Request, wire: Wire) -> None:
        if request.method == "GET":
            wire.answer(INFO)
        elif again.is_set():
            wire.answer(result(7))
        else:
            arrived.set()
            wire.hang()

    server = serve(script)

    def restart() -> None:
        arrived.wait()
        again.set()
        server.away()
        threading.Event().wait(0.2)
        server.back()

    thread = threading.Thread(target=restart)
    thread.start()

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        await get(sbx.info())
        assert (await get(sbx.run("x"))).exit_code == 7

    kit.run(body())
    thread.join()


def test_staying_away_is_unreachable_within_bounded_time(kit: Kit, serve: Serve) -> None:
    server = serve(lambda request, wire: wire.answer(INFO) if request.method == "GET" else wire.drop())

    async def body() -> None:
        sbx = kit.sandbox(server.url, replace(PATIENT, reconnect_s=0.3))
        await get(sbx.info())
        with pytest.raises(dsec.NodeUnreachable):
            await get(sbx.run("x"))

    kit.run(body())


def test_silent_server_is_found_out(kit: Kit, serve: Serve) -> None:
    server = serve(lambda request, wire: wire.hang())

    async def body() -> None:
        with pytest.raises(dsec.NodeUnreachable, match="does not answer"):
            await get(kit.sandbox(server.url, replace(HASTY, health_s=0.3)).run("sleep 9999"))

    kit.run(body())
    assert [request.path for request in server.requests].count("/v1/health") == 1


def test_long_quiet_run_is_waited_for_while_health_answers(kit: Kit, serve: Serve) -> None:
    """Longer than every patience: no time of ours ends a program that runs."""
    asked: list[str] = []
    enough = threading.Event()

    def script(request: Request, wire: Wire) -> None:
        asked.append(request.path)
        if asked.count("/v1/health") >= 3:
            enough.set()
        if not health_is_fine(request, wire):
            enough.wait()
            wire.answer(result(0, b"late"))

    server = serve(script)

    async def body() -> None:
        sbx = kit.sandbox(server.url, replace(HASTY, reask_s=3600.0))
        assert (await get(sbx.run("sleep 9999"))).stdout == "late"

    kit.run(body())
    assert sum(path.endswith("/run") for path in asked) == 1


def test_one_lost_connection_is_asked_again_under_its_key(kit: Kit, serve: Serve) -> None:
    """Half-open: the server is well and answers others, this one connection leads nowhere."""
    runs: list[Request] = []

    def script(request: Request, wire: Wire) -> None:
        if health_is_fine(request, wire):
            return
        runs.append(request)
        if len(runs) == 1:
            wire.hang()
        else:
            wire.answer(result(0, b"found"))

    server = serve(script)

    async def body() -> None:
        assert (await get(kit.sandbox(server.url, HASTY).run("x"))).stdout == "found"

    kit.run(body())
    assert len(runs) >= 2
    assert len({run.key for run in runs}) == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n\xc1\xc1\xc1\xc1",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\n<html>404",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
    ],
)
def test_garbage_is_typed_and_not_repeated(kit: Kit, serve: Serve, garbage: bytes) -> None:
    def script(request: Request, wire: Wire) -> None:
        wire.raw(garbage)
        wire.hang()

    server = serve(script)

    async def body() -> None:
        with pytest.raises(dsec.NodeUnreachable, match="not a dsec server"):
            await get(kit.sandbox(server.url).run("x"))

    kit.run(body())
    assert len(server.requests) == 1


def test_proxy_without_its_server_is_a_break(kit: Kit, serve: Serve) -> None:
    times = []

    def script(request: Request, wire: Wire) -> None:
        times.append(1)
        if len(times) < 3:
            wire.answer(b"<html>502 Bad Gateway</html>", 502, "text/html")
        else:
            wire.answer(INFO)

    server = serve(script)

    async def body() -> None:
        assert (await get(kit.sandbox(server.url).info())).state == "running"

    kit.run(body())


def test_errors_keep_code_detail_and_request_id(kit: Kit, serve: Serve) -> None:
    def script(request: Request, wire: Wire) -> None:
        body = {"code": "node_full", "message": "no memory", "detail": {"resource": "memory"}, "retry": "later"}
        wire.answer(body, 503, extra="X-Request-Id: r-77\r\n")

    server = serve(script)

    async def body() -> None:
        with pytest.raises(dsec.NodeFull, match="no memory") as caught:
            await get(kit.sandbox(server.url).info())
        error = caught.value
        assert (error.retry, error.request_id, error.detail) == ("later", "r-77", {"resource": "memory"})

    kit.run(body())
    assert len(server.requests) == 1


def test_closed_idle_connection_is_replaced_without_an_error(kit: Kit, serve: Serve) -> None:
    def script(request: Request, wire: Wire) -> None:
        wire.answer(INFO)
        wire.drop()

    server = serve(script)

    async def body() -> None:
        sbx = kit.sandbox(server.url, replace(PATIENT, reconnect_s=0.0))
        for _ in range(3):
            await get(sbx.info())

    kit.run(body())


def test_connection_close_and_answers_without_length(kit: Kit, serve: Serve) -> None:
    import msgspec

    def script(request: Request, wire: Wire) -> None:
        wire.raw(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for byte in msgspec.msgpack.encode(INFO):
            wire.raw(bytes([byte]))
        wire.drop()

    server = serve(script)

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        assert (await get(sbx.info())).id == (await get(sbx.info())).id

    kit.run(body())


def test_key_goes_in_the_header_and_the_url_may_have_a_prefix(kit: Kit, serve: Serve) -> None:
    server = serve(
        lambda request, wire: wire.answer({"node": "n1", "version": "1", "started_at": 0, "sandboxes": 0}), tcp=True
    )

    async def body() -> None:
        await get(kit.client(f"{server.url}/team", api_key="s3cret").node())

    kit.run(body())
    assert server.requests[0].path == "/team/v1/node"
    assert server.requests[0].headers["authorization"] == "Bearer s3cret"


def test_a_server_that_does_not_read_is_found_out(kit: Kit, serve: Serve) -> None:
    import socket

    listener = socket.socket(socket.AF_UNIX)
    server = serve(lambda request, wire: None)
    server.away()
    listener.bind(str(server.path))
    listener.listen()

    async def body() -> None:
        sbx = kit.sandbox(server.url, replace(HASTY, health_s=0.3))
        with pytest.raises(dsec.NodeUnreachable):
            await get(sbx.run("cat", stdin=b"x" * limits.STDIN_MAX_BYTES))

    kit.run(body())
    listener.close()
