"""Processes that no signal ends, since they wait for a device: whoever ends them is answered in time and is told no
more than is so, nobody else waits for them, and once they are gone so is all they had."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.groups import below
from tests.kit.inventory import Inventory, Scope
from tests.kit.lanes import fewer
from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtnode import create, make_node, needs, sh, until_known
from tests.kit.stuck import Frozen, frozen, state, stuck_in

pytestmark = needs

# A file system of its own, so that of this sandbox alone.
EXT4 = {"kind": "ext4", "bytes": 64 << 20, "inodes": 0}
# More than the runtime has threads for what may block.
MANY = 10


@pytest.fixture
def node() -> Iterator[Node]:
    made = make_node()
    yield made
    made.stop()


def writer(c: Client, box: str, run: str = "w", **over: object) -> int:
    """A request whose program writes to a disk that does not answer, and says so before."""
    return c.send("run.start", run_plan(box, run, sh("echo on; echo x >/f"), **over))


def until_stuck(node: Node, count: int = 1, box: str = "") -> list[int]:
    deadline = time.monotonic() + 60
    while len(stuck := stuck_in(f"{node.cgroup}/{box}")) < count:
        assert time.monotonic() < deadline, "nothing waits for the disk"
        time.sleep(0.02)
    return stuck


def until_dead(pids: list[int]) -> None:
    """Collected too: not even a zombie is left."""
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if state(pid)]:
        assert time.monotonic() < deadline, [(pid, state(pid)) for pid in left]
        time.sleep(0.02)


def groups(node: Node, box: str) -> list[Path]:
    return [group for group in below(f"{node.cgroup}/{box}/payload") if group.name.startswith("run-")]


def until_no_group(node: Node, box: str) -> None:
    deadline = time.monotonic() + 60
    while left := [g for g in groups(node, box) if "populated 1" in (g / "cgroup.events").read_text()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["timeout", "killed"])
def test_a_run_that_cannot_die_is_over(node: Node, how: str) -> None:
    with node.client() as c, node.client() as other:
        create(c, "a", upper=EXT4)
        with frozen(node.run_dir, "a"):
            number = writer(other, "a", timeout_ms=1000 if how == "timeout" else 0)
            (stuck,) = until_stuck(node)
            if how == "killed":
                c.call("run.kill", sandbox="a", run="w")
            result = other.wait(number, [])
            assert (result["signal"], result["exit_code"], result["cause"]) == (9, None, how)
            assert result["streams"][0]["head"] == b"on\n"
            # It is not claimed that nothing is left.
            assert (result["leftover"], state(stuck)) == (1, "D")
            assert c.call("run.start", **run_plan("a", "r", sh("cat /etc/passwd >/dev/null; exit 3")))["exit_code"] == 3
        until_dead([stuck])
        until_no_group(node, "a")
        assert c.call("run.start", **run_plan("a", "again", sh("echo x >/f; cat /f")))["exit_code"] == 0
        assert c.call("sandbox.stop", id="a")["exit"]["reason"] == "stopped"


def test_one_that_only_took_long_has_its_own_end(node: Node) -> None:
    """The disk answers before the time is up."""
    with node.client() as c, node.client() as other:
        create(c, "a", upper=EXT4)
        with frozen(node.run_dir, "a") as disk:
            number = writer(other, "a")
            until_stuck(node)
            c.call("run.kill", sandbox="a", run="w")
            disk.thaw()
            result = other.wait(number, [])
        assert (result["signal"], result["cause"], result["leftover"]) == (9, "killed", 0)


def test_a_stop_says_what_it_could_not_do_and_is_done_when_it_can_be(node: Node) -> None:
    scope = Scope(node.run_dir, node.state_dir, (node.cgroup,))
    with node.client() as c, node.client() as other, node.client() as waiter:
        create(c, "before", upper=EXT4)
        c.call("sandbox.stop", id="before")
        before = Inventory.take(scope)
        create(c, "a", upper=EXT4)
        with frozen(node.run_dir, "a"):
            number = writer(other, "a")
            waiting = waiter.send("sandbox.wait", {"id": "a"})
            (stuck,) = until_stuck(node)
            for _ in range(2):
                with pytest.raises(RuntimeFault, match="waits for a device") as caught:
                    c.call("sandbox.stop", id="a")
                assert (caught.value.code, caught.value.detail["step"]) == ("deadline", "stop.dying")
            # Its runs are over, and nothing else is.
            with pytest.raises(RuntimeFault, match="gone"):
                other.wait(number, [])
            with pytest.raises(RuntimeFault, match="gone"):
                c.call("run.start", **run_plan("a", "late", ["true"]))
            assert (c.call("sandbox.get", id="a")["state"], state(stuck)) == ("running", "D")
            assert (node.state_dir / "upper.ext4/a").exists()
        # Nobody asks again.
        ended = waiter.wait(waiting)
        assert (ended["state"], ended["exit"]["reason"]) == ("ended", "stopped")
        assert not (node.state_dir / "upper.ext4/a").exists()
        until_dead([stuck])
    changes = Inventory.settled(scope, before).changes_since(before)
    # Its record is kept for a while; and the network namespace that was spare before is not any more.
    assert [change for change in changes if change.startswith("+") and "ns/sbx/" not in change] == []


def test_however_many_cannot_die_the_others_go_on(node: Node) -> None:
    names = [f"s{n}" for n in range(MANY)]
    disks: list[Frozen] = []
    with node.client() as c, node.client() as stopping, node.client() as running:
        try:
            for name in names:
                create(c, name, upper=EXT4)
                disks.append(Frozen(node.run_dir, name))
                writer(running, name)
            until_stuck(node, MANY)
            numbers = {stopping.send("sandbox.stop", {"id": name}) for name in names}
            for n in range(fewer(10)):
                create(c, f"b{n}", upper=EXT4)
                assert c.call("run.start", **run_plan(f"b{n}", "r", sh("echo x >/f; exit 3")))["exit_code"] == 3
                assert c.call("sandbox.stop", id=f"b{n}")["state"] == "ended"
            answers = [stopping.recv() for _ in names]
            assert {a["id"] for a in answers} == numbers
            assert {a["err"]["code"] for a in answers} == {"deadline"}
        finally:
            for disk in disks:
                disk.thaw()
        for name in names:
            assert c.call("sandbox.wait", id=name)["exit"]["reason"] == "stopped"


@pytest.mark.parametrize("dies", ["runtime", "both"])
@pytest.mark.parametrize("after", ["kill", "stop"])
def test_who_comes_after_a_death_goes_on_with_it(node: Node, dies: str, after: str) -> None:
    with node.client() as c, node.client() as other:
        create(c, "a", upper=EXT4)
        create(c, "b", upper=EXT4)
        disk = Frozen(node.run_dir, "a")
        try:
            number = writer(other, "a")
            until_known(c, "a", "w")
            (stuck,) = until_stuck(node)
            if after == "stop":
                with pytest.raises(RuntimeFault, match="waits for a device"):
                    c.call("sandbox.stop", id="a")
            else:
                c.call("run.kill", sandbox="a", run="w")
                assert other.wait(number, [])["signal"] == 9
        except BaseException:
            disk.thaw()
            raise
    try:
        keeper, runtime = node.keeper_pid(), node.runtime_pid()
        if dies == "both":
            node.kill_keeper()
            until_dead([runtime])
            node.start()
        else:
            os.kill(runtime, 9)
        with node.client() as c:
            assert (node.keeper_pid() == keeper) is (dies == "runtime")
            assert c.call("sandbox.get", id="a")["state"] == "running"
            if after == "kill" and dies == "runtime":
                again = c.call("run.attach", sandbox="a", run="w")
                assert (again["signal"], again["cause"]) == (9, "killed")
            assert c.call("run.start", **run_plan("b", "r", sh("echo x >/f; exit 3")))["exit_code"] == 3
            with pytest.raises(RuntimeFault, match="waits for a device"):
                c.call("sandbox.stop", id="a")
            assert state(stuck) == "D"
            waiting = c.send("sandbox.wait", {"id": "a"})
            disk.thaw()
            assert c.wait(waiting)["exit"]["reason"] == "stopped"
            assert not (node.state_dir / "upper.ext4/a").exists()
            until_dead([stuck])
    finally:
        disk.thaw()
