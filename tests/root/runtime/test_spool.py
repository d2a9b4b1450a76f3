"""Output that stays readable lies on the disk: it costs no memory, survives the runtime, and a bad disk shortens it
with a word, never silently."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.disk import MIB, Disk, small_disk
from tests.kit.inventory import Inventory, Scope
from tests.kit.lanes import fewer, in_guest, kernel_lacks
from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtnode import WINDOW, create, make_node, memory_kib, needs, sh

pytestmark = [*needs, pytest.mark.one_guest]

FIRST = 10_000_000
COUNT = fewer(4_000_000)
LINES = b"".join(b"%d\n" % n for n in range(FIRST, FIRST + COUNT))
SPOOL = fewer(16) * MIB
# What may stay in memory of an output that rests.
REST = 64 << 10
PATIENCE_S = 240 if in_guest() else 120
ON_TMPFS = {"upper": {"kind": "tmpfs", "bytes": 16 * MIB, "inodes": 0}}


def lines(count: int) -> str:
    return f"seq {FIRST} {FIRST + count // 9 - 1}"


def start(c: Client, box: str, script: str, run: str = "r", **over: Any) -> int:
    over = {"spool_bytes": SPOOL, "head_bytes": 1000, "tail_bytes": 1000} | over
    number = c.send("run.start", run_plan(box, run, sh(script), **over))
    return number


def until(c: Client, what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read(c: Client, offset: int, most: int = 1 << 20, **over: Any) -> dict[str, Any]:
    return c.call("run.read", **({"sandbox": "a", "run": "r", "s": 1, "offset": offset, "max": most} | over))


def written(c: Client, total: int, **over: Any) -> bool:
    def there() -> bool:
        try:
            return bool(read(c, 0, 0, **over)["total"] >= total)
        except RuntimeFault as fault:
            assert fault.code == "not_found"
            return False

    until(c, there)
    return True


def everything(c: Client, offset: int = 0, **over: Any) -> list[tuple[int, bytes]]:
    """All that is kept from an offset on, as it is read."""
    pieces: list[tuple[int, bytes]] = []
    while True:
        kept = read(c, offset, **over)
        if not kept["d"]:
            assert kept["o"] >= kept["total"]
            return pieces
        pieces.append((kept["o"], kept["d"]))
        offset = kept["o"] + len(kept["d"])


def followed(c: Client, number: int) -> list[tuple[int, bytes]]:
    """The pieces a reader gets, to the end."""
    pieces = []
    while True:
        frame = c.recv()
        if frame["id"] != number:
            continue
        if frame.get("ev") == "out":
            pieces.append((frame["o"], frame["d"]))
            c.send("run.ack", {"request": number, "bytes": len(frame["d"])})
        elif "ev" not in frame:
            assert "ok" in frame
            return pieces


def checked(pieces: list[tuple[int, bytes]], data: bytes = LINES) -> int:
    """Every byte is the one at its offset; how many there are."""
    for offset, piece in pieces:
        assert data[offset : offset + len(piece)] == piece, "bytes at the wrong place"
    return sum(len(piece) for _, piece in pieces)


def held(node: Node, pattern: str) -> int:
    """What takes room among the files without a name that the keeper holds, in bytes."""
    taken = 0
    for path in Path(f"/proc/{node.keeper_pid()}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if re.search(pattern, str(path.readlink())):
                taken += path.stat().st_blocks * 512
    return taken


def in_memory(node: Node) -> int:
    return held(node, r"memfd:output")


def on_disk(node: Node) -> int:
    return held(node, re.escape(f"{node.state_dir}/output/") + ".*deleted")


def of_many(node: Node, count: int, each: int) -> None:
    with node.client() as c, node.client() as asks:
        create(c, "a", pids_max=4096)
        for n in range(count):
            start(c, "a", f"{lines(each)}; sleep 1000", f"r{n}")
        for n in range(count):
            written(asks, each, run=f"r{n}")
        until(asks, lambda: in_memory(node) <= count * REST or off(node))


def off(node: Node) -> bool:
    return "DSEC_NATIVE_DISABLE" in node.env


@pytest.mark.parametrize("switched", ["on", "off"])
def test_many_programs_cost_no_memory(switched: str) -> None:
    """Of 40 programs with 3.6 MiB each nothing but the last pages stays in memory; with `output.disk` off all of it."""
    count, each = fewer(40), 9 * fewer(400_000)
    env = {"DSEC_NATIVE_DISABLE": "output.disk"} if switched == "off" else {}
    node = make_node(env=env)
    try:
        of_many(node, count, each)
        with node.client() as c:
            for n in (0, count - 1):
                pieces = everything(c, run=f"r{n}")
                assert checked(pieces) == each
        if switched == "on":
            with node.client() as c:
                own = [memory_kib(pid) << 10 for pid in (c.hello["pid"], node.keeper_pid())]
            assert sum(own) + in_memory(node) <= 16 * MIB
            assert in_memory(node) <= count * REST
            assert on_disk(node) >= count * (each - REST)
        else:
            assert in_memory(node) >= count * each
            assert on_disk(node) == 0
    finally:
        node.stop()


@pytest.mark.same_everywhere
def test_little_output_needs_no_file(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        number = start(c, "a", "echo little; exit 3")
        result = c.wait(number)
        assert (result["exit_code"], result["streams"][0]["head"]) == (3, b"little\n")
        assert read(c, 0)["d"] == b"little\n"
        assert on_disk(node) == 0


def test_an_ended_program_leaves_nothing_in_memory_and_its_file_goes_when_it_is_forgotten(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        total = 9 * fewer(1_000_000)
        result = c.wait(start(c, "a", lines(total)))
        assert (result["exit_code"], result["limits_hit"]) == (0, ["output"])
        assert result["streams"][0]["head"] == LINES[:1000]
        assert result["streams"][0]["tail"] == LINES[total - 1000 : total]
        until(c, lambda: in_memory(node) == 0)
        assert on_disk(node) >= total
        assert checked(everything(c)) == total
        assert os.listdir(node.state_dir / "output") == []
        c.call("run.forget", sandbox="a", run="r")
        until(c, lambda: on_disk(node) == 0)


def test_no_more_than_was_promised_is_on_the_disk(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        spool = 1 * MIB
        c.wait(start(c, "a", lines(len(LINES)), spool_bytes=spool))
        until(c, lambda: in_memory(node) == 0)
        assert on_disk(node) <= spool + 4096 + 2 * (256 << 10) + (64 << 10)
        pieces = everything(c)
        assert pieces[0] == (0, LINES[:1000])
        assert checked(pieces) >= spool + 1000
        assert pieces[-1][0] + len(pieces[-1][1]) == len(LINES)


def stubborn(node: Node, step: Callable[[Client], Any]) -> Any:
    """Again for as long as the runtime dies over it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline
        try:
            with node.client() as c:
                return step(c)
        except (ConnectionError, BrokenPipeError):
            time.sleep(0.01)


