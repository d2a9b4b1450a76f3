"""From start to stop, and found again in between."""

from __future__ import annotations

import asyncio

from dsec.backends.base import Exit, LayerMount
from dsec.backends.conformance.kit import (
    FOREVER,
    Box,
    Subject,
    backend,
    check,
    encoded,
    equal,
    expect,
    raises,
    same_inventory,
    sandbox,
    soon,
    stop_by_handle,
)
from dsec.model.errors import Conflict, DsecError, SandboxLost

# How often starting is cut off, each time a little later.
CUTS = 24
CROWD = 30


@check()
async def probe_says_what_is_there_and_why_not(subject: Subject) -> None:
    """Probing has no effect, and what is missing has a reason."""
    before = subject.inventory()
    async with backend(subject) as over:
        first, second = await soon(over.probe()), await soon(over.probe())
        equal(first, second, "a second probe")
        equal(first.backend, over.name, "the name")
        expect(first.available, f"not available: {first.reason}")
        for name, feature in first.features.items():
            expect(feature.available or feature.reason, f"{name} is missing without a reason")
    equal(subject.inventory() - before, set(), "made by a probe")


@check()
async def stopping_releases_everything_and_is_idempotent(subject: Subject) -> None:
    """After stop nothing is left; stopping again answers the same."""
    before = subject.inventory()
    async with backend(subject) as over:
        runtime = await soon(over.start(subject.plan()))
        expect(subject.inventory() - before, "a running sandbox does not show in the inventory")
        waiters = [asyncio.create_task(runtime.wait()) for _ in range(3)]
        first = await soon(runtime.stop())
        equal(first.reason, "stopped", "the reason")
        await same_inventory(subject, before)
        equal(await soon(runtime.stop(grace_s=1)), first, "stopping again")
        for waiter in waiters:
            equal(await soon(waiter), first, "what a waiter was told")
        equal(await soon(runtime.wait()), first, "waiting after the end")


@check()
async def stopping_from_many_sides_at_once(subject: Subject) -> None:
    """Concurrent stops, from two backend objects, all answer that it is stopped."""
    async with backend(subject) as one, backend(subject) as two:
        runtime = await soon(one.start(subject.plan()))
        again = await soon(two.attach(runtime.handle))
        ends = await soon(asyncio.gather(*(r.stop() for r in (runtime, again, runtime, again))))
        equal({end.reason for end in ends}, {"stopped"}, "the reasons")


@check()
async def an_id_is_started_once(subject: Subject) -> None:
    """The same id again is a Conflict, and the sandbox that has it is not harmed."""
    async with sandbox(subject) as box:
        async with backend(subject) as over:
            await raises(Conflict, over.start(box.plan), "starting the same id")
        equal((await box.run("true")).exit_code, 0, "the first one")


@check()
async def after_stop_everything_is_sandbox_lost(subject: Subject) -> None:
    """A run in flight, a new run and attaching raise SandboxLost once it was stopped; never an invented exit code."""
    async with backend(subject) as over:
        plan = subject.plan()
        runtime = await soon(over.start(plan))
        box = Box(runtime, plan)
        spawned = await box.spawn(f"sleep {FOREVER}")
        await soon(runtime.stop())
        await raises(SandboxLost, spawned.task, "the run in flight")
        await raises(SandboxLost, runtime.guest().run(box.command("true")), "a new run")
        await raises(SandboxLost, runtime.guest().attach(spawned.process_id), "attaching to the run")
        await raises(SandboxLost, over.attach(runtime.handle), "attaching to the sandbox")


@check()
async def stop_with_grace_ends_in_time(subject: Subject) -> None:
    """A program that ignores SIGTERM does not delay a stop beyond the grace; one that dies of it has no result."""
    async with backend(subject) as over:
        plan = subject.plan()
        runtime = await soon(over.start(plan))
        box = Box(runtime, plan)
        ready = asyncio.Event()

        async def sink(stream: int, offset: int, data: bytes) -> None:
            ready.set()

        deaf = await box.spawn(f'trap "" TERM; echo ready; sleep {FOREVER}; sleep {FOREVER}', sink=sink)
        meek = await box.spawn_plan(box.command("sleep", FOREVER))
        await soon(ready.wait(), "the trap")
        equal((await soon(runtime.stop(grace_s=0.2))).reason, "stopped", "the reason")
        await raises(SandboxLost, deaf.task, "the run that ignores it")
        await raises(SandboxLost, meek.task, "the run that dies of it")


