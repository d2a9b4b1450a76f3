"""Containers while what they stand on is killed: exact results or typed errors, and it comes back by itself."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.backends.conformance.kit import Box, backend, sandbox, soon
from dsec.backends.container.keeper import living_keeper
from dsec.linux import proc
from dsec.model.errors import DsecError, SandboxLost, Unknown
from dsec.model.states import RunOutcome
from tests.kit import rootfs, runtime
from tests.kit.aio import until
from tests.kit.runtime import ContainerSubject

pytestmark = pytest.mark.chaos

RUNS = 200


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> rootfs.LayerMount:
    if reason := runtime.missing() or rootfs.missing():
        pytest.skip(reason)
    return rootfs.busybox_layer(Path(tmp_path_factory.mktemp("rootfs")))


@pytest.fixture
def subject(layer: rootfs.LayerMount) -> Iterator[ContainerSubject]:
    with runtime.own_place() as place:
        yield ContainerSubject(place, (layer,))


def check(number: int, outcome: RunOutcome) -> None:
    assert outcome.exit_code == number % 256
    assert outcome.out.head == b"%d\n" % number
    assert outcome.out.total == len(outcome.out.head)


async def numbered(box: Box, number: int) -> RunOutcome:
    """A run that says who it is, and leaves one line each time it begins."""
    script = f"echo {number} >>/begun; sleep 0.{number % 10}; echo {number}; exit {number % 256}"
    return await soon(box.guest.run(box.command("sh", "-c", script)))


def test_killing_the_runtime_loses_nothing(subject: ContainerSubject) -> None:
    """Again and again during two hundred runs, captured and streamed: each has its exact result, and ran once."""

    async def main() -> None:
        async with backend(subject) as over, sandbox(subject, over, pids=4 * RUNS) as box:
            instance = (await over.client.connect()).instance
            data = hashlib.sha256(b"x").digest() * 50_000
            got = bytearray()

            async def sink(stream: int, offset: int, piece: bytes) -> None:
                assert offset == len(got)
                got.extend(piece)
                await asyncio.sleep(0.01)

            streamed = asyncio.create_task(box.run("cat", stdin=data, sink=sink))
            tasks = [asyncio.create_task(numbered(box, number)) for number in range(RUNS)]
            kills = 0
            while not all(task.done() for task in tasks):
                await asyncio.sleep(random.uniform(0.05, 0.3))
                hello = await over.client.connect()
                os.kill(hello.pid, signal.SIGKILL)
                kills += 1
                await until(lambda pid=hello.pid: over.client.hello is not None and over.client.hello.pid != pid)
            for number, task in enumerate(tasks):
                check(number, task.result())
            assert sorted(map(int, (await box.text("cat /begun")).split())) == list(range(RUNS))
            assert (await streamed).exit_code == 0
            assert bytes(got) == data
            assert kills >= 2
            assert (await over.client.connect()).instance == instance

    asyncio.run(main())


def test_killing_keeper_and_runtime_is_unknown_and_the_sandbox_lives(subject: ContainerSubject) -> None:
    """What was in flight is Unknown, never an invented exit code; a new keeper is started and finds the sandbox."""

    async def main() -> None:
        async with backend(subject) as over, sandbox(subject, over) as box:
            await box.text("echo kept > /kept")
            spawned = await box.spawn("sleep 1; exit 5")
            keeper = living_keeper(subject.place.run_dir)
            assert keeper is not None
            runtime_pid = (await over.client.connect()).pid
            os.kill(keeper.pid, signal.SIGKILL)
            os.kill(runtime_pid, signal.SIGKILL)
            with pytest.raises(Unknown):
                await soon(spawned.task)
            assert (await over.client.connect()).instance != keeper.instance
            again = await soon(over.attach(box.runtime.handle))
            with pytest.raises(Unknown):
                await soon(again.guest().attach(spawned.process_id))
            assert await Box(again, box.plan).text("cat /kept") == "kept"

    asyncio.run(main())


def test_an_init_that_dies_is_never_a_result(subject: ContainerSubject) -> None:
    """Its programs die with it; each call raises SandboxLost, and whoever waits hears why."""

    async def main() -> None:
        async with backend(subject) as over, sandbox(subject, over) as box:
            running = [await box.spawn("sleep 1000") for _ in range(20)]
            waiter = asyncio.create_task(box.runtime.wait())
            os.kill(box.runtime.handle.data["init_pid"], signal.SIGKILL)
            for one in running:
                with pytest.raises(SandboxLost):
                    await soon(one.task)
            assert (await soon(waiter)).reason == "init_died"
            with pytest.raises(SandboxLost):
                await soon(box.run("true"))
            assert (await soon(box.runtime.stop())).reason in ("init_died", "stopped")

    asyncio.run(main())


def test_a_sandbox_that_ends_while_the_runtime_is_away_is_heard_of(subject: ContainerSubject) -> None:
    """The connection breaks, the init dies, the runtime comes back: whoever waits is told."""

    async def main() -> None:
        async with backend(subject) as over, sandbox(subject, over) as box:
            waiter = asyncio.create_task(box.runtime.wait())
            pid = (await over.client.connect()).pid
            init = box.runtime.handle.data["init_pid"]
            os.kill(pid, signal.SIGSTOP)
            os.kill(init, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
            assert (await soon(waiter)).reason in ("init_died", "lost")
            await until(lambda: proc.start_time(init) is None)

    asyncio.run(main())


def test_starts_while_the_runtime_is_killed_leave_nothing(subject: ContainerSubject) -> None:
    """Each start works or raises a typed error; afterwards exactly those that worked are there."""

    async def main() -> None:
        async with backend(subject) as over:
            await over.client.connect()
            tasks = [asyncio.create_task(over.start(subject.plan())) for _ in range(40)]
            for _ in range(3):
                await asyncio.sleep(0.05)
                pid = (await over.client.connect()).pid
                os.kill(pid, signal.SIGKILL)
                await until(lambda pid=pid: over.client.hello is not None and over.client.hello.pid != pid)
            done = await soon(asyncio.gather(*tasks, return_exceptions=True))
            assert all(isinstance(one, DsecError) or not isinstance(one, BaseException) for one in done), done
            made = [one for one in done if not isinstance(one, BaseException)]
            alive = {handle.id for handle in await over.survey()}
            assert alive == {one.handle.id for one in made}
            for one in made:
                await soon(one.stop())
        assert await settled(subject) == set()

    asyncio.run(main())


async def settled(subject: ContainerSubject) -> set[str]:
    """What is left once the background has done its work."""
    left: set[str] = set()
    for _ in range(200):
        left = subject.inventory()
        if not left:
            break
        await asyncio.sleep(0.05)
    return left