@pytest.mark.parametrize("point", ["output.move", "output.moved", "run.spliced"])
def test_no_byte_is_lost_or_wrong_whenever_the_runtime_dies(point: str) -> None:
    """Each runtime dies at its tenth step; the program writes on, and ends, whatever happens."""
    # With a tenth of the output two or three die.
    nth = fewer(200) if point == "run.spliced" else 5 if in_guest() else 10
    node = make_node(env={"DSEC_NATIVE_FAILPOINTS": f"{point}:{nth}:kill"})
    try:
        total = len(LINES)
        first = stubborn(node, lambda c: c.hello["pid"])
        stubborn(node, lambda c: create(c, "a"))
        stubborn(node, lambda c: start(c, "a", f"{lines(total)}; read x; exit 5", stdin_open=True))
        stubborn(node, lambda c: written(c, total))
        pieces = stubborn(node, everything)
        assert checked(pieces) >= SPOOL + 1000
        assert pieces[-1][0] + len(pieces[-1][1]) == total
        stubborn(node, lambda c: c.call("run.stdin", sandbox="a", run="r", offset=0, d=b"\n", eof=True))
        result = stubborn(node, lambda c: c.call("run.attach", sandbox="a", run="r"))
        assert (result["exit_code"], result["limits_hit"]) == (5, ["output"])
        out = result["streams"][0]
        assert (out["total"], out["head"], out["tail"]) == (total, LINES[:1000], LINES[-1000:])
        assert checked(stubborn(node, everything)) >= SPOOL + 1000
        last = stubborn(node, lambda c: c.hello["pid"])
        assert first != last, "it did not die once"
    finally:
        node.stop()


