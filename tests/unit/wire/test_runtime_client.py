from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dsec.model import limits
from dsec.model.errors import Conflict, DeadlineExceeded, InvalidSpec, NotFound, Unavailable, Unknown
from dsec.wire import ops
from dsec.wire import values as v
from dsec.wire.frames import FrameError
from dsec.wire.runtime import RuntimeClient
from tests.kit.aio import until
from tests.kit.scripted_runtime import ScriptedRuntime, Session, run_result

pytestmark = pytest.mark.unit

Scenario = Callable[[ScriptedRuntime, RuntimeClient], Awaitable[None]]


def play(tmp_path: Path, scenario: Scenario, *, deadline_s: float = 10.0) -> None:
    async def main() -> None:
        server = ScriptedRuntime(tmp_path / "runtime.sock")
        await server.start()
        client = RuntimeClient(server.path, deadline_s=deadline_s)
        try:
            async with asyncio.timeout(30):
                await scenario(server, client)
        finally:
            await client.close()
            await server.stop()

    asyncio.run(main())


def start(run: str = "r1") -> v.RunStart:
    return v.RunStart(sandbox="s", run=run, argv=(b"true",), env={}, cwd=b"/", user="root")


PLAN = v.SandboxPlan(
    id="s",
    hostname="h",
    layers=("sha256:0",),
    upper=v.UpperSpec(1 << 20),
    memory_bytes=1,
    pids_max=1,
    nofile=1,
    shm_bytes=1,
    pty_max=1,
    deadline_ms=1000,
)
STATUS = {"id": "s", "state": "running", "init_pid": 7}


def test_many_requests_on_one_connection_answered_in_any_order(tmp_path: Path) -> None:
    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        waiting: list[tuple[int, str]] = []

        @server.on("run.start")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            waiting.append((id_, args["run"]))
            if len(waiting) == 50:
                for number, run in reversed(waiting):
                    session.send(id=number, ev="started", pid=1)
                    session.send(id=number, ok=run_result(run, run.encode()))

        started: list[int] = []
        runs = [client.run(start(f"r{n}"), started=lambda n=n: started.append(n)) for n in range(50)]
        results = await asyncio.gather(*runs)
        assert [r.streams[0].head for r in results] == [f"r{n}".encode() for n in range(50)]
        assert sorted(started) == list(range(50))
        assert len(server.sessions) == 1

    play(tmp_path, scenario)


def test_discards_go_with_the_next_request_or_a_little_later(tmp_path: Path) -> None:
    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        @server.on("run.start")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            session.send(id=id_, ok=run_result(args["run"], b""))

        client.discard("s", "before there is a connection: dropped")
        await until(lambda: client._discards._timer is None)
        await client.connect()
        client.discard("s", "a")
        client.discard("s", "b")
        await client.run(start("r"))
        await until(lambda: server.count("run.forget") == 2)
        ops_seen = [(op, args.get("run")) for op, args in server.seen if op.startswith("run.")]
        assert ops_seen == [("run.start", "r"), ("run.forget", "a"), ("run.forget", "b")]
        client.discard("s", "alone")
        await until(lambda: server.count("run.forget") == 3)

    play(tmp_path, scenario)


def test_a_restarted_runtime_gets_what_was_in_flight_again(tmp_path: Path) -> None:
    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        @server.on("run.start")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            session.send(id=id_, ev="started", pid=1)
            if server.count("run.start") < 3:
                session.drop()
            else:
                session.send(id=id_, ok=run_result(args["run"]))

        started: list[int] = []
        result = await client.run(start(), started=lambda: started.append(1))
        assert result.exit_code == 0
        assert started == [1]
        assert server.count("run.start") == 3

    play(tmp_path, scenario)


def test_a_new_keeper_makes_runs_in_flight_unknown_and_repeats_the_rest(tmp_path: Path) -> None:
    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        both = asyncio.Event()

        @server.on("run.start")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            both.set()

        @server.on("sandbox.get")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            if server.instance == "two":
                session.send(id=id_, ok=STATUS)

        run = asyncio.create_task(client.run(start()))
        get = asyncio.create_task(client.get("s"))
        await both.wait()
        await until(lambda: bool(server.count("sandbox.get")))
        server.instance = "two"
        server.drop()
        with pytest.raises(Unknown, match="r1"):
            await run
        assert (await get).init_pid == 7
        assert server.count("run.start") == 1

    play(tmp_path, scenario)


