"""One connection to a program, by the SDK: over the fake backend here, over containers in the lane root."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from pathlib import Path

import pytest

import dsec
from tests.kit.cutting import Cutting

pytestmark = pytest.mark.contract

MIB = 1 << 20


def test_both_ways_over_one_connection(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])
    with program.attach() as attached:
        for word in (b"one\n", "two\n", b"\0\xff\n"):
            attached.write(word)
            said = word.encode() if isinstance(word, str) else word
            got = b""
            while len(got) < len(said):
                stream, data = next(attached)
                assert stream == 1
                got += data
            assert got == said
        attached.close_input()
        attached.close_input()
        with pytest.raises(dsec.InvalidState):
            attached.write(b"more")
        assert list(attached) == []
        assert attached.result is not None and attached.result.ok
        assert attached.offsets == {1: 11, 2: 0} and attached.dropped == {1: 0, 2: 0}


def test_much_goes_both_ways_at_once(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn("cat >&2")
    sent = random.Random(1).randbytes(8 * MIB)
    attached = program.attach()

    def write() -> None:
        attached.write(sent)
        attached.close_input()

    writer = threading.Thread(target=write)
    writer.start()
    got = {1: bytearray(), 2: bytearray()}
    for stream, data in attached:
        got[stream] += data
    writer.join(60)
    assert not writer.is_alive()
    assert (bytes(got[1]), got[2] == sent) == (b"", True)


def test_who_comes_again_goes_on_at_its_offset(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])
    with program.attach() as first:
        first.write(b"0123456789")
        got = b""
        while len(got) < 10:
            got += next(first)[1]
    again = sbx.process(program.id)
    with again.attach((4, 0)) as second:
        assert next(second) == (1, b"456789")
        second.write(b"ab")
        assert next(second) == (1, b"ab")
        second.close_input()
        assert list(second) == []
    assert b"".join(data for _, data in again.attach((9, 0))) == b"9ab"
    with again.attach() as ended, pytest.raises(dsec.InvalidState):
        ended.write(b"x")


@pytest.mark.parametrize("seed", range(3))
def test_connections_that_break_lose_and_double_no_byte(sbx: dsec.Sandbox, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    budgets = [chance.choice((chance.randrange(1, 600), chance.randrange(1, 200_000))) for _ in range(10)]
    sent = chance.randbytes(2 * MIB)
    target = sbx._client.url.removeprefix("unix://")
    program = sbx.spawn(["cat"])
    with Cutting(tmp_path / "s", target, budgets) as proxy, dsec.Client(proxy.url) as client:
        # So that it has been met: a server that never answered is not waited for.
        while True:
            try:
                attached = client.get(sbx.id).process(program.id).attach()
                break
            except dsec.NodeUnreachable:
                continue

        def write() -> None:
            at = 0
            while at < len(sent):
                size = chance.randrange(1, 100_000)
                attached.write(sent[at : at + size])
                at += size
            attached.close_input()

        writer = threading.Thread(target=write)
        writer.start()
        got = b"".join(data for _, data in attached)
        writer.join(60)
        assert not writer.is_alive()
        assert len(got) == len(sent) and got == sent
        assert attached.result is not None and attached.result.ok
        assert proxy.cuts > 3


def test_a_program_that_reads_nothing_holds_its_writer(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["sleep", "1000"])
    attached = program.attach()
    ended = threading.Event()

    def write() -> None:
        with pytest.raises(dsec.InvalidState):
            attached.write(bytes(64 * MIB))
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert not ended.wait(1), "64 MiB were taken of which nothing was read"
    attached.signal(15)  # overtakes it
    assert list(attached) == []
    writer.join(60)
    assert ended.is_set()
    assert attached.result is not None and attached.result.signal == 15


def test_another_writer_is_noticed(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])
    attached = program.attach()
    attached.write(b"mine")
    assert next(attached) == (1, b"mine")
    other = sbx.process(program.id)
    other.stdin.write(b"another's")
    assert next(attached) == (1, b"another's")
    attached.locate()
    attached.write(b" mine")
    assert next(attached) == (1, b" mine")
    other.stdin.locate()
    other.stdin.write(b"!" * 100)
    assert next(attached) == (1, b"!" * 100)
    with pytest.raises(dsec.Conflict):
        while True:
            attached.write(b"lost")
            attached.locate()
    attached.write(b"heard")
    assert next(attached) == (1, b"heard")
    program.kill()


@pytest.mark.parametrize("word", [b"x", b"four", b"a longer one"])
def test_a_place_that_another_has_taken_is_refused(sbx: dsec.Sandbox, word: bytes) -> None:
    program = sbx.spawn(["cat"])
    attached = program.attach()
    attached.write(b"mine")
    assert next(attached) == (1, b"mine")
    other = sbx.process(program.id)
    other.stdin.write(word)
    assert next(attached) == (1, word)
    with pytest.raises(dsec.Conflict, match="locate"):
        attached.write(b"lost")  # told with the next at the latest
        attached.settle()
    attached.write(b"well")
    assert next(attached) == (1, b"well")
    with pytest.raises(dsec.Conflict):
        other.stdin.write(word)
    attached.close_input()
    assert list(attached) == []
    assert program.output() == b"mine" + word + b"well"


def test_what_was_on_its_way_meets_anothers_when_it_comes_again(sbx: dsec.Sandbox) -> None:
    """The connection is lost with it, and another has written as much where it belongs."""
    program = sbx.spawn(["cat"])
    attached = program.attach()
    attached.ready()
    attached._drop()
    attached.write(b"mine")  # for the next connection
    sbx.process(program.id).stdin.write(b"hers")
    with pytest.raises(dsec.Conflict):
        attached.settle()
    attached.write(b"more")
    attached.close_input()
    assert b"".join(data for _, data in attached) == b"hersmore"


def test_a_handle_writes_over_all_its_connections_in_turn(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])
    program.stdin.write("zero\n")
    with program.attach() as attached:
        attached.write("one\n")
        assert program.stdin.offset == 9
        program.stdin.write("two\n")
        attached.write("three\n")
        with program.attach() as second:
            second.write("four\n")
            attached.write("five\n")
            second.write("six\n")
    program.stdin.write("seven\n")
    with program.attach() as third:
        third.write("eight\n")
        with pytest.raises(dsec.InvalidState):
            attached.write("closed")
        other = sbx.process(program.id)
        with pytest.raises(dsec.Conflict):
            program.stdin.write("")
            other.stdin.write("other's\n")
            third.write("lost\n")
    assert program.stdin.locate() == other.stdin.offset
    program.stdin.close()
    said = "zero one two three four five six seven eight other's "
    assert program.wait(60).stdout == said.replace(" ", "\n")


def test_what_is_on_its_way_when_it_is_closed_goes_on_elsewhere(sbx: dsec.Sandbox) -> None:
    """Whether it was taken is not known: it comes again, once."""
    program = sbx.spawn(["cat"])
    sent = random.Random(2).randbytes(2 * MIB)
    at = 0
    while at < len(sent):
        with program.attach() as attached:
            attached.write(sent[at : at + 100_000])
        program.stdin.write(sent[at + 100_000 : at + 150_000])
        at += 150_000
    program.stdin.close()
    assert b"".join(program.stdout) == sent


def test_what_cannot_be_is_said_and_ends_nothing(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])
    with program.attach() as attached:
        with pytest.raises(dsec.InvalidState):
            attached.resize(3, 4)
        with pytest.raises(dsec.InvalidSpec):
            attached.signal(1000)
        attached.write(b"well")
        assert next(attached) == (1, b"well")
        program.kill()
        assert list(attached) == []
        assert attached.result is not None and attached.result.cause == "killed"
    with pytest.raises(dsec.NotFound):
        next(sbx.process("p-0000000000000000").attach())
    deaf = sbx.spawn(["sleep", "1000"], stdin=False).attach()
    with pytest.raises(dsec.InvalidState):
        deaf.write(b"x")


def test_many_attach_to_one_program(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])
    got: dict[int, bytes] = {}

    def read(number: int) -> None:
        got[number] = b"".join(data for _, data in sbx.process(program.id).attach())

    readers = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for reader in readers:
        reader.start()
    sent = bytes(range(256)) * 4096
    program.stdin.write(sent)
    program.stdin.close()
    for reader in readers:
        reader.join(60)
    assert [got.get(number) == sent for number in range(4)] == [True] * 4


def test_tasks_share_one_attachment(sbx: dsec.Sandbox) -> None:
    """One reads, many write: each piece is whole."""
    program = sbx.spawn(["cat"])

    async def main() -> bytes:
        async with dsec.AsyncClient(sbx._client.url) as client:
            attached = (await client.get(sbx.id)).process(program.id).attach()

            async def write(letter: bytes) -> None:
                for _ in range(20):
                    await attached.write(letter * 5000)

            async def write_all() -> None:
                await asyncio.gather(*(write(bytes([letter])) for letter in b"abcdefgh"))
                await attached.close_input()

            writing = asyncio.ensure_future(write_all())
            got = b"".join([data async for _, data in attached])
            await writing
            return got

    got = asyncio.run(asyncio.wait_for(main(), 60))
    runs = [(letter, len(list(run))) for letter, run in itertools.groupby(got)]
    assert len(got) == 8 * 20 * 5000
    assert all(size % 5000 == 0 for _, size in runs)


def test_a_task_that_gives_up_reading_loses_nothing(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn(["cat"])

    async def main() -> bytes:
        async with dsec.AsyncClient(sbx._client.url) as client:
            attached = (await client.get(sbx.id)).process(program.id).attach()
            got = b""
            for word in (b"one", b"two", b"three"):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(attached), 0.05)
                await attached.write(word)
                got += (await anext(attached))[1]
            await attached.close_input()
            return got + b"".join([data async for _, data in attached])

    assert asyncio.run(asyncio.wait_for(main(), 60)) == b"onetwothree"


def test_an_attachment_to_a_sandbox_that_is_stopped_ends_with_its_error(sbx: dsec.Sandbox) -> None:
    attached = sbx.spawn("echo up; sleep 1000").attach()
    assert next(attached) == (1, b"up\n")
    sbx.stop()
    with pytest.raises(dsec.SandboxLost):
        next(attached)