@check()
async def another_backend_object_takes_over(subject: Subject) -> None:
    """A handle from disk is enough to go on: runs in flight end with their result there, as for a restarted node."""
    first = subject.backend()
    plan = subject.plan()
    runtime = await soon(first.start(plan))
    handle = encoded(runtime.handle)
    try:
        spawned = await Box(runtime, plan).spawn("sleep 0.3; echo done; exit 7")
        spawned.task.cancel()
        await asyncio.gather(spawned.task, return_exceptions=True)
        await first.close()
        async with backend(subject) as second:
            again = await soon(second.attach(handle))
            equal(again.handle, runtime.handle, "the handle")
            outcome = await soon(again.guest().attach(spawned.process_id))
            equal((outcome.exit_code, outcome.out.head), (7, b"done\n"), "the result")
            equal((await Box(again, plan).run("true")).exit_code, 0, "a new run")
            waiter = asyncio.create_task(again.wait())
            await soon(again.stop())
            equal((await soon(waiter)).reason, "stopped", "the end")
    finally:
        await stop_by_handle(subject, handle)


@check()
async def survey_lists_what_lives(subject: Subject) -> None:
    """Every living sandbox is found by a survey, and none that has ended."""
    async with backend(subject) as over:
        known = {handle.id for handle in await soon(over.survey())}
        async with sandbox(subject) as one, sandbox(subject) as two:
            found = {handle.id: handle for handle in await soon(over.survey())}
            equal(set(found) - known, {one.plan.id, two.plan.id}, "the survey")
            await soon(over.attach(encoded(found[one.plan.id])))
        equal({handle.id for handle in await soon(over.survey())} - known, set(), "the survey after the stops")


@check()
async def cancelling_a_start_undoes_it(subject: Subject) -> None:
    """Wherever starting is cut off, nothing stays, and the machine still starts sandboxes."""
    before = subject.inventory()
    loop = asyncio.get_running_loop()
    async with backend(subject) as over:
        begun = loop.time()
        await (await soon(over.start(subject.plan()))).stop()
        whole_s = loop.time() - begun
        for cut in range(CUTS):
            task = asyncio.create_task(over.start(subject.plan()))
            if cut < CUTS // 2:
                for _ in range(cut):
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(whole_s * (cut - CUTS // 2) / (CUTS // 2))
            task.cancel()
            done = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(done, BaseException):
                await soon(done.stop())
        await same_inventory(subject, before)
        await (await soon(over.start(subject.plan()))).stop()


@check("layers")
async def a_start_that_fails_undoes_itself(subject: Subject) -> None:
    """A layer that is not there fails the start with a typed error, and nothing stays."""
    before = subject.inventory()
    missing = LayerMount(digest="sha256:" + "0" * 64, path="/nonexistent/layer.erofs")
    async with backend(subject) as over:
        await raises(DsecError, over.start(subject.plan(layers=(missing,))), "a missing layer")
        await same_inventory(subject, before)


@check()
async def many_at_once(subject: Subject) -> None:
    """Thirty sandboxes started, used and stopped concurrently."""

    async def one(over_subject: Subject) -> Exit:
        async with sandbox(over_subject, over) as box:
            equal((await box.run("echo", box.plan.id)).out.head, box.plan.id.encode() + b"\n", "its output")
            return await soon(box.runtime.stop())

    async with backend(subject) as over:
        ends = await soon(asyncio.gather(*(one(subject) for _ in range(CROWD))))
        equal({end.reason for end in ends}, {"stopped"}, "the reasons")


@check()
async def usage_is_reported(subject: Subject) -> None:
    """A living sandbox says what it uses; one that has ended raises SandboxLost."""
    async with sandbox(subject) as box:
        await box.run("true")
        usage = await soon(box.runtime.usage())
        expect((usage.memory_bytes or 0) > 0, f"memory: {usage}")
        expect((usage.pids or 0) >= 1, f"processes: {usage}")
        await soon(box.runtime.stop())
        await raises(SandboxLost, box.runtime.usage(), "usage after the end")
