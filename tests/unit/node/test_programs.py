"""Spawned programs: whether their sandbox is idle meanwhile, and what their output reserves of the disk."""

from __future__ import annotations

import asyncio
import random

import pytest

from dsec.model import limits
from dsec.model.errors import Conflict, InvalidSpec, NodeFull
from dsec.model.processes import How, SpawnSpec, Terminal
from dsec.node.admission import RESOURCES, Room
from dsec.node.plan import spool_mib
from tests.kit.aio import until
from tests.kit.simnode import SimNode

SLEEP = ["sleep", "1000"]
MIB = 1 << 20


def reserved(s: SimNode) -> float:
    """What output has of the promised disk, beside the sandboxes."""
    core = s.node.core
    return core.admission.snapshot()["disk_mib"]["promised"] - sum(
        box.info.spec.disk_mib for box in core.boxes.values()
    )


def test_a_program_that_runs_does_not_keep_its_sandbox_alive_unless_asked_to(sim):
    async def scenario(s: SimNode) -> None:
        idle = await s.create(idle_timeout_s=10, lifetime_s=None)
        busy = await s.create(idle_timeout_s=10, lifetime_s=None)
        program = await s.node.programs.spawn(idle, SpawnSpec(command=SLEEP, keepalive=False))
        await s.node.programs.spawn(busy, SpawnSpec(command=SLEEP))
        assert program.state == "running"
        await s.clock.advance(9)
        assert [(await s.node.get(id_)).state for id_ in (idle, busy)] == ["running", "running"]
        await s.clock.advance(2)
        info = await s.node.get(idle)
        assert (info.state, info.end_reason) == ("stopped", "idle")
        await s.clock.advance(900)
        assert (await s.node.get(busy)).state == "running"
        await s.clock.advance(120)
        assert (await s.node.get(busy)).end_reason == "idle"

    sim(scenario)


@pytest.mark.parametrize("seed", range(20))
def test_input_is_what_its_writers_were_told(sim, seed):
    """Several give it, repeat what they gave, are late, in an agent that restarts: against a model of one text."""

    async def scenario(s: SimNode) -> None:
        chance = random.Random(seed)
        id_ = await s.create()
        program = (await s.node.programs.spawn(id_, SpawnSpec(command=["cat"]))).id
        text, newest, begins = b"", "", 0
        for _ in range(60):
            if not chance.randrange(8):
                await s.restart()
            writer = chance.choice(("", "a", "b"))
            offset = max(0, len(text) - chance.choice((0, 0, chance.randrange(12))))
            again = text[offset:] if writer == newest and offset >= begins else b""
            data = again + bytes(chance.choice(b"xyz") for _ in range(chance.randrange(0 if again else 1, 4)))
            giving = s.node.programs.write(id_, program, offset, data, eof=False, writer=writer)
            if offset < len(text) and not again:
                with pytest.raises(Conflict) as caught:
                    await giving
                assert caught.value.detail["input_size"] == len(text)
                continue
            if not again:
                newest, begins = writer, len(text) if writer != newest else begins
            text = text[:offset] + data
            assert (await giving).size == len(text)
        await s.node.programs.write(id_, program, len(text), b"", eof=True, writer="a")
        ended = await s.node.programs.wait(id_, program, 60)
        assert ended.result is not None and ended.result.out.head == text

    sim(scenario)


