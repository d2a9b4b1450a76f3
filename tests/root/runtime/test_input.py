"""Standard input that stays open: fed in pieces, in order, once each, and held back by who does not read."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtnode import WINDOW, create, needs, sh, stream, until_known

pytestmark = needs

PIECE = 1 << 20


def start(c: Client, box: str, script: str, name: str = "r", **over: Any) -> int:
    return c.send("run.start", run_plan(box, name, sh(script), stdin_open=True, **over))


def feed(c: Client, box: str, offset: int, data: bytes = b"", *, run: str = "r", eof: bool = False) -> dict[str, Any]:
    return c.call("run.stdin", sandbox=box, run=run, offset=offset, d=data, eof=eof)


def until_running(c: Client, box: str, run: str = "r") -> None:
    deadline = time.monotonic() + 30
    while {r["run"]: r["state"] for r in c.call("run.list", sandbox=box)["runs"]}.get(run) != "running":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_reads_what_comes_when_it_comes(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    number = start(
        c, name, "while read line; do echo got $line; done; echo over", stdin=b"first\n", stream=True, window=WINDOW
    )
    with shared.client() as other:
        got = bytearray()

        def until(text: bytes) -> None:
            while text not in got:
                frame = c.recv()
                assert frame["id"] == number
                if frame.get("ev") == "out":
                    got.extend(frame["d"])

        until(b"got first\n")
        assert feed(other, name, 6, b"sec") == {"size": 9, "closed": False}
        assert feed(other, name, 9, b"ond\n") == {"size": 13, "closed": False}
        until(b"got second\n")
        # Said again, and with more: only what is new counts.
        assert feed(other, name, 6, b"second\n")["size"] == 13
        assert feed(other, name, 9, b"ond\nthird\n")["size"] == 19
        until(b"got third\n")
        with pytest.raises(RuntimeFault) as ahead:
            feed(other, name, 21, b"x")
        assert (ahead.value.code, ahead.value.detail) == ("bad_request", {"field": "offset", "size": 19})
        assert feed(other, name, 19, eof=True) == {"size": 19, "closed": True}
        out, result = stream(c, number, got=[got, bytearray()])
        assert bytes(out[0]) == b"got first\ngot second\ngot third\nover\n"
        assert result["exit_code"] == 0
        assert feed(other, name, 19, b"more") == {"size": 19, "closed": True}


def test_an_end_of_nothing_and_one_with_the_last_bytes(box: tuple[Client, str]) -> None:
    c, name = box
    number = start(c, name, "wc -c", "empty")
    feed_number = c.send("run.stdin", {"sandbox": name, "run": "empty", "eof": True})
    answers = {}
    while len(answers) < 2:
        frame = c.recv()
        if "ok" in frame:
            answers[frame["id"]] = frame["ok"]
    assert answers[number]["streams"][0]["head"] == b"0\n"
    assert answers[feed_number]["size"] == 0
    number = start(c, name, "cat", "last")
    c.send("run.stdin", {"sandbox": name, "run": "last", "offset": 0, "d": b"all", "eof": True})
    while (frame := c.recv())["id"] != number or "ok" not in frame:
        pass
    assert frame["ok"]["streams"][0]["head"] == b"all"


def test_who_does_not_read_is_not_given_more(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    number = start(c, name, "read line; while ! [ -e /go ]; do sleep 0.1; done; cat | wc -c")
    with shared.client() as other, shared.client() as third:
        until_known(other, name, "r")
        assert feed(other, name, 0, b"go\n" + bytes(200_000))["size"] == 200_003
        sent = other.send("run.stdin", {"sandbox": name, "run": "r", "offset": 200_003, "d": bytes(PIECE)})
        other.sock.settimeout(1)
        with pytest.raises(TimeoutError):
            other.sock.recv(1)
        other.sock.settimeout(60)
        third.call("run.start", **run_plan(name, "go", ["touch", "/go"]))
        size = other.wait(sent)["size"]
        assert size == 200_003 + PIECE
        assert feed(other, name, size, eof=True)["size"] == size
    assert c.wait(number)["streams"][0]["head"] == b"%d\n" % (size - 3)


def test_too_much_at_once_is_refused(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    number = start(c, name, "sleep 1000")
    with shared.client() as other, shared.client() as third:
        until_running(third, name)
        with pytest.raises(RuntimeFault) as long:
            feed(other, name, 0, bytes(PIECE + 1))
        assert long.value.code == "too_long"
        for n in range(7):
            other.send("run.stdin", {"sandbox": name, "run": "r", "offset": n * PIECE, "d": bytes(PIECE)})
        frame = other.recv()
        assert (frame["err"]["code"], frame["err"]["detail"]["resource"]) == ("limit", "stdin")
        third.call("run.kill", sandbox=name, run="r")
        assert c.wait(number)["signal"] == 9
        # Those that waited are told that nobody reads any more.
        told = [other.recv() for _ in range(6)]
        assert sum("err" in frame for frame in told) == 1
        assert all(frame["ok"]["closed"] for frame in told if "ok" in frame)


def test_a_program_that_closes_its_end_is_told(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    number = start(c, name, "exec 0</dev/null; sleep 1000")
    with shared.client() as other:
        until_running(other, name)
        deadline = time.monotonic() + 30
        while not feed(other, name, 0)["closed"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert feed(other, name, 0, b"nobody reads this")["closed"]
        other.call("run.kill", sandbox=name, run="r")
    c.wait(number)


def test_only_a_run_whose_input_is_open_takes_some(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    number = c.send("run.start", run_plan(name, "r", ["sleep", "1000"]))
    with shared.client() as other:
        until_running(other, name)
        with pytest.raises(RuntimeFault) as refused:
            feed(other, name, 0, b"x")
        assert refused.value.code == "conflict"
        with pytest.raises(RuntimeFault) as none:
            feed(other, name, 0, b"x", run="none")
        assert none.value.code == "not_found"
        other.call("run.kill", sandbox=name, run="r")
    c.wait(number)


def memfd_kib(node: Node) -> int:
    """Memory of the files behind standard inputs."""
    total = 0
    pid = node.runtime_pid()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(fd).startswith("/memfd:stdin"):
                total += fd.stat().st_blocks // 2
        except OSError:
            continue
    return total


def test_much_goes_through_in_little_memory_and_arrives_whole(node: Node) -> None:
    with node.client() as c, node.client() as other:
        create(c, "a")
        number = start(c, "a", "sha256sum")
        until_known(other, "a", "r")
        digest, offset, most = hashlib.sha256(), 0, 0
        for n in range(200):
            data = random.Random(n).randbytes(PIECE)
            digest.update(data)
            offset = feed(other, "a", offset, data)["size"]
            if n % 20 == 0:
                most = max(most, memfd_kib(node))
        assert feed(other, "a", offset, eof=True)["size"] == 200 * PIECE
        assert c.wait(number)["streams"][0]["head"].split()[0] == digest.hexdigest().encode()
        assert most < 8 << 10, f"{most} KiB are held"


def test_a_runtime_that_dies_loses_no_byte_and_repeats_none(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        # Never read: the answer comes by another way after the death.
        start(c, "a", "sha256sum > /sum; cat /sum")
        with node.client() as other:
            until_known(other, "a", "r")
    rnd = random.Random(7)
    data = rnd.randbytes(20 << 20)
    offset, kills = 0, 0
    while True:
        try:
            with node.client() as c:
                # What is not known any more is told by the refusal of a byte that is far ahead.
                while offset < len(data):
                    size = rnd.choice([1, 1000, 65_536, PIECE])
                    offset = feed(c, "a", offset, data[offset : offset + size])["size"]
                    if rnd.random() < 0.2 and kills < 8:
                        kills += 1
                        c.send(
                            "run.stdin", {"sandbox": "a", "run": "r", "offset": offset, "d": data[offset : offset + 9]}
                        )
                        os.kill(c.hello["pid"], signal.SIGKILL)
                        raise ConnectionError
                fed = feed(c, "a", offset, eof=True)
                assert fed["size"] == len(data)
                break
        except (ConnectionError, BrokenPipeError, TimeoutError):
            continue
    assert kills >= 3
    with node.client() as c:
        r = c.call("run.attach", sandbox="a", run="r")
        assert r["streams"][0]["head"].split()[0] == hashlib.sha256(data).hexdigest().encode()
