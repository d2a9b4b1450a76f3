"""Programs that are talked to, and sessions; both clients."""

from __future__ import annotations

import asyncio
import enum
import os
import pickle
import signal
import threading
from collections.abc import Callable

import pytest
from msgspec.structs import replace

import dsec
from tests.kit.scripted import Request, Server, Wire
from tests.kit.scripted_program import ScriptedProgram
from tests.unit.sdk.conftest import PATIENT, SANDBOX_ID, Kit, collect, get, result

Serve = Callable[..., Server]
OUT = bytes(range(256))
ERR = b"errors"


def test_spawn_sends_what_was_asked(kit: Kit, serve: Serve) -> None:
    server = serve(ScriptedProgram())

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        process = await get(
            sbx.spawn(["cat", b"\xff"], cwd="/srv", env={"A": "b"}, user="nobody", tty=(40, 120), key="mine")
        )
        assert process.id == "p-1"
        await get(sbx.spawn("x", stdin=False, keepalive=False, timeout_s=3))
        again = pickle.loads(pickle.dumps(process))
        assert (again.id, type(again)) == (process.id, type(process))

    kit.run(body())
    first, second = server.requests
    assert (first.method, first.path, first.key) == ("POST", f"/v1/sandboxes/{SANDBOX_ID}/processes", "mine")
    assert first.value() == {
        "argv": [b"cat", b"\xff"],
        "cwd": "/srv",
        "env": {"A": "b"},
        "user": "nobody",
        "tty": {"rows": 40, "cols": 120},
    }
    assert second.value() == {"command": "x", "stdin": False, "keepalive": False, "timeout_s": 3}
    assert second.key not in (None, "mine")


def test_what_cannot_be_is_refused_before_anything_is_sent(kit: Kit, serve: Serve) -> None:
    server = serve(ScriptedProgram())

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        for field, call in {
            "tty": {"tty": (1, 2, 3)},
            "rows": {"tty": (0, 80)},
            "cols": {"tty": (24, "80")},
            "stdin": {"stdin": b"text"},
            "keepalive": {"keepalive": None},
            "env": {"env": {"A": 1}},
            "key": {"key": ""},
        }.items():
            with pytest.raises(dsec.InvalidSpec) as caught:
                await get(sbx.spawn("x", **call))
            assert caught.value.detail["field"] == field
        with pytest.raises(dsec.InvalidSpec, match="terminal has an input"):
            await get(sbx.spawn("x", tty=True, stdin=False))
        with pytest.raises(dsec.InvalidSpec):
            await get(sbx.process("p-1").resize(24, 5000))
        with pytest.raises(dsec.InvalidSpec):
            await get(sbx.process("p-1").stdin.write(7))
        with pytest.raises(dsec.InvalidSpec):
            await get(sbx.session(cwd="relative"))

    kit.run(body())
    assert not server.requests


def test_output_comes_whole_whatever_breaks(kit: Kit, serve: Serve) -> None:
    server = serve(ScriptedProgram(out={1: OUT, 2: ERR}, result=result(3), cut_output=frozenset({1, 2, 3, 5, 6})))

    async def body() -> None:
        process = kit.sandbox(server.url).process("p-1")
        assert b"".join(await collect(process.stdout)) == OUT
        assert b"".join(await collect(process.stderr)) == ERR
        follow = process.follow()
        pieces = await collect(follow)
        assert b"".join(data for stream, data in pieces if stream == 1) == OUT
        assert b"".join(data for stream, data in pieces if stream == 2) == ERR
        assert (follow.result.exit_code, follow.dropped) == (3, {1: 0, 2: 0})

    kit.run(body())
    assert len(server.requests) >= 8


async def begin(reader: object, count: int) -> bytes:
    """So many pieces of either kind of iterator."""
    if hasattr(reader, "__anext__"):
        return b"".join([await anext(reader) for _ in range(count)])  # type: ignore[call-overload]  # checked above
    return b"".join([next(reader) for _ in range(count)])  # type: ignore[call-overload]  # the blocking kind


