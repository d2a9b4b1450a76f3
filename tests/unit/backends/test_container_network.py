"""Tables for the process for connections, through its deaths; a thread stands in its place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from dsec.backends.base import Verdict
from dsec.backends.container import network
from dsec.backends.container.network import ContainerNetworks
from dsec.model.errors import LaunchFailed, SandboxLost, Unavailable
from dsec.wire.runtime import RuntimeClient
from tests.kit.aio import asynchronous, until

pytestmark = pytest.mark.unit
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(dict[str, Any]).decode


class Process:
    """What there would be of the process, and of the runtime that starts it and steers to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lives = 0
        self.asked: list[str] = []
        self.tables: dict[str, Any] = {}  # of those that are steered, None: closed
        self.own: list[str] = []
        self.refuses: Callable[[dict[str, Any]], str | None] = lambda request: None
        self.mute = False  # does what it is asked, and does not say so
        self.lost: set[str] = set()
        self.unsteerable: set[str] = set()
        self._sockets: list[socket.socket] = []

    # The runtime.

    async def network_start(self) -> None:
        if not self._sockets:
            self.start()

    async def network_steer(self, sandbox_id: str) -> None:
        if sandbox_id in self.lost:
            raise SandboxLost("gone")
        if sandbox_id in self.tables or sandbox_id in self.unsteerable:
            raise LaunchFailed("the address is in use")
        self.tables[sandbox_id] = None

    # The process.

    def start(self) -> None:
        self.lives += 1
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(os.fspath(self.path))
        listening.listen()
        self._sockets.append(listening)
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    def die(self) -> None:
        self.path.unlink()
        self.tables.clear()
        self.hang_up()
        listening = self._sockets.pop(0)
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()

    def hang_up(self) -> None:
        for one in self._sockets[1:]:
            one.shutdown(socket.SHUT_RDWR)
        del self._sockets[1:]

    def say(self, **message: Any) -> None:
        self._sockets[-1].send(b"\0" + _ENCODE(message))

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                self._sockets.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while packet := connection.recv(1 << 16):
                request = _DECODE(packet[1:])
                answer = {"id": request["id"], **self._do(request)}
                if not (self.mute and request["op"] == "set"):
                    connection.send(b"\0" + _ENCODE(answer))

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        op, sandbox = request["op"], request.get("sandbox", "")
        self.asked.append(f"{op} {sandbox}".strip())
        if (error := self.refuses(request)) is not None:
            return {"error": error}
        if op == "node":
            self.own = request["own"]
        if op == "list":
            return {"sandboxes": list(self.tables)}
        if op in ("set", "remove", "status") and sandbox not in self.tables:
            return {"error": f"there is no sandbox {sandbox}"}
        if op == "set":
            self.tables[sandbox] = request["table"]
        if op == "remove":
            del self.tables[sandbox]
        if op == "status":
            return {"status": {"connections": 2, "hits": [("a", 1), ("a", 2), ("b", 4)], "unmatched": 5}}
        return {}


class Stand:
    def __init__(self, tmp_path: Path) -> None:
        self.process = Process(tmp_path / "net.sock")
        self.networks = ContainerNetworks(cast(RuntimeClient, self.process), self.process.path)
        self.told: list[tuple[list[Verdict], dict[str, int]]] = []
        self.networks.configure(resolvers=(), own=("192.0.2.1/32",), told=lambda *one: self.told.append(one))

    async def put(self, sandbox_id: str, table: int) -> None:
        await self.networks.put(sandbox_id, msgspec.msgpack.encode(table))


def case(test: Callable[[Stand], Any]) -> Callable[[Path], None]:
    """A test with a stand, which is taken down afterwards."""

    async def run(tmp_path: Path) -> None:
        stand = Stand(tmp_path)
        try:
            await test(stand)
        finally:
            await stand.networks.close()

    run.__name__ = test.__name__
    return asynchronous(run)


@case
async def test_nothing_is_started_before_somebody_may_reach_something(s: Stand) -> None:
    await s.networks.remove("a")
    await s.networks.settled()
    assert await s.networks.counters("a") is None
    assert s.process.lives == 0
    await s.put("a", 1)
    await s.put("a", 2)
    assert s.process.tables == {"a": 2}
    assert s.process.own == ["192.0.2.1/32"]
    assert s.process.asked == ["hello", "node", "events", "list", "set a", "set a"]
    found = await s.networks.counters("a")
    assert found is not None and (found.hits, found.unmatched, found.connections) == ({"a": 3, "b": 4}, 5, 2)
    await s.networks.remove("a")
    assert s.process.tables == {}


