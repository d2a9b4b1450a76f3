"""Several readers of one run, each at its own pace, and output that is read again."""

from __future__ import annotations

import array
import fcntl
import os
import signal
import termios
import time
from typing import Any

import pytest

from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtnode import WINDOW, create, frozen_file, make_node, needs, sh, stream, until_running

pytestmark = needs

LINES = b"".join(b"%d\n" % n for n in range(10_000_000, 12_000_000))
MANY = "seq 10000000 11999999"


def start(c: Client, box: str, script: str, **over: Any) -> int:
    return c.send("run.start", run_plan(box, "r", sh(script), **over))


def attach(c: Client, box: str, **over: Any) -> int:
    return c.send("run.attach", {"sandbox": box, "run": "r", "stream": True, "window": WINDOW} | over)


def follow(c: Client, number: int) -> tuple[list[tuple[int, bytes]], dict[str, Any]]:
    """The pieces of the first stream as they came, and the result; everything is acknowledged."""
    pieces: list[tuple[int, bytes]] = []
    while True:
        frame = c.recv()
        if frame["id"] != number:
            continue
        if "err" in frame:
            raise RuntimeFault(frame["err"])
        if "ok" in frame:
            return pieces, frame["ok"]
        if frame["ev"] == "out":
            pieces.append((frame["o"], frame["d"]))
            c.send("run.ack", {"request": number, "bytes": len(frame["d"])})


