"""The native runtime: what survives a death, its own included."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dsec.images import LayerStore
from dsec.images.tools import cache_dir
from tests.kit.lanes import fewer, in_guest
from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan, sandbox_plan
from tests.kit.rtnode import WINDOW, cpu_ticks, create, make_node, needs, sh, stream

pytestmark = [*needs, pytest.mark.one_guest]


def test_the_runtime_dies_and_nothing_is_lost(node: Node) -> None:
    """Exit codes and output of 1 byte to 20 MB on both streams, the runtime killed at random."""
    stop = threading.Event()
    kills = 0

    def killer() -> None:
        nonlocal kills
        rnd = random.Random(3)
        before = -1
        while kills < fewer(60) and not stop.wait(rnd.uniform(0.05, 0.6)):
            if Counted.frames > before:  # killed before it has said anything it would never get on
                before = Counted.frames
                node.kill_runtime()
                kills += 1

    with node.client() as c:
        create(c, "a")
    thread = threading.Thread(target=killer)
    thread.start()
    try:
        failures: list[str] = []
        count = 2 if in_guest() else 4
        workers = [threading.Thread(target=_checked_runs, args=(node, w, failures)) for w in range(count)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert kills > 5
    with node.client() as c:
        assert c.call("sandbox.get", id="a")["state"] == "running"


class Counted(Client):
    """Counts the frames of all its connections, but for the first of each."""

    frames = 0

    def recv(self) -> dict[str, Any]:
        frame = super().recv()
        if self.hello:
            Counted.frames += 1
        return frame


def _checked_runs(node: Node, worker: int, failures: list[str]) -> None:
    rnd = random.Random(worker)
    for i in range(fewer(60)):
        sizes = [int(10 ** rnd.uniform(0, 5.5)), int(10 ** rnd.uniform(0, 5))]
        if i == fewer(60) // 2:
            sizes[0] = fewer(20_000_000)
        code = rnd.randrange(256)
        try:
            _checked_run(node, f"w{worker}-{i}", sizes, code, streaming=bool(i % 2))
        except (AssertionError, RuntimeFault, OSError) as e:
            failures.append(f"{worker}-{i} {sizes} {code}: {type(e).__name__} {e}")


def _pattern(seed: int, size: int) -> bytes:
    """What `seq SEED 100000000 | head -c SIZE` prints, for seeds of four digits and more."""
    return ("\n".join(map(str, range(seed, seed + size // 5 + 1))) + "\n").encode()[:size]


def _checked_run(node: Node, run: str, sizes: list[int], code: int, *, streaming: bool) -> None:
    first = f"seq 1000 100000000 | head -c {sizes[0]}"
    second = f"seq 5000 100000000 | head -c {sizes[1]} >&2"
    script = f"{first} & {second}; wait; exit {code}"
    plan = run_plan("a", run, sh(script), head_bytes=1 << 20, tail_bytes=1 << 20)
    want = [_pattern(1000, sizes[0]), _pattern(5000, sizes[1])]
    got = [bytearray(), bytearray()]
    while True:
        try:
            with Counted(node.socket) as c:
                follow = {"stream": streaming, "window": WINDOW, "offsets": [len(got[0]), len(got[1])]}
                number = c.send("run.start", plan | follow)
                _, r = stream(c, number, got=got)
                break
        except (ConnectionError, BrokenPipeError, TimeoutError):
            continue
    assert r["exit_code"] == code, r["exit_code"]
    for s in range(2):
        out = r["streams"][s]
        assert out["total"] == sizes[s], (s, out["total"])
        assert out["head"] == want[s][: 1 << 20]
        assert len(out["head"]) + out["dropped"] + len(out["tail"]) == sizes[s]
        if out["tail"]:
            assert out["tail"] == want[s][-len(out["tail"]) :]
        if streaming:
            assert bytes(got[s]) == want[s]


def test_a_node_that_is_started_where_everything_was_killed_once() -> None:
    """By systemd-oomd, say, or a job manager that uses its group again. The kernel compares counts of kills."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    (v2, *_) = [line.split()[4] for line in mounts if " - cgroup2 " in line]
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))[3:]
    group, back = Path(v2) / f"dsec-t-killed-{os.getpid()}", Path(v2 + own) / "cgroup.procs"
    group.mkdir()
    try:
        (group / "cgroup.kill").write_text("1")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        node = make_node()
        try:
            with node.client() as c:
                create(c, "a")
                assert c.call("run.start", **run_plan("a", "r", ["true"]))["exit_code"] == 0
                node.kill_runtime()
            with node.client() as c:
                create(c, "b")
        finally:
            node.stop()
    finally:
        back.write_text(str(os.getpid()))
        group.rmdir()


