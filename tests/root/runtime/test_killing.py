"""A kill is of a whole tree: who is told that it was killed finds nothing of it that could still act."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import groups
from tests.kit.lanes import fewer
from tests.kit.rtclient import Node, run_plan
from tests.kit.rtnode import create, make_node, needs, sh
from tests.root.runtime.test_fences import Shell, until

pytestmark = needs

COUNT = fewer(300)
# In sessions of their own, without a parent, deaf to what is polite.
CROWD = f"i=0; while [ $i -lt {COUNT} ]; do (trap '' TERM HUP INT; setsid sleep 4321 &); i=$((i+1)); done"


@pytest.fixture(params=["on", "off"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """With `run.tree` off only a run's first process is killed."""
    made = make_node(env={"DSEC_NATIVE_DISABLE": "run.tree"} if request.param == "off" else {})
    yield made
    made.stop()


def off(node: Node) -> bool:
    return "DSEC_NATIVE_DISABLE" in node.env


def alive(node: Node) -> int:
    """Of the crowd, what has not died. Read from the groups: nothing is asked that could take its time."""
    found = 0
    for group in groups.below(f"{node.cgroup}/a/payload"):
        for pid in groups.processes(group):
            try:
                found += Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x004321\x00"
            except OSError:
                continue
    return found


@pytest.mark.same_everywhere  # an emulator may not get so far in its time; the kill below is the same
def test_nothing_of_a_run_outlives_its_timeout(node: Node) -> None:
    with node.client() as c:
        create(c, "a", pids_max=2048)
        result = c.call("run.start", **run_plan("a", "r", sh(f"{CROWD}; echo up; sleep 4321"), timeout_ms=5000))
        left = alive(node)
        assert (result["signal"], result["cause"], result["streams"][0]["head"]) == (9, "timeout", b"up\n")
        # The ablation.
        assert left == (COUNT if off(node) else 0)
        assert (result["leftover"] > 0) is off(node)


def test_nothing_of_a_run_outlives_its_kill(node: Node) -> None:
    with node.client() as c, node.client() as other:
        create(c, "a", pids_max=2048)
        number = c.send("run.start", run_plan("a", "r", sh(f"{CROWD}; sleep 4321")))
        until(lambda: alive(node) == COUNT + 1)
        other.call("run.kill", sandbox="a", run="r")
        assert c.wait(number)["signal"] == 9
        assert alive(node) == (COUNT if off(node) else 0)


def test_nothing_of_a_fence_outlives_its_kill(shared: Node) -> None:
    with shared.client() as c:
        create(c, "a", pids_max=2048)
    try:
        shell = Shell(shared, "a").start().again(shared)
        number = shell.fence()
        assert shell.do(CROWD) == b"did 0\n"
        until(lambda: alive(shared) == COUNT)
        shell.kill(number)
        assert alive(shared) == 0
        assert shell.do("echo lives") == b"did 0\n"
        shell.c.close()
    finally:
        with shared.client() as c:
            c.call("sandbox.stop", id="a")
