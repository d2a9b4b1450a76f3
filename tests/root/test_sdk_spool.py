"""Output that stays readable, by the SDK over a real node: slow readers, old programs, and whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
import threading

import pytest

import dsec
from dsec.model.limits import PROGRAMS_KEPT, SPOOL_MAX_BYTES
from tests.kit.home import Home
from tests.kit.rtclient import Client

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20
FIRST = 10_000_000


def lines(count: int) -> bytes:
    return b"".join(b"%d\n" % n for n in range(FIRST, FIRST + count))


def seq(count: int) -> str:
    return f"seq {FIRST} {FIRST + count - 1}"


def test_a_reader_that_stops_harms_no_other_and_gets_every_byte(sbx: dsec.Sandbox) -> None:
    """It reads on after all has been written, which with nothing kept on the disk would wait for it."""
    data = lines(1_500_000)
    program = sbx.spawn(f"read x; {seq(1_500_000)}; sleep 1000")
    slow = program.stdout.follow()
    quick = sbx.process(program.id).stdout.follow()
    started = threading.Event()
    got: list[bytes] = []

    def read_some() -> None:
        got.append(next(slow))
        started.set()

    first = threading.Thread(target=read_some)
    first.start()
    program.stdin.write("\n")
    assert started.wait(60)
    first.join()
    all_of_it = b""
    while len(all_of_it) < len(data):
        all_of_it += next(quick)
    assert all_of_it == data
    size = len(got[0])
    while size < len(data):
        got.append(next(slow))
        size += len(got[-1])
    assert b"".join(got) == data
    assert slow.dropped == 0
    program.kill()


def test_one_that_may_miss_some_is_told_how_much(sbx: dsec.Sandbox) -> None:
    count = 4_000_000
    data = b"go\n" + lines(count)
    program = sbx.spawn(f"echo go; read x; {seq(count)}", spool_bytes=1 * MIB)
    slow = program.stdout.follow(lossy=True)
    quick = sbx.process(program.id).stdout.follow()
    begun = next(quick)  # it is there: from now on the program waits for it
    pieces = [(0, next(slow))]
    program.stdin.write("\n")
    assert begun + b"".join(quick) == data
    for piece in slow:
        pieces.append((slow.offset - len(piece), piece))
    for offset, piece in pieces:
        assert data[offset : offset + len(piece)] == piece
    assert pieces[-1][0] + len(pieces[-1][1]) == len(data)
    assert slow.dropped > 0
    assert slow.dropped + sum(len(piece) for _, piece in pieces) == len(data)
    assert program.wait().ok


def test_the_newest_keep_their_output_and_of_older_ones_head_and_tail_are_left(sbx: dsec.Sandbox) -> None:
    data = lines(600_000)
    programs = []
    for _ in range(2):  # the second ends after the first
        programs.append(sbx.spawn(seq(600_000), stdin=False))
        assert programs[-1].wait().stdout_bytes[:9] == data[:9]
    first, second = programs
    for _ in range(PROGRAMS_KEPT - 1):
        sbx.spawn(["true"], stdin=False).wait()
    assert second.output() == data, "it is one of the newest"
    reader = sbx.process(first.id).stdout.follow()
    left = b"".join(reader)
    assert left == data[:MIB] + data[-MIB:]
    assert reader.dropped == len(data) - 2 * MIB
    late = sbx.process(first.id).stdout.follow(2 * MIB)
    assert b"".join(late) == data[-MIB:]
    assert late.dropped == len(data) - 3 * MIB


def test_whatever_dies_it_is_read_from_any_offset(sbx: dsec.Sandbox, home: Home) -> None:
    data = lines(1_000_000)
    program = sbx.spawn(f"{seq(1_000_000)}; read x; echo last; exit 4")
    reader = program.stdout.follow()
    got = b""
    while len(got) < len(data):
        got += next(reader)
    assert got == data

    def all_die() -> None:
        with Client(home.place.run_dir / "runtime.sock") as runtime:
            os.kill(runtime.hello["pid"], signal.SIGKILL)
        os.kill(home.agent(), signal.SIGKILL)
        home.dsec("up")

    def read_everywhere(whole: bytes) -> None:
        for offset in (0, 1, MIB - 1, MIB, 5_000_001, len(data) - 1, len(data)):
            assert sbx.process(program.id).output(offset) == whole[offset:]

    all_die()
    read_everywhere(data)
    program.stdin.write("\n")
    assert b"".join(reader) == b"last\n"
    assert program.wait().exit_code == 4
    read_everywhere(data + b"last\n")
    all_die()
    read_everywhere(data + b"last\n")
    late = sbx.process(program.id).stdout.follow(7)
    assert b"".join(late) == data[7:] + b"last\n"
    assert late.dropped == 0
    assert program.wait().exit_code == 4


def test_more_than_is_allowed_is_refused(sbx: dsec.Sandbox) -> None:
    for bad in (-1, SPOOL_MAX_BYTES + 1, "1", True):
        with pytest.raises(dsec.InvalidSpec) as caught:
            sbx.spawn(["true"], spool_bytes=bad)  # type: ignore[arg-type]  # some are no numbers on purpose
        assert caught.value.detail["field"] == "spool_bytes"
