"""Programs that are talked to, by the SDK: over the fake backend here, over containers in the lane root."""

from __future__ import annotations

import threading

import pytest

import dsec

pytestmark = pytest.mark.contract


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
    with pytest.raises(dsec.InvalidState):
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
