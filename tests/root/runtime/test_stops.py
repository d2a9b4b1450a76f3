"""The native runtime: ends of sandboxes while something goes on in them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit.lanes import kernel_lacks
from tests.kit.rtclient import Node, RuntimeFault, run_plan
from tests.kit.rtnode import create, frozen_file, make_node, needs, sh, stream

pytestmark = [*needs, pytest.mark.one_guest]


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


DYING = (ConnectionError, BrokenPipeError)


def keeper_holds(node: Node) -> int:
    return len(os.listdir(f"/proc/{node.keeper_pid()}/fd"))


@pytest.mark.parametrize("point", ["sandbox.stopping", "sandbox.released", "sandbox.ended"])
def test_a_runtime_that_dies_while_a_sandbox_ends_keeps_why_it_does(point: str) -> None:
    # The second time: the first stop of the runtime that comes after is to work.
    node = make_node(env={"DSEC_NATIVE_FAILPOINTS": f"{point}:2:kill"})
    try:
        with node.client() as c:
            held = keeper_holds(node)
            create(c, "first")
            c.call("sandbox.stop", id="first")
            create(c, "a", memory_bytes=64 << 20)
            assert c.call("run.start", **run_plan("a", "r", ["tail", "/dev/zero"]))["cause"] == "oom"
            with pytest.raises(DYING):
                c.call("sandbox.stop", id="a")
        with node.client() as c:
            ending = c.call("sandbox.wait", id="a")["exit"]
            assert (ending["oom"], ending["reason"]) == (True, "stopped")
        deadline = time.monotonic() + 10  # it is told, and does not answer
        while keeper_holds(node) != held:
            assert time.monotonic() < deadline
    finally:
        node.stop()


def test_a_runtime_that_dies_while_it_releases_what_died_says_so() -> None:
    node = make_node(env={"DSEC_NATIVE_FAILPOINTS": "sandbox.stopping:2:kill"})
    try:
        with node.client() as c:
            create(c, "first")
            c.call("sandbox.stop", id="first")
            pid = create(c, "a")["init_pid"]
            waiting = c.send("sandbox.wait", {"id": "a"})
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(DYING):
                c.wait(waiting)
        with node.client() as c:
            ending = c.call("sandbox.wait", id="a")["exit"]
            assert (ending["reason"], ending["signal"]) == ("init_died", 9)
    finally:
        node.stop()


def test_the_time_to_end_by_itself_outlives_the_runtime(node: Node) -> None:
    # 2 s after it was asked it ends by itself; asked twice it would say so twice.
    script = "trap 't=1; echo bye' TERM; echo on; while [ ${n:-0} -lt 40 ]; do sleep 0.05; [ $t ] && n=$((n+1)); done"
    with node.client() as c:
        create(c, "a")
        n = c.send("run.start", run_plan("a", "r", sh(f"{script}; exit 3")) | {"stream": True, "window": 100})
        while c.recv().get("ev") != "out":
            pass
        with node.client() as other:
            other.send("sandbox.stop", {"id": "a", "grace_ms": 60_000})
            while (frame := c.recv()).get("d") != b"bye\n":
                assert frame["id"] == n, frame
    node.kill_runtime()
    with node.client() as c, node.client() as waiting:
        follow = {"sandbox": "a", "run": "r", "stream": True, "window": 100}
        out, r = stream(c, c.send("run.attach", follow), ack=False)
        assert (r["exit_code"], bytes(out[0])) == (3, b"on\nbye\n")
        assert waiting.call("sandbox.wait", id="a")["exit"]["reason"] == "stopped"


def test_the_groups_of_an_ended_sandbox_serve_the_next(node: Node) -> None:
    """If nothing is charged to them or counted in them, an init that is not collected yet included."""
    with node.client() as c:
        if c.call("probe")["cgroup"]["mode"] != "hybrid":
            kernel_lacks("cgroup.v1", "v2 cannot rename a group")
        kept = 0
        for i in range(12):  # the first reads the base, which stays charged to it; and a late look finds too much
            create(c, f"a{i}")
            c.call("sandbox.stop", id=f"a{i}")
            kept += len(list(Path("/sys/fs/cgroup/memory", node.cgroup).glob(".spare-*")))
        assert kept
