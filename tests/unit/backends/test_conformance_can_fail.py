"""Every promise broken on purpose is noticed: the suite fails on fakes that have exactly one fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from dsec.backends import fake, fake_files, fake_programs, fake_runs
from dsec.backends.base import Exit
from dsec.backends.conformance import CHECKS, Violation, kit, perform
from dsec.model.files import FileChange
from dsec.model.states import RunOutcome
from tests.contract.test_fake import FakeSubject

pytestmark = pytest.mark.unit

Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "PATIENCE_S", 1.5)


def changed(field: str, value: Any) -> Break:
    """Every outcome has a wrong value in one field."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        right = fake_runs.FakeRun._conclude

        def wrong(self: fake_runs.FakeRun, task: asyncio.Task[int]) -> RunOutcome:
            return msgspec.structs.replace(right(self, task), **{field: value})

        monkeypatch.setattr(fake_runs.FakeRun, "_conclude", wrong)

    return apply


def replaced(owner: Any, name: str, value: Any) -> Break:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


def leaky_end(self: Any, exit_: Exit) -> Exit:
    """Ends without taking the sandbox out of the world."""
    self.exit = self.exit or exit_
    self.ended.set()
    return self.exit


async def write_without_waiting(self: fake_runs.FakeRun, stream: int, data: bytes) -> None:
    capture = self._captures[stream - 1]
    offset = capture.total
    capture.append(data)
    for reader in self._readers:
        reader.push(stream, offset, data)


async def write_everything_to_stdout(self: fake_runs.FakeRun, stream: int, data: bytes) -> None:
    self._captures[0].append(data)


def kill_only_the_process(self: fake_runs.FakeRun, cause: Any) -> None:
    self._verdict = self._verdict or (cause, 9)
    self._cancel()


async def forget_nothing(self: fake.FakeGuest, process_id: str) -> None:
    return None


def discard_nothing(self: fake.FakeGuest, process_id: str) -> None:
    return None


async def always_a_new_run(self: fake.FakeGuest, plan: Any, *, sink: Any = None, started: Any = None) -> RunOutcome:
    box = self._sandbox
    run = fake_runs.FakeRun(plan, box.plan, box.directories, box.world.clock, box.world.next_pid())
    box.runs[plan.process_id] = run
    run.start()
    if started:
        started()
    return await run.follow(sink, (0, 0))


async def cancelled_with_its_caller(
    self: fake.FakeGuest, plan: Any, *, sink: Any = None, started: Any = None
) -> RunOutcome:
    task = asyncio.ensure_future(always_a_new_run(self, plan, sink=sink, started=started))
    try:
        return await task
    except asyncio.CancelledError:
        self._sandbox.runs[plan.process_id].kill_tree("killed")
        raise


def runs_go_on_after_the_end(self: fake_runs.FakeRun, error: Any) -> None:
    return None


def no_offsets(self: fake_runs.Capture, offset: int) -> list[tuple[int, bytes]]:
    return [(0, bytes(self.head))]


def greedy_tail(self: fake_runs.Capture, data: bytes) -> None:
    self.total += len(data)
    self.head += data


async def empty_survey(self: fake.FakeBackend) -> list[Any]:
    return []


def anyone(user: str) -> None:
    return None


def always_the_rest(original: Any) -> Any:
    """Tells what is anywhere, whatever part was asked for."""
    return lambda self, where: original(self, b"/")


def whatever_was_touched(original: Any) -> Any:
    """Tells also what is again as it was."""

    def changes(self: fake_files.Tree, where: bytes) -> Iterator[FileChange]:
        told = {one.path for one in original(self, where)}
        yield from original(self, where)
        yield from (
            FileChange(kind="changed", path=p.decode()) for p in self.nodes if p.decode("utf-8", "replace") not in told
        )

    return changes


BROKEN: dict[str, tuple[Break, str]] = {
    "exit codes": (changed("exit_code", 0), "ends.every_exit_code_is_exact"),
    "signal": (changed("signal", None), "ends.signals_are_exact"),
    "cause of a timeout": (changed("cause", "exited"), "ends.a_timeout_kills_the_tree"),
    "cause of a kill": (changed("cause", "timeout"), "ends.kill_ends_the_tree"),
    "oom": (changed("limits_hit", ()), "isolation.out_of_memory_is_attributed"),
    "duration": (changed("duration_s", 0.0), "ends.times_and_use_are_reported"),
    "leak": (replaced(fake._Sandbox, "end", leaky_end), "lifecycle.stopping_releases_everything_and_is_idempotent"),
    "back-pressure": (
        replaced(fake_runs.FakeRun, "write", write_without_waiting),
        "output.a_slow_sink_slows_the_program",
    ),
    "streams": (replaced(fake_runs.FakeRun, "write", write_everything_to_stdout), "output.both_streams_are_exact"),
    "ids": (replaced(fake.FakeGuest, "run", always_a_new_run), "idempotence.the_same_id_runs_once"),
    "forget": (replaced(fake.FakeGuest, "forget", forget_nothing), "idempotence.a_result_is_kept_until_forgotten"),
    "discard": (
        replaced(fake.FakeGuest, "discard", discard_nothing),
        "idempotence.a_discarded_result_is_gone_soon",
    ),
    "cancel": (
        replaced(fake.FakeGuest, "run", cancelled_with_its_caller),
        "idempotence.cancelling_a_call_stops_nothing",
    ),
    "stop": (
        replaced(fake_runs.FakeRun, "lose", runs_go_on_after_the_end),
        "lifecycle.after_stop_everything_is_sandbox_lost",
    ),
    "offsets": (replaced(fake_runs.Capture, "kept_from", no_offsets), "output.attaching_goes_on_at_an_offset"),
    "bounds": (replaced(fake_runs.Capture, "append", greedy_tail), "output.long_output_is_cut_at_the_default_limits"),
    "survey": (replaced(fake.FakeBackend, "survey", empty_survey), "lifecycle.survey_lists_what_lives"),
    "changes": (
        replaced(fake_files.Tree, "changes", whatever_was_touched(fake_files.Tree.changes)),
        "changes.changes_are_what_is_there_against_what_was",
    ),
    "mounts": (replaced(fake_files, "MOUNTS", ()), "changes.changes_are_told_of_a_part_and_in_bounds"),
    "part": (
        replaced(fake_files.Tree, "changes", always_the_rest(fake_files.Tree.changes)),
        "changes.changes_are_told_of_a_part_and_in_bounds",
    ),
    "users": (replaced(fake_programs, "_check_user", anyone), "ends.what_is_wrong_inside_names_the_field"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, check_name = BROKEN[name]
    check = next(check for check in CHECKS if check.name == check_name)
    asyncio.run(perform(check, FakeSubject()))  # passes before
    broken(monkeypatch)
    with pytest.raises((Violation, AssertionError)):
        asyncio.run(perform(check, FakeSubject()))


def test_every_check_is_registered_once() -> None:
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names)) > 50
    assert all(check.promise != check.name for check in CHECKS)
