"""The third output: after all that was said on the other two before it, whoever reads how."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtnode import WINDOW, create, needs, sh

pytestmark = needs

MUCH = 10 << 20
SPEAK = f"head -c {MUCH} /dev/zero | tr '\\0' a; head -c {MUCH} /dev/zero | tr '\\0' b >&2; echo 'done 7' >&3; "


def follow(c: Client, number: int, until: bytes | None = None) -> tuple[list[tuple[int, int, bytes]], dict[str, Any]]:
    """Every piece in its order: (stream, offset, data); acknowledged as it comes."""
    pieces = []
    while True:
        frame = c.recv()
        if frame["id"] != number:
            continue
        if "err" in frame:
            raise RuntimeFault(frame["err"])
        if "ok" in frame:
            return pieces, frame["ok"]
        if frame["ev"] == "out":
            pieces.append((frame["s"], frame["o"], frame["d"]))
            c.send("run.ack", {"request": number, "bytes": len(frame["d"])})
            if until is not None and frame["s"] == 3 and until in frame["d"]:
                return pieces, {}


def joined(pieces: list[tuple[int, int, bytes]], stream: int) -> bytes:
    data = bytearray()
    for s, offset, piece in pieces:
        if s == stream:
            assert offset == len(data)
            data += piece
    return bytes(data)


def start(c: Client, box: str, script: str, name: str = "r", **over: Any) -> int:
    over = {"stream": True, "window": WINDOW, "control": True} | over
    return c.send("run.start", run_plan(box, name, sh(script), **over))


def test_what_is_told_comes_after_what_was_said(box: tuple[Client, str]) -> None:
    c, name = box
    number = start(c, name, SPEAK + "sleep 100 & read x; echo never", stdin_open=True)
    pieces, _ = follow(c, number, until=b"done 7\n")
    # Nothing of the others was still to come.
    assert len(joined(pieces, 1)) == MUCH
    assert len(joined(pieces, 2)) == MUCH
    assert pieces[-1] == (3, 0, b"done 7\n")
    status = c_call(c, "run.status", sandbox=name, run="r")
    assert status["totals"] == [MUCH, MUCH, 7]
    assert status["state"] == "running"


def c_call(c: Client, op: str, **args: Any) -> dict[str, Any]:
    """Between the answers to acknowledgements."""
    number = c.send(op, args)
    while (frame := c.recv())["id"] != number:
        pass
    if "err" in frame:
        raise RuntimeFault(frame["err"])
    ok: dict[str, Any] = frame["ok"]
    return ok


def test_many_lines_are_each_in_their_place(box: tuple[Client, str]) -> None:
    c, name = box
    script = "i=0; while [ $i -lt 2000 ]; do echo out $i; echo err $i >&2; echo $i >&3; i=$((i+1)); done"
    number = start(c, name, script)
    pieces, result = follow(c, number)
    assert result["exit_code"] == 0
    seen = {1: 0, 2: 0, 3: 0}
    for s, _, data in pieces:
        seen[s] += data.count(b"\n")
        if s == 3:
            assert seen[1] >= seen[3] and seen[2] >= seen[3]
    assert seen == {1: 2000, 2: 2000, 3: 2000}
    assert joined(pieces, 3) == b"".join(b"%d\n" % i for i in range(2000))


def test_it_is_read_again_and_its_end_is_kept(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    number = start(c, name, SPEAK, stream=False)
    result = c.wait(number)
    assert len(result["streams"]) == 2
    kept = c.call("run.read", sandbox=name, run="r", s=3, offset=0)
    assert (kept["d"], kept["total"]) == (b"done 7\n", 7)
    assert c.call("run.status", sandbox=name, run="r")["totals"] == [MUCH, MUCH, 7]
    # From the middle on, as after a lost connection.
    again = c.send(
        "run.attach", {"sandbox": name, "run": "r", "stream": True, "window": 1 << 30, "offsets": [MUCH, MUCH, 5]}
    )
    pieces, _ = follow(c, again)
    assert pieces == [(3, 5, b"7\n")]


def test_without_one_there_is_none(box: tuple[Client, str]) -> None:
    c, name = box
    plan = run_plan(name, "r", sh("echo x >&3"), control=False)
    assert c.call("run.start", **plan)["exit_code"] != 0
    with pytest.raises(RuntimeFault) as refused:
        c.call("run.read", sandbox=name, run="r", s=3, offset=0)
    assert refused.value.code == "bad_request"
    with pytest.raises(RuntimeFault) as refused:
        c.call("run.attach", sandbox=name, run="r", stream=True, offsets=[0, 0, 0, 0])
    assert refused.value.code == "bad_request"


def test_it_is_all_there_is_beside_the_three(box: tuple[Client, str]) -> None:
    c, name = box
    # That of ls itself is the fourth.
    assert c.call("run.start", **run_plan(name, "r", ["ls", "/proc/self/fd"], control=True))["streams"][0][
        "head"
    ].split() == [b"0", b"1", b"2", b"3", b"4"]


def test_order_survives_the_death_of_a_runtime(node: Node) -> None:
    with node.client() as c:
        create(c, "s")
        script = (
            "read x; i=0; while [ $i -lt 400 ]; do head -c 5000 /dev/zero | tr '\\0' o; "
            "echo $i >&3; i=$((i+1)); [ $((i % 100)) = 0 ] && read x; done"
        )
        number = start(c, "s", script, stdin_open=True)
        while (frame := c.recv())["id"] != number or frame.get("ev") != "started":
            pass
        c_call(c, "run.stdin", sandbox="s", run="r", offset=0, d=b"\n")
    offsets = [0, 0, 0]
    sums = [hashlib.sha256() for _ in offsets]
    size = 1
    node.kill_runtime()
    for turn in range(4):
        with node.client() as c:
            number = c.send(
                "run.attach", {"sandbox": "s", "run": "r", "stream": True, "window": WINDOW, "offsets": offsets}
            )
            wanted = b"%d\n" % (turn * 100 + 99)
            pieces, result = follow(c, number, until=wanted)
            for s, offset, data in pieces:
                assert offset == offsets[s - 1]
                offsets[s - 1] += len(data)
                sums[s - 1].update(data)
                if s == 3:
                    told = sum(1 for i in range(400) if offsets[2] >= len(b"".join(b"%d\n" % j for j in range(i + 1))))
                    assert offsets[0] >= told * 5000
            if not result:
                size = c_call(c, "run.stdin", sandbox="s", run="r", offset=size, d=b"\n")["size"]
                # While there is a reader: what nobody follows is not kept.
                node.kill_runtime()
    assert sums[2].digest() == hashlib.sha256(b"".join(b"%d\n" % i for i in range(400))).digest()
    assert sums[0].digest() == hashlib.sha256(b"o" * 5000 * 400).digest()