def until_written(c: Client, box: str, total: int) -> None:
    deadline = time.monotonic() + 60
    while c.call("run.read", sandbox=box, run="r", s=1, max=0)["total"] < total:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_that_does_not_mind_holds_nobody_up(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    number = start(c, name, f"sleep 0.5; {MANY}")
    with shared.client() as slow, shared.client() as quick, shared.client() as asks:
        slow_number = attach(slow, name, lossy=True, window=1000)
        quick_number = attach(quick, name)
        # The slow one reads nothing at all meanwhile; the quick one gets it all.
        got, result = stream(quick, quick_number)
        assert bytes(got[0]) == LINES
        assert (result["exit_code"], result["streams"][0]["total"]) == (0, len(LINES))
        assert c.wait(number)["exit_code"] == 0
        assert asks.call("run.list", sandbox=name)["runs"][0]["state"] == "done"
        slow.send("run.ack", {"request": slow_number, "bytes": len(LINES)})
        pieces, result = follow(slow, slow_number)
        assert result["exit_code"] == 0
        at = 0
        for offset, data in pieces:
            assert offset >= at
            assert LINES[offset : offset + len(data)] == data, "bytes at the wrong place"
            at = offset + len(data)
        assert at == len(LINES), "the end is always there"
        assert sum(len(data) for _, data in pieces) < len(LINES) // 2, "it was kept for it"


def test_one_that_minds_holds_the_program_back(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    number = start(c, name, MANY)
    with shared.client() as slow, shared.client() as asks:
        slow_number = attach(slow, name, window=1000)
        time.sleep(1)
        assert asks.call("run.list", sandbox=name)["runs"][0]["state"] == "running"
        slow.send("run.ack", {"request": slow_number, "bytes": WINDOW})
        got, _ = stream(slow, slow_number)
        assert bytes(got[0]) == LINES
    c.wait(number)


def test_the_newest_bytes_can_be_read_again(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    spool = 4 << 20
    number = start(c, name, f"{MANY}; echo err >&2; sleep 1000", head_bytes=1000, tail_bytes=1000, spool_bytes=spool)

    def read(offset: int, most: int = 1 << 20, s: int = 1) -> dict[str, Any]:
        return asks.call("run.read", sandbox=name, run="r", s=s, offset=offset, max=most)

    with shared.client() as asks:
        until_written(asks, name, len(LINES))
        while not read(0, s=2)["d"].endswith(b"\n"):
            time.sleep(0.01)
        for state in ("running", "done"):
            first = read(0)
            assert (first["o"], first["d"], first["state"]) == (0, LINES[:1000], state)
            assert first["total"] == len(LINES)
            begin = read(1000, 10)["o"]
            assert len(LINES) - spool - (2 << 20) <= begin <= len(LINES) - spool
            at, again = begin, b""
            while at < len(LINES):
                kept = read(at)
                assert kept["o"] == at
                again += kept["d"]
                at += len(kept["d"])
            assert again == LINES[begin:]
            assert read(len(LINES) - 5, 3)["d"] == LINES[-5:-2]
            assert read(len(LINES) + 7)["d"] == b""
            assert read(0, s=2) == {"o": 0, "d": b"err\n", "total": 4, "gap": None, "state": state}
            if state == "running":
                asks.call("run.kill", sandbox=name, run="r")
                result = c.wait(number)
                assert result["streams"][0]["tail"] == LINES[-1000:]
        for bad in ({"s": 0}, {"s": 3}):
            with pytest.raises(RuntimeFault) as refused:
                asks.call("run.read", sandbox=name, run="r", **bad)
            assert refused.value.code == "bad_request"
        with pytest.raises(RuntimeFault) as none:
            asks.call("run.read", sandbox=name, run="none", s=1)
        assert none.value.code == "not_found"


def test_a_run_that_is_forgotten_while_it_is_read_is_not_found(shared: Node, box: tuple[Client, str]) -> None:
    """Its sandbox has not ended: who asks for output reads what is recorded then."""
    c, name = box
    c.call("run.start", **run_plan(name, "r", sh("seq 300000"), head_bytes=1000, tail_bytes=1000, spool_bytes=4 << 20))
    pid = shared.runtime_pid()
    os.kill(pid, signal.SIGSTOP)  # for both to be taken in one turn, and the disk to be read after it
    read = c.send("run.read", {"sandbox": name, "run": "r", "s": 1, "offset": 2000, "max": 1 << 20})
    forget = c.send("run.forget", {"sandbox": name, "run": "r"})
    os.kill(pid, signal.SIGCONT)
    answers = {frame["id"]: frame for frame in (c.recv() for _ in range(2))}
    assert "ok" in answers[forget]
    assert answers[read]["err"]["code"] == "not_found"


@pytest.mark.parametrize("spool", [64 << 10, 1 << 20])
def test_one_that_minds_misses_nothing_when_the_runtime_dies(node: Node, spool: int) -> None:
    """Though it is as far behind as it may be, by what is kept and by a pipe."""
    script = "i=0; while [ $i -lt 40 ]; do seq 10000000 10099999; i=$((i+1)); done"
    wanted = b"".join(b"%d\n" % n for n in range(10_000_000, 10_100_000))
    with node.client() as c:
        create(c, "a")
        start(c, "a", script, head_bytes=0, tail_bytes=0, spool_bytes=spool)
    at = 0
    for turn in range(8):
        with node.client() as c:
            attach(c, "a", window=300_000, offsets=[at, 0])
            read = 0
            while read < 300_000:
                frame = c.recv()
                if frame.get("ev") == "out":
                    assert frame["o"] == at, f"{frame['o'] - at} bytes are missing after {turn} deaths"
                    data = frame["d"]
                    begin = at % len(wanted)
                    assert data == (wanted + wanted)[begin : begin + len(data)]
                    at += len(data)
                    read += len(data)
            # It does not read on: the program goes as far ahead as it may.
            before = -1
            with node.client() as asks:
                while (total := asks.call("run.read", sandbox="a", run="r", s=1, max=0)["total"]) != before:
                    before = total
                    time.sleep(0.3)
            assert total > at
            node.kill_runtime()
    with node.client() as c:
        c.call("run.kill", sandbox="a", run="r")


def test_it_is_there_after_the_runtime_has_died(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        start(c, "a", f"{MANY}; sleep 1000", head_bytes=0, tail_bytes=0, spool_bytes=1 << 20)
        with node.client() as asks:
            until_written(asks, "a", len(LINES))
    node.kill_runtime()
    with node.client() as c:
        kept = c.call("run.read", sandbox="a", run="r", s=1, offset=len(LINES) - 1_000_000)
        assert (kept["o"], kept["d"]) == (len(LINES) - 1_000_000, LINES[-1_000_000:])
        c.call("run.kill", sandbox="a", run="r")
        result = c.call("run.attach", sandbox="a", run="r")
        assert (result["streams"][0]["total"], result["streams"][0]["head"]) == (len(LINES), b"")
        assert c.call("run.read", sandbox="a", run="r", s=1, offset=len(LINES) - 100)["d"] == LINES[-100:]


@pytest.mark.parametrize(("off", "size"), [("", 256 << 10), ("output.wide", 64 << 10)])
def test_a_pipe_that_was_full_is_made_larger_and_nothing_in_it_is_lost(off: str, size: int) -> None:
    """Full since its reader gives no credit; then all of it is read, and the pipe is what a program has that writes
    on."""
    total = 1 << 20
    node = make_node(env={"DSEC_NATIVE_DISABLE": off})
    try:
        with node.client() as c, node.client() as asks:
            create(c, "a")
            script = f"seq 10000000 11999999 | head -c {total}; read x; echo end"
            number = start(c, "a", script, stream=True, window=1, stdin_open=True)
            until_running(asks, "a", {"r"})
            pipe = output_pipe(node, "a")
            try:
                before = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
                deadline = time.monotonic() + 60
                while waiting(pipe) < before:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                got = bytearray()
                c.send("run.ack", {"request": number, "bytes": 2 * total})
                while len(got) < total:
                    frame = c.recv()
                    if frame.get("ev") == "out":
                        assert frame["o"] == len(got)
                        got += frame["d"]
                assert fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) == size
            finally:
                os.close(pipe)
            asks.call("run.stdin", sandbox="a", run="r", d=b"\n", eof=True)
            out, result = stream(c, number, got=[got, bytearray()])
            assert bytes(out[0]) == LINES[:total] + b"end\n"
            assert result["exit_code"] == 0
    finally:
        node.stop()


def output_pipe(node: Node, sandbox: str) -> int:
    """The standard output of the run's program, as another one to read from."""
    groups = frozen_file(node, sandbox).parent.glob("run-*/cgroup.procs")
    pid = next(pid for group in groups for pid in group.read_text().split())
    return os.open(f"/proc/{pid}/fd/1", os.O_RDONLY | os.O_NONBLOCK)


def waiting(pipe: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]
