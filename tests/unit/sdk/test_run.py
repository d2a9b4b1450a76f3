"""Streaming, cancelling and checking runs; both clients."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

import pytest
from msgspec.structs import replace

import dsec
from tests.kit.scripted import Request, Server, Wire
from tests.unit.sdk.conftest import INFO, PATIENT, SANDBOX_ID, Kit, get, result

Serve = Callable[..., Server]


def stream_of(*items: dict[str, object]) -> Callable[[Request, Wire], None]:
    def script(request: Request, wire: Wire) -> None:
        wire.stream()
        for item in items:
            wire.item(item)
        wire.end()

    return script


def data(stream: int, offset: int, text: bytes) -> dict[str, object]:
    return {"stream": stream, "offset": offset, "data": text}


def test_output_comes_in_order_and_the_connection_is_kept(kit: Kit, serve: Serve) -> None:
    server = serve(
        stream_of({"started": "p-1"}, {}, data(1, 0, b"ab"), data(2, 0, b"!"), data(1, 2, b"c"), {"result": result(0)})
    )
    got: list[tuple[int, bytes]] = []

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        for _ in range(2):
            got.clear()
            await get(sbx.run("x", on_output=lambda stream, piece: got.append((stream, piece))))

    kit.run(body())
    assert got == [(1, b"ab"), (2, b"!"), (1, b"c")]
    assert server.connections == 1


def test_cut_stream_goes_on_where_it_was_without_a_byte_twice(kit: Kit, serve: Serve) -> None:
    def script(request: Request, wire: Wire) -> None:
        wire.stream()
        if len(server.requests) == 1:
            wire.item(data(1, 0, b"hello "))
            wire.item(data(2, 0, b"E"))
            wire.drop()
        # It starts a little earlier than it was asked to.
        wire.item(data(1, 4, b"o world"))
        wire.item({"result": result(0)})
        wire.end()

    server = serve(script)
    got = {1: b"", 2: b""}

    def on_output(stream: int, piece: bytes) -> None:
        got[stream] += piece

    async def body() -> None:
        await get(kit.sandbox(server.url).run("x", on_output=on_output))

    kit.run(body())
    assert got == {1: b"hello world", 2: b"E"}
    first, second = server.requests
    assert first.key == second.key
    assert second.path.endswith("&stdout_offset=6&stderr_offset=1")


def kill_server(serve: Serve, *, started: bool = True) -> tuple[Server, threading.Event]:
    arrived = threading.Event()

    def script(request: Request, wire: Wire) -> None:
        if request.path.endswith("/kill"):
            wire.answer({})
        elif "stream=1" in request.path:
            wire.stream()
            wire.item({"started": "p-42"})
            wire.item(data(1, 0, b"out"))
            wire.hang()
        else:
            arrived.set()
            wire.hang()

    return serve(script), arrived


def kills(server: Server) -> list[str]:
    return [request.path for request in server.requests if request.path.endswith("/kill")]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_node_that_stays_away_during_a_run_is_told_with_the_way_to_its_result(
    kit: Kit, serve: Serve, streaming: bool
) -> None:
    def script(request: Request, wire: Wire) -> None:
        if streaming and "idempotency-key" in request.headers:
            wire.stream()
            wire.item({"started": "p-1"})
        if request.method == "GET":
            wire.answer(INFO)
        else:
            wire.drop()

    server = serve(script)

    async def body() -> None:
        sbx = kit.sandbox(server.url, replace(PATIENT, lived_s=1e9, reconnect_s=0.3))
        await get(sbx.info())
        with pytest.raises(dsec.NodeUnreachable) as caught:
            await get(sbx.run("x", on_output=(lambda *_: None) if streaming else None))
        key = server.requests[-1].headers["idempotency-key"]
        assert caught.value.detail["idempotency_key"] == key
        [note] = caught.value.__notes__
        assert note.startswith("the program was started and goes on" if streaming else "if the call arrived")
        assert f"dsec inspect {SANDBOX_ID}" in note and key in note

    kit.run(body())


def test_a_node_that_was_never_there_has_started_nothing(kit: Kit) -> None:
    async def body() -> None:
        with pytest.raises(dsec.NodeUnreachable) as caught:
            await get(kit.sandbox("unix:///nowhere/at/all").run("x"))
        assert not hasattr(caught.value, "__notes__")

    kit.run(body())


def test_exception_of_on_output_kills_and_is_raised(kit: Kit, serve: Serve) -> None:
    server, _ = kill_server(serve)

    def on_output(stream: int, piece: bytes) -> None:
        raise KeyError("mine")

    async def body() -> None:
        with pytest.raises(KeyError, match="mine"):
            await get(kit.sandbox(server.url).run("x", on_output=on_output))

    kit.run(body())
    assert kills(server) == ["/v1/sandboxes/sbx-n1-aaaaaaaaaaaaa/processes/p-42/kill"]


def test_cancelled_task_kills_a_buffered_run(serve: Serve) -> None:
    server, arrived = kill_server(serve)
    kit = Kit("async")

    async def body() -> None:
        task = asyncio.create_task(kit.sandbox(server.url).run("x"))
        await asyncio.to_thread(arrived.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    kit.run(body())
    assert len(kills(server)) == 1
    assert len({request.key for request in server.requests if "/run" in request.path}) == 1


def test_keyboard_interrupt_kills(serve: Serve) -> None:
    server, arrived = kill_server(serve)

    def interrupt() -> None:
        arrived.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        Kit("sync").sandbox(server.url).run("x")
    thread.join()
    assert len(kills(server)) == 1


def test_failed_kill_is_added_to_the_callers_error(kit: Kit, serve: Serve) -> None:
    def script(request: Request, wire: Wire) -> None:
        if request.path.endswith("/kill"):
            wire.error("internal", "broken", 500)
        else:
            wire.stream()
            wire.item({"started": "p-1"})
            wire.item(data(1, 0, b"x"))
            wire.hang()

    server = serve(script)

    def on_output(stream: int, piece: bytes) -> None:
        raise KeyError("mine")

    async def body() -> None:
        with pytest.raises(KeyError) as caught:
            await get(kit.sandbox(server.url).run("x", on_output=on_output))
        assert "may still be running" in caught.value.__notes__[0]

    kit.run(body())


def test_error_of_the_server_in_a_stream_does_not_kill(kit: Kit, serve: Serve) -> None:
    server = serve(stream_of({"error": {"code": "sandbox_lost", "message": "gone"}}))

    async def body() -> None:
        with pytest.raises(dsec.SandboxLost):
            await get(kit.sandbox(server.url).run("x", on_output=lambda stream, piece: None))

    kit.run(body())
    assert len(server.requests) == 1


def test_coroutine_callbacks(serve: Serve) -> None:
    server = serve(stream_of(data(1, 0, b"ab"), {"result": result(0)}))
    got: list[bytes] = []

    async def on_output(stream: int, piece: bytes) -> None:
        await asyncio.sleep(0)
        got.append(piece)

    async def body() -> None:
        await Kit("async").sandbox(server.url).run("x", on_output=on_output)

    asyncio.run(body())
    assert got == [b"ab"]
    server = serve(
        lambda request, wire: (
            wire.answer({})
            if request.path.endswith("/kill")
            else stream_of({"started": "p"}, data(1, 0, b"ab"), {"result": result(0)})(request, wire)
        )
    )
    with pytest.raises(TypeError, match="AsyncClient"):
        Kit("sync").sandbox(server.url).run("x", on_output=on_output)


def test_slow_callback_is_back_pressure(kit: Kit, serve: Serve) -> None:
    """The server cannot get far ahead of a callback that waits: nobody buffers a stream whole."""
    sent = 0
    go_on = threading.Event()
    piece = b"x" * 65536
    pieces = 400

    def script(request: Request, wire: Wire) -> None:
        nonlocal sent
        wire.stream()
        for i in range(pieces):
            wire.item(data(1, i * len(piece), piece))
            sent += 1
        wire.item({"result": result(0)})
        wire.end()

    server = serve(script)
    seen = 0

    def on_output(stream: int, got: bytes) -> None:
        nonlocal seen
        seen += len(got)
        if seen == len(got):
            # Wait until the server is stuck: its count stands still.
            before = -1
            while before != sent:
                before = sent
                go_on.wait(0.2)
            assert sent < pieces

    async def body() -> None:
        await get(kit.sandbox(server.url).run("yes", on_output=on_output))

    kit.run(body())
    assert seen == pieces * len(piece)


def test_check_raises_with_result_and_last_words(kit: Kit, serve: Serve) -> None:
    failed = result(
        2, err={"head": b"Traceback\nValueError: nope\n", "total": 27}, limits_hit=["memory"], duration_s=1.5
    )
    server = serve(lambda request, wire: wire.answer(failed))

    async def body() -> None:
        with pytest.raises(dsec.CommandFailed) as caught:
            await get(kit.sandbox(server.url).run(["pytest", "-q"], check=True))
        error = caught.value
        assert error.result.exit_code == 2
        assert str(error) == (
            "the command ended by exit code 2 after 1.50 s: pytest -q\nlimits hit: memory\n"
            "end of stderr:\nTraceback\nValueError: nope"
        )

    kit.run(body())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_key_of_the_callers_is_sent_with_every_try(kit: Kit, serve: Serve, streaming: bool) -> None:
    def script(request: Request, wire: Wire) -> None:
        if len(server.requests) == 1:
            # Heard of, so that the client waits for it.
            wire.answer(INFO)
        elif len(server.requests) == 2:
            wire.drop()
        elif streaming:
            stream_of({"started": "p-1"}, {"result": result(0)})(request, wire)
        else:
            wire.answer(result(0))

    server = serve(script)

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        await get(sbx.info())
        assert (await get(sbx.run("x", key="test-1", on_output=(lambda *_: None) if streaming else None))).ok

    kit.run(body())
    assert [request.key for request in server.requests] == [None, "test-1", "test-1"]


def test_without_a_key_each_run_has_its_own(kit: Kit, serve: Serve) -> None:
    server = serve(lambda request, wire: wire.answer(result(0)))

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        for _ in range(2):
            await get(sbx.run("x"))

    kit.run(body())
    first, second = (request.key for request in server.requests)
    assert first and second and first != second


def test_commands_and_input_cross_exactly(kit: Kit, serve: Serve) -> None:
    server = serve(lambda request, wire: wire.answer(result(0)))

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        await get(sbx.run("a; b", stdin="ü", env={"A": "1"}, cwd="/x", user="1000", timeout_s=3))
        await get(sbx.run(["a", "b c"]))
        await get(sbx.run(["a", b"\xff"], stdin=bytearray(b"\0")))
        await get(sbx.run("echo \udcff"))

    kit.run(body())
    a, b, c, d = (request.value() for request in server.requests)
    assert a == {
        "command": "a; b",
        "stdin": "ü".encode(),
        "env": {"A": "1"},
        "cwd": "/x",
        "user": "1000",
        "timeout_s": 3,
    }
    assert b == {"command": ["a", "b c"]}
    assert c == {"argv": [b"a", b"\xff"], "stdin": b"\0"}
    assert d == {"argv": [b"/bin/sh", b"-c", b"echo \xff"]}


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("command", {"command": []}),
        ("command", {"command": ["a\0b"]}),
        ("command", {"command": 7}),
        ("command", {"command": b"ls"}),
        ("command", {"command": ["ls", 7]}),
        ("command", {"command": "x" * 200_000}),
        ("cwd", {"command": "x", "cwd": "relative"}),
        ("cwd", {"command": "x", "cwd": 3}),
        ("user", {"command": "x", "user": "a b"}),
        ("env", {"command": "x", "env": {"A=B": "1"}}),
        ("env", {"command": "x", "env": {"A": 1}}),
        ("stdin", {"command": "x", "stdin": 5}),
        ("timeout_s", {"command": "x", "timeout_s": 0}),
        ("timeout_s", {"command": "x", "timeout_s": "9"}),
        ("timeout_s", {"command": "x", "timeout_s": float("nan")}),
        ("key", {"command": "x", "key": ""}),
        ("key", {"command": "x", "key": "two words"}),
        ("key", {"command": "x", "key": "k" * 129}),
        ("key", {"command": "x", "key": 7}),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(
    kit: Kit, serve: Serve, field: str, arguments: dict[str, object]
) -> None:
    server = serve(lambda request, wire: wire.answer(result(0)))

    async def body() -> None:
        with pytest.raises(dsec.InvalidSpec) as caught:
            await get(kit.sandbox(server.url).run(**arguments))
        assert caught.value.detail["field"] == field

    kit.run(body())
    assert server.requests == []