@case
async def test_all_is_told_again_to_the_next_one(s: Stand) -> None:
    for number in range(50):
        await s.put(f"s{number}", number)
    s.process.die()
    await until(lambda: s.process.tables == {f"s{number}": number for number in range(50)})
    assert s.process.lives == 2
    s.process.hang_up()  # the process itself goes on
    await s.put("s1", 100)
    assert s.process.tables["s1"] == 100
    assert s.process.lives == 2


@case
async def test_one_that_cannot_be_told_keeps_nobody_else_from_it_and_is_tried_again(s: Stand) -> None:
    await s.put("a", 1)
    await s.put("b", 2)
    await s.put("c", 3)
    s.process.unsteerable.add("a")
    s.process.lost.add("b")  # its end is told elsewhere
    s.process.die()
    await until(lambda: s.process.tables == {"c": 3})
    s.process.unsteerable.clear()
    await until(lambda: s.process.tables == {"a": 1, "c": 3})


@case
async def test_what_is_refused_does_not_hold(s: Stand) -> None:
    await s.put("a", 1)
    s.process.refuses = lambda request: "no" if request["op"] == "set" else None
    with pytest.raises(Unavailable, match="no"):
        await s.put("a", 2)
    with pytest.raises(Unavailable):
        await s.put("b", 3)
    s.process.refuses = lambda request: None
    s.process.die()
    await until(lambda: s.process.tables == {"a": 1})


@case
async def test_what_was_not_waited_for_does_not_hold(s: Stand) -> None:
    await s.put("a", 1)
    s.process.mute = True
    waiting = asyncio.ensure_future(s.put("a", 2))
    await until(lambda: s.process.tables == {"a": 2})
    waiting.cancel()
    s.process.mute = False
    await until(lambda: s.process.tables == {"a": 1})


@case
async def test_who_ended_while_the_connection_was_lost_is_let_go(s: Stand) -> None:
    await s.put("a", 1)
    await s.put("b", 2)
    await s.networks.settled()
    s.process.hang_up()
    await s.networks.remove("a")
    await until(lambda: s.process.tables == {"b": 2})


@case
async def test_of_a_life_before_only_those_that_are_put_again_stay(s: Stand) -> None:
    s.process.tables = {"a": 1, "b": 2}
    s.process.start()
    await s.put("a", 3)
    assert s.process.tables == {"a": 3, "b": 2}
    await s.networks.settled()
    assert s.process.tables == {"a": 3}


@case
async def test_without_any_left_of_a_life_before_all_are_let_go(s: Stand) -> None:
    s.process.tables = {"a": 1}
    s.process.start()
    await s.networks.settled()
    await until(lambda: s.process.tables == {})
    s.process.die()  # and nobody starts it again for nothing
    await until(lambda: s.networks._keeping is not None and s.networks._keeping.done())
    assert s.process.lives == 1


@case
async def test_a_change_of_the_machines_addresses_is_told(s: Stand) -> None:
    await s.put("a", 1)
    s.networks.configure(resolvers=(), own=("192.0.2.2/32",), told=lambda *one: None)
    await until(lambda: s.process.own == ["192.0.2.2/32"])
    await s.put("a", 2)
    assert (s.process.tables, s.process.lives) == ({"a": 2}, 1)


@case
async def test_verdicts_are_handed_on(s: Stand) -> None:
    await s.put("a", 1)
    event = {"at_ns": 1_500_000_000, "sandbox": "a", "kind": "dns", "allow": True, "rule": "r", "name": "a.org"}
    s.process.say(events=[event], dropped={"a": 3})
    await until(lambda: bool(s.told))
    one = Verdict(at=1.5, sandbox="a", kind="dns", allow=True, rule="r", name="a.org")
    assert s.told == [([one], {"a": 3})]


def test_who_cannot_be_reached_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PATIENCE_S", 0.05)

    @case
    async def run(s: Stand) -> None:
        async def start() -> None:
            raise Unavailable("no runtime")

        monkeypatch.setattr(s.process, "network_start", start)
        with pytest.raises(Unavailable, match="nothing is let through"):
            await s.put("a", 1)

    run(tmp_path)
