"""The native runtime: ends of sandboxes while something goes on in them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.kit.rtclient import Node, RuntimeFault, run_plan
from tests.kit.rtnode import create, frozen_file, needs, sh, stream

pytestmark = needs


def test_stop_while_runs_are_in_flight(node: Node) -> None:
    with node.client() as c, node.client() as other:
        create(c, "a")
        waiter = other.send("sandbox.wait", {"id": "a"})
        numbers = [c.send("run.start", run_plan("a", f"r{i}", ["sleep", "100"])) for i in range(50)]
        started = 0
        while started < 25:
            started += c.recv().get("ev") == "started"
        stop = c.send("sandbox.stop", {"id": "a"})
        answers: dict[int, Any] = {}
        while len(answers) < 51:
            frame = c.recv()
            if "ev" not in frame:
                answers[frame["id"]] = frame
        assert answers[stop]["ok"]["state"] == "ended"
        for n in numbers:
            a = answers[n]
            assert a["err"]["code"] == "gone", a
        assert other.wait(waiter)["state"] == "ended"
        assert c.call("sandbox.stop", id="a")["state"] == "ended"
        with pytest.raises(RuntimeFault) as e:
            c.call("run.start", **run_plan("a", "late", ["true"]))
        assert e.value.code == "gone"


def test_stop_with_grace_lets_programs_end(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        n = c.send(
            "run.start",
            run_plan("a", "r", sh("trap 'echo bye; exit 3' TERM; echo on; while :; do sleep 0.05; done"))
            | {"stream": True, "window": 100},
        )
        while c.recv().get("ev") != "out":
            pass
        with node.client() as other:
            other.call("sandbox.stop", id="a", grace_ms=20_000)
        out, r = stream(c, n, ack=False, got=[bytearray(b"on\n"), bytearray()])
        assert (r["exit_code"], bytes(out[0])) == (3, b"on\nbye\n")


def test_a_frozen_sandbox_stops_nobody_else(node: Node) -> None:
    with node.client() as c, node.client() as other:
        create(c, "cold")
        create(c, "warm")
        frozen_file(node, "cold").write_text("1")
        waiting = other.send("run.start", run_plan("cold", "r", ["true"]))
        late = other.send("run.start", run_plan("cold", "late", ["true"], timeout_ms=300))
        for i in range(20):
            assert c.call("run.start", **run_plan("warm", f"r{i}", ["true"]))["exit_code"] == 0
        while "ev" in (answer := other.recv()):
            pass
        assert answer["id"] == late
        # It may have been killed before its program was started, or after.
        assert "err" in answer or answer["ok"]["cause"] == "timeout"
        frozen_file(node, "cold").write_text("0")
        while "ev" in (answer := other.recv()):
            pass
        assert (answer["id"], answer["ok"]["exit_code"]) == (waiting, 0)
        frozen_file(node, "cold").write_text("1")
        assert c.call("sandbox.stop", id="cold")["state"] == "ended"


def test_a_dead_init_ends_the_sandbox(node: Node) -> None:
    with node.client() as c, node.client() as sub:
        number = sub.send("subscribe", {})
        pid = create(c, "a")["init_pid"]
        os.kill(pid, signal.SIGKILL)
        status = c.call("sandbox.wait", id="a")
        assert status["exit"]["reason"] == "init_died"
        assert status["exit"]["signal"] == 9
        event = sub.recv()
        assert (event["id"], event["ev"], event["sandbox"]) == (number, "ended", "a")