def test_each_reader_is_its_own_and_goes_on_where_it_was(kit: Kit, serve: Serve) -> None:
    server = serve(ScriptedProgram(out={1: OUT, 2: b""}, result=result()))

    async def body() -> None:
        process = kit.sandbox(server.url).process("p-1")
        first, second = process.stdout.follow(), process.stdout.follow(offset=250)
        start = await begin(first, 2)
        assert (len(start), first.offset) == (14, 14)
        assert b"".join(await collect(second)) == OUT[250:]
        assert start + b"".join(await collect(first)) == OUT
        assert await collect(first) == []

    kit.run(body())
    assert server.connections == 2


def test_what_is_not_kept_any_more_is_counted(kit: Kit, serve: Serve) -> None:
    ended = result() | {"out": {"head": OUT[:4], "total": 260}}
    server = serve(ScriptedProgram(out={1: OUT, 2: b""}, kept_from={1: 100, 2: 0}, result=ended))

    async def body() -> None:
        process = kit.sandbox(server.url).process("p-1")
        reader = process.stdout.follow()
        assert b"".join(await collect(reader)) == OUT[100:]
        assert (reader.dropped, reader.offset) == (104, 260)
        assert await get(process.output()) == OUT[100:]
        assert await get(process.output(200)) == OUT[200:]
        assert await get(process.output(stream=2)) == b""

    kit.run(body())


def test_who_follows_is_told_of_a_lost_connection(kit: Kit, serve: Serve) -> None:
    server = serve(ScriptedProgram(out={1: OUT, 2: b""}, result=result(), cut_output=frozenset({1, 2})))
    told: list[bool] = []

    async def body() -> None:
        await collect(kit.sandbox(server.url).process("p-1").follow(on_broken=told.append))

    kit.run(body())
    assert told == [True, False, True, False]


def test_breaks_between_which_something_came_have_all_tries_each(kit: Kit, serve: Serve) -> None:
    """Together they take longer than a connection may be away."""
    server = serve(ScriptedProgram(out={1: OUT, 2: b""}, result=result(), cut_output=frozenset(range(1, 8))))

    async def body() -> None:
        timing = replace(PATIENT, reconnect_s=0.3, lived_s=1e9, backoff_first_s=0.2, backoff_max_s=0.2)
        assert b"".join(await collect(kit.sandbox(server.url, timing).process("p-1").stdout)) == OUT

    kit.run(body())


def test_what_was_known_already_is_no_progress(kit: Kit, serve: Serve) -> None:
    """A server that sends the same again and breaks off is not tried for ever."""
    # Two bytes a piece, of which the first two of each connection are those from before.
    server = serve(ScriptedProgram(out={1: OUT, 2: b""}, piece=2, cut_output=frozenset(range(1, 1000))))

    async def body() -> None:
        timing = replace(PATIENT, reconnect_s=0.5, lived_s=1e9)
        with pytest.raises(dsec.NodeUnreachable):
            await collect(kit.sandbox(server.url, timing).process("p-1").stdout.follow(10))

    kit.run(body())


def test_a_reader_goes_on_after_the_node_was_away_too_long(kit: Kit, serve: Serve) -> None:
    server = serve(ScriptedProgram(out={1: OUT, 2: b""}, result=result(), cut_output=frozenset({1})))

    async def body() -> None:
        sbx = kit.sandbox(server.url, replace(PATIENT, reconnect_s=0.2, lived_s=1e9))
        await get(sbx.process("p-1").info())
        reader = sbx.process("p-1").stdout.follow()
        start = await begin(reader, 1)
        server.away()
        with pytest.raises(dsec.NodeUnreachable):
            await begin(reader, 100)
        server.back()
        assert OUT[: len(start)] == start
        assert OUT[reader.offset :] == b"".join(await collect(reader))

    kit.run(body())


