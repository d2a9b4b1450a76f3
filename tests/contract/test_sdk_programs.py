"""Programs that are talked to, by the blocking SDK, by asyncio and by the dsec command.

Over the fake backend here, over containers in the lane root.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

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


def test_input_and_output_as_they_come(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])
    pieces = iter(program.stdout)
    for word in (b"one\n", b"two\n", b"\0\xff\n"):
        program.stdin.write(word)
        got = b""
        while len(got) < len(word):
            got += next(pieces)
        assert got == word
    program.stdin.close()
    assert list(pieces) == []
    assert program.wait().ok
    assert program.output() == b"one\ntwo\n\0\xff\n"


def test_its_output_is_read_after_its_end(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn("echo out; echo err >&2; exit 3", stdin=False)
    result = program.wait()
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    again = sbx.process(program.id)
    assert (again.output(), again.output(stream=2), again.output(2)) == (b"out\n", b"err\n", b"t\n")
    info = again.info()
    assert (info.state, info.kind, info.result.exit_code if info.result else None) == ("ended", "spawn", 3)
    assert b"".join(again.stdout) == b"out\n"


def test_of_much_output_the_newest_is_given_in_one_piece(sbx: dsec.Sandbox) -> None:
    """The beginning is kept, and the newest; between them there is a gap."""
    lines = b"".join(b"%d\n" % number for number in range(1, 500_001))
    program = sbx.spawn(["cat"], spool_bytes=1 << 16)
    program.stdin.write(lines)
    program.stdin.close()
    program.wait()
    for offset in (0, 100, len(lines) // 2):
        kept = program.output(offset)
        assert len(kept) >= 1 << 16 and kept == lines[-len(kept) :]
    assert program.output(len(lines) - 10) == lines[-10:]
    both = {offset: data for offset, data in _pieces(program)}
    assert both[0] == lines[: len(both[0])] and len(both) == 2


def _pieces(program: dsec.Process) -> Iterator[tuple[int, bytes]]:
    """What is kept, by where it begins."""
    begun: dict[int, bytearray] = {}
    follow, at, end = program.follow(wait=False), 0, -1
    for _, data in follow:
        begins = follow.offsets[1] - len(data)
        at = at if begins == end else begins
        begun.setdefault(at, bytearray()).extend(data)
        end = follow.offsets[1]
    yield from ((offset, bytes(data)) for offset, data in begun.items())


def test_many_read_one_program(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])
    got: dict[int, bytes] = {}

    def read(number: int) -> None:
        got[number] = b"".join(sbx.process(program.id).stdout)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for reader in readers:
        reader.start()
    sent = bytes(range(256)) * 4096
    program.stdin.write(sent)
    program.stdin.close()
    for reader in readers:
        reader.join(60)
    assert program.wait().ok
    assert [got.get(number) == sent for number in range(4)] == [True] * 4


def test_a_program_that_reads_nothing_holds_its_writer(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["sleep", "1000"])
    done = threading.Event()

    def write() -> None:
        with pytest.raises(dsec.DsecError):
            program.stdin.write(bytes(64 << 20))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert not done.wait(1), "64 MiB were taken of which nothing was read"
    program.kill()
    writer.join(60)
    assert done.is_set()
    assert program.wait().cause == "killed"


def test_a_key_starts_one(sbx: dsec.Sandbox) -> None:
    first = sbx.spawn(["sleep", "1000"], key="one")
    assert sbx.spawn(["sleep", "1000"], key="one").id == first.id
    with pytest.raises(dsec.Conflict):
        sbx.spawn(["sleep", "2000"], key="one")
    listed = sbx.processes()
    assert [program.id for program in listed.programs] == [first.id]
    assert first.id in [process.id for process in listed]
    first.kill()
    assert sbx.spawn(["sleep", "1000"], key="one").wait().cause == "killed"


def test_what_cannot_be_started_is_said(sbx: dsec.Sandbox) -> None:
    with pytest.raises(dsec.ProgramNotStarted):
        sbx.spawn(["/none/such"])
    with pytest.raises(dsec.NotFound):
        sbx.process("p-0000000000000000").info()
    closed = sbx.spawn(["true"], stdin=False)
    with pytest.raises(dsec.InvalidState):
        closed.stdin.write(b"x")
    ended = sbx.spawn(["true"])
    ended.wait()
    with pytest.raises(dsec.InputClosed, match=ended.id):
        ended.stdin.write(b"x")


def test_streams_of_a_sandbox_that_is_stopped_end_with_its_error(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn("echo up; sleep 1000")
    pieces = iter(program.stdout)
    assert next(pieces) == b"up\n"
    sbx.stop()
    with pytest.raises(dsec.SandboxLost):
        next(pieces)
    with pytest.raises(dsec.SandboxLost):
        program.wait()


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


@pytest.mark.parametrize("words", [("two\n", "three\n"), ("three\n", "two\n"), ("same\n", "same\n")])
def test_a_place_that_another_has_taken_is_refused(sbx: dsec.Sandbox, words: tuple[str, str]) -> None:
    """However long either is, and also when the bytes are the same."""
    first = sbx.spawn(["cat"])
    second = sbx.process(first.id)
    first.stdin.write("one\n")
    second.stdin.write(words[0])
    with pytest.raises(dsec.Conflict, match="locate") as caught:
        first.stdin.write(words[1])
    assert caught.value.detail["input_size"] == 4 + len(words[0])
    first.stdin.write("again\n")
    with pytest.raises(dsec.Conflict):
        second.stdin.close()
    assert second.stdin.locate() == 4 + len(words[0]) + 6
    second.stdin.write("last\n")
    second.stdin.close()
    assert first.wait(60).stdout == f"one\n{words[0]}again\nlast\n"


def test_what_comes_twice_is_a_repeat_of_who_gave_it_alone(sbx: dsec.Sandbox) -> None:
    first = sbx.spawn(["cat"])
    second = sbx.process(first.id)
    first.stdin.write("one\n")
    assert first.stdin._send(0, b"one\ntwo\n", eof=False).size == 8
    assert first.stdin._send(4, b"two\n", eof=False).size == 8
    for offset, data, eof in ((0, b"one\n", False), (4, b"t", False), (7, b"", True)):
        with pytest.raises(dsec.Conflict):
            second.stdin._send(offset, data, eof=eof)
    assert second.stdin._send(8, b"x\n", eof=False).size == 10
    assert second.stdin._send(8, b"x\n", eof=False).size == 10
    for offset in (4, 8):
        with pytest.raises(dsec.Conflict):
            first.stdin._send(offset, b"two\n", eof=False)
    with pytest.raises(dsec.Conflict):
        second.stdin._send(7, b"\nx\n", eof=False)  # its first byte is another's
    second.stdin._send(10, b"", eof=True)
    assert first.wait(60).stdout == "one\ntwo\nx\n"


def test_streams_are_named_or_numbered(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn("echo out; echo err >&2", stdin=False)
    program.wait()
    assert program.output(stream="stdout") == b"out\n"
    assert program.output(stream="stderr") == program.output(stream=2) == b"err\n"
    for wrong in (0, 3, "2", "err", None, True, b"stderr"):
        with pytest.raises(dsec.InvalidSpec) as caught:
            program.output(stream=wrong)  # type: ignore[arg-type]  # as a caller without types may
        assert caught.value.detail["field"] == "stream"


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


def test_a_directory_is_a_path_too(sbx: dsec.Sandbox) -> None:
    assert sbx.run("pwd", cwd=Path("/tmp")).stdout == sbx.spawn("pwd", cwd=Path("/tmp")).wait().stdout == "/tmp\n"
    with sbx._client.create(disk_mib=64, cwd=Path("/tmp")) as other:
        assert other.run("pwd").stdout == "/tmp\n"
        assert other.info().spec.cwd == "/tmp"


def test_what_is_entered_need_not_be_awaited(sbx: dsec.Sandbox, url: str) -> None:
    async def body() -> None:
        async with dsec.AsyncClient(url) as client:
            async with client.create(disk_mib=64) as made, made.spawn(["cat"]) as process:
                assert made.state == "running"
            assert (await made.info()).state == "stopped"
            with pytest.raises(dsec.NotFound):
                async with client.get("none"):
                    pass
            task = asyncio.create_task(client.create(disk_mib=64))
            async with await task as second, asyncio.TaskGroup() as group:
                process = await group.create_task(second.spawn("echo up; sleep 1000"))
                (line,) = await asyncio.gather(process.wait_for("up", timeout_s=60))
                assert line == "up"
            assert second.id != made.id

    asyncio.run(body())


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
    assert command(url, "logs", sbx.id).stdout == b"first\nsecond\n"


def test_the_command_starts_and_goes(sbx: dsec.Sandbox, url: str) -> None:
    """Whatever is piped into it: a loop that reads a list keeps the rest of it."""
    done = command(url, "exec", "-d", sbx.id, "echo first; sleep 1000", stdin=b"kept")
    assert (done.returncode, done.stderr) == (0, b"")
    silent = sbx.process(done.stdout.decode().strip())
    assert silent.wait_for("first", 60) == "first" and not silent.info().stdin
    silent.kill()
    line = ("exec", "--detach", "-i", "--key", "mine", sbx.id, "cat; exit 3")
    done = command(url, *line)
    assert done.returncode == 0 and command(url, *line).stdout == done.stdout != silent.id.encode() + b"\n"
    asked = done.stdout.decode().strip()
    done = command(url, "attach", sbx.id, asked, stdin=b"taken up\n")
    assert (done.returncode, done.stdout) == (3, b"taken up\n")
    assert command(url, "attach", sbx.id, asked).returncode == 3  # also afterwards
    done = command(url, "exec", "-d", sbx.id, "/none/such", "x")
    assert (done.returncode, done.stdout) == (127, b"") and b"/none/such" in done.stderr
    done = command(url, "exec", "-d", sbx.id)
    assert done.returncode == 125 and b"no program" in done.stderr


def test_a_key_of_the_command_starts_one(sbx: dsec.Sandbox, url: str) -> None:
    line = ("exec", "--key", "mine", sbx.id, "echo $$")
    first = command(url, *line)
    assert first.returncode == 0
    assert command(url, *line).stdout == first.stdout
    assert command(url, "exec", "--key", "mine", sbx.id, "echo else").returncode == 125
