"""Every failpoint of the runtime, as an error and as a death: nothing is invented, nothing is left."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtnode import BINARY, create, make_node, needs, sh
from tests.kit.runtime import marks

pytestmark = [*needs, pytest.mark.one_guest]

#: A sandbox or a run may fail this often before the failpoint is switched off.
TRIES = 3
# Groups that serve the node and no sandbox.
OURS = (".spare-", ".launcher-")


def failpoints() -> list[str]:
    if not BINARY:
        return ["none"]
    out = subprocess.run([BINARY, "failpoints"], stdout=subprocess.PIPE, check=True, text=True).stdout
    return [name for name in out.split() if name.startswith(("sandbox.", "run.", "spare."))]


def tolerant(node: Node, step: Callable[[Client], Any]) -> Any:
    """Tries a step a few times; whatever it answers is an answer of the protocol or a lost connection."""
    for _ in range(TRIES):
        with contextlib.suppress(ConnectionError, BrokenPipeError, RuntimeFault), node.client() as c:
            return step(c)
    return None


def leftovers(node: Node) -> list[str]:
    """Cgroups of sandboxes, and marks of runs, that are still there."""
    found = [p for p in Path("/sys/fs/cgroup").glob(f"*/{node.cgroup}/*/") if p.is_dir()]
    found += [p for p in Path("/sys/fs/cgroup").glob(f"{node.cgroup}/*/") if p.is_dir()]
    return [str(p) for p in found if not p.name.startswith(OURS)] + marks(node.run_dir)


#: In a guest these have a test of their own, of the same death, in test_deaths.py; spare groups only v1 has.
ELSEWHERE = ("run.marked", "run.cloned", "run.put_pid", "run.ended", "run.reaped", "spare.")


def named(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.same_everywhere] if name.startswith(ELSEWHERE) else [])


# In a guest one pass: the harder one.
@pytest.mark.parametrize("action", [pytest.param("error", marks=pytest.mark.same_everywhere), "kill"])
@pytest.mark.parametrize("name", [named(name) for name in failpoints()])
def test_nothing_is_left_and_nothing_is_invented(name: str, action: str) -> None:
    node = make_node(env={"DSEC_NATIVE_FAILPOINTS": f"{name}:1:{action}"})
    try:
        plan = run_plan("a", "r", sh("echo out; exit 7"))
        tolerant(node, lambda c: create(c, "a"))
        seen = tolerant(node, lambda c: c.call("run.start", **plan))
        tolerant(node, lambda c: c.call("sandbox.stop", id="a"))
        # What the first left serves the second.
        tolerant(node, lambda c: create(c, "next"))
        tolerant(node, lambda c: c.call("sandbox.stop", id="next"))
        if seen is not None:
            assert (seen["exit_code"], seen["streams"][0]["head"]) == (7, b"out\n")
        node.kill_keeper()
        node.env.pop("DSEC_NATIVE_FAILPOINTS")
        node.start()
        with node.client() as c:
            create(c, "b")
            r = c.call("run.start", **(plan | {"sandbox": "b"}))
            assert (r["exit_code"], r["streams"][0]["head"]) == (7, b"out\n")
            for s in c.call("sandbox.list")["sandboxes"]:
                assert c.call("sandbox.stop", id=s["id"])["state"] == "ended"
        assert leftovers(node) == []
    finally:
        node.stop()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{node.cgroup}")), "also the spare groups go"
