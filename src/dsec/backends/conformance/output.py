"""Standard input, output and error: exact, bounded, streamed, never in the way."""

from __future__ import annotations

import asyncio
import hashlib

from dsec.backends.conformance.kit import FOREVER, Subject, check, equal, expect, raises, sandbox, soon
from dsec.model import limits
from dsec.model.errors import NotFound
from dsec.model.states import RunOutcome

ALL_BYTES = bytes(range(256))
# How long a flood may run: longer where the machine is too slow to fill the head in that time.
FLOOD_TIMEOUTS_S = (0.5, 2.0, 8.0, 32.0)
LARGE = 10_000_000


def pattern(size: int) -> bytes:
    """Bytes in which every position can be told from its neighbours."""
    blocks = (hashlib.sha256(number.to_bytes(8, "big")).digest() for number in range(size // 32 + 1))
    return b"".join(blocks)[:size]


class Collected:
    """A sink that keeps everything and sees that nothing is missing or doubled."""

    def __init__(self, offsets: tuple[int, int] = (0, 0)) -> None:
        self.data = {1: bytearray(), 2: bytearray()}
        self.next = dict(zip((1, 2), offsets, strict=True))
        self.first = asyncio.Event()

    async def __call__(self, stream: int, offset: int, data: bytes) -> None:
        equal(offset, self.next[stream], f"the offset in stream {stream}")
        self.next[stream] += len(data)
        self.data[stream] += data
        self.first.set()


@check()
async def both_streams_are_exact(subject: Subject) -> None:
    """Standard output and error are told apart and complete."""
    async with sandbox(subject) as box:
        outcome = await box.sh("echo one; echo two >&2; echo three; echo four >&2")
        equal((outcome.out.head, outcome.err.head), (b"one\nthree\n", b"two\nfour\n"), "the output")
        equal((outcome.out.total, outcome.err.total), (10, 9), "the totals")
        silent = await box.run("true")
        equal((silent.out.total, silent.err.total), (0, 0), "the totals of a silent program")


@check()
async def input_and_binary_output_are_exact(subject: Subject) -> None:
    """Every byte value goes in and comes out; without input there is an end of file."""
    async with sandbox(subject) as box:
        for data in (b"", b"\0", ALL_BYTES * 3, pattern(200_000)):
            outcome = await box.run("cat", stdin=data)
            equal((outcome.exit_code, outcome.out.head), (0, data), "what cat said")


@check()
async def input_nobody_reads_is_no_error(subject: Subject) -> None:
    """A program that does not read its input ends as it would without."""
    async with sandbox(subject) as box:
        outcome = await box.run("true", stdin=pattern(1_000_000))
        equal((outcome.cause, outcome.exit_code), ("exited", 0), "the ending")


@check()
async def head_and_tail_are_kept_and_the_gap_is_known(subject: Subject) -> None:
    """What is too long keeps exactly its start and its end, and says how much is missing."""
    async with sandbox(subject) as box:
        for size in (0, 1, 10, 11, 29, 30, 31, 100, 5000):
            data = pattern(size)
            out = (await box.run("cat", stdin=data, head_bytes=10, tail_bytes=20)).out
            equal(out.total, size, "the total")
            equal(out.head, data[:10], f"the head of {size} bytes")
            equal(out.tail, data[10:][-20:], f"the tail of {size} bytes")
            equal(out.dropped_bytes, max(0, size - 30), "the gap")


@check()
async def long_output_is_cut_at_the_default_limits(subject: Subject) -> None:
    """Three megabytes keep one at each end, exactly, and the result says which limit it was."""
    data = pattern(3 * limits.MIB + 12_345)
    async with sandbox(subject) as box:
        outcome = await box.run("cat", stdin=data)
        same(outcome, data)
        expect("output" in outcome.limits_hit, f"limits_hit {outcome.limits_hit}")


def same(outcome: RunOutcome, data: bytes) -> None:
    equal(outcome.out.total, len(data), "the total")
    equal(outcome.out.head, data[: limits.OUTPUT_HEAD_BYTES], "the head")
    equal(outcome.out.tail, data[limits.OUTPUT_HEAD_BYTES :][-limits.OUTPUT_TAIL_BYTES :], "the tail")


@check("posix")
async def megabytes_on_both_streams(subject: Subject) -> None:
    """Captured and streamed, megabytes on each stream are exact."""
    size = LARGE
    line = b"0123456789abcdef\n"
    whole = (line * (size // len(line) + 1))[:size]
    text = f"yes {line.decode().strip()} | head -c {size} & yes {line.decode().strip()} | head -c {size} >&2; wait"
    async with sandbox(subject) as box:
        same(await box.sh(text), whole)
        sink = Collected()
        await box.sh(text, sink=sink)
        for stream in (1, 2):
            equal(bytes(sink.data[stream]), whole, f"stream {stream}")


@check()
async def a_flood_is_bounded(subject: Subject) -> None:
    """A program that never stops talking is cut off by its timeout; head and tail are right, nothing else is kept."""
    async with sandbox(subject) as box:
        for timeout_s in FLOOD_TIMEOUTS_S:
            outcome = await box.run("yes", timeout_s=timeout_s)
            if outcome.out.total >= limits.OUTPUT_HEAD_BYTES:
                break
        equal((outcome.cause, outcome.exit_code), ("timeout", 137), "the ending")
        equal(outcome.out.head[:100], b"y\n" * 50, "the head")
        expect(outcome.out.total >= limits.OUTPUT_HEAD_BYTES, f"only {outcome.out.total} bytes")
        kept = len(outcome.out.head) + len(outcome.out.tail)
        expect(kept <= limits.OUTPUT_HEAD_BYTES + limits.OUTPUT_TAIL_BYTES, f"{kept} bytes kept")


@check()
async def a_stream_has_everything_in_order(subject: Subject) -> None:
    """A sink gets every byte, also those a captured result would drop, and before the call returns."""
    data = pattern(3 * limits.MIB)
    async with sandbox(subject) as box:
        sink = Collected()
        outcome = await box.run("cat", stdin=data, sink=sink)
        equal(bytes(sink.data[1]), data, "the stream")
        equal(outcome.out.total, len(data), "the total")


@check()
async def output_comes_while_the_program_runs(subject: Subject) -> None:
    """A sink does not wait for the end of the program."""
    async with sandbox(subject) as box:
        sink = Collected()
        spawned = await box.spawn(f"echo now; sleep {FOREVER}", sink=sink)
        await soon(sink.first.wait(), "the first output")
        equal(bytes(sink.data[1]), b"now\n", "the stream")
        await box.guest.kill(spawned.process_id)
        await spawned.end()


@check()
async def a_slow_sink_slows_the_program(subject: Subject) -> None:
    """While the sink does not take anything, the program waits: it cannot fill memory, and nothing is lost."""
    async with sandbox(subject) as box:
        gate, first = asyncio.Event(), asyncio.Event()
        taken = 0

        async def sink(stream: int, offset: int, data: bytes) -> None:
            nonlocal taken
            equal(offset, taken, "the offset")
            first.set()
            await gate.wait()
            taken += len(data)

        spawned = await box.spawn("yes", sink=sink)
        await soon(first.wait(), "the first output")
        await asyncio.sleep(0.3)
        await box.guest.kill(spawned.process_id)
        gate.set()
        outcome = await spawned.end()
        equal(taken, outcome.out.total, "what the sink was given")
        most = 2 * limits.STREAM_WINDOW_BYTES + limits.MIB  # the window, what is on its way, the pipe
        expect(outcome.out.total <= most, f"the program wrote {outcome.out.total} bytes against a closed sink")


@check()
async def a_reader_that_leaves_does_not_stop_the_program(subject: Subject) -> None:
    """Cancelled or failed readers go; the program runs on, and its result can be had."""
    async with sandbox(subject) as box:
        data = pattern(2 * limits.MIB)

        async def failing(stream: int, offset: int, piece: bytes) -> None:
            raise ZeroDivisionError

        async def stuck(stream: int, offset: int, piece: bytes) -> None:
            await asyncio.Event().wait()

        for sink in (failing, stuck):
            spawned = await box.spawn_plan(box.command("cat", stdin=data), sink)
            if sink is stuck:
                await asyncio.sleep(0.05)
                spawned.task.cancel()
            ended = (await soon(asyncio.gather(spawned.task, return_exceptions=True)))[0]
            expect(isinstance(ended, ZeroDivisionError | asyncio.CancelledError), f"the reader ended with {ended!r}")
            same(await soon(box.guest.attach(spawned.process_id)), data)


@check()
async def attaching_goes_on_at_an_offset(subject: Subject) -> None:
    """What was read before is not sent again; after the end it is still there until it is forgotten."""
    async with sandbox(subject) as box:
        spawned = await box.spawn("echo abcdef; echo 123456 >&2; sleep 0.3; echo ghijkl")
        sink = Collected((3, 4))
        outcome = await soon(box.guest.attach(spawned.process_id, sink=sink, offsets=(3, 4)))
        equal((bytes(sink.data[1]), bytes(sink.data[2])), (b"def\nghijkl\n", b"56\n"), "the streams")
        equal(await spawned.end(), outcome, "what the first one was told")
        late = Collected((7, 7))
        equal(await soon(box.guest.attach(spawned.process_id, sink=late, offsets=(7, 7))), outcome, "after the end")
        equal(bytes(late.data[1]), b"ghijkl\n", "the stream after the end")
        await raises(NotFound, box.guest.attach("p-never"), "attaching to what was never started")


@check()
async def two_readers_at_once(subject: Subject) -> None:
    """Two readers of one program both get all of it."""
    async with sandbox(subject) as box:
        one, two = Collected(), Collected()
        spawned = await box.spawn("sleep 0.2; echo a; sleep 0.1; echo b", sink=one)
        await soon(box.guest.attach(spawned.process_id, sink=two))
        await spawned.end()
        equal((bytes(one.data[1]), bytes(two.data[1])), (b"a\nb\n", b"a\nb\n"), "the streams")
