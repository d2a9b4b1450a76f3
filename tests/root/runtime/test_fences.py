"""Fences: what a program has started since a moment is killed by itself, whole, and nothing before it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.groups import below
from tests.kit.lanes import fewer
from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtnode import create, needs, sh

pytestmark = [*needs, pytest.mark.one_guest]

# A shell that does what it is told, line by line, and says so.
SHELL = 'while read line; do eval "$line"; echo "did $?" >&3; done'


def until(true: Callable[[], bool], what: str = "it") -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Shell:
    """A run that is told lines, on a connection of its own."""

    def __init__(self, node: Node, box: str, run: str = "sh", size: int = 0, told: int = 0) -> None:
        self.c, self.box, self.run, self.size, self.told = node.client(), box, run, size, told

    def start(self, **over: Any) -> Shell:
        plan = run_plan(self.box, self.run, sh(SHELL), stdin_open=True, control=True, **over)
        self.c.send("run.start", plan)
        self.c.close()
        return self

    def again(self, node: Node) -> Shell:
        self.c = node.client()
        until(lambda: self.status()["state"] == "running")
        return self

    def call(self, op: str, **args: Any) -> dict[str, Any]:
        return self.c.call(op, sandbox=self.box, run=self.run, **args)

    def status(self) -> dict[str, Any]:
        return self.call("run.status")

    def tell(self, line: str) -> None:
        self.size = self.call("run.stdin", offset=self.size, d=line.encode() + b"\n")["size"]

    def done(self) -> bytes:
        """Waits for the answer to the next line."""
        found = b""

        def there() -> bool:
            nonlocal found
            found = self.call("run.read", s=3, offset=self.told)["d"]
            return b"\n" in found

        until(there, "an answer of the shell")
        line = found[: found.index(b"\n") + 1]
        self.told += len(line)
        return line

    def do(self, line: str) -> bytes:
        self.tell(line)
        return self.done()

    def fence(self) -> int:
        return int(self.call("run.fence")["fence"])

    def kill(self, fence: int) -> None:
        self.call("run.kill", signal=0, fence=fence)


@pytest.fixture
def shell(shared: Node, box: tuple[Client, str]) -> Shell:
    return Shell(shared, box[1]).start().again(shared)


def commands(shell: Shell) -> list[str]:
    found = shell.c.call("process.list", sandbox=shell.box)["processes"]
    return sorted(b" ".join(p["argv"]).decode() for p in found if p["run"] == shell.run)


def sleeping(shell: Shell, *seconds: int) -> bool:
    return [c for c in commands(shell) if c.startswith("sleep")] == [f"sleep {n}" for n in sorted(seconds)]


def groups(node: Node, shell: Shell) -> list[Path]:
    """Those of runs, in the hierarchy of v2."""
    return [group for group in below(f"{node.cgroup}/{shell.box}/payload") if group.name.startswith("run-")]


def group(node: Node, shell: Shell) -> Path:
    (found,) = groups(node, shell)
    return found


def fences(node: Node, shell: Shell) -> list[str]:
    return sorted(p.name for p in group(node, shell).iterdir() if p.is_dir())


def test_what_was_begun_since_dies_and_nothing_before(shared: Node, shell: Shell) -> None:
    assert shell.do("sleep 1001 &") == b"did 0\n"
    first = shell.fence()
    assert first == 1
    assert shell.do("sleep 1002 &") == b"did 0\n"
    second = shell.fence()
    assert second == 2
    # Grandchildren in sessions of their own, one whose parent is gone, and the command itself.
    shell.tell("setsid sh -c 'sleep 1003 & sleep 1004' & (setsid sleep 1005 &); sleep 1006")
    until(lambda: sleeping(shell, *range(1001, 1007)))
    shell.kill(second)
    assert shell.done() == b"did 137\n"
    until(lambda: sleeping(shell, 1001, 1002))
    assert shell.do("echo lives") == b"did 0\n"
    with pytest.raises(RuntimeFault) as old:
        shell.kill(first)
    assert (old.value.code, old.value.detail["fence"]) == ("conflict", 2)
    # Again is as good, and kills nothing of what began after.
    assert shell.do("sleep 1007 &") == b"did 0\n"
    shell.kill(second)
    until(lambda: sleeping(shell, 1001, 1002, 1007))
    assert shell.status()["fence"] == 2


def test_empty_ones_go_and_the_others_stay(shared: Node, shell: Shell) -> None:
    for _ in range(20):
        shell.fence()
        shell.do("true")
    assert fences(shared, shell) == ["fence-20"]
    shell.do("sleep 1001 &")
    shell.fence()
    assert fences(shared, shell) == ["fence-20", "fence-21"]
    c = shell.c
    shell.call("run.kill", signal=0)
    until(lambda: shell.status()["state"] == "done")
    until(lambda: not groups(shared, shell))
    with pytest.raises(RuntimeFault) as over:
        shell.fence()
    assert over.value.code == "conflict"
    shell.kill(21)
    c.close()


def test_leftovers_of_a_fence_are_counted_and_can_be_killed(shared: Node, shell: Shell) -> None:
    number = shell.fence()
    shell.do("sleep 1001 & sleep 1002 &")
    shell.tell("exit 5")
    until(lambda: shell.status()["state"] == "done")
    result = shell.call("run.attach")
    assert (result["exit_code"], result["leftover"]) == (5, 2)
    until(lambda: sleeping(shell, 1001, 1002))
    shell.kill(number)
    until(lambda: not groups(shared, shell))


def test_a_bomb_inside_a_fence(shared: Node) -> None:
    with shared.client() as c:
        create(c, "bomb", pids_max=200)
    try:
        shell = Shell(shared, "bomb").start().again(shared)
        number = shell.fence()
        shell.tell("b() { b | b & }; b; sleep 1000")
        usage = lambda: shell.c.call("sandbox.usage", id="bomb")  # noqa: E731 - said once
        until(lambda: usage()["pids_max_events"] > 100)
        shell.kill(number)
        shell.done()
        assert shell.do("echo lives") == b"did 0\n"
        until(lambda: usage()["pids"] <= 2)
        assert "pids" in shell.status()["limits_hit"]
    finally:
        with shared.client() as c:
            c.call("sandbox.stop", id="bomb")


def test_the_bound_of_processes_does_not_keep_a_fence_from_being_made(shared: Node) -> None:
    with shared.client() as c:
        create(c, "full", pids_max=8)
    try:
        shell = Shell(shared, "full").start().again(shared)
        # In a child: this shell ends when it cannot fork.
        shell.do("(for i in 1 2 3 4 5 6 7 8 9; do sleep 1000 & done) &")
        until(lambda: shell.c.call("sandbox.usage", id="full")["pids_max_events"] > 0)
        assert shell.fence() == 1
    finally:
        with shared.client() as c:
            c.call("sandbox.stop", id="full")


def test_what_cannot_be(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    shell = Shell(shared, name).start().again(shared)
    for fence in (0, 1):
        with pytest.raises(RuntimeFault) as refused:
            shell.kill(fence)
        assert refused.value.code == "conflict"
    number = shell.fence()
    with pytest.raises(RuntimeFault) as refused:
        shell.call("run.kill", signal=15, fence=number)
    assert refused.value.code == "bad_request"
    with pytest.raises(RuntimeFault) as refused:
        c.call("run.fence", sandbox=name, run="nobody")
    assert refused.value.code == "not_found"


def test_fences_survive_the_death_of_a_runtime(node: Node) -> None:
    with node.client() as c:
        create(c, "s")
    shell = Shell(node, "s").start().again(node)
    shell.do("sleep 1001 &")
    number = shell.fence()
    shell.tell("setsid sleep 1002 & sleep 1003")
    until(lambda: sleeping(shell, 1001, 1002, 1003))
    node.kill_runtime()
    shell.again(node)
    assert shell.status()["fence"] == number
    assert sleeping(shell, 1001, 1002, 1003)
    shell.kill(number)
    assert shell.done() == b"did 137\n"
    until(lambda: sleeping(shell, 1001))
    assert shell.fence() == number + 1


@pytest.mark.parametrize("where", ["run.fence", "run.fenced"])
def test_a_runtime_that_dies_over_a_fence(where: str) -> None:
    from tests.kit.rtnode import make_node

    node = make_node(env={"DSEC_NATIVE_FAILPOINTS": f"{where}:1:kill"})
    try:
        with node.client() as c:
            create(c, "s")
        shell = Shell(node, "s").start().again(node)
        shell.do("sleep 1001 &")
        with pytest.raises((ConnectionError, OSError)):
            shell.fence()
        shell.again(node)
        # It may have been made: a number is given once, so the next one is another.
        assert shell.status()["fence"] == 1
        # The new runtime has the failpoint too.
        with pytest.raises((ConnectionError, OSError)):
            shell.fence()
        shell.again(node)
        shell.tell("sleep 1002")
        until(lambda: sleeping(shell, 1001, 1002))
        shell.kill(shell.status()["fence"])
        until(lambda: 1001 in [int(c.split()[1]) for c in commands(shell) if c.startswith("sleep")])
    finally:
        node.stop()


def test_a_kill_while_the_runtime_dies(node: Node) -> None:
    with node.client() as c:
        create(c, "s")
    shell = Shell(node, "s").start().again(node)
    for turn in range(5):
        number = shell.fence()
        shell.tell("setsid sleep 1002 & sleep 1003")
        until(lambda: sleeping(shell, 1002, 1003))
        pid = int(shell.c.hello["pid"])
        killer = threading.Timer(turn * 0.0007, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with contextlib.suppress(ConnectionError, OSError):
            shell.kill(number)
        killer.join()
        shell.again(node)
        shell.kill(number)
        assert shell.done() == b"did 137\n"
        until(lambda: sleeping(shell))
        assert shell.do("true") == b"did 0\n"


def test_a_status_adds_up(shell: Shell) -> None:
    before = shell.status()
    assert before["state"] == "running" and before["pid"] > 0
    assert before["input"] == {"size": 0, "closed": False}
    shell.fence()
    count = "i=0; while [ $i -lt %d ]; do i=$((i+1)); done"
    shell.do(f"{count % fewer(200_000)}; sh -c '{count % fewer(100_000)}'")
    after = shell.status()
    assert after["usage"]["user_us"] > before["usage"]["user_us"]
    assert after["totals"] == [0, 0, 6]
    assert after["input"]["size"] == shell.size
    shell.tell("exit 3")
    until(lambda: shell.status()["state"] == "done")
    over = shell.status()
    assert over["pid"] is None and over["input"]["closed"]
    assert over["usage"]["user_us"] >= after["usage"]["user_us"]
