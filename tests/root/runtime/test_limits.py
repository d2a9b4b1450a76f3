"""The native runtime: limits and what is told of them, cgroups that serve one run after the other, endings that are
not a run's own."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from dsec.linux import proc
from tests.kit.lanes import fewer, kernel_lacks
from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan, sandbox_plan
from tests.kit.rtnode import BINARY, cpu_ticks, create, frozen_file, make_node, needs, sh, until_running

pytestmark = needs


# Limits


BURN: list[str | bytes] = ["timeout", "1", "sh", "-c", "while :; do :; done"]
FILL: list[str | bytes] = ["dd", "if=/dev/zero", "of=/f", "bs=1M", "count=64"]


@pytest.mark.parametrize(("program", "count"), [(BURN, "throttled_us"), (FILL, "memory_max_events")])
def test_what_held_it_up_is_told_and_of_itself_only(node: Node, program: list[str | bytes], count: str) -> None:
    """Time under the quota, met limits, waiting: also where the groups of an ended sandbox serve the next one."""
    with node.client() as c:
        # The first to read a file is charged for it, which would keep its groups from serving again.
        create(c, "first")
        c.call("run.start", **run_plan("first", "r", program))
        c.call("sandbox.stop", id="first")
        create(c, "a", cpu_milli=100, memory_bytes=32 << 20)
        c.call("run.start", **run_plan("a", "r", program))
        used = c.call("sandbox.usage", id="a")
        assert used[count] > 0
        if Path("/proc/pressure/cpu").exists():
            assert used["pressure"]["cpu_us"] > 0
        c.call("sandbox.stop", id="a")
        create(c, "b")
        assert c.call("sandbox.usage", id="b")[count] == 0


def test_out_of_memory_is_the_cause(node: Node) -> None:
    with node.client() as c:
        create(c, "a", memory_bytes=48 << 20)
        _out_of_memory(c, "a")


def _out_of_memory(c: Client, s: str) -> None:
    # One large read: the pages of a program that loops the kernel would drop and read again, for minutes in a guest.
    eat = "dd if=/dev/zero of=/dev/null bs=1000M count=1"
    r = c.call("run.start", **run_plan(s, "r", [*eat.split()], memory_cgroup=True))
    assert (r["signal"], r["cause"], r["limits_hit"]) == (9, "oom", ["memory"])
    assert r["usage"]["memory_peak_bytes"] > 32 << 20
    # A child's end is told too, whatever its parent makes of it; and it stays with the run it happened in.
    r = c.call("run.start", **run_plan(s, "child", sh(f"sh -c '{eat}' ; exit 4"), memory_cgroup=True))
    assert (r["exit_code"], r["cause"], r["limits_hit"]) == (4, "exited", ["memory"])
    r = c.call("run.start", **run_plan(s, "q", ["true"], memory_cgroup=True))
    assert (r["exit_code"], r["limits_hit"]) == (0, [])
    assert r["usage"]["memory_peak_bytes"] < 16 << 20


def test_the_limit_of_processes_is_told(node: Node) -> None:
    with node.client() as c:
        create(c, "a", pids_max=12)
        r = c.call("run.start", **run_plan("a", "r", sh("for i in $(seq 30); do sleep 1 & done; wait")))
        assert r["limits_hit"] == ["pids"]
        r = c.call("run.start", **run_plan("a", "q", ["true"]))
        assert (r["exit_code"], r["limits_hit"]) == (0, [])


@pytest.mark.parametrize("kind", ["auto", "ext4", "tmpfs"])
def test_a_full_disk_is_told(node: Node, kind: str) -> None:
    with node.client() as c:
        try:
            create(c, "a", upper={"kind": kind, "bytes": 16 << 20, "inodes": 0})
        except RuntimeFault as error:
            if error.code != "unsupported":
                raise
            kernel_lacks(str(error.detail["mechanism"]), f"a writable part of {kind} is refused: {error}")
        r = c.call("run.start", **run_plan("a", "some", ["dd", "if=/dev/zero", "of=/some", "bs=1M", "count=2"]))
        assert (r["exit_code"], r["limits_hit"]) == (0, [])
        r = c.call("run.start", **run_plan("a", "all", ["dd", "if=/dev/urandom", "of=/all", "bs=64k"]))
        assert (r["exit_code"], r["limits_hit"]) == (1, ["disk"])
        c.call("run.start", **run_plan("a", "rm", ["rm", "/all"]))
        # What a removed file held may come back a little later.
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            run = f"again-{os.urandom(4).hex()}"
            r = c.call("run.start", **run_plan("a", run, ["dd", "if=/dev/zero", "of=/again", "bs=1M", "count=2"]))
            if r["limits_hit"] == []:
                break
        assert (r["exit_code"], r["limits_hit"]) == (0, [])


def leaves(node: Node, sandbox: str) -> list[str]:
    payload = frozen_file(node, sandbox).parent
    return sorted(p.name for p in payload.glob("run-*"))


@pytest.mark.one_guest
def test_a_cgroup_serves_one_run_after_the_other(node: Node) -> None:
    """Never two at once, never while something is left in it, and nothing of one run is told of another."""
    with node.client() as c:
        create(c, "a")

        def run(name: str, argv: list[str | bytes]) -> dict[str, Any]:
            return c.call("run.start", **run_plan("a", name, argv, memory_cgroup=True))

        burn = run("burn", sh(f"i=0; while [ $i -lt {fewer(200_000)} ]; do i=$((i+1)); done"))
        burnt = burn["usage"]["user_us"] + burn["usage"]["system_us"]
        after = run("after", ["true"])["usage"]
        assert after["user_us"] + after["system_us"] < burnt
        run("server", sh("sleep 1000 & echo up"))
        before = set(leaves(node, "a"))
        for i in range(5):
            assert run(f"r{i}", ["true"])["leftover"] == 0
        kept = set(leaves(node, "a"))
        assert before <= kept, "what a leftover lives in is kept"
        assert len(kept) <= len(before) + 1
        r = c.call("run.start", **run_plan("a", "late", sh("sleep 1000"), memory_cgroup=True, timeout_ms=200))
        assert r["cause"] == "timeout"
        init = c.call("sandbox.get", id="a")["init_pid"]
        inside = Path(f"/proc/{init}/root/proc").glob("[0-9]*/cmdline")
        assert sum(b"sleep" in p.read_bytes() for p in inside) == 1, "the kill reached another run's leftover"
        node.kill_runtime()
    with node.client() as c:
        r = c.call("run.start", **run_plan("a", "new", ["true"], memory_cgroup=True))
        assert (r["exit_code"], r["leftover"]) == (0, 0)


@pytest.mark.parametrize("off", [False, True])
def test_a_crowd_of_runs_finds_the_cgroups_of_the_crowd_before(off: bool) -> None:
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        kernel_lacks("cgroup.v1", "with the controllers on v2 each run has a new cgroup")
    crowd, few = 20, 8
    node = make_node(env={"DSEC_NATIVE_DISABLE": "cgroup.crowd"} if off else {})
    try:
        with node.client() as c:
            create(c, "a")
            # The first to read a program is charged for it.
            c.call("run.start", **run_plan("a", "first", ["cat"], memory_cgroup=True))

            def all_at_once(name: str) -> tuple[set[str], set[str]]:
                """None ends before the last has begun. The cgroups they run in, and those that are kept."""
                clients = [node.client() for _ in range(crowd)]
                asked = []
                for i, one in enumerate(clients):
                    plan = run_plan("a", f"{name}{i}", ["cat"], memory_cgroup=True, stdin_open=True)
                    asked.append(one.send("run.start", plan))
                until_running(c, "a", {f"{name}{i}" for i in range(crowd)})
                used = set(leaves(node, "a"))
                assert len(used) == crowd
                for i, (one, request) in enumerate(zip(clients, asked, strict=True)):
                    c.call("run.stdin", sandbox="a", run=f"{name}{i}", eof=True)
                    assert one.wait(request)["exit_code"] == 0
                    one.close()
                kept = few if off else crowd
                deadline = time.monotonic() + 30
                while len(found := set(leaves(node, "a"))) != kept:
                    assert time.monotonic() < deadline, found
                    time.sleep(0.01)
                return used, found

            _, before = all_at_once("x")
            used, _ = all_at_once("y")
            assert len(used - before) == (crowd - few if off else 0)
    finally:
        node.stop()


@pytest.mark.one_guest
def test_what_a_run_leaves_behind_costs_no_time(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        assert c.call("run.start", **run_plan("a", "r", sh("sleep 1000 & exit 0")))["leftover"] == 1
        before = cpu_ticks(node.runtime_pid())
        time.sleep(1)
        # Also when the file that tells of its end says something else.
        for value in "10":
            frozen_file(node, "a").write_text(value)
            time.sleep(0.5)
        assert cpu_ticks(node.runtime_pid()) - before < 20
        assert c.call("sandbox.get", id="a")["runs"] == 0


def shortest_turn(env: dict[str, str]) -> float:
    """Seconds from one byte of what a run left behind to the taking of the next, at the best of many."""
    node = make_node(env=env)
    try:
        with node.client() as c:
            init = create(c, "a")["init_pid"]
            assert c.call("run.start", **run_plan("a", "r", sh("sleep 1000 & exit 0")))["leftover"] == 1
            inside, left = Path(f"/proc/{init}/root/proc"), None
            while left is None:  # it may still be a copy of the shell
                found = (p for p in inside.glob("[0-9]*/cmdline") if p.read_bytes().startswith(b"sleep\0"))
                left = next(found, None)
            out = os.open(left.parent / "fd/1", os.O_WRONLY)
            try:
                turns: list[float] = []
                for _ in range(50):
                    began = time.monotonic()
                    for _ in range(2):
                        os.write(out, b"x")
                        deadline = time.monotonic() + 30
                        while struct.unpack("i", fcntl.ioctl(out, termios.FIONREAD, bytes(4)))[0]:
                            assert time.monotonic() < deadline, "nobody takes what is left behind"
                            time.sleep(0)
                    turns.append(time.monotonic() - began)
                return min(turns)
            finally:
                os.close(out)
    finally:
        node.stop()


@pytest.mark.same_everywhere
def test_what_is_left_behind_and_writes_in_small_pieces_wakes_nobody_for_each() -> None:
    """After a small piece its pipe rests for 10 ms: however busy the machine, two are never taken within less."""
    assert shortest_turn({}) >= 0.01
    assert shortest_turn({"DSEC_NATIVE_DISABLE": "output.rest"}) < 0.01


# What is seen inside


def test_nothing_of_the_hosts_cgroups_is_seen_of_a_run_that_enters(node: Node) -> None:
    """It is seen inside from its clone on, before it has joined its groups; frozen, it stays there."""
    with node.client() as c:
        init = create(c, "a")["init_pid"]
        frozen = frozen_file(node, "a")
        frozen.write_text("1")
        number = c.send("run.start", run_plan("a", "r", ["true"], memory_cgroup=True))
        deadline = time.monotonic() + 20
        while not (pids := [p for f in frozen.parent.glob("run-*/cgroup.procs") for p in f.read_text().split()]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        look = ["nsenter", f"--target={init}", "--cgroup", "cat", f"/proc/{pids[0]}/cgroup"]
        seen = subprocess.run(look, check=True, capture_output=True, text=True).stdout
        frozen.write_text("0")
        assert c.wait(number, [])["exit_code"] == 0
    # Its own group is beside its init's, which is where its namespace begins on v2.
    ours = [line for line in seen.split() if line.split(":")[1] in ("", "memory", "cpu", "pids")]
    named = [part for line in ours for part in line.rpartition(":")[2].split("/") if part not in ("", "..")]
    assert [name for name in named if not name.startswith("run-")] == [], seen


# Results that are kept


@pytest.mark.one_guest
@pytest.mark.parametrize("ended", ["timeout", "killed"])
def test_a_killed_run_does_not_take_the_next_with_it(shared: Node, box: tuple[Client, str], ended: str) -> None:
    """Whatever is cloned into a cgroup that was killed once is killed too."""
    c, s = box
    for i in range(4):
        plan = run_plan(s, f"r{i}", ["sleep", "100"], memory_cgroup=True, timeout_ms=100 if ended == "timeout" else 0)
        number = c.send("run.start", plan)
        while c.recv().get("ev") != "started":
            pass
        if ended == "killed":
            with shared.client() as other:
                other.call("run.kill", sandbox=s, run=f"r{i}", signal=0, cause="killed")
        assert c.wait(number)["cause"] == ended
        r = c.call("run.start", **run_plan(s, f"n{i}", ["true"], memory_cgroup=True))
        assert (r["exit_code"], r["cause"]) == (0, "exited")


@pytest.mark.same_everywhere
def test_a_sandbox_has_its_share_of_the_descriptors() -> None:
    """Ended runs whose children hold their pipes use up the share of their own sandbox; it comes back with its end."""
    node = make_node(env={"DSEC_NATIVE_DISABLE": "nofile.raise"}, nofile=1200)
    try:
        with node.client() as c:
            for name in ("greedy", "other"):
                create(c, name, pids_max=400)
            first, refused = _use_up(c, "greedy")
            assert refused.code == "limit"
            assert refused.detail["resource"] == "descriptors"
            assert refused.detail["limit"] < 1200 // 2
            assert first > 10
            second, _ = _use_up(c, "other")
            assert second > 10
            c.call("sandbox.stop", id="greedy")
            c.call("sandbox.stop", id="other")
            create(c, "third", pids_max=400)
            again, _ = _use_up(c, "third")
            assert again >= first
    finally:
        node.stop()


def _use_up(c: Client, s: str) -> tuple[int, RuntimeFault]:
    for count in range(1000):
        try:
            c.call("run.start", **run_plan(s, f"r{count}", sh("sleep 1000 & exit 0")))
        except RuntimeFault as e:
            return count, e
    raise AssertionError("no limit")


def test_keeper_and_runtime_have_all_the_descriptors_there_are(node: Node) -> None:
    for pid in (node.keeper_pid(), node.runtime_pid()):
        line = next(
            li for li in Path(f"/proc/{pid}/limits").read_text().splitlines() if li.startswith("Max open files")
        )
        assert line.split()[3:5] == [str(proc.descriptors_max())] * 2
    with node.client() as c:
        create(c, "a")
        r = c.call("run.start", **run_plan("a", "r", sh("ulimit -Sn; ulimit -Hn")))
        assert len(set(r["streams"][0]["head"].split())) == 1
        assert int(r["streams"][0]["head"].split()[0]) == sandbox_plan("a", [])["nofile"]


@pytest.mark.same_everywhere
def test_old_results_make_room(box: tuple[Client, str]) -> None:
    c, s = box
    for i in range(300):
        assert c.call("run.start", **run_plan(s, f"r{i}", ["true"]))["exit_code"] == 0
    known = {r["run"] for r in c.call("run.list", sandbox=s)["runs"]}
    assert 256 <= len(known) <= 258
    assert "r299" in known
    with pytest.raises(RuntimeFault) as e:
        c.call("run.attach", sandbox=s, run="r0")
    assert e.value.code == "not_found"
    assert c.call("run.attach", sandbox=s, run="r299")["exit_code"] == 0


# Endings that are not a run's own


@pytest.mark.one_guest
def test_what_ends_with_its_sandbox_has_no_result(node: Node) -> None:
    with node.client() as c, node.client() as other:
        for how in ("stop", "grace", "init"):
            init = create(c, how)["init_pid"]
            n = c.send("run.start", run_plan(how, "r", ["sleep", "100"]))
            while c.recv().get("ev") != "started":
                pass
            if how == "init":
                os.kill(init, signal.SIGKILL)
            else:
                other.call("sandbox.stop", id=how, grace_ms=0 if how == "stop" else 20_000)
            with pytest.raises(RuntimeFault) as e:
                c.wait(n, [])
            assert e.value.code == "gone", how


@pytest.mark.one_guest
def test_a_kill_before_the_stop_keeps_its_cause(node: Node) -> None:
    with node.client() as c, node.client() as other:
        create(c, "a")
        n = c.send("run.start", run_plan("a", "r", ["sleep", "100"]))
        while c.recv().get("ev") != "started":
            pass
        other.call("run.kill", sandbox="a", run="r", signal=0, cause="timeout")
        other.call("sandbox.stop", id="a")
        assert c.wait(n, [])["cause"] == "timeout"


@pytest.mark.one_guest
def test_a_create_that_takes_too_long_is_undone() -> None:
    node = make_node(env={"DSEC_NATIVE_FAILPOINTS": "create.cloned:1:hang"})
    try:
        with node.client() as c:
            with pytest.raises(RuntimeFault) as e:
                create(c, "a", deadline_ms=500)
            assert e.value.code == "deadline"
            assert c.call("sandbox.list")["sandboxes"] == []
    finally:
        node.stop()


@pytest.mark.one_guest
def test_the_keeper_keeps_nothing_of_its_starter_open() -> None:
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    assert BINARY is not None
    node = Node(BINARY, pass_fds=(theirs,))
    try:
        os.close(theirs)
        os.set_blocking(ours, False)
        assert os.read(ours, 1) == b"", "the end of the pipe does not come while somebody has it open"
    finally:
        os.close(ours)
        node.stop()


def test_a_program_starts_with_default_signals(box: tuple[Client, str]) -> None:
    c, s = box
    r = c.call("run.start", **run_plan(s, "r", ["grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status"]))
    fields = r["streams"][0]["head"].split()
    assert fields[1::2] == [b"0" * 16] * 3, fields
