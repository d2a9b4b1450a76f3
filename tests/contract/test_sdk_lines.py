"""Output by lines, and waiting for one, by the blocking SDK and by asyncio.

Over the fake backend here, over containers in the lane root.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading

import pytest

import dsec
from tests.kit.agent import Agent

pytestmark = pytest.mark.contract


@pytest.fixture
def url(agent: Agent) -> str:
    return agent.url


def test_lines_of_both_streams_as_they_come(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])
    lines = program.lines()
    program.stdin.write("one\ntw")
    assert next(lines) == "one"
    program.stdin.write("o\n\nlast")
    assert next(lines) == "two"
    program.stdin.close()
    assert [(line, line.data, line.ending) for line in lines] == [("", b"\n", "newline"), ("last", b"last", "end")]
    assert lines.result is not None and lines.result.ok
    both = sbx.spawn("echo out; echo err >&2; exit 3", stdin=False).lines()
    assert sorted((line.stream, str(line)) for line in both) == [(1, "out"), (2, "err")]
    assert both.result is not None and both.result.exit_code == 3


def test_lines_from_an_offset_and_where_they_were_left(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn("echo one; echo two; echo three", stdin=False)
    program.wait()
    lines = program.lines()
    for line in lines:
        assert (line, lines.offsets) == ("one", (4, 0))
        break
    again = sbx.process(program.id)
    assert list(again.lines(lines.offsets)) == list(again.lines((4, 0))) == list(lines) == ["two", "three"]
    assert list(again.lines((5, 0))) == ["wo", "three"]
    assert list(again.lines()) == ["one", "two", "three"]


def test_a_long_line_comes_in_pieces_and_nothing_is_lost(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])
    data = b"x" * (5 << 19) + b"\nend"

    def write() -> None:
        program.stdin.write(data)
        program.stdin.close()

    writer = threading.Thread(target=write)
    writer.start()
    lines = list(program.lines())
    writer.join(60)
    assert [(len(line), line.ending) for line in lines] == [
        (1 << 20, "cut"),
        (1 << 20, "cut"),
        (1 << 19, "newline"),
        (3, "end"),
    ]
    assert b"".join(line.data for line in lines) == data


def test_lines_of_an_attachment(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])
    with program.attach() as attached:
        lines = attached.lines()
        for word in ("one", "two"):
            attached.write(f"{word}\n")
            assert next(lines) == word
        attached.close_input()
        assert list(lines) == []
        assert attached.result is not None and attached.result.ok


def test_a_line_is_waited_for_no_longer_than_is_said(sbx: dsec.Sandbox) -> None:
    """Also where another thread writes over the same attachment, and reads for both."""
    program = sbx.spawn(["cat"])
    with program.attach() as attached, program.lines() as plain:
        lines = attached.lines()
        for number in range(3):
            for one in (plain, lines):
                with pytest.raises(dsec.DeadlineExceeded):
                    one.next(timeout_s=0.05)
            attached.write(f"half {number}")
            for one in (plain, lines):
                with pytest.raises(dsec.DeadlineExceeded):
                    one.next(timeout_s=0.05)
            attached.write("\n")
            assert [one.next(timeout_s=60) for one in (plain, lines)] == [f"half {number}"] * 2

        def write() -> None:
            with contextlib.suppress(dsec.InvalidState):  # closed, at last
                attached.write(bytes(8 << 20))

        waiting = threading.Thread(target=write)
        waiting.start()
        assert lines.next(timeout_s=60).ending == "cut"
        lines.close()
        program.kill()
        waiting.join(60)


def test_waiting_for_a_line(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])
    program.stdin.write("starting\nlistening on port 8080\n")
    line = program.wait_for(re.compile(r"port (\d+)"), timeout_s=60)
    assert (line, line.stream, line.offset) == ("listening on port 8080", 1, 9)
    found = re.search(r"port (\d+)", line)
    assert found is not None and found[1] == "8080"
    for number in range(3):  # each is another line than the one before
        program.stdin.write(f"listening {number}\n")
        assert program.wait_for("listening", timeout_s=60) == f"listening {number}"
    assert sbx.process(program.id).wait_for("listening", timeout_s=60) == "listening on port 8080"


def test_a_line_of_the_other_stream_that_came_before_is_found(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn("echo one >&2; echo two; sleep 1000", stdin=False)
    assert program.wait_for("two", 60).stream == 1
    assert program.wait_for("one", 60).stream == 2


def test_a_program_that_ends_first_says_how(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn("echo cannot bind >&2; exit 3", stdin=False)
    with pytest.raises(
        dsec.ProgramEnded, match=r"by exit code 3 after .*'listening'\nlast output:\ncannot bind$"
    ) as caught:
        program.wait_for("listening", timeout_s=60)
    assert isinstance(caught.value, dsec.CommandFailed)
    assert caught.value.result.exit_code == caught.value.detail["exit_code"] == 3
    assert sbx.spawn(["echo", "ready"]).wait_for("ready") == "ready"  # though it has ended


def test_a_time_that_is_over_says_what_came(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])
    program.stdin.write("starting\n>>> ")
    assert program.wait_for("starting", 60)
    with pytest.raises(
        dsec.DeadlineExceeded,
        match=r"behind 'starting', which .*'>>>' within 0 s.*\nand this, which is no line.*\n>>> $",
    ):
        program.wait_for(">>>", timeout_s=0)
    program.stdin.write("ready\n")
    next(line for line in program.lines() if line == ">>> ready")
    assert program.wait_for("ready", timeout_s=0) == ">>> ready"
    program.stdin.write("one\ntwo\nthree\n")
    next(line for line in program.lines() if line == "three")
    assert program.wait_for("three", timeout_s=0) == "three"  # what was there in time is found, however far behind
    with pytest.raises(dsec.DeadlineExceeded, match="behind 'three', which the last call returned"):
        program.wait_for("ready", timeout_s=0.2)
    with pytest.raises(dsec.InvalidSpec, match="timeout_s"):
        program.wait_for("ready", timeout_s="5")  # type: ignore[arg-type]  # as a caller without types may


def test_a_program_that_writes_all_the_time_does_not_outrun_the_time(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["yes"])
    with pytest.raises(dsec.DeadlineExceeded, match="last output:\ny\n"):
        program.wait_for("ready", timeout_s=0.5)
    program.kill()


def test_lines_and_waiting_with_asyncio(sbx: dsec.Sandbox, url: str) -> None:
    async def body() -> None:
        async with dsec.AsyncClient(url) as client:
            process = await (await client.get(sbx.id)).spawn(["cat"])
            await process.stdin.write("one\ntw")
            lines = process.lines()
            assert await anext(lines) == "one"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(lines), 0.05)
            with pytest.raises(dsec.DeadlineExceeded, match="no line yet"):
                await process.wait_for("tw", timeout_s=0.1)
            await process.stdin.write("o\nthree")
            assert await process.wait_for("tw", timeout_s=60) == "two"
            await process.stdin.close()
            assert [line async for line in lines] == ["two", "three"]
            with pytest.raises(dsec.ProgramEnded, match="exit code 0"):
                await process.wait_for("four")

    asyncio.run(body())


def test_a_reader_that_nobody_reads_holds_the_program_and_one_that_is_closed_does_not(sbx: dsec.Sandbox) -> None:
    """The hazard that the how-to tells of."""
    program = sbx.spawn(["cat"], spool_bytes=1 << 16)
    left = program.lines()
    program.stdin.write("one\n")
    assert next(left) == "one"
    done = threading.Event()

    def write() -> None:
        program.stdin.write(bytes(64 << 20))
        done.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert not done.wait(1), "nobody was held back"
    with pytest.raises(
        dsec.DeadlineExceeded, match=r"a reader of this handle .* holds it back: it stands at byte \d+ of"
    ):
        program.wait(0)
    left.close()
    writer.join(60)
    assert done.is_set()
