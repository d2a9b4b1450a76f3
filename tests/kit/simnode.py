"""A simulated node: the real node code over the fake backend, with a clock that a test moves.

async with SimNode(tmp_path) as sim:
    created = await sim.node.create(Spec())
    await sim.restart()            # the agent is new, the sandboxes are the same
    await sim.clock.advance(3600)  # timers fire in order, as fast as they can
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Self, cast

import msgspec

from dsec.backends.base import Backend
from dsec.backends.fake import FakeBackend, World
from dsec.model import failpoint
from dsec.model.errors import DsecError
from dsec.model.specs import RunSpec, Spec
from dsec.model.states import RunResult
from dsec.node.admission import RESOURCES, Room
from dsec.node.agent import Node
from dsec.node.capacity import EndlessGauge
from dsec.node.core import value_of
from dsec.node.runs import Flight
from dsec.node.simulated import SimulatedLayers
from tests.kit.severed import Link, Severable, SeverableStore

_VISIT = failpoint._visit
ENDLESS = Room(total=dict.fromkeys(RESOURCES, 1e12))


class Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """A clock for a node and for a fake world; it moves only when it is told to."""

    def __init__(self) -> None:
        self._now = 1000.0
        self.wall_offset = 1_700_000_000.0
        self.boot_name = "boot-1"
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self.busy: Callable[[], bool] = lambda: False

    # what a node asks
    def wall(self) -> float:
        return self._now + self.wall_offset

    def boot(self) -> float:
        return self._now

    def boot_id(self) -> str:
        return self.boot_name

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (self._now + max(delay_s, 0.0), next(self._count), timer))
        return timer

    # what the fake asks
    def time(self) -> float:
        return self.wall()

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call_later(seconds, lambda: None if done.done() else done.set_result(None))
        await done

    # what a test does
    async def advance(self, seconds: float) -> None:
        """Let time pass; what is due happens at its moment."""
        until = self._now + seconds
        await self.settle()
        while self._timers and self._timers[0][0] <= until:
            when, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, when)
            if timer.callback is not None:
                timer.callback()
                await self.settle()
        self._now = until
        await self.settle()

    async def settle(self) -> None:
        """Let everything that can go on go on, and the disk finish what it was given."""
        await settle()
        while self.busy():
            await settle()


async def settle(rounds: int = 12) -> None:
    """Let everything that can go on go on, the writer of the store included."""
    for _ in range(rounds):
        await asyncio.sleep(0)
    await asyncio.sleep(0.003)
    for _ in range(rounds):
        await asyncio.sleep(0)


class SimNode:
    """One simulated node and the machine under it."""

    def __init__(self, directory: Path, *, room: Room = ENDLESS, name: str = "n1") -> None:
        self.directory = directory
        self.name = name
        self.room = room
        self.backend_name = "container"
        self.clock = VirtualClock()
        self.world = World(clock=self.clock)
        self.layers = SimulatedLayers()
        self._node: Node | None = None
        self._link = Link()
        self._dead: list[Link] = []

    @property
    def node(self) -> Node:
        assert self._node is not None, "not started"
        return self._node

    async def start(self) -> Node:
        """A new agent over what is there."""
        self._link = Link()
        store = SeverableStore(self.directory)
        store.link = self._link
        self.clock.busy = lambda: not store.closed and not store.idle
        backend = Severable(FakeBackend(self.world, name=self.backend_name), self._link)
        self._node = Node(
            name=self.name,
            backends={self.backend_name: cast(Backend, backend)},
            layers=self.layers,
            store=store,
            room=self.room,
            gauge=EndlessGauge(),
            clock=self.clock,
        )
        await self._node.start()
        return self._node

    def kill(self) -> None:
        """From now on nothing the agent does has an effect: what it had not written is lost, what runs goes on."""
        self._link.cut = True
        self._dead.append(self._link)

    async def crash(self) -> None:
        """Kill the agent, if it is not dead yet, and let go of its files."""
        node, self._node = self.node, None
        if not self._link.cut:
            self.kill()
        node.core.deadlines.close()
        node.core.store.close()
        await self.clock.settle()

    def kill_at(self, nth: int) -> list[str]:
        """Kill the agent at the nth failpoint of its own it comes to; the names of those visited."""
        visited: list[str] = []

        def visit(name: str) -> None:
            if self._link.cut or name.startswith("fake."):
                return
            visited.append(name)
            if len(visited) == nth:
                self.kill()
                raise failpoint.Injected(name)

        failpoint.count()
        failpoint._visit = visit  # the sweep needs "die here", which no action of a process that goes on can be
        return visited

    async def restart(self) -> Node:
        """The agent is killed and another one starts."""
        await self.crash()
        return await self.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        failpoint.disarm()
        failpoint._visit = _VISIT
        if self._node is not None and not self._link.cut:
            await self._node.close()
        for link in self._dead:
            link.release()
        await settle()

    # shorthand
    async def create(self, key: str | None = None, **fields: object) -> str:
        """A sandbox's id."""
        return (await self.node.create(Spec.build(**fields), key)).info.id

    async def run(self, ref: str, command: str | list[str], key: str | None = None, **fields: object) -> RunResult:
        """Run to the end."""
        flight = await self.fly(ref, command, key, **fields)
        answer = await flight.answer() if isinstance(flight, Flight) else flight
        return msgspec.msgpack.decode(value_of(answer), type=RunResult)

    async def fly(
        self, ref: str, command: str | list[str], key: str | None = None, **fields: object
    ) -> Flight | bytes | DsecError:
        """Begin a run."""
        return await self.node.run(ref, msgspec.convert({"command": command, **fields}, RunSpec), key)

    def rows(self) -> list[tuple[str, str]]:
        """(id, state) of every sandbox the disk knows."""
        return [(row[0], row[1]) for row in self.node.core.store.read("SELECT id, state FROM sandboxes ORDER BY id")]

    def open_steps(self) -> int:
        """Steps begun and never answered."""
        return int(self.node.core.store.read("SELECT count(*) FROM steps WHERE state = 0")[0][0])

    def check(self) -> None:
        """What holds whenever nothing is going on: memory, disk and machine say the same."""
        node = self.node
        alive = {id_ for id_, state in self.rows() if state not in ("stopped", "lost")}
        there = set(self.world.sandboxes)
        assert alive == there == set(node.core.boxes), (alive, there, set(node.core.boxes))
        assert set(node.core.names.values()) <= alive
        assert node.core.admission.holders() == alive
        assert not node.core.calls
