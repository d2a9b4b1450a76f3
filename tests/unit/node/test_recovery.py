"""A node that starts again: what the disk says and what is there become one."""

from __future__ import annotations

import asyncio

import pytest

from dsec.backends.base import StartPlan
from dsec.backends.fake import FakeBackend
from dsec.model import failpoint, ids
from dsec.model.errors import SandboxLost, Unavailable, Unknown
from dsec.model.processes import SpawnSpec
from dsec.model.specs import Spec
from dsec.node.core import value_of
from tests.kit.aio import until
from tests.kit.simnode import SimNode


def test_sandboxes_live_on_with_their_limits_names_and_labels(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(name="a", labels={"x": "y"}, env={"A": "1"}, lifetime_s=100, idle_timeout_s=None)
        before = await s.node.get("a")
        await s.clock.advance(40)
        await s.restart()
        after = await s.node.get("a")
        assert (after.id, after.labels, after.expires_at) == (id_, {"x": "y"}, before.expires_at)
        assert (await s.run("a", "echo $A")).stdout == "1\n"
        s.check()
        await s.clock.advance(61)
        assert (await s.node.get(id_)).end_reason == "lifetime"

    sim(scenario)


def test_idle_time_goes_on_over_a_restart(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(idle_timeout_s=100, lifetime_s=None)
        await s.clock.advance(50)
        await s.run(id_, ["true"])
        await s.clock.advance(60)
        await s.restart()
        await s.clock.advance(39)
        assert (await s.node.get(id_)).state == "running"
        await s.clock.advance(2)
        assert (await s.node.get(id_)).end_reason == "idle"

    sim(scenario)


def test_a_limit_that_passed_meanwhile_ends_it_at_once(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(lifetime_s=10)
        await s.crash()
        await s.clock.advance(20)
        await s.start()
        await s.clock.advance(0)
        assert (await s.node.get(id_)).end_reason == "lifetime"
        s.check()

    sim(scenario)


def test_orphans_are_ended_and_ghosts_are_lost(sim):
    async def scenario(s: SimNode) -> None:
        ghost = await s.create()
        await s.crash()
        s.world.lose(ghost)
        orphan = StartPlan(
            id=ids.new_sandbox_id("n1"),
            hostname="x",
            layers=(),
            env={},
            cwd="/",
            user="root",
            cpu=1,
            cpu_weight=1,
            cpus=(),
            memory_bytes=1,
            disk_bytes=1,
            pids=1,
        )
        await FakeBackend(s.world, name="container").start(orphan)
        await s.start()
        s.check()
        assert (await s.node.get(ghost)).state == "lost"
        with pytest.raises(SandboxLost):
            await s.run(ghost, ["true"])
        assert not s.world.sandboxes

    sim(scenario)


@pytest.mark.parametrize("reason", ["init_died", "oom", "disk_lost"])
def test_how_it_ended_while_the_agent_was_away_is_told(sim, reason):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        await s.crash()
        s.world.lose(id_, reason)
        await s.start()
        assert ((info := await s.node.get(id_)).state, info.end_reason) == ("lost", reason)
        with pytest.raises(SandboxLost) as lost:
            await s.run(id_, ["true"])
        assert lost.value.end_reason == reason
        s.check()

    sim(scenario)


def test_after_a_reboot_everything_is_lost_and_said_so(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(name="a")
        await s.fly(id_, "sleep 100", "k")
        await s.clock.settle()
        await s.crash()
        s.clock.boot_name = "boot-2"
        s.world.crash(keep_sandboxes=False)
        await s.start()
        info = await s.node.get("a")
        assert (info.state, info.end_reason) == ("lost", "reboot")
        with pytest.raises(Unknown):
            await s.run(id_, "sleep 100", "k")
        assert await s.create(name="a")
        s.check()

    sim(scenario)


def test_one_that_was_being_stopped_is_stopped(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        s.kill_at(2)  # the row is written; stop.marked
        stopping = asyncio.ensure_future(s.node.stop(id_))
        await s.clock.settle()
        await s.restart()
        assert stopping.cancelled() or not stopping.done() or stopping.exception() is not None
        await s.clock.advance(1)
        info = await s.node.get(id_)
        assert (info.state, info.end_reason) == ("stopped", "stopped")
        s.check()

    sim(scenario)


@pytest.mark.parametrize("gone", [False, True])
def test_what_was_begun_in_one_that_was_being_stopped_has_ended(sim, gone):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        program = await s.node.programs.spawn(id_, SpawnSpec(command="sleep 1000"))
        s.kill_at(2)  # the row is written; stop.marked
        stopping = asyncio.ensure_future(s.node.stop(id_))
        await s.clock.settle()
        if gone:
            s.world.lose(id_)
        await s.restart()
        await asyncio.gather(stopping, return_exceptions=True)
        await s.clock.advance(1)
        assert (await s.node.programs.find(id_, program.id)).state == "ended"
        with pytest.raises(SandboxLost) as lost:
            await s.node.programs.wait(id_, program.id, 5)
        assert lost.value.detail["reason"] == "stopped"
        assert s.node.core.steps.open(id_) == []
        s.check()

    sim(scenario)


def test_what_nobody_wrote_down_the_end_of_has_ended_with_its_sandbox(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        program = await s.node.programs.spawn(id_, SpawnSpec(command="sleep 1000"))
        await s.node.stop(id_)
        await s.node.core.store.commit(("UPDATE steps SET state = 0, response = NULL WHERE scope = ?", (id_,)))
        assert (await s.node.programs.find(id_, program.id)).state == "ended"
        with pytest.raises(SandboxLost):
            await s.node.programs.wait(id_, program.id, 5)

    sim(scenario)


async def everything(s: SimNode) -> None:
    """A scenario that passes every failpoint of a node; errors are what a sweep is about."""

    async def step(work):  # type: ignore[no-untyped-def]  # a helper of this test
        try:
            return await work
        except Exception:  # noqa: BLE001 - a sweep makes anything fail; what it leaves behind is what counts
            return None

    created = await step(s.node.create(Spec(name="a"), "c1"))
    other = await step(s.node.create(Spec(name="b"), "c2"))
    if created is not None:
        await step(s.run("a", "echo hi", "r1"))
        await step(s.node.set_labels("a", {"x": "y"}, "l1"))
        await step(s.node.stop("a"))
    if other is not None:
        s.world.lose(other.info.id)
    await s.clock.settle()

    async def batch(atomic):  # type: ignore[no-untyped-def]  # a helper of this test
        specs = [Spec(job="j"), Spec(job="j")]
        return [value_of(answer) async for _, answer in s.node.create_many(specs, f"b{atomic}", atomic=atomic)]

    await step(batch(True))
    await step(batch(False))


def names_of(sim_) -> list[str]:  # type: ignore[no-untyped-def]  # the fixture's runner
    seen: list[str] = []

    async def scenario(s: SimNode) -> None:
        failpoint.count()
        await everything(s)
        seen.extend(name for name, count in failpoint.seen.items() for _ in range(count) if not name.startswith("fake"))
        failpoint.disarm()

    sim_(scenario)
    return seen


# At least as many failpoints as the scenario passes.
STEPS = 60


def test_the_scenario_passes_the_failpoints(sim):
    names = names_of(sim)
    assert 40 < len(names) <= STEPS
    assert set(names) >= {
        "create.admitted",
        "create.begun",
        "create.started",
        "create.recorded",
        "batch.begun",
        "run.begun",
        "run.ended",
        "run.recorded",
        "stop.marked",
        "stop.ended",
        "stop.recorded",
        "lost.released",
        "store.before_commit",
    }


@pytest.mark.parametrize("nth", range(1, STEPS + 1))
def test_killed_at_any_step_nothing_is_left_half_made(sim, nth):
    async def scenario(s: SimNode) -> None:
        visited = s.kill_at(nth)
        work = asyncio.ensure_future(everything(s))
        await until(lambda: len(visited) == nth or work.done())
        await s.clock.settle()
        if len(visited) < nth:  # how many transactions there are depends on how changes are grouped
            return
        work.cancel()
        await s.restart()
        await s.clock.advance(10)
        s.check()
        await s.node.create(Spec(name="a", if_exists="get"), "again")
        assert (await s.run("a", "echo hi", "r2")).stdout == "hi\n"
        if s.node.core.alive("a"):
            await s.node.stop("a")
        await s.node.stop_job("j")
        s.check()

    sim(scenario)


@pytest.mark.parametrize(
    "name",
    [
        "create.admitted",
        "create.begun",
        "create.started",
        "create.recorded",
        "batch.begun",
        "stop.marked",
        "stop.ended",
        "lost.released",
        "run.begun",
        "run.ended",
        "run.recorded",
        "store.before_commit",
        "fake.start.reserved",
        "fake.start.made",
    ],
)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_error_at_any_step_is_undone(sim, name, nth):
    async def scenario(s: SimNode) -> None:
        failpoint.arm(name, nth)
        await everything(s)
        failpoint.disarm()
        await s.clock.advance(20)
        s.check()
        await s.node.stop_job("j")
        for ref in ("a", "b"):
            if s.node.core.alive(ref):
                await s.node.stop(ref)
        s.check()
        assert not s.world.inventory()
        await s.restart()
        s.check()

    sim(scenario)


def test_a_backend_that_is_missing_is_refused(sim):
    async def scenario(s: SimNode) -> None:
        await s.create()
        await s.crash()
        s.backend_name = "microvm"
        with pytest.raises(Unavailable):
            await s.start()

    sim(scenario)
