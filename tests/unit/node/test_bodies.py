"""What bodies hold of memory, of all connections together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from dsec.model.errors import Unavailable
from dsec.model.limits import KIB, MIB
from dsec.node.http import bodies as limits
from dsec.node.http.bodies import SMALL_BYTES, Bodies
from dsec.node.http.exchange import Exchange, Vanished
from tests.kit.aio import until
from tests.kit.simserver import SimServer

MOST = 100


class Case:
    """Bodies that stay until they are told to go."""

    def __init__(self) -> None:
        self.bodies = Bodies(MOST)
        self.inside: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._go: dict[str, asyncio.Event] = {}

    async def come(self, name: str, size: int) -> None:
        self._go[name] = asyncio.Event()

        async def stay() -> None:
            async with self.bodies.room(size):
                self.inside.append(name)
                try:
                    await self._go[name].wait()
                finally:
                    self.inside.remove(name)

        self._tasks[name] = asyncio.create_task(stay())
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def go(self, name: str) -> None:
        self._go[name].set()
        await self._tasks.pop(name)
        await self.settle()

    async def cancel(self, name: str) -> None:
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.wait([task])
        await self.settle()

    async def refused(self, name: str) -> str:
        with pytest.raises(Unavailable) as caught:
            await self._tasks.pop(name)
        assert caught.value.retry == "later"
        return str(caught.value)

    def empty(self) -> bool:
        return not (self.inside or self.bodies._held or self.bodies._ahead or self.bodies._rooms)


def played(play: Callable[[Case], Awaitable[None]]) -> None:
    async def main() -> None:
        case = Case()
        await play(case)
        assert case.empty()

    uvloop.run(main())


def test_more_than_fit_wait_and_who_came_first_is_first() -> None:
    async def play(case: Case) -> None:
        await case.come("a", 60)
        await case.come("b", 40)
        await case.come("large", 90)
        await case.come("little", 10)
        assert case.inside == ["a", "b"]
        await case.go("b")
        assert case.inside == ["a"], "the little one does not go before the large one, which would wait for ever"
        await case.go("a")
        assert case.inside == ["large", "little"]
        await case.go("large")
        await case.go("little")

    played(play)


def test_one_that_leaves_while_it_waits_is_waited_for_by_nobody() -> None:
    async def play(case: Case) -> None:
        await case.come("a", 60)
        await case.come("large", 90)
        await case.come("little", 10)
        await case.cancel("large")
        assert case.inside == ["a", "little"]
        await case.come("b", 90)
        # Cancelled at the moment it has got room.
        case._go["a"].set()
        case._tasks["b"].cancel()
        await case.settle()
        await case.go("little")
        await case.come("all", MOST)
        assert case.inside == ["all"]
        await case.go("all")

    played(play)


def test_a_silent_one_is_ended_once_another_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SILENT_S", 0.0)
    monkeypatch.setattr(limits, "_LOOK_S", 0.01)

    async def play(case: Case) -> None:
        await case.come("a", 60)
        assert case.bodies._looker is None, "nobody looks while nobody waits"
        await case.come("b", 60)
        assert "too slowly while others waited" in await case.refused("a")
        await until(lambda: case.inside == ["b"])
        await case.go("b")

    played(play)


def test_one_that_drips_is_ended_as_well() -> None:
    async def play(case: Case) -> None:
        await case.come("a", 60)
        (room,) = case.bodies._rooms
        now = room.was + limits.WHOLE_S + 1
        room.came = now
        assert room.slow(now)
        room.bytes = 2 * limits.RATE_MIN
        assert not room.slow(now), "one that keeps coming is not"
        room.came = now - limits.SILENT_S - 1
        assert room.slow(now)
        await case.go("a")

    played(play)


def test_waiting_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAIT_S", 0.01)

    async def play(case: Case) -> None:
        await case.come("a", 60)
        await case.come("b", 60)
        assert "no room to read the body within" in await case.refused("b")
        await case.go("a")

    played(play)


def test_no_more_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAITING_MAX_BYTES", 100)

    async def play(case: Case) -> None:
        await case.come("a", 100)
        await case.come("b", 60)
        await case.come("c", 60)
        assert "too many large bodies wait" in await case.refused("c")
        await case.go("a")
        await case.go("b")

    played(play)


Scenario = Callable[[SimServer, Bodies], Awaitable[None]]


def served(tmp_path: Path, scenario: Scenario, most: int = 64 * MIB) -> None:
    async def main() -> None:
        bodies = Bodies(most)
        async with SimServer(tmp_path, bodies=bodies) as s:
            status, _ = await s.call("POST", "/v1/sandboxes", {"name": "a"})
            assert status == 201
            await scenario(s, bodies)
            await until(lambda: not bodies._held and not bodies._ahead)

    uvloop.run(main())


def line(size: int) -> bytes:
    """A command whose body has so many bytes."""
    return json.dumps({"command": "echo ok"}).encode().ljust(size)


def head(length: int) -> bytes:
    return b"POST /v1/sandboxes/a/run HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length


async def ran(s: SimServer, size: int) -> int | None:
    """The exit code of a command whose body has so many bytes."""
    headers = {"Content-Type": "application/json"}
    async with s.http.post("/v1/sandboxes/a/run", data=line(size), headers=headers) as answer:
        return (await answer.json()).get("exit_code") if answer.status == 200 else -answer.status


async def half(s: SimServer, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection over which half a body came."""
    reader, writer = await asyncio.open_unix_connection(str(s.path))
    writer.write(head(size) + line(size)[: size // 2])
    return reader, writer


def test_half_a_body_has_room_for_the_whole_and_a_client_that_leaves_gives_it_back(tmp_path: Path) -> None:
    async def scenario(s: SimServer, bodies: Bodies) -> None:
        _, writer = await half(s, 100 * KIB)
        await until(lambda: bodies._held == 100 * KIB)
        writer.write(line(100 * KIB)[50 * KIB :])
        await until(lambda: bodies._held == 0)
        writer.close()
        _, writer = await half(s, 100 * KIB)
        await until(lambda: bodies._held == 100 * KIB)
        writer.close()

    served(tmp_path, scenario)


def test_small_ones_never_wait_and_large_ones_do_until_the_silent_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_LOOK_S", 3600.0)

    async def scenario(s: SimServer, bodies: Bodies) -> None:
        reader, writer = await half(s, MIB)
        await until(lambda: bodies._held == MIB)
        waits = asyncio.create_task(ran(s, MIB // 2))
        await until(lambda: len(bodies._waiting) == 1)
        assert await ran(s, SMALL_BYTES) == 0
        assert not waits.done()
        monkeypatch.setattr(limits, "SILENT_S", 0.0)
        bodies._end_slow()
        assert await waits == 0
        # The silent one is told, and its connection goes on once what it had begun is over.
        answer = await reader.readuntil(b'"retry":"later"')
        assert b" 503 " in answer and b'"code":"unavailable"' in answer
        writer.write(line(MIB)[MIB // 2 :] + head(SMALL_BYTES) + line(SMALL_BYTES))
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()

    served(tmp_path, scenario, MIB)


def test_chunked_ones_have_room_once_they_are_not_small(tmp_path: Path) -> None:
    async def scenario(s: SimServer, bodies: Bodies) -> None:
        go = asyncio.Event()
        whole = line(100 * KIB)

        async def chunks(first: int) -> AsyncIterator[bytes]:
            yield whole[:first]
            await go.wait()
            yield whole[first:]

        async def send(first: int) -> int:
            async with s.http.post(
                "/v1/sandboxes/a/run", data=chunks(first), headers={"Content-Type": "application/json"}
            ) as answer:
                return answer.status

        tasks = [asyncio.create_task(send(KIB)), asyncio.create_task(send(50 * KIB))]
        await until(lambda: bodies._held == 32 * MIB)
        go.set()
        assert await asyncio.gather(*tasks) == [200, 200]

    served(tmp_path, scenario)


@pytest.mark.parametrize("length", [b"20", b"2000000"])
def test_a_body_that_never_came_is_not_an_empty_one(length: bytes) -> None:
    """Of a call whose body may be left out it would be another call."""

    async def gone() -> dict[str, object]:
        return {"type": "http.disconnect"}

    async def nobody(message: object) -> None:
        raise AssertionError("there is nobody to answer")

    async def main() -> None:
        scope = {"headers": [(b"content-length", length)], "query_string": b""}
        with pytest.raises(Vanished):
            await Exchange(scope, gone, nobody, Bodies()).body()

    uvloop.run(main())