def test_an_error_ends_the_output_typed(kit: Kit, serve: Serve) -> None:
    def script(request: Request, wire: Wire) -> None:
        wire.stream()
        wire.item({"stream": 1, "offset": 0, "data": b"a"})
        wire.item({"error": {"code": "sandbox_lost", "message": "gone", "detail": {}}})
        wire.end()

    server = serve(script)

    async def body() -> None:
        reader = kit.sandbox(server.url).process("p-1").stdout.follow()
        assert await begin(reader, 1) == b"a"
        with pytest.raises(dsec.SandboxLost):
            await begin(reader, 1)

    kit.run(body())


@pytest.mark.parametrize("takes", [1 << 30, 1000])
def test_input_comes_once_whatever_breaks(kit: Kit, serve: Serve, takes: int) -> None:
    program = ScriptedProgram(takes=takes, cut_input=frozenset({1, 3, 4}))
    server = serve(program)
    data = os.urandom(3000)

    async def body() -> None:
        process = await get(kit.sandbox(server.url).spawn("cat"))
        await get(process.stdin.write(data))
        await get(process.stdin.write("é\n"))
        await get(process.stdin.write(b""))
        await get(process.stdin.close())
        await get(process.stdin.close())
        assert process.stdin.offset == 3003
        with pytest.raises(dsec.InvalidState, match=r"the input of p-1 was closed by this handle"):
            await get(process.stdin.write(b"x"))

    kit.run(body())
    assert program.taken == data + "é\n".encode()
    assert program.eof


def test_a_handle_found_again_writes_behind_what_is_there(kit: Kit, serve: Serve) -> None:
    program = ScriptedProgram(taken=b"before ")
    server = serve(program)

    async def body() -> None:
        stdin = kit.sandbox(server.url).process("p-1").stdin
        assert stdin.offset is None
        await get(stdin.write(b"and "))
        with pytest.raises(dsec.Conflict, match=r"`process\.stdin\.locate\(\)`"):
            program.taken += b"another's "
            await get(stdin.write(b"x"))
        await get(stdin.write(b"after "))
        program.taken += b"another's "
        await get(stdin.locate())
        await get(stdin.write(b"end"))

    kit.run(body())
    assert program.taken == b"before and another's after another's end"


def test_input_that_nobody_reads_is_told(kit: Kit, serve: Serve) -> None:
    program = ScriptedProgram(reader_gone=True)
    server = serve(program)

    async def body() -> None:
        stdin = kit.sandbox(server.url).process("p-1").stdin
        with pytest.raises(dsec.InputClosed, match="nobody reads the input of p-1 any more") as caught:
            await get(stdin.write(b"x"))
        assert isinstance(caught.value, BrokenPipeError) and isinstance(caught.value, dsec.InvalidState)
        assert caught.value.detail == {"id": "p-1", "size": 0}
        await get(stdin.close())

    kit.run(body())


