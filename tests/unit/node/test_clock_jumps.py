"""Somebody sets the wall clock, by days, forward and back: no limit and no wait moves, nothing is forgotten early."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsec.model.errors import NodeFull, NotFound
from dsec.model.processes import SpawnSpec
from dsec.node.admission import RESOURCES, Room
from dsec.node.lifecycle import ENDED_KEEP_S
from tests.kit.simnode import SimNode

DAY = 86_400.0
JUMPS = pytest.mark.parametrize("jump_s", [2 * DAY, -2 * DAY, 400 * DAY])


@JUMPS
@pytest.mark.parametrize("restarted", [False, True])
def test_limits_and_timeouts_stay_where_they_are(sim, jump_s, restarted):
    async def scenario(s: SimNode) -> None:
        lasting = await s.create(lifetime_s=1000, idle_timeout_s=None)
        idle = await s.create(idle_timeout_s=1000, lifetime_s=None)
        cut = asyncio.ensure_future(s.run(lasting, "sleep 2000", key="cut", timeout_s=500))
        ends = asyncio.ensure_future(s.run(lasting, "sleep 400; exit 3", key="ends", timeout_s=500))
        await s.clock.advance(300)
        s.clock.wall_offset += jump_s
        if restarted:
            for task in (cut, ends):
                task.cancel()
            await s.restart()
            cut = asyncio.ensure_future(s.run(lasting, "sleep 2000", key="cut", timeout_s=500))
            ends = asyncio.ensure_future(s.run(lasting, "sleep 400; exit 3", key="ends", timeout_s=500))
        await s.clock.advance(199)
        assert not cut.done()
        result = await ends
        assert (result.exit_code, result.cause, result.duration_s) == (3, "exited", pytest.approx(400, abs=1))
        await s.clock.advance(2)
        assert ((await cut).cause, (await cut).duration_s) == ("timeout", pytest.approx(500, abs=1))
        await s.clock.advance(498)
        assert [(await s.node.get(id_)).state for id_ in (lasting, idle)] == ["running", "running"]
        left = (await s.node.get(lasting)).expires_at
        assert left is not None and left - s.clock.wall() == pytest.approx(1, abs=0.5)
        await s.clock.advance(2)
        ended = [await s.node.get(id_) for id_ in (lasting, idle)]
        assert [info.end_reason for info in ended] == ["lifetime", "idle"]
        s.check()

    sim(scenario)


@JUMPS
def test_who_waits_for_room_waits_as_long_as_it_asked_to(tmp_path: Path, jump_s: float) -> None:
    async def main() -> None:
        room = Room(total=dict.fromkeys(RESOURCES, 1e12) | {"memory_mib": 1500.0})
        async with SimNode(tmp_path, room=room) as s:
            first = await s.create(memory_mib=1000, idle_timeout_s=None, lifetime_s=None)
            refused = asyncio.ensure_future(s.create(memory_mib=1000, wait_s=100))
            granted = asyncio.ensure_future(s.create(memory_mib=1000, wait_s=200))
            await s.clock.advance(50)
            s.clock.wall_offset += jump_s
            await s.clock.advance(49)
            assert not refused.done() and not granted.done()
            await s.clock.advance(2)
            with pytest.raises(NodeFull):
                await refused
            await s.node.stop(first)
            await s.clock.advance(5)
            assert (await s.node.get(await granted)).state == "running"

    asyncio.run(main())


@JUMPS
def test_what_ended_is_known_as_long_as_is_said(sim, jump_s):
    async def scenario(s: SimNode) -> None:
        before, after = await s.create(name="before"), await s.create(name="after")
        await s.run(before, "exit 3", key="run")
        await s.node.stop(before)
        s.clock.wall_offset += jump_s
        await s.node.stop(after)
        s.clock.wall_offset -= jump_s
        for back in (jump_s, -jump_s):
            s.node._lifecycle.collect()
            await s.clock.settle()
            assert [(await s.node.get(id_)).end_reason for id_ in (before, after)] == ["stopped", "stopped"]
            assert (await s.run(before, "exit 3", key="run")).exit_code == 3
            s.clock.wall_offset += back
        await s.clock.advance(ENDED_KEEP_S + 3 * abs(jump_s))
        s.node._lifecycle.collect()
        await s.clock.settle()
        for id_ in (before, after):
            with pytest.raises(NotFound):
                await s.node.get(id_)

    sim(scenario)


def test_after_a_reboot_the_wall_clock_alone_says_how_long_ago_something_ended(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        await s.node.stop(id_)
        await s.crash()
        s.clock.boot_name = "boot-2"
        s.clock.wall_offset += s.clock.boot() - 10
        s.clock._now = 10.0
        await s.start()
        assert (await s.node.get(id_)).end_reason == "stopped"
        s.clock.wall_offset += ENDED_KEEP_S + 1
        s.node._lifecycle.collect()
        await s.clock.settle()
        with pytest.raises(NotFound):
            await s.node.get(id_)

    sim(scenario)


@JUMPS
@pytest.mark.parametrize("restarted", [False, True])
def test_a_program_is_found_again_after_ten_minutes_and_after_its_end(sim, jump_s, restarted):
    """By offset, with its exit code; whatever the clocks and the agents did meanwhile."""

    async def scenario(s: SimNode) -> None:
        id_ = await s.create(idle_timeout_s=None, lifetime_s=None)
        program = await s.node.programs.spawn(id_, SpawnSpec(command="echo one; sleep 900; echo two; exit 3"))

        async def later(seconds: float) -> None:
            await s.clock.advance(seconds)
            s.clock.wall_offset += jump_s
            if restarted:
                await s.restart()

        async def read(offset: int) -> bytes:
            return (await s.node.programs.read(id_, program.id, 1, offset)).data

        await later(600)
        assert (await s.node.programs.find(id_, program.id)).state == "running"
        assert (await read(0), await read(2)) == (b"one\n", b"e\n")
        await later(600)
        for _ in range(2):
            found = await s.node.programs.find(id_, program.id)
            assert found.result is not None
            assert (found.state, found.result.exit_code) == ("ended", 3)
            assert (await read(0), await read(4)) == (b"one\ntwo\n", b"two\n")
            await later(6000)
        await s.node.stop(id_)

    sim(scenario)