def test_what_ended_is_read_from_any_offset_after_a_death(node: Node) -> None:
    total = len(LINES)
    with node.client() as c:
        create(c, "a")
        c.wait(start(c, "a", lines(total)))
        until(c, lambda: in_memory(node) == 0)
    node.kill_runtime()
    with node.client() as c:
        for offset in (0, 500, 1000, total - SPOOL, total - 5, total, total + 7):
            pieces = everything(c, offset)
            assert checked(pieces) >= min(SPOOL, max(total - offset, 0))
        number = c.send(
            "run.attach", {"sandbox": "a", "run": "r", "stream": True, "window": WINDOW, "offsets": [900, 0]}
        )
        got = followed(c, number)
        assert checked(got) >= SPOOL + 100


@pytest.fixture
def disk() -> Iterator[Disk]:
    with small_disk(256) as made:
        yield made


@contextlib.contextmanager
def disk_on(disk: Disk) -> Iterator[Disk]:
    """One that promises more than the disk it lies on has."""
    image, at = disk.path / "image", disk.path / "at"
    at.mkdir()
    with image.open("wb") as opened:
        opened.truncate(200 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", image], check=True)
    subprocess.run(["mount", "-o", "loop,errors=continue", image, at], check=True)
    try:
        yield Disk(at)
    finally:
        subprocess.run(["umount", at], check=True)


@pytest.fixture
def on_small(disk: Disk) -> Iterator[Node]:
    """A node whose state is on a small disk."""
    node = make_node(state_dir=disk.path / "state")
    try:
        yield node
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk.path], check=True)
        disk.empty()
        node.stop()


def create_beside(c: Client) -> None:
    """A sandbox that does not end when the disk below is full: its own is in memory."""
    if "tmpfs" not in c.call("probe")["upper"]:
        kernel_lacks("idmap.upper", "no tmpfs for writable parts")
    create(c, "a", **ON_TMPFS)


def shortened(c: Client, node: Node, result: dict[str, Any], code: int) -> None:
    """It says that something is missing, and nothing of what is there is wrong."""
    total = len(LINES)
    assert result["exit_code"] == code
    assert "spool" in result["limits_hit"]
    out = result["streams"][0]
    assert out["total"] == total
    assert LINES.startswith(out["head"])
    assert LINES.endswith(out["tail"])
    assert len(out["head"]) + out["dropped"] + len(out["tail"]) == total
    pieces = everything(c)
    assert checked(pieces) < SPOOL
    assert pieces[-1][0] + len(pieces[-1][1]) == total, "the newest is always there"
    assert in_memory(node) <= 1 * MIB


