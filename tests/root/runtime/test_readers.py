"""Several readers of one run, each at its own pace, and output that is read again."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtnode import WINDOW, create, needs, sh, stream

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
            assert read(0, s=2) == {"o": 0, "d": b"err\n", "total": 4, "state": state}
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
