"""Events: what happened to a sandbox, kept with what it tells of."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsec.model.errors import InvalidSpec, NotFound
from dsec.model.events import Event
from dsec.model.processes import SpawnSpec
from dsec.model.specs import RunSpec, Spec
from dsec.node import events as node_events
from dsec.node import lifecycle
from dsec.node.admission import RESOURCES, Room
from dsec.node.core import decode_info
from dsec.node.runs import Flight
from tests.kit.aio import until
from tests.kit.simnode import SimNode


async def told(s: SimNode, ref: str, since: int = 0) -> list[Event]:
    return [event async for event in s.node.events.of(ref, since)]


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def test_a_life_is_told_in_order_without_gaps_also_after_its_end(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(name="a", lifetime_s=1000)
        result = await s.run("a", "exit 3")
        await s.node.set_labels("a", {"k": "v"})
        await s.node.extend("a", 50)
        await s.node.stop("a", caller="uid 0")
        events = await told(s, id_)
        assert kinds(events) == ["created", "run.ended", "labels", "extend", "ended"]
        assert [event.seq for event in events] == [1, 2, 3, 4, 5]
        ended = events[1]
        assert (ended.step, ended.process_id, ended.command) == (1, result.process_id, "exit 3")
        assert (ended.detail["exit_code"], ended.detail["cause"]) == (3, "exited")
        assert events[2].detail == {"labels": {"k": "v"}}
        assert events[4].detail == {"state": "stopped", "reason": "stopped", "by": "stop by uid 0"}
        assert [event.at for event in events] == sorted(event.at for event in events)
        assert await told(s, id_, since=3) == events[3:]
        assert await told(s, id_, since=5) == []

    sim(scenario)


@pytest.mark.parametrize("atomic", [None, False, True])
def test_the_first_one_tells_how_long_there_was_no_room(tmp_path: Path, atomic: bool | None) -> None:
    async def main() -> None:
        room = Room(total=dict.fromkeys(RESOURCES, 1e12) | {"memory_mib": 1500.0})
        async with SimNode(tmp_path, room=room) as s:
            first = await s.create(memory_mib=1000, idle_timeout_s=None, lifetime_s=None)
            assert (await told(s, first))[0].detail["waited_s"] == 0
            spec = Spec(memory_mib=1000, wait_s=100)

            async def later() -> str:
                if atomic is None:
                    return await s.create(memory_mib=1000, wait_s=100)
                answers = [answer async for _, answer in s.node.create_many([spec], "k", atomic=atomic)]
                assert isinstance(answers[0], bytes)
                return decode_info(answers[0]).id

            waiting = asyncio.ensure_future(later())
            await s.clock.advance(30)
            await s.node.stop(first)
            created = (await told(s, await waiting))[0]
            assert created.kind == "created"
            assert created.detail["waited_s"] == pytest.approx(30, abs=1)
            assert created.detail["took_s"] >= created.detail["waited_s"]

    asyncio.run(main())


def test_events_are_still_there_after_a_restart_which_is_one(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        await s.run(id_, "true")
        before = await told(s, id_)
        await s.restart()
        after = await told(s, id_)
        assert after[: len(before)] == before
        assert kinds(after[len(before) :]) == ["node_restarted"]
        await s.crash()
        await s.start()
        assert [event.seq for event in await told(s, id_)] == list(range(1, len(before) + 3))

    sim(scenario)


def test_an_end_by_a_limit_says_which(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(idle_timeout_s=100, lifetime_s=None)
        await s.clock.advance(101)
        assert (await told(s, id_))[-1].detail["reason"] == "idle"

    sim(scenario)


def test_a_result_in_a_file_of_its_own_is_told_like_others(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        await s.run(id_, f"printf {'x' * 40_000}; exit 5")
        assert s.node.core.store.read("SELECT count(*) FROM steps WHERE spool IS NOT NULL") == [(1,)]
        assert (await told(s, id_))[-1].detail["exit_code"] == 5

    sim(scenario)


def test_the_last_are_kept_and_what_is_missed_is_said(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        total = node_events.EVENTS_KEEP_MAX + 300
        await s.node.core.store.commit(*[x for _ in range(total) for x in s.node.events.restarted([id_])])
        rows = s.node.core.store.read("SELECT count(*), max(seq) FROM events WHERE sandbox = ?", (id_,))
        assert rows[0][1] == total + 1
        assert node_events.EVENTS_KEEP_MAX <= rows[0][0] < node_events.EVENTS_KEEP_MAX + 64
        first, *rest = await told(s, id_)
        assert (first.kind, first.detail["count"]) == ("missed", total + 1 - rows[0][0])
        assert [event.seq for event in rest] == list(range(first.seq + 1, total + 2))

    sim(scenario)


def test_a_follower_hears_what_happens_until_the_end(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        heard: list[Event] = []

        async def follow() -> None:
            async for event in s.node.events.of(id_, follow=True):
                heard.append(event)

        following = asyncio.create_task(follow())
        await until(lambda: bool(heard))
        assert not following.done()
        await s.run(id_, "true")
        await s.node.stop(id_)
        await following
        assert kinds(heard) == ["created", "run.ended", "ended"]

    sim(scenario)


def test_a_follower_of_a_quiet_sandbox_does_nothing(sim, monkeypatch):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        heard: list[Event] = []

        async def follow() -> None:
            async for event in s.node.events.of(id_, follow=True):
                heard.append(event)

        following = [asyncio.create_task(follow()) for _ in range(2)]
        await until(lambda: len(heard) == 2)
        await asyncio.sleep(2 * node_events.LOOK_S)
        reads: list[str] = []
        read = s.node.core.store.read
        monkeypatch.setattr(s.node.core.store, "read", lambda sql, args=(): reads.append(sql) or read(sql, args))
        await asyncio.sleep(3 * node_events.LOOK_S)
        assert reads == []
        following.pop().cancel()  # one that leaves wakes no other, and is not waited for
        await s.run(id_, "true")
        await until(lambda: len(heard) == 3)
        await s.node.stop(id_)
        await asyncio.gather(*following)
        assert kinds(heard)[2:] == ["run.ended", "ended"]

    sim(scenario)


@pytest.mark.parametrize("how", ["stopped", "by itself"])
def test_what_a_sandbox_took_with_it_ended_before_it_did(sim, how):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        run = await s.fly(id_, "sleep 1000")
        program = await s.node.programs.spawn(id_, SpawnSpec(command="sleep 1000"))
        assert isinstance(run, Flight)
        await until(lambda: run.launched)
        if how == "stopped":
            await s.node.stop(id_)
        else:
            s.world.lose(id_)
            await until(lambda: s.node.core.alive(id_) is None)
        *_, first, second, last = await told(s, id_)
        assert {first.kind, second.kind} == {"run.ended", "spawn.ended"}
        assert program.id in (first.process_id, second.process_id)
        assert last.kind == "ended"

    sim(scenario)


def test_a_stuck_end_of_a_run_holds_up_no_end_of_a_sandbox_for_long(sim, monkeypatch):
    monkeypatch.setattr(lifecycle, "LAND_S", 0.01)

    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        blocked = asyncio.Event()

        async def stuck(*_: object) -> None:
            blocked.set()
            await asyncio.Event().wait()

        flight = await s.node.run(id_, RunSpec(command="echo x; sleep 1000"), None, stuck)
        assert isinstance(flight, Flight)
        await blocked.wait()
        assert (await s.node.stop(id_)).state == "stopped"
        assert not flight.done.done()
        assert flight.task is not None
        flight.task.cancel()

    sim(scenario)


def test_events_are_forgotten_with_their_sandbox(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        await s.run(id_, "true")
        await s.node.stop(id_)
        await s.node.core.store.commit(("DELETE FROM sandboxes WHERE id = ?", (id_,)))
        assert s.node.core.store.read("SELECT count(*) FROM events") == [(0,)]

    sim(scenario)


def test_what_cannot_be_told_is_refused(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        with pytest.raises(InvalidSpec):
            await told(s, id_, since=-1)
        with pytest.raises(NotFound):
            await told(s, "nobody")

    sim(scenario)