@pytest.mark.parametrize(
    "point", ["run.marked", "run.cloned", "run.put_pid", "run.ended", "run.put_outcome", "run.reaped"]
)
@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.same_everywhere)])
def test_a_runtime_that_dies_during_a_launch_knows_what_has_begun(point: str, *, streaming: bool) -> None:
    """A run has begun, and is here; or it has certainly not, and can be sent again. It never runs twice."""
    # The second time: the first launch of the runtime that comes after is to work.
    node = make_node(env={"DSEC_NATIVE_FAILPOINTS": f"{point}:2:kill"})
    try:
        with node.client() as c:
            create(c, "a")
            c.call("run.start", **run_plan("a", "first", ["true"]))
            plan = run_plan("a", "r", sh("echo x >>/ran; cat /ran; exit 7"), stream=streaming, window=WINDOW)
            # Only what is kept is told, and that is told before the process is reaped.
            told = point == "run.reaped"
            with contextlib.nullcontext() if told else pytest.raises((ConnectionError, BrokenPipeError)):
                assert stream(c, c.send("run.start", plan))[1]["exit_code"] == 7
        begun = point not in ("run.marked", "run.cloned")
        with node.client() as c:
            known = {run["run"] for run in c.call("run.list", sandbox="a")["runs"]}
            assert ("r" in known) is begun
            if not begun:
                with pytest.raises(RuntimeFault, match="not_found"):
                    c.call("run.attach", sandbox="a", run="r")
            _, r = stream(c, c.send("run.start", plan))
            assert (r["exit_code"], r["streams"][0]["head"]) == (7, b"x\n")
    finally:
        node.stop()