def test_a_full_disk_shortens_what_is_kept_and_says_so(on_small: Node, disk: Disk) -> None:
    total, half = len(LINES), 9 * fewer(500_000)
    with on_small.client() as c, on_small.client() as asks:
        create_beside(c)
        script = f"{lines(half)}; read x; seq {FIRST + half // 9} {FIRST + COUNT - 1}; exit 7"
        number = start(c, "a", script, stdin_open=True)
        written(asks, half)
        until(asks, lambda: in_memory(on_small) <= REST)
        disk.fill()
        asks.call("run.stdin", sandbox="a", run="r", offset=0, d=b"\n", eof=True)
        result = c.wait(number)
        shortened(asks, on_small, result, 7)
        kept = read(asks, 1000, 10)
        assert (kept["o"], kept["d"]) == (1000, LINES[1000:1010]), "what the disk has is read from there"
        assert result["streams"][0]["total"] == total
        disk.empty()
        other = c.wait(start(c, "a", lines(total), "other"))
        assert (other["exit_code"], other["limits_hit"]) == (0, ["output"])
    on_small.kill_runtime()
    with on_small.client() as c:
        shortened(c, on_small, c.call("run.attach", sandbox="a", run="r"), 7)


@pytest.mark.same_everywhere  # only a disk that has taken much says at once that it loses
def test_what_a_disk_took_and_lost_is_never_told_as_something_else(disk: Disk) -> None:
    """A disk in a file on a full disk takes everything, and fails later, when it is written out: then nobody is told
    but who asks. What is kept in memory meanwhile hides it until it is let go."""
    with disk_on(disk) as inner:
        node = make_node(state_dir=inner.path / "state")
        try:
            with node.client() as c:
                create_beside(c)
                disk.fill()
                number = start(c, "a", f"{lines(len(LINES))}; read x; exit 6", stdin_open=True)
                with node.client() as asks:
                    written(asks, len(LINES))
                    subprocess.run(["sync", "-f", inner.path], check=False)
                    Path("/proc/sys/vm/drop_caches").write_text("1")
                    checked(everything(asks))
                    asks.call("run.stdin", sandbox="a", run="r", offset=0, d=b"\n", eof=True)
                shortened(c, node, c.wait(number), 6)
        finally:
            disk.empty()
            node.stop()


def test_a_disk_that_cannot_be_written_keeps_the_newest(on_small: Node, disk: Disk) -> None:
    with on_small.client() as c:
        create_beside(c)
        # The agent's own need of it is another matter.
        subprocess.run(["mount", "-o", "remount,ro", disk.path], check=True)
        result = c.wait(start(c, "a", f"{lines(len(LINES))}; exit 9"))
        shortened(c, on_small, result, 9)
        few = c.wait(start(c, "a", "echo few; exit 1", "few"))
        assert (few["exit_code"], few["limits_hit"], few["streams"][0]["head"]) == (1, [], b"few\n")


@pytest.mark.parametrize("point", ["output.move", "output.fetch"])
def test_an_error_of_the_disk_is_told(point: str) -> None:
    """Of any step: what cannot be read any more is missing, and said to be."""
    node = make_node(env={"DSEC_NATIVE_FAILPOINTS": f"{point}:{1 if point == 'output.fetch' else 3}:error"})
    try:
        with node.client() as c:
            create(c, "a")
            result = c.wait(start(c, "a", f"{lines(len(LINES))}; exit 3"))
            shortened(c, node, result, 3)
    finally:
        node.stop()


def test_nothing_is_left_when_all_are_killed() -> None:
    node = make_node()
    scope = Scope(node.run_dir, node.state_dir, (node.cgroup,))
    left = Path(node.state_dir) / "output" / "half-made"
    try:
        with node.client() as c:
            create(c, "a")
            start(c, "a", f"{lines(len(LINES))}; sleep 1000")
            with node.client() as asks:
                written(asks, len(LINES))
        held_open = [what for what in Inventory.take(scope).kinds["descriptors"] if "/output/" in what]
        assert held_open, "the inventory sees files without a name"
        left.write_bytes(b"x")
        assert str(left) in Inventory.take(scope).kinds["file"]
        node.kill_keeper()
        node.start()
        with node.client() as c:
            c.call("sandbox.stop", id="a")
            until(c, lambda: not [w for w in Inventory.take(scope).kinds["descriptors"] if "/output/" in w])
        assert not left.exists()
    finally:
        node.stop()