def test_a_cancelled_write_is_counted_to_where_it_says(serve: Serve) -> None:
    hung = threading.Event()
    program = ScriptedProgram()

    def script(request: Request, wire: Wire) -> None:
        if request.body == b"first" and not hung.is_set():
            program.taken += request.body[:2]  # it took some and waits for the reader
            hung.set()
            wire.hang()
        else:
            program(request, wire)

    server = serve(script)

    async def body() -> None:
        async with dsec.AsyncClient(server.url) as client:
            stdin = dsec.AsyncSandbox(client, SANDBOX_ID).process("p-1").stdin
            task = asyncio.ensure_future(stdin.write(b"first"))
            await asyncio.to_thread(hung.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert stdin.offset == 5
            await stdin.write(b" second")

    asyncio.run(body())
    assert program.taken == b"first second"


def test_writers_of_one_handle_take_turns(serve: Serve) -> None:
    program = ScriptedProgram(takes=3)
    server = serve(program)
    with dsec.Client(server.url) as client:
        stdin = dsec.Sandbox(client, SANDBOX_ID).process("p-1").stdin
        threads = [threading.Thread(target=stdin.write, args=(letter * 20,)) for letter in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(program.taken[start : start + 20] for start in range(0, 80, 20)) == [
        c * 20 for c in (b"a", b"b", b"c", b"d")
    ]


def test_wait_asks_until_it_has_ended_or_the_time_is_over(kit: Kit, serve: Serve) -> None:
    program = ScriptedProgram()
    server = serve(program)

    async def body() -> None:
        process = kit.sandbox(server.url).process("p-1")
        with pytest.raises(dsec.DeadlineExceeded, match="goes on"):
            await get(process.wait(timeout_s=0.2))
        program.result = result(9)
        assert (await get(process.wait())).exit_code == 9
        info = await get(process.info())
        assert (info.state, info.result.exit_code) == ("ended", 9)

    kit.run(body())
    assert not program.kills


def test_signals_sizes_and_the_end_of_a_with_block(kit: Kit, serve: Serve) -> None:
    program = ScriptedProgram()
    server = serve(program)

    async def body() -> None:
        process = await get(kit.sandbox(server.url).spawn("x", tty=True))
        await get(process.signal(2))
        await get(process.resize(30, 100))
        if kit.kind == "sync":
            with process:
                pass
        else:
            async with process:
                pass

    kit.run(body())
    assert program.kills == [{"signal": 2}, {}]
    assert program.sizes == [{"rows": 30, "cols": 100}]


def test_a_spawn_that_is_given_up_leaves_no_program(serve: Serve) -> None:
    arrived = threading.Event()
    program = ScriptedProgram()

    def script(request: Request, wire: Wire) -> None:
        if request.path.endswith("/processes") and not arrived.is_set():
            arrived.set()
            wire.hang()
        else:
            program(request, wire)

    server = serve(script)

    async def body() -> None:
        async with dsec.AsyncClient(server.url) as client:
            task = asyncio.ensure_future(dsec.AsyncSandbox(client, SANDBOX_ID).spawn("x"))
            await asyncio.to_thread(arrived.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(body())
    assert program.kills == [{}]
    assert server.requests[0].key == server.requests[1].key


def test_a_spawn_whose_answer_does_not_come_says_how_to_find_it(kit: Kit, serve: Serve) -> None:
    def script(request: Request, wire: Wire) -> None:
        if request.method == "GET":
            wire.answer({"id": "p-1", "kind": "spawn", "state": "running"})
        else:
            wire.drop()

    server = serve(script)

    async def body() -> None:
        sbx = kit.sandbox(server.url, replace(PATIENT, reconnect_s=0.2, lived_s=1e9))
        await get(sbx.process("p-1").info())
        with pytest.raises(dsec.NodeUnreachable) as caught:
            await get(sbx.spawn("x"))
        assert caught.value.detail["idempotency_key"] == server.requests[-1].key
        assert str(server.requests[-1].key) in caught.value.__notes__[0]

    kit.run(body())


def test_lists_of_processes(kit: Kit, serve: Serve) -> None:
    answer = {
        "programs": [{"id": "p-1", "kind": "spawn", "state": "running", "command": "sleep 60"}],
        "processes": [{"pid": 1, "ppid": 0, "name": "init"}, {"pid": 7, "ppid": 1, "id": "p-1", "main": True}],
        "more": True,
    }
    server = serve(lambda request, wire: wire.answer(answer))

    async def body() -> None:
        found = await get(kit.sandbox(server.url).processes())
        assert [process.pid for process in found] == [1, 7]
        assert (len(found), found.more, found.programs[0].command) == (2, True, "sleep 60")
        assert isinstance(found.processes[0], dsec.ProcessInfo)
        assert isinstance(found, dsec.ProcessList)

    kit.run(body())


SESSION = {"id": "ses-1", "program": "p-1", "shell": "/bin/bash", "state": "running"}


def sessions(seen: list[str]) -> Callable[[Request, Wire], None]:
    def script(request: Request, wire: Wire) -> None:
        path = request.path.removeprefix(f"/v1/sandboxes/{SANDBOX_ID}")
        seen.append(f"{request.method} {path}")
        if path.startswith("/sessions/nowhere"):
            wire.error("not_found", "no such session", 404)
        elif path.endswith("stream=1"):
            wire.stream()
            wire.item({"started": "p-9"})
            wire.item({"stream": 1, "offset": 0, "data": b"out"})
            if request.value()["command"] == "hang":
                wire.hang()
            wire.item({"result": result(1, b"out")})
            wire.end()
        elif path.endswith("/run"):
            wire.answer(result(0, b"out"))
        elif path.endswith("/kill") or request.method == "DELETE":
            wire.answer({})
        else:
            wire.answer(SESSION, 201 if request.method == "POST" else 200)

    return script


def test_a_session_from_its_start_to_its_end(kit: Kit, serve: Serve) -> None:
    seen: list[str] = []
    server = serve(sessions(seen))

    async def use(shell: object) -> None:
        assert (await get(shell.run("cd /srv"))).stdout == "out"  # type: ignore[attr-defined]  # of either client
        got: list[bytes] = []
        with pytest.raises(dsec.CommandFailed):
            await get(
                shell.run("ls", stdin="in", check=True, on_output=lambda _, data: got.append(data))  # type: ignore[attr-defined]  # of either client
            )
        assert got == [b"out"]
        assert (await get(shell.info())).state == "running"  # type: ignore[attr-defined]  # of either client

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        made = await get(sbx.session("/bin/bash", cwd="/srv", env={"A": "b"}))
        if kit.kind == "sync":
            with made as shell:
                await use(shell)
        else:
            async with made as shell:
                await use(shell)
        assert (await get(sbx.get_session("ses-1"))).id == made.id == "ses-1"
        with pytest.raises(dsec.NotFound):
            await get(sbx.get_session("nowhere"))

    kit.run(body())
    assert seen == [
        "POST /sessions",
        "POST /sessions/ses-1/run",
        "POST /sessions/ses-1/run?stream=1",
        "GET /sessions/ses-1",
        "DELETE /sessions/ses-1",
        "GET /sessions/ses-1",
        "GET /sessions/nowhere",
    ]
    assert server.requests[0].value() == {"shell": "/bin/bash", "cwd": "/srv", "env": {"A": "b"}}
    assert server.requests[2].value() == {"command": "ls", "stdin": b"in"}
    assert all(request.key for request in server.requests[:3])


def test_a_cancelled_command_of_a_session_is_killed_and_the_session_stays(kit: Kit, serve: Serve) -> None:
    seen: list[str] = []
    server = serve(sessions(seen))

    def stop(stream: int, data: bytes) -> None:
        raise KeyError(data)

    async def body() -> None:
        shell = await get(kit.sandbox(server.url).session())
        with pytest.raises(KeyError):
            await get(shell.run("hang", on_output=stop))

    kit.run(body())
    assert seen == ["POST /sessions", "POST /sessions/ses-1/run?stream=1", "POST /processes/p-9/kill"]


def test_a_user_is_a_name_or_a_number_everywhere(kit: Kit, serve: Serve) -> None:
    server = serve(lambda request, wire: wire.error("internal", "that is all", 500))

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        client = sbx._client
        for call in (
            lambda user: sbx.run("x", user=user),
            lambda user: sbx.spawn("x", user=user),
            lambda user: sbx.session(user=user),
            lambda user: client.create(user=user),
            lambda user: client.create(dsec.Spec(user=user)),
            lambda user: client.layers.import_("dir:/a", "a@1", user=user),
        ):
            for user in (1000, "1000", "nobody"):
                with pytest.raises(dsec.DsecError, match="that is all"):
                    await get(call(user))
                assert server.requests[-1].value()["user"] == str(user)
        for user in (1000, "1000", "nobody"):
            with pytest.raises(dsec.DsecError, match="that is all"):
                await get(sbx.files.read("/f", user=user))
            assert server.requests[-1].path.endswith(f"&user={user}")

    kit.run(body())


def test_a_terminal_has_one_output(kit: Kit, serve: Serve) -> None:
    """Without a word to the stream, which would go on to the program's end."""
    server = serve(ScriptedProgram(tty=True))

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        for process in (await get(sbx.spawn("x", tty=True)), sbx.process("p-1")):
            assert await collect(process.stderr) == []
            assert await collect(process.stderr.follow(5)) == []

    kit.run(body())
    assert [request.method for request in server.requests] == ["POST", "GET"], "asked once, where it is not known"


def test_a_line_that_does_not_come_in_time(kit: Kit, serve: Serve) -> None:
    server = serve(ScriptedProgram(out={1: b"one\ntwo", 2: b""}))

    async def body() -> None:
        process = kit.sandbox(server.url).process("p-1")
        lines = process.lines()
        assert await get(lines.next(60)) == "one"
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"no line has come within 0\.1 s; the program goes on") as caught:
                await get(lines.next(timeout_s=0.1))
            assert isinstance(caught.value, dsec.DeadlineExceeded)
        assert lines.offsets == (4, 0), "what had come is kept"
        lines.close()
        with pytest.raises(dsec.InvalidState, match="no more lines"):
            await get(lines.next(60))

    kit.run(body())
    asked = [request for request in server.requests if "/output" in request.path]
    assert len(asked) == 1, "the connection that was there goes on"


def test_an_end_that_a_reader_holds_back_says_so(kit: Kit, serve: Serve) -> None:
    program = ScriptedProgram(out={1: bytes(3 << 20), 2: b""})
    server = serve(program)

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        process = await get(sbx.spawn("yes", spool_bytes=0))
        with pytest.raises(dsec.DeadlineExceeded, match=r"has not ended after 0 s; it goes on$"):
            await get(process.wait(0))
        left = process.stdout.follow()
        await begin(left, 1)
        at = left.offset
        with pytest.raises(
            dsec.DeadlineExceeded, match=rf"holds it back: it stands at byte {at} of stream 1, more than"
        ):
            await get(process.wait(0))
        left.close()
        lossy = process.stdout.follow(lossy=True)
        await begin(lossy, 1)
        with pytest.raises(dsec.DeadlineExceeded, match=r"it goes on$"):
            await get(process.wait(0))
        lossy.close()
        found = sbx.process("p-1")
        program.out[1] = bytes(17 << 20)
        reader = found.stdout.follow()
        await begin(reader, 1)
        with pytest.raises(dsec.DeadlineExceeded, match="may hold it back"):
            await get(found.wait(0))

    kit.run(body())


def test_a_signal_is_a_number_or_a_name_of_linux(kit: Kit, serve: Serve) -> None:
    program = ScriptedProgram()
    server = serve(program)

    async def names() -> None:
        process = kit.sandbox(server.url).process("p-1")
        there = enum.IntEnum("there", {"SIGUSR2": 31})  # as on macOS
        for name in ("TERM", "SIGUSR1", "sigwinch", signal.SIGUSR2, "HUP", "SYS", 34, there["SIGUSR2"]):
            await get(process.signal(name))

    kit.run(names())
    assert program.kills == [{"signal": number} for number in (15, 10, 28, 12, 1, 31, 34, 12)]

    async def body() -> None:
        process = await get(kit.sandbox(server.url).spawn("x"))
        asked = len(server.requests)
        for wrong in ("TREM", "15", 15.0, True, None):
            with pytest.raises(dsec.InvalidSpec) as refused:
                await get(process.signal(wrong))
            assert refused.value.detail["field"] == "signal"
        assert len(server.requests) == asked

    kit.run(body())