def test_a_reader_of_such_a_program_does(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(idle_timeout_s=10, lifetime_s=None)
        program = await s.node.programs.spawn(id_, SpawnSpec(command=SLEEP, keepalive=False))

        async def sink(*_: object) -> None: ...

        followed = s.node.programs.follow(id_, program.id, sink, (0, 0), lossy=False)
        assert followed is not None
        await s.clock.advance(100)
        assert (await s.node.get(id_)).state == "running"
        followed[1].cancel()
        await asyncio.wait({followed[1]})
        await s.clock.advance(11)
        assert (await s.node.get(id_)).end_reason == "idle"

    sim(scenario)


def test_an_agent_that_restarts_knows_which_programs_count(sim):
    async def scenario(s: SimNode) -> None:
        idle = await s.create(idle_timeout_s=10, lifetime_s=None)
        busy = await s.create(idle_timeout_s=10, lifetime_s=None)
        await s.node.programs.spawn(idle, SpawnSpec(command=SLEEP, keepalive=False))
        await s.node.programs.spawn(busy, SpawnSpec(command=SLEEP))
        await s.restart()
        await s.clock.advance(30)
        assert (await s.node.get(idle)).end_reason == "idle"
        assert (await s.node.get(busy)).state == "running"

    sim(scenario)


def test_output_reserves_disk_until_it_is_not_kept_any_more(sim):
    each = 2 * (1 + 16 + 0.25)

    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        await s.run(id_, ["true"])
        assert reserved(s) == 0
        key = "once"
        running = await s.node.programs.spawn(id_, SpawnSpec(command=SLEEP), key)
        assert (await s.node.programs.spawn(id_, SpawnSpec(command=SLEEP), key)).id == running.id
        assert reserved(s) == each
        more = await s.node.programs.spawn(id_, SpawnSpec(command=SLEEP, spool_bytes=100 * MIB))
        assert reserved(s) == each + 2 * 101.25
        await s.node.programs.spawn(id_, SpawnSpec(command=SLEEP, spool_bytes=0))
        assert reserved(s) == each + 2 * 101.25
        await s.restart()
        assert reserved(s) == each + 2 * 101.25
        box = s.node.core.boxes[id_]
        assert box.guest is not None
        for program in (running, more):
            await box.guest.kill(program.id)
            await s.node.programs.wait(id_, program.id, 10)
        assert reserved(s) == each + 2 * 101.25, "it is kept"
        await s.restart()
        assert reserved(s) == each + 2 * 101.25
        for number in range(limits.PROGRAMS_KEPT):
            last = await s.node.programs.spawn(id_, SpawnSpec(command=["true"]), f"k{number}")
            await s.node.programs.wait(id_, last.id, 10)
        await until(lambda: reserved(s) == limits.PROGRAMS_KEPT * each)
        await s.node.stop(id_)
        assert reserved(s) == 0
        s.check()

    sim(scenario)


def test_what_an_agent_that_died_had_not_let_go_the_next_one_does(sim, monkeypatch):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        monkeypatch.setattr("dsec.backends.fake.FakeGuest.discard", lambda guest, process_id: None)
        ids = []
        for number in range(limits.PROGRAMS_KEPT + 2):
            program = await s.node.programs.spawn(id_, SpawnSpec(command=["true"]), f"k{number}")
            await s.node.programs.wait(id_, program.id, 10)
            ids.append(program.id)
        there = s.world.sandboxes[id_].runs
        assert set(ids) == set(there)
        monkeypatch.undo()
        await s.restart()
        assert set(there) == set(ids[2:])
        assert reserved(s) == limits.PROGRAMS_KEPT * 2 * 17.25

    sim(scenario)


def test_what_is_reserved_is_for_each_output_in_whole_pages():
    assert spool_mib(How(kind="session", control=True)) == 3 * 17.25
    assert spool_mib(How(kind="spawn", tty=Terminal())) == 17.25
    assert spool_mib(How(kind="spawn", spool_bytes=16 * MIB + 1)) == 2 * (17.25 + 4096 / MIB)
    assert spool_mib(How(kind="spawn", spool_bytes=1)) == 2 * 2.25, "the tail of the result lies there too"
    assert spool_mib(How(kind="run")) == spool_mib(How(kind="command")) == 0


def test_what_cannot_be_started_reserves_nothing(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        with pytest.raises(Exception, match="none"):
            await s.node.programs.spawn(id_, SpawnSpec(command=["/none"]))
        assert reserved(s) == 0
        for bad in (-1, limits.SPOOL_MAX_BYTES + 1):
            with pytest.raises(InvalidSpec) as caught:
                await s.node.programs.spawn(id_, SpawnSpec(command=SLEEP, spool_bytes=bad))
            assert caught.value.detail["field"] == "spool_bytes"

    sim(scenario)


def test_without_room_for_its_output_nothing_is_started(tmp_path):
    async def main() -> None:
        room = Room(total={**dict.fromkeys(RESOURCES, 1e12), "disk_mib": 1000.0})
        async with SimNode(tmp_path, room=room) as s:
            id_ = await s.create(disk_mib=900)
            programs = s.node.programs
            await programs.spawn(id_, SpawnSpec(command=SLEEP), "a")
            await programs.spawn(id_, SpawnSpec(command=SLEEP), "b")
            with pytest.raises(NodeFull) as caught:
                await programs.spawn(id_, SpawnSpec(command=SLEEP), "c")
            assert caught.value.detail["resource"] == "disk_mib"
            assert s.open_steps() == 2, "nothing was begun"
            # The key is free: it may be tried again with less.
            await programs.spawn(id_, SpawnSpec(command=SLEEP, spool_bytes=8 * MIB), "c")
            # One that is there is found, not refused.
            await programs.spawn(id_, SpawnSpec(command=SLEEP), "a")

    asyncio.run(main())
