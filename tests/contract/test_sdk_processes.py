"""Programs that are talked to by asyncio and by the dsec command: over the fake backend here, over containers in the
lane root. What the blocking SDK does is in test_sdk_programs."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys

import pytest

import dsec
from tests.kit.agent import Agent

pytestmark = pytest.mark.contract
COMMAND = [sys.executable, "-c", "import sys; from dsec.cli.main import main; sys.exit(main())"]


@pytest.fixture
def url(agent: Agent) -> str:
    return agent.url


def command(url: str, *args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *args], env={**os.environ, "DSEC_URL": url}, input=stdin, capture_output=True, check=False
    )


def test_asyncio_talks_to_several_at_once(sbx: dsec.Sandbox, url: str) -> None:
    async def talk(box: dsec.AsyncSandbox, number: int) -> bytes:
        async with await box.spawn(["cat"]) as process:

            async def write() -> None:
                async with process.stdin as stdin:
                    for part in range(50):
                        await stdin.write(f"{number}.{part}\n")

            writing = asyncio.create_task(write())
            got = b"".join([data async for data in process.stdout])
            await writing
            assert (await process.wait()).ok
            return got

    async def body() -> list[bytes]:
        async with dsec.AsyncClient(url) as client:
            box = await client.get(sbx.id)
            return await asyncio.gather(*(talk(box, number) for number in range(8)))

    got = asyncio.run(body())
    assert got == ["".join(f"{number}.{part}\n" for part in range(50)).encode() for number in range(8)]


def test_a_reader_that_is_cancelled_goes_on_where_it_was(sbx: dsec.Sandbox, url: str) -> None:
    async def body() -> None:
        async with dsec.AsyncClient(url) as client:
            process = await (await client.get(sbx.id)).spawn(["cat"])
            reader = process.stdout.follow()
            await process.stdin.write("one")
            assert await anext(reader) == b"one"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(reader), 0.05)
            await process.stdin.write("two")
            await process.stdin.close()
            assert b"".join([data async for data in reader]) == b"two"

    asyncio.run(body())


def test_a_handle_goes_to_another_place(sbx: dsec.Sandbox) -> None:
    first = sbx.spawn(["cat"])
    first.stdin.write("from the first, ")
    second = pickle.loads(pickle.dumps(first))
    second.stdin.write("from the second")
    second.stdin.close()
    assert first.wait(60).stdout == "from the first, from the second"


def test_a_time_that_is_over_and_a_signal(sbx: dsec.Sandbox) -> None:
    process = sbx.spawn(["sleep", "1000"])
    with pytest.raises(dsec.DeadlineExceeded):
        process.wait(timeout_s=0.1)
    process.signal(signal.SIGTERM)
    result = process.wait()
    assert (result.exit_code, result.signal) == (143, 15)
    with sbx.spawn(["sleep", "1000"]) as killed:
        pass
    assert killed.wait().cause == "killed"
    assert sbx.spawn(["sleep", "1000"], timeout_s=0.1).wait().cause == "timeout"


def test_the_command_streams_lists_and_shows_again(sbx: dsec.Sandbox, url: str) -> None:
    data = os.urandom(3 << 20)
    done = command(url, "exec", "-i", sbx.id, "cat", stdin=data)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == data
    done = command(url, "exec", "-i", sbx.id, "echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
    process = sbx.spawn("echo first; cat")
    assert next(iter(process.stdout)) == b"first\n"
    listed = command(url, "ps", sbx.id).stdout.decode().splitlines()
    assert listed[0].split()[:3] == ["PID", "PPID", "PROGRAM"]
    assert any(process.id in line for line in listed[1:])
    assert command(url, "logs", sbx.id).stdout == b"first\n"
    done = command(url, "attach", sbx.id, process.id, stdin=b"second\n")
    assert (done.returncode, done.stdout) == (0, b"second\n")
    assert command(url, "logs", "-f", sbx.id, process.id).stdout == b"first\nsecond\n"
    done = command(url, "logs", sbx.id)
    assert done.returncode == 1 and b"no spawned program runs" in done.stderr


def test_a_key_of_the_command_starts_one(sbx: dsec.Sandbox, url: str) -> None:
    line = ("exec", "--key", "mine", sbx.id, "echo $$")
    first = command(url, *line)
    assert first.returncode == 0
    assert command(url, *line).stdout == first.stdout
    assert command(url, "exec", "--key", "mine", sbx.id, "echo else").returncode == 125