def test_an_upgrade_under_load(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        first = c.hello
        numbers = {
            c.send("run.start", run_plan("a", f"r{i}", sh(f"sleep 0.5; echo {i}; exit {i}"))): i for i in range(40)
        }
        started = 0
        while started < len(numbers):
            started += c.recv().get("ev") == "started"
        # Another file under the same name, as a package manager does it.
        data = node.binary.read_bytes()
        node.binary.unlink()
        node.binary.write_bytes(data + b"\0")
        node.binary.chmod(0o755)
        with node.client() as other:
            other.call("shutdown", restart=True)
    with node.client() as c:
        assert c.hello["instance"] == first["instance"]
        assert c.hello["pid"] != first["pid"]
        assert c.hello["binary"] != first["binary"]
        for i in range(40):
            r = c.call("run.attach", sandbox="a", run=f"r{i}")
            assert (r["exit_code"], r["streams"][0]["head"]) == (i, b"%d\n" % i)


def test_a_timeout_holds_over_a_restart(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        c.send("run.start", run_plan("a", "r", ["sleep", "100"], timeout_ms=1500))
        while c.recv().get("ev") != "started":
            pass
    node.kill_runtime()
    with node.client() as c:
        r = c.call("run.attach", sandbox="a", run="r")
        assert (r["cause"], r["signal"]) == ("timeout", 9)
        assert r["duration_ns"] >= 1_500_000_000


# Traces the process whose number is in /pid, and does not let go.
TRACER = """
import ctypes, time
libc = ctypes.CDLL(None)
assert libc.ptrace(0x4206, int(open("/pid").read()), 0, 0) == 0  # PTRACE_SEIZE
open("/traced", "w").close()
time.sleep(600)
"""


def test_a_traced_program_that_ends_after_a_restart_is_seen(node: Node) -> None:
    """It is its tracer's first: neither the keeper nor the runtime can collect it before that is ended."""
    store = LayerStore(cache_dir())
    if store.get("debian:12") is None:
        pytest.skip(f"no layer debian:12 in {cache_dir()} (scripts/setup makes it)")
    base = store.resolve("debian:12").digest
    with node.client() as c:
        c.call("layer.mount", digest=base, path=str(store.path(base)))
        c.call("sandbox.create", plan=sandbox_plan("a", [base]))
        c.call("run.start", **run_plan("a", "pipe", ["mkfifo", "/end"]))
        # No children: their signals would stop it.
        c.send("run.start", run_plan("a", "traced", sh("echo $$ >/pid; read code </end; exit $code")))
        c.recv()
        c.call("run.start", **run_plan("a", "ready", sh("until [ -s /pid ]; do sleep 0.01; done")))
    with node.client() as c:
        c.send("run.start", run_plan("a", "tracer", ["python3", "-I", "-c", TRACER]))
        c.recv()
    with node.client() as c:
        c.call("run.start", **run_plan("a", "held", sh("until [ -e /traced ]; do sleep 0.01; done"), timeout_ms=60_000))
    node.kill_runtime()
    with node.client() as c:
        c.call("run.start", **run_plan("a", "end", sh("echo 7 >/end")))
        result = c.call("run.attach", sandbox="a", run="traced")
        assert (result["exit_code"], result["cause"]) == (7, "exited")
        assert c.call("run.attach", sandbox="a", run="tracer")["signal"] == signal.SIGKILL


def test_both_die_and_the_sandbox_lives(node: Node) -> None:
    with node.client() as c:
        pid = create(c, "a")["init_pid"]
        done = run_plan("a", "done", ["true"])
        c.call("run.start", **done)
        c.send("run.start", run_plan("a", "r", ["sleep", "100"]))
        while c.recv().get("ev") != "started":
            pass
        first = c.hello["instance"]
    node.kill_keeper()
    node.start()
    with node.client() as c:
        assert c.hello["instance"] != first
        status = c.call("sandbox.get", id="a")
        assert (status["state"], status["init_pid"]) == ("running", pid)
        for run in ("r", "done"):
            with pytest.raises(RuntimeFault) as e:
                c.call("run.attach", sandbox="a", run=run)
            assert e.value.code == "unknown"
        with pytest.raises(RuntimeFault) as e:
            c.call("run.attach", sandbox="a", run="never")
        assert e.value.code == "not_found"
        with pytest.raises(RuntimeFault) as e:
            c.call("run.start", **done)
        assert e.value.code == "unknown"
        c.call("run.forget", sandbox="a", run="done")
        assert c.call("run.start", **done)["exit_code"] == 0
        os.kill(pid, signal.SIGKILL)
        assert c.call("sandbox.wait", id="a")["state"] == "ended"


def test_the_mark_of_a_lost_run_harms_none_that_comes_later(node: Node) -> None:
    """Its cgroup's name may be another's by now, one that is kept for the next run: a killed one would kill that."""
    with node.client() as c:
        create(c, "a")
        c.send("run.start", run_plan("a", "lost", ["sleep", "100"], memory_cgroup=True))
        c.recv()
    node.kill_keeper()
    node.start()
    for _ in range(2):
        node.kill_runtime()
    with node.client() as c:
        c.send("run.start", run_plan("a", "other", ["sleep", "0.2"], memory_cgroup=True))
        c.recv()
        runtime = int(c.hello["pid"])
    away = node.binary.rename(node.dir / "away")
    os.kill(runtime, signal.SIGKILL)
    time.sleep(0.5)
    away.rename(node.binary)
    with node.client() as c:
        assert c.call("run.attach", sandbox="a", run="other")["exit_code"] == 0
        for i in range(3):
            result = c.call("run.start", **run_plan("a", f"r{i}", ["true"], memory_cgroup=True))
            assert (result["exit_code"], result["signal"]) == (0, None)


def test_an_init_that_died_while_both_were_dead(node: Node) -> None:
    with node.client() as c:
        pid = create(c, "a")["init_pid"]
    node.kill_keeper()
    os.kill(pid, signal.SIGKILL)
    node.start()
    with node.client() as c:
        assert c.call("sandbox.wait", id="a")["exit"]["reason"] == "lost"


@pytest.mark.same_everywhere
def test_one_keeper_per_directory(node: Node) -> None:
    again = subprocess.run(
        [node.binary, "keeper", "--run-dir", node.run_dir, "--state-dir", node.state_dir],
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert again.returncode != 0
    assert b"running already" in again.stderr


@pytest.mark.parametrize("at_work", [False, True])
def test_a_killed_launcher_is_replaced_and_nobody_hears_of_it(node: Node, *, at_work: bool) -> None:
    """What it had not read when it died was not begun: another one is asked."""
    with node.client() as c, node.client() as waiting:
        create(c, "a")
        c.call("run.start", **run_plan("a", "r", ["true"]))
        pids = launchers(node)
        assert pids
        asked = 2 if at_work else 0
        for pid in pids if at_work else ():
            os.kill(pid, signal.SIGSTOP)
        for i in range(asked):
            waiting.send("run.start", run_plan("a", f"w{i}", ["true"]))
        c.call("sandbox.list")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while asked:
            frame = waiting.recv()
            assert "err" not in frame, frame
            asked -= "ok" in frame
        for i in range(len(pids)):
            assert c.call("run.start", **run_plan("a", f"r{i}", ["true"]))["exit_code"] == 0
        for i in range(len(pids)):
            create(c, f"b{i}")
        assert not set(pids) & set(launchers(node))


def launchers(node: Node) -> list[int]:
    """The runtime's own; inits and runs have another name."""
    tasks = Path(f"/proc/{node.runtime_pid()}/task").glob("*/children")
    children = [int(pid) for task in tasks for pid in task.read_text().split()]
    return [pid for pid in children if Path(f"/proc/{pid}/comm").read_text() == "dsec-launcher\n"]


@pytest.mark.same_everywhere
def test_a_runtime_that_cannot_start_is_not_tried_for_ever_at_once(node: Node) -> None:
    keeper = node.keeper_pid()
    binary = node.binary.read_bytes()
    node.binary.unlink()
    node.binary.write_text("#!/bin/false\n")
    node.binary.chmod(0o755)
    os.kill(node_runtime(node), signal.SIGKILL)
    before = cpu_ticks(keeper)
    time.sleep(1)
    assert cpu_ticks(keeper) - before < 20
    assert node.log().count("runtime.start pid=") < 12
    node.binary.unlink()
    node.binary.write_bytes(binary)
    node.binary.chmod(0o755)
    with node.client() as c:
        assert c.call("sandbox.list")["sandboxes"] == []


def node_runtime(node: Node) -> int:
    keeper = node.keeper_pid()
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return int(children[0])


def test_shutdown_rests_until_someone_connects(node: Node) -> None:
    with node.client() as c:
        pid = c.hello["pid"]
        c.call("shutdown", restart=False)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Path(f"/proc/{node.keeper_pid()}/task/{node.keeper_pid()}/children").read_text().strip() == ""
    assert node.runtime_pid() != pid


def test_the_socket_is_ours_alone(node: Node) -> None:
    assert node.socket.stat().st_mode & 0o777 == 0o600


def test_the_keeper_is_small(node: Node) -> None:
    rollup = Path(f"/proc/{node.keeper_pid()}/smaps_rollup").read_text()
    private = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))
    assert private < 400, f"{private} KiB"