def test_create_sent_twice_finds_what_the_first_one_made(tmp_path: Path) -> None:
    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        @server.on("sandbox.create")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            if server.count("sandbox.create") == 1:
                session.drop()
            else:
                session.send(id=id_, err={"code": "exists", "message": "s exists", "detail": {}})

        @server.on("sandbox.get")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            session.send(id=id_, ok=STATUS)

        assert (await client.create(PLAN)).init_pid == 7
        with pytest.raises(Conflict):  # sent once: somebody else's
            await client.create(PLAN)

    play(tmp_path, scenario)


def test_a_signal_is_never_sent_twice_but_killing_the_tree_is(tmp_path: Path) -> None:
    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        @server.on("run.kill")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            if server.count("run.kill") == 1 or args["signal"]:
                session.drop()
            else:
                session.send(id=id_, ok={})

        await client.kill("s", "r1")
        assert server.count("run.kill") == 2
        with pytest.raises(Unknown):
            await client.kill("s", "r1", 2)
        assert server.count("run.kill") == 3

    play(tmp_path, scenario)


def test_a_stream_goes_on_where_it_broke(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40

    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        @server.on("run.start")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            session.send(id=id_, ev="started", pid=1)
            session.send(id=id_, ev="out", s=1, o=0, d=data[:1000])
            session.send(id=id_, ev="out", s=2, o=0, d=b"err")
            await session.writer.drain()
            session.drop()

        @server.on("run.attach")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            assert args["offsets"] == [1000, 3]
            session.send(id=id_, ev="out", s=1, o=500, d=data[500:2000])  # overlaps what is known
            session.send(id=id_, ev="out", s=1, o=2000, d=data[2000:])
            session.send(id=id_, ok=run_result(args["run"], data))

        got: list[tuple[int, int, bytes]] = []

        async def sink(stream: int, offset: int, piece: bytes) -> None:
            got.append((stream, offset, piece))

        await client.run(start(), sink=sink)
        assert b"".join(piece for stream, _, piece in got if stream == 1) == data
        assert b"".join(piece for stream, _, piece in got if stream == 2) == b"err"
        position = 0
        for stream, offset, piece in got:
            if stream == 1:
                assert offset == position
                position += len(piece)

    play(tmp_path, scenario)


class CreditServer:
    """Sends output only while it has credit, and notes the most that was out."""

    def __init__(self, server: ScriptedRuntime, total: int) -> None:
        self.total = total
        self.sent = self.acked = self.peak = self.window = 0
        server.handlers["run.start"] = self.start
        server.handlers["run.ack"] = self.ack

    async def start(self, session: Session, id_: int, args: dict[str, Any]) -> None:
        assert args["stream"] is True
        self.id, self.run, self.window = id_, args["run"], args["window"]
        session.send(id=id_, ev="started", pid=1)
        self.push(session)

    async def ack(self, session: Session, id_: int, args: dict[str, Any]) -> None:
        assert args["request"] == self.id
        self.acked += args["bytes"]
        session.send(id=id_, ok={})
        self.push(session)

    def push(self, session: Session) -> None:
        while self.sent < self.total and self.sent - self.acked < self.window:
            size = min(65536, self.total - self.sent, self.window - (self.sent - self.acked))
            session.send(id=self.id, ev="out", s=1, o=self.sent, d=b"x" * size)
            self.sent += size
            self.peak = max(self.peak, self.sent - self.acked)
        if self.sent == self.total:
            self.sent += 1
            session.send(id=self.id, ok=run_result(self.run, b""))


def test_credit_goes_back_only_as_the_sink_takes(tmp_path: Path) -> None:
    total = 5 * limits.STREAM_WINDOW_BYTES

    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        flow = CreditServer(server, total)
        gate, taken = asyncio.Event(), 0

        async def sink(stream: int, offset: int, piece: bytes) -> None:
            nonlocal taken
            await gate.wait()
            taken += len(piece)

        run = asyncio.create_task(client.run(start(), sink=sink))
        await until(lambda: not (flow.sent < flow.window or not flow.window))
        await client_round_trip(server, client)
        assert flow.sent == limits.STREAM_WINDOW_BYTES  # the program waits for the sink
        assert flow.acked == 0
        gate.set()
        await run
        assert taken == total
        assert flow.peak <= limits.STREAM_WINDOW_BYTES

    play(tmp_path, scenario)


async def client_round_trip(server: ScriptedRuntime, client: RuntimeClient) -> None:
    async def answer(session: Session, id_: int, args: dict[str, Any]) -> None:
        session.send(id=id_, ok=STATUS)

    server.handlers["sandbox.get"] = answer
    await client.get("s")


@pytest.mark.parametrize("how", ["cancelled", "sink raises"])
def test_a_reader_that_leaves_does_not_hold_up_the_program(tmp_path: Path, how: str) -> None:
    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        flow = CreditServer(server, 8 * limits.STREAM_WINDOW_BYTES)
        reached = asyncio.Event()

        async def sink(stream: int, offset: int, piece: bytes) -> None:
            reached.set()
            if how == "sink raises":
                raise ZeroDivisionError
            await asyncio.Event().wait()

        run = asyncio.create_task(client.run(start(), sink=sink))
        await reached.wait()
        if how == "cancelled":
            run.cancel()
        with pytest.raises((asyncio.CancelledError, ZeroDivisionError)):
            await run
        await until(lambda: not (flow.sent <= flow.total))
        await client_round_trip(server, client)
        assert not client._pending

    play(tmp_path, scenario)


def test_a_subscription_is_renewed_and_the_gap_reported(tmp_path: Path) -> None:
    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        ended: list[str] = []
        gaps = asyncio.Event()
        second = asyncio.Event()

        @server.on("subscribe")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            if server.count("subscribe") == 1:
                session.send(id=id_, ev="ended", sandbox="s", status=STATUS | {"state": "ended"})
            else:
                session.send(id=id_, ev="ended", sandbox="t", status=STATUS | {"id": "t", "state": "ended"})

        def note(status: v.SandboxStatus) -> None:
            ended.append(status.id)
            if status.id == "t":
                second.set()

        await client.subscribe(note, gaps.set)
        await until(lambda: bool(ended))
        assert not gaps.is_set()
        server.drop()
        await gaps.wait()
        await second.wait()
        assert ended == ["s", "t"]

    play(tmp_path, scenario)


def test_nobody_listens(tmp_path: Path) -> None:
    async def main() -> None:
        client = RuntimeClient(tmp_path / "nothing.sock", deadline_s=0.1)
        with pytest.raises(Unavailable, match=r"nothing\.sock"):
            await client.get("s")
        await client.close()

    asyncio.run(main())


def test_reviving_is_asked_for_when_nobody_listens(tmp_path: Path) -> None:
    async def main() -> None:
        server = ScriptedRuntime(tmp_path / "runtime.sock")

        @server.on("sandbox.get")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            session.send(id=id_, ok=STATUS)

        client = RuntimeClient(server.path, deadline_s=10, revive=server.start)
        assert (await client.get("s")).id == "s"
        await client.close()
        await server.stop()

    asyncio.run(main())


def test_a_runtime_that_does_not_answer(tmp_path: Path) -> None:
    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        with pytest.raises(DeadlineExceeded, match=r"layer\.list"):
            await client._call(ops.LAYER_LIST, v.Nothing(), deadline_s=0.05)
        assert not client._pending

    play(tmp_path, scenario)


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x02\x81\xa1"])
def test_garbage_from_the_runtime_is_a_typed_error(tmp_path: Path, garbage: bytes) -> None:
    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        @server.on("sandbox.get")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            session.raw(garbage)

        with pytest.raises(FrameError):
            await client.get("s")
        await client_round_trip(server, client)  # and it can be used again

    play(tmp_path, scenario)


def test_an_answer_of_the_wrong_type_is_a_typed_error(tmp_path: Path) -> None:
    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        @server.on("run.start")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            session.send(id=id_, ok=run_result("r1", exit_code="zero"))

        with pytest.raises(FrameError):
            await client.run(start())

    play(tmp_path, scenario)


def test_errors_are_translated_and_too_big_requests_never_sent(tmp_path: Path) -> None:
    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        @server.on("run.attach")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            session.send(id=id_, err={"code": "not_found", "message": "no r9", "detail": {}})

        with pytest.raises(NotFound, match="r9"):
            await client.attach(v.RunAttach(sandbox="s", run="r9"))
        big = v.RunStart(
            sandbox="s", run="r", argv=(b"cat",), env={}, cwd=b"/", user="root", stdin=b"x" * limits.FRAME_MAX_BYTES
        )
        with pytest.raises(InvalidSpec):
            await client.run(big)
        assert server.count("run.start") == 0
        assert not client._pending

    play(tmp_path, scenario)


def test_a_call_at_a_connection_that_is_closing_waits_for_the_next(tmp_path: Path) -> None:
    """Between its end and the word of it nothing may be tried over and over: the event loop would never get to it."""

    async def scenario(server: ScriptedRuntime, client: RuntimeClient) -> None:
        @server.on("sandbox.list")
        async def _(session: Session, id_: int, args: dict[str, Any]) -> None:
            session.send(id=id_, ok={"sandboxes": []})

        assert await client.sandboxes() == ()
        assert client._link is not None
        client._link.close()
        assert await client.sandboxes() == ()

    play(tmp_path, scenario)
