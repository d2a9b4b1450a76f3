"""A runtime that says what is almost right to its keeper: that lives, and what it keeps is there for the next one."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.kit import mutations
from tests.kit.rtclient import Node, run_plan
from tests.kit.rtnode import create, needs, sh
from tests.root.runtime.test_fuzz import descriptors, rss_bytes

# The first of several limits counts.
pytestmark = [pytest.mark.timeout(6 * 3600), *needs, pytest.mark.same_everywhere]
LIVES = 3
# Only ends what would never end.
PATIENCE_S = 120.0
TREE = Path(__file__).resolve().parents[3]


def put_in_place(node: Node, seed: int) -> Path:
    """From now on the keeper starts another program; gives where the real one lies."""
    home = node.dir
    (home / "seed").write_text(str(seed))
    (home / "packets").write_text("0")
    away = node.binary.rename(home / "away")
    start = f"import sys; sys.path[:0] = [{str(TREE)!r}, {str(TREE / 'src')!r}]; from tests.kit import bad_runtime"
    node.binary.write_text(f"#!{sys.executable} -I\n{start}; bad_runtime.main()\n")
    node.binary.chmod(0o755)
    return away


def number(node: Node, name: str) -> int:
    """What a runtime that dies has noted; while it is noted, what was before."""
    return int((node.dir / name).read_text() or -1)


def until_lived(node: Node, seed: int, keeper: int) -> None:
    """Until some more have come and gone."""
    lives = max(number(node, "seed"), seed) + LIVES
    deadline = time.monotonic() + PATIENCE_S
    while number(node, "seed") < lives:
        assert Path(f"/proc/{keeper}").exists(), f"seed {seed}: the keeper died"
        assert time.monotonic() < deadline, f"seed {seed}: the keeper starts nothing any more"
        time.sleep(0.05)


def test_a_runtime_that_cannot_speak_harms_no_keeper(node: Node) -> None:
    seed = mutations.seed()
    keeper = node.keeper_pid()
    with node.client() as c:
        create(c, "a")
        plan = run_plan("a", "r", sh("echo before; read x; echo $x; exit 3"), stdin_open=True)
        c.send("run.start", plan)
        while c.recv().get("ev") != "started":
            pass
        runtime = int(c.hello["pid"])
    away = put_in_place(node, seed)
    os.kill(runtime, signal.SIGKILL)
    for _ in mutations.until_over(random.Random(seed)):
        until_lived(node, seed, keeper)
    print(f"\nseed {seed}: {number(node, 'seed') - seed} lives, {number(node, 'packets')} packets")
    away.rename(node.binary)
    with node.client() as c:
        c.call("run.stdin", sandbox="a", run="r", offset=0, d=b"after\n", eof=True)
        result = c.call("run.attach", sandbox="a", run="r")
        assert (result["exit_code"], result["streams"][0]["head"]) == (3, b"before\nafter\n"), f"seed {seed}"
        assert c.call("run.start", **run_plan("a", "next", ["true"]))["exit_code"] == 0
    assert descriptors(keeper) < 400, f"seed {seed}: descriptors stay"
    assert rss_bytes(keeper) < 100 << 20, f"seed {seed}: memory stays"
