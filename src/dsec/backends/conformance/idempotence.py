"""One process id is one program, however often it is asked for."""

from __future__ import annotations

import asyncio

from dsec.backends.conformance.kit import FOREVER, Subject, backend, check, equal, expect, raises, sandbox, soon
from dsec.model.errors import Conflict, NotFound

# How often, 10 ms apart, to look for a result that nobody waits to be rid of.
GONE_AFTER_LOOKS = 1000


@check()
async def the_same_id_runs_once(subject: Subject) -> None:
    """Asked for many times at once and again after its end, from two backend objects, it ran once."""
    async with sandbox(subject) as box, backend(subject) as over:
        other = (await soon(over.attach(box.runtime.handle))).guest()
        plan = box.command("sh", "-c", "echo $$; sleep 0.2")
        guests = (box.guest, other) * 10
        outcomes = await soon(asyncio.gather(*(guest.run(plan) for guest in guests)))
        equal(len({outcome.out.head for outcome in outcomes}), 1, "different process numbers")
        equal(await soon(other.run(plan)), outcomes[0], "asked for again after its end")


@check()
async def a_result_is_kept_until_forgotten(subject: Subject) -> None:
    """It can be had again and again; then it is NotFound. Forgetting is idempotent."""
    async with sandbox(subject) as box:
        plan = box.command("sh", "-c", "echo kept; exit 4")
        outcome = await soon(box.guest.run(plan))
        for _ in range(3):
            equal(await soon(box.guest.attach(plan.process_id)), outcome, "the kept result")
        await soon(box.guest.forget(plan.process_id))
        await soon(box.guest.forget(plan.process_id))
        await soon(box.guest.forget("p-never"))
        await raises(NotFound, box.guest.attach(plan.process_id), "a forgotten result")


@check()
async def a_discarded_result_is_gone_soon(subject: Subject) -> None:
    """Discarding what runs, or was never there, changes nothing."""
    async with sandbox(subject) as box:
        running = await box.spawn(f"sleep {FOREVER}")
        ended = box.command("sh", "-c", "exit 3")
        await soon(box.guest.run(ended))
        for process_id in (ended.process_id, ended.process_id, running.process_id, "p-never"):
            box.guest.discard(process_id)
        for _ in range(GONE_AFTER_LOOKS):
            if [info.process_id for info in await soon(box.guest.processes())] == [running.process_id]:
                break
            await asyncio.sleep(0.01)
        await raises(NotFound, box.guest.attach(ended.process_id), "a discarded result")
        await box.guest.kill(running.process_id)
        equal((await running.end()).cause, "killed", "the ending of what ran")


@check()
async def what_runs_is_not_forgotten(subject: Subject) -> None:
    """Forgetting a running program is a Conflict and changes nothing."""
    async with sandbox(subject) as box:
        spawned = await box.spawn(f"sleep {FOREVER}")
        await raises(Conflict, box.guest.forget(spawned.process_id), "forgetting what runs")
        await soon(box.guest.kill(spawned.process_id))
        equal((await spawned.end()).cause, "killed", "the ending")


@check()
async def processes_are_listed(subject: Subject) -> None:
    """Running ones with their number, ended ones until they are forgotten."""
    async with sandbox(subject) as box:
        running = await box.spawn(f"sleep {FOREVER}")
        ended = await box.spawn("exit 1")
        await ended.end()
        found = {info.process_id: info for info in await soon(box.guest.processes())}
        equal(set(found), {running.process_id, ended.process_id}, "the list")
        equal(found[running.process_id].state, "running", "the state")
        expect((found[running.process_id].pid or 0) > 0, f"its number: {found[running.process_id].pid}")
        equal(found[ended.process_id].state, "ended", "the state of the other")
        await soon(box.guest.forget(ended.process_id))
        equal([info.process_id for info in await box.guest.processes()], [running.process_id], "the list afterwards")
        await box.guest.kill(running.process_id)
        await running.end()


@check()
async def cancelling_a_call_stops_nothing(subject: Subject) -> None:
    """The program goes on without the caller, and its result waits."""
    async with sandbox(subject) as box:
        spawned = await box.spawn("sleep 0.3; echo survived; exit 9")
        spawned.task.cancel()
        await asyncio.gather(spawned.task, return_exceptions=True)
        outcome = await soon(box.guest.attach(spawned.process_id))
        equal((outcome.exit_code, outcome.out.head), (9, b"survived\n"), "the result")
