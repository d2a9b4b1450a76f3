"""Runs: exactly once under a key, in flight, after their end, after a restart."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dsec.model.errors import (
    Conflict,
    DsecError,
    Exhausted,
    InvalidSpec,
    LaunchFailed,
    NodeDiskFull,
    NotFound,
    ProgramNotStarted,
    Unavailable,
    Unknown,
)
from dsec.model.specs import RunSpec
from dsec.node import runs
from dsec.node.core import value_of
from dsec.node.runs import Flight, never_launched
from tests.kit.simnode import SimNode


def test_a_repeated_key_runs_once(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        results = await asyncio.gather(*(s.run(id_, "echo hi", "k") for _ in range(20)))
        again = await s.run(id_, "echo hi", "k")
        assert {result.process_id for result in [*results, again]} == {again.process_id}
        assert again.stdout == "hi\n"
        assert s.world.faults.calls["run"] == 1
        with pytest.raises(Conflict, match=r"other content \(of 'echo hi'\); every field counts, also a timeout"):
            await s.run(id_, "echo ho", "k")
        other = await s.create()
        assert (await s.run(other, "echo ho", "k")).stdout == "ho\n"  # a key is its sandbox's

    sim(scenario)


def test_another_content_conflicts_in_flight_as_well(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        await s.fly(id_, "sleep 10", "k")
        with pytest.raises(Conflict, match="of 'sleep 10'"):
            await s.fly(id_, "sleep 11", "k")

    sim(scenario)


def test_answers_are_kept_over_a_restart_and_the_end_of_the_sandbox(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        first = await s.run(id_, "echo hi", "k")
        big = await s.run(id_, ["echo", "x" * 100_000], "big")
        await s.restart()
        assert await s.run(id_, "echo hi", "k") == first
        assert await s.run(id_, ["echo", "x" * 100_000], "big") == big
        await s.node.stop(id_)
        assert await s.run(id_, "echo hi", "k") == first
        assert (await s.run(id_, ["echo", "x" * 100_000], "big")).stdout_bytes == big.stdout_bytes

    sim(scenario)


def test_a_large_answer_lies_in_a_file(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        text = "x" * 50_000
        first = await s.run(id_, ["echo", text], "k")
        files = [path for path in s.node.core.store.spool.rglob("*") if path.is_file()]
        assert len(files) == 1 and files[0].stat().st_size > 50_000
        assert (await s.run(id_, ["echo", text], "k")) == first

    sim(scenario)


def test_what_the_sandbox_refuses_is_an_answer_too(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        for _ in range(2):
            with pytest.raises(ProgramNotStarted) as caught:
                await s.run(id_, ["no-such-program"], "k")
            assert caught.value.detail["field"] == "command"
        assert s.world.faults.calls["run"] == 1
        assert not s.open_steps()

    sim(scenario)


@pytest.mark.parametrize("error", [LaunchFailed("no"), Exhausted("full")])
def test_what_never_ran_frees_its_key(sim, error):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        s.world.faults.fail("run", error)
        with pytest.raises(type(error)):
            await s.run(id_, ["true"], "k")
        assert (await s.run(id_, ["true"], "k")).ok
        assert not s.open_steps()

    sim(scenario)


def test_a_runtime_out_of_reach_leaves_the_step_open_and_the_same_key_finds_the_run(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        s.world.faults.fail("run", Unavailable("gone for a moment"))
        with pytest.raises(Unavailable):
            await s.run(id_, "echo hi", "k")
        assert s.open_steps() == 1
        assert (await s.run(id_, "echo hi", "k")).stdout == "hi\n"
        assert not s.open_steps()

    sim(scenario)


def test_a_run_in_flight_is_found_again_after_a_restart(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        flight = await s.fly(id_, "sleep 30; exit 7", "k")
        assert isinstance(flight, Flight)
        await s.clock.settle()
        await s.restart()
        assert len((await s.node.programs.list(id_)).programs) == 1
        again = asyncio.ensure_future(s.run(id_, "sleep 30; exit 7", "k"))
        await s.clock.advance(31)
        result = await again
        assert (result.exit_code, result.process_id, result.step) == (7, flight.process_id, 1)
        assert (await s.run(id_, ["true"])).step == 2

    sim(scenario)


def test_when_nobody_knows_it_is_unknown_never_invented(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        await s.fly(id_, "sleep 30", "k")
        await s.clock.settle()
        await s.crash()
        s.world.crash()
        await s.start()
        await s.clock.settle()
        with pytest.raises(Unknown):
            await s.run(id_, "sleep 30", "k")
        assert (await s.run(id_, ["true"], "k2")).ok

    sim(scenario)


def test_begun_but_never_launched_runs_when_it_is_asked_for_again(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        s.kill_at(2)  # the row is written; run.begun
        flight = await s.fly(id_, "echo hi", "k")
        await s.clock.settle()
        assert s.open_steps is not None and isinstance(flight, Flight)
        await s.restart()
        answer = await s.fly(id_, "echo hi", "k")
        if isinstance(answer, Flight):
            answer = await answer.answer()
        if never_launched(answer):
            assert (await s.run(id_, "echo hi", "k")).stdout == "hi\n"
        else:
            assert not isinstance(answer, DsecError)

    sim(scenario)


def test_kill_ends_the_tree_and_is_done_once(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        run = asyncio.ensure_future(s.run(id_, "sleep 100"))
        await s.clock.settle()
        (process,) = (await s.node.programs.list(id_)).programs
        assert process.command == "sleep 100" and process.state == "running"
        await s.node.kill(id_, process.id, None, "kk")
        result = await run
        assert result.cause == "killed" and not result.ok
        await s.node.kill(id_, process.id, None, "kk")  # it has ended: nothing to do
        assert s.world.faults.calls["kill"] == 1
        with pytest.raises(NotFound):
            await s.node.kill(id_, "p-aaaaaaaaaaaaa")
        with pytest.raises(InvalidSpec):
            await s.node.kill(id_, process.id, 99)

    sim(scenario)


def test_env_directory_and_user_come_from_spec_then_layers(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(env={"A": "1", "B": "2"}, cwd="/tmp")
        result = await s.run(id_, "echo $A $B $C; pwd", env={"B": "3", "C": "4"})
        assert result.stdout == "1 3 4\n/tmp\n"
        with pytest.raises(ProgramNotStarted) as caught:
            await s.run(id_, ["true"], cwd="/nowhere")
        assert caught.value.detail["field"] == "cwd"

    sim(scenario)


def test_a_reader_that_leaves_does_not_end_the_run(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        seen: list[bytes] = []

        async def sink(stream: int, offset: int, data: bytes) -> None:
            seen.append(data)

        flight = await s.node.run(id_, RunSpec(command="echo one; sleep 5; echo two"), "k", sink)
        assert isinstance(flight, Flight)
        await s.clock.settle()
        assert b"".join(seen) == b"one\n"
        flight.detach()
        await s.clock.advance(6)
        answer = runs.decode_result(value_of(await flight.answer()))
        assert answer.stdout == "one\ntwo\n"
        assert b"".join(seen) == b"one\n"
        assert s.world.faults.calls["run"] == 2  # the second call attached to the first one's program
        assert answer.process_id == flight.process_id

    sim(scenario)


def test_runs_in_flight_are_bounded(sim, monkeypatch):
    monkeypatch.setattr(runs, "RUNS_IN_FLIGHT_MAX", 3)

    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        for _ in range(3):
            await s.fly(id_, "sleep 10")
        with pytest.raises(Exhausted):
            await s.fly(id_, "sleep 10")

    sim(scenario)


# A disk that is full


LOUD = ["echo", "x" * 100_000]


@pytest.fixture
def no_room(monkeypatch) -> Iterator[pytest.MonkeyPatch]:
    """For files: what is small still finds room in the log."""

    def full(files: Sequence[tuple[Path, bytes]]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(files[0][0]))

    with monkeypatch.context() as patch:
        patch.setattr("dsec.node.store._write_files", full)
        yield patch


async def known(s: SimNode, id_: str) -> set[str]:
    """What the runtime knows of."""
    guest = s.node.core.boxes[id_].guest
    assert guest is not None
    return {process.process_id for process in await guest.processes()}


def test_a_result_without_room_is_told_and_written_when_there_is_some(sim, no_room):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        first = await s.run(id_, LOUD, "k")
        assert first.out.total == 100_001
        for _ in range(2):
            assert await s.run(id_, LOUD, "k") == first
        program = await s.node.programs.find(id_, first.process_id)
        assert (program.state, program.result) == ("ended", first)
        with pytest.raises(Conflict):
            await s.run(id_, ["true"], "k")
        await s.clock.advance(20)
        assert s.open_steps() == 1
        assert await known(s, id_) == {first.process_id}, "the runtime is where the next agent asks"
        no_room.undo()
        await s.clock.advance(20)
        assert s.open_steps() == 0
        assert await known(s, id_) == set()
        await s.restart()
        assert await s.run(id_, LOUD, "k") == first
        assert s.world.faults.calls["run"] == 1

    sim(scenario)


def test_a_result_that_was_not_written_is_asked_for_where_it_ran(sim, no_room):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        first = await s.run(id_, LOUD, "k")
        await s.crash()
        await s.start()
        assert await s.run(id_, LOUD, "k") == first
        no_room.undo()
        await s.clock.advance(20)
        assert s.open_steps() == 0

    sim(scenario)


def test_a_result_that_was_not_written_outlives_its_sandbox(sim, no_room):
    async def scenario(s: SimNode) -> None:
        id_, forgotten = await s.create(), await s.create()
        first = await s.run(id_, LOUD, "k")
        await s.run(forgotten, LOUD, "k")
        await s.node.stop(id_)
        await s.node.stop(forgotten)
        assert await s.run(id_, LOUD, "k") == first
        await s.node.core.store.commit(("DELETE FROM steps WHERE scope = ?", (forgotten,)))
        no_room.undo()
        await s.clock.advance(20)
        assert [path.parent.name for path in s.node.core.store.spool.rglob("*") if path.is_file()] == [id_]
        await s.restart()
        assert await s.run(id_, LOUD, "k") == first

    sim(scenario)


def test_what_would_take_the_agents_memory_is_refused_and_found_under_its_key(sim, no_room, monkeypatch):
    async def scenario(s: SimNode) -> None:
        monkeypatch.setattr("dsec.node.owed.RESULTS_MAX_BYTES", 150_000)
        id_ = await s.create()
        first = await s.run(id_, LOUD, "k")
        with pytest.raises(NodeDiskFull):
            await s.run(id_, LOUD, "l")
        assert await s.run(id_, LOUD, "k") == first
        no_room.undo()
        assert (await s.run(id_, LOUD, "l")).ok
        assert s.world.faults.calls["run"] == 3, "the second asks for what had been begun"
        assert (await s.run(id_, ["true"])).step == 3

    sim(scenario)
