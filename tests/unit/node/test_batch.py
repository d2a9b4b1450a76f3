"""Many at once: keys of items, all or none, retention."""

from __future__ import annotations

import asyncio

import pytest

from dsec.model.errors import DsecError, InvalidSpec, LaunchFailed, NodeFull, NotFound
from dsec.model.specs import Spec
from dsec.node import lifecycle
from dsec.node.admission import RESOURCES, Room
from dsec.node.agent import Query
from dsec.node.core import decode_info
from tests.kit.simnode import SimNode


async def batch(s: SimNode, specs: list[Spec], key: str, *, atomic: bool = False) -> dict[int, str | DsecError]:
    items = s.node.create_many(specs, key, atomic=atomic)
    return {i: answer if isinstance(answer, DsecError) else decode_info(answer).id async for i, answer in items}


@pytest.mark.parametrize("atomic", [False, True])
def test_the_same_batch_again_finds_the_same_sandboxes(sim, atomic):
    async def scenario(s: SimNode) -> None:
        specs = [Spec(job="j") for _ in range(20)]
        first, meanwhile = await asyncio.gather(
            batch(s, specs, "k", atomic=atomic), batch(s, specs, "k", atomic=atomic)
        )
        await s.restart()
        assert first == meanwhile == await batch(s, specs, "k", atomic=atomic)
        assert len(s.world.sandboxes) == 20
        s.check()

    sim(scenario)


def test_one_that_fails_does_not_fail_the_others_unless_asked_to(sim):
    async def scenario(s: SimNode) -> None:
        s.world.faults.fail("start", LaunchFailed("no"))
        some = await batch(s, [Spec(), Spec(), Spec()], "a")
        assert sum(isinstance(item, LaunchFailed) for item in some.values()) == 1
        s.world.faults.fail("start", LaunchFailed("no"))
        none = await batch(s, [Spec(name="x"), Spec(), Spec()], "b", atomic=True)
        assert all(isinstance(item, LaunchFailed) for item in none.values()) and len(none) == 3
        s.check()
        assert len(s.world.sandboxes) == 2
        assert all(isinstance(item, str) for item in (await batch(s, [Spec(name="x")] * 1, "b2", atomic=True)).values())

    sim(scenario)


def test_all_or_none_is_refused_when_it_cannot_all_fit(sim):
    async def scenario(s: SimNode) -> None:
        await s.crash()
        s.room = Room(total={**dict.fromkeys(RESOURCES, 1e9), "memory_mib": 1000.0})
        await s.start()
        assert all(isinstance(i, NodeFull) for i in (await batch(s, [Spec()] * 2, "a", atomic=True)).values())
        assert s.world.faults.calls["start"] == 0
        part = await batch(s, [Spec()] * 2, "b")
        assert sorted(type(item).__name__ for item in part.values()) == ["NodeFull", "str"]
        s.check()

    sim(scenario)


def test_names_within_a_batch(sim):
    async def scenario(s: SimNode) -> None:
        twice = await batch(s, [Spec(name="a"), Spec(name="a")], "k", atomic=True)
        assert all(isinstance(item, DsecError) for item in twice.values())
        s.check()
        assert not s.world.sandboxes
        with pytest.raises(InvalidSpec):
            await batch(s, [], "e")
        with pytest.raises(NotFound):
            s.node.cancel_many("k")

    sim(scenario)


def test_what_ended_long_ago_is_forgotten_with_its_steps_and_files(sim):
    async def scenario(s: SimNode) -> None:
        old = await s.create("c1")
        await s.run(old, ["echo", "x" * 100_000], "k")
        await s.node.stop(old)
        await s.clock.advance(lifecycle.ENDED_KEEP_S + 10)
        new = await s.create("c2", lifetime_s=None, idle_timeout_s=None)
        await s.node.stop(new)
        await s.restart()
        await s.clock.settle()
        assert [info.id for info in (await s.node.find(Query(states=["any"]))).items] == [new]
        with pytest.raises(NotFound):
            await s.node.get(old)
        assert not [path for path in s.node.core.store.spool.rglob("*") if path.is_file()]
        assert s.node.core.store.read("SELECT subject FROM steps") == [(new,)]

    sim(scenario)


def test_only_so_many_that_ended_are_kept(sim, monkeypatch):
    monkeypatch.setattr(lifecycle, "ENDED_KEEP_MAX", 3)

    async def scenario(s: SimNode) -> None:
        for _ in range(6):
            await s.node.stop(await s.create())
            await s.clock.advance(1)
        await s.restart()
        await s.clock.settle()
        assert len((await s.node.find(Query(states=["any"]))).items) == 3

    sim(scenario)
