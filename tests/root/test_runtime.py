"""The native runtime: supervision, streams, endings, and what survives a death."""

from __future__ import annotations

import atexit
import errno
import functools
import hashlib
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.lanes import fewer, in_guest, kernel_lacks, runtime_binary
from tests.kit.rtclient import Client, Node, RuntimeFault, busybox_image, run_plan, sandbox_plan

BINARY = runtime_binary()
LAYERS = ["sha256:" + "b" * 64]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not BINARY, reason="dsec-runtime is not built (scripts/build)"),
    pytest.mark.timeout(300),
]

WINDOW = 1 << 20


@functools.cache
def image() -> Path:
    home = Path(tempfile.mkdtemp(prefix="runtime-image-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return busybox_image(home)


def make_node(**kwargs: Any) -> Node:
    assert BINARY is not None
    node = Node(BINARY, **kwargs)
    with node.client() as c:
        for digest in LAYERS:
            c.call("layer.mount", digest=digest, path=str(image()))
    return node


def create(c: Client, name: str, **over: Any) -> dict[str, Any]:
    return c.call("sandbox.create", plan=sandbox_plan(name, LAYERS, **over))


@pytest.fixture(scope="module")
def shared() -> Iterator[Node]:
    node = make_node()
    yield node
    node.stop()


@pytest.fixture
def node() -> Iterator[Node]:
    node = make_node()
    yield node
    node.stop()


@pytest.fixture
def box(shared: Node) -> Iterator[tuple[Client, str]]:
    name = f"s{os.urandom(4).hex()}"
    with shared.client() as c:
        create(c, name)
        yield c, name
    # On a connection of its own: answers to a stream's last acknowledgements may still come on the other.
    with shared.client() as c:
        c.call("sandbox.stop", id=name)


def sh(script: str) -> list[str | bytes]:
    return ["sh", "-c", script]


def stream(c: Client, number: int, *, ack: bool = True, got: list[bytearray] | None = None) -> tuple[Any, Any]:
    """Follows a run to its end; the bytes of both streams and the result."""
    out = got if got is not None else [bytearray(), bytearray()]
    while True:
        frame = c.recv()
        if frame["id"] != number:
            continue
        if "err" in frame:
            raise RuntimeFault(frame["err"])
        if "ok" in frame:
            return out, frame["ok"]
        if frame["ev"] == "out":
            data = out[frame["s"] - 1]
            assert frame["o"] == len(data), "bytes are missing or came twice"
            data += frame["d"]
            if ack:
                c.send("run.ack", {"request": number, "bytes": len(frame["d"])})


# What a run answers


def test_exit_code_output_and_streams(box: tuple[Client, str]) -> None:
    c, s = box
    r = c.call("run.start", **run_plan(s, "r", sh("printf out; printf err >&2; exit 7")))
    assert (r["exit_code"], r["signal"], r["cause"]) == (7, None, "exited")
    assert [x["head"] for x in r["streams"]] == [b"out", b"err"]
    assert r["leftover"] == 0
    assert r["limits_hit"] == []


def test_signal_is_told(box: tuple[Client, str]) -> None:
    c, s = box
    r = c.call("run.start", **run_plan(s, "r", sh("kill -SEGV $$")))
    assert (r["exit_code"], r["signal"], r["cause"]) == (None, signal.SIGSEGV, "signalled")


@pytest.mark.same_everywhere
@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 3_000_000])
def test_stdin_arrives_whole(box: tuple[Client, str], size: int) -> None:
    c, s = box
    data = random.Random(size).randbytes(size)
    r = c.call("run.start", **run_plan(s, "r", ["sha256sum"], stdin=data))
    assert r["streams"][0]["head"].split()[0].decode() == hashlib.sha256(data).hexdigest()


@pytest.mark.same_everywhere
def test_a_program_that_does_not_read_its_input(box: tuple[Client, str]) -> None:
    c, s = box
    r = c.call("run.start", **run_plan(s, "r", ["true"], stdin=b"x" * 1_000_000))
    assert r["exit_code"] == 0


@pytest.mark.same_everywhere
@pytest.mark.parametrize(("head", "tail"), [(0, 0), (100, 0), (0, 100), (1000, 5000), (1 << 20, 1 << 20)])
def test_head_and_tail_are_kept_and_the_rest_is_counted(box: tuple[Client, str], head: int, tail: int) -> None:
    c, s = box
    text = b"".join(b"%d\n" % i for i in range(1, 700_001))
    plan = run_plan(s, "r", ["seq", "700000"], head_bytes=head, tail_bytes=tail)
    out = c.call("run.start", **plan)["streams"][0]
    assert out["total"] == len(text)
    assert out["head"] == text[:head]
    assert out["tail"] == (text[-tail:] if tail else b"")
    assert out["dropped"] == len(text) - head - tail


@pytest.mark.same_everywhere
def test_the_same_id_attaches_and_runs_once(box: tuple[Client, str]) -> None:
    c, s = box
    plan = run_plan(s, "r", sh("sleep 0.2; cat /proc/uptime; echo $$"))
    a, b = c.send("run.start", plan), c.send("run.start", plan)
    answers = {frame["id"]: frame["ok"] for frame in (c.recv() for _ in range(4)) if "ok" in frame}
    assert answers[a] == answers[b] == c.call("run.attach", sandbox=s, run="r")
    c.call("run.forget", sandbox=s, run="r")
    with pytest.raises(RuntimeFault) as e:
        c.call("run.attach", sandbox=s, run="r")
    assert e.value.code == "not_found"


@pytest.mark.same_everywhere
def test_streaming_gives_every_byte_once(box: tuple[Client, str]) -> None:
    c, s = box
    plan = run_plan(s, "r", sh("seq 500000; seq 1000 >&2"), head_bytes=100, tail_bytes=100)
    out, result = stream(c, c.send("run.start", plan | {"stream": True, "window": WINDOW}))
    assert bytes(out[0]) == b"".join(b"%d\n" % i for i in range(1, 500_001))
    assert bytes(out[1]) == b"".join(b"%d\n" % i for i in range(1, 1001))
    assert result["streams"][0]["total"] == len(out[0])


@pytest.mark.same_everywhere
def test_without_credit_the_program_waits(box: tuple[Client, str], shared: Node) -> None:
    c, s = box
    number = c.send("run.start", run_plan(s, "r", ["yes"]) | {"stream": True, "window": 100_000})
    got = 0
    while got < 100_000:
        frame = c.recv()
        got += len(frame.get("d", b""))
    assert got == 100_000
    with shared.client() as other:
        before = cpu_ticks(other.call("run.list", sandbox=s)["runs"][0]["pid"])
        time.sleep(0.5)
        assert cpu_ticks(other.call("run.list", sandbox=s)["runs"][0]["pid"]) == before
        other.call("run.kill", sandbox=s, run="r", signal=0, cause="killed")
    c.send("run.ack", {"request": number, "bytes": 1 << 30})
    while True:
        frame = c.recv()
        got += len(frame.get("d", b""))
        if frame["id"] == number and "ok" in frame:
            break
    assert got == frame["ok"]["streams"][0]["total"]
    assert frame["ok"]["cause"] == "killed"


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.same_everywhere
def test_a_vanished_reader_does_not_stop_the_program(box: tuple[Client, str], shared: Node) -> None:
    c, s = box
    lost = shared.client()
    lost.send("run.start", run_plan(s, "r", ["seq", "1000000"]) | {"stream": True, "window": 1000})
    while lost.recv().get("ev") != "out":
        pass
    lost.close()
    r = c.call("run.attach", sandbox=s, run="r")
    assert r["exit_code"] == 0
    assert r["streams"][0]["total"] == 6_888_896


def test_a_background_child_keeps_its_pipe(box: tuple[Client, str]) -> None:
    c, s = box
    loop = "i=0; while [ $i -lt 300 ]; do echo $i-$(printf %01000d 0); i=$((i+1)); done"
    script = f"(sleep 0.3; {loop}; sleep 30) & echo up"
    r = c.call("run.start", **run_plan(s, "r", sh(script)))
    assert (r["exit_code"], r["streams"][0]["head"]) == (0, b"up\n")
    assert r["leftover"] > 0
    time.sleep(1.5)
    # 300 kB went into a pipe of 64 KiB whose run has ended: neither stopped nor killed by SIGPIPE.
    c.call("run.forget", sandbox=s, run="r")
    r = c.call("run.start", **run_plan(s, "q", ["true"]))
    assert r["exit_code"] == 0


def test_a_timeout_kills_the_whole_tree(box: tuple[Client, str]) -> None:
    c, s = box
    script = "trap '' TERM HUP INT; setsid sh -c 'trap \"\" TERM; while :; do sleep 1; done' & wait; sleep 100"
    r = c.call("run.start", **run_plan(s, "r", sh(script), timeout_ms=500))
    assert (r["signal"], r["cause"]) == (9, "timeout")
    deadline = time.monotonic() + 10
    while c.call("sandbox.get", id=s)["runs"] and time.monotonic() < deadline:
        time.sleep(0.01)
    r = c.call("run.start", **run_plan(s, "q", sh("true")))
    assert r["exit_code"] == 0


def test_kill_with_a_signal(box: tuple[Client, str], shared: Node) -> None:
    c, s = box
    number = c.send(
        "run.start",
        run_plan(s, "r", sh("trap 'exit 9' TERM; echo on; while :; do sleep 0.05; done"))
        | {"stream": True, "window": 100},
    )
    while c.recv().get("ev") != "out":
        pass
    with shared.client() as other:
        other.call("run.kill", sandbox=s, run="r", signal=15, cause="killed")
    _, r = stream(c, number, got=[bytearray(b"on\n"), bytearray()])
    assert (r["exit_code"], r["cause"]) == (9, "killed")


@pytest.mark.same_everywhere
def test_a_thousand_runs_at_once(box: tuple[Client, str]) -> None:
    c, s = box
    numbers = {}
    for i in range(1000):
        plan = run_plan(s, f"r{i}", sh(f"sleep 0.{i % 10}; echo {i}; exit {i % 256}"))
        numbers[c.send("run.start", plan)] = i
    seen = 0
    while seen < 1000:
        frame = c.recv()
        if "ev" in frame:
            continue
        i = numbers[frame["id"]]
        assert "ok" in frame, frame
        assert frame["ok"]["exit_code"] == i % 256
        assert frame["ok"]["streams"][0]["head"] == b"%d\n" % i
        seen += 1


def memory_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise AssertionError("no Pss")


def shmem_kib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1])
    raise AssertionError("no Shmem")


@pytest.mark.same_everywhere
def test_a_flood_takes_no_memory(box: tuple[Client, str], shared: Node) -> None:
    c, s = box
    before = shmem_kib()
    number = c.send("run.start", run_plan(s, "r", ["cat", "/dev/zero"], timeout_ms=2000))
    time.sleep(1.5)
    during = shmem_kib()
    r = c.wait(number, [])
    assert r["streams"][0]["total"] > 100 << 20
    assert during - before < 50 << 10
    assert memory_kib(shared.runtime_pid()) < 50 << 10


# What is refused


@pytest.mark.same_everywhere
@pytest.mark.parametrize(
    ("over", "code", "field"),
    [
        ({"argv": []}, "bad_request", "argv"),
        ({"argv": [b""]}, "bad_request", "argv"),
        ({"argv": [b"a\0b"]}, "bad_request", "argv"),
        ({"cwd": b"x"}, "bad_request", "cwd"),
        ({"env": {b"A=B": b""}}, "bad_request", "env"),
        ({"head_bytes": 1 << 40}, "bad_request", "head_bytes"),
        ({"argv": [b"x" * 200_000]}, "too_long", None),
        ({"argv": [b"x" * 100_000] * 30}, "too_long", None),
        ({"run": "../x"}, "bad_request", "run"),
        ({"run": ""}, "bad_request", "run"),
        ({"run": "r" * 300}, "bad_request", "run"),
        ({"sandbox": "nobody"}, "not_found", None),
        ({"stdin_open": True}, "unsupported", None),
        ({"argv": "x"}, "bad_request", "args"),
        ({"timeout_ms": -1}, "bad_request", "args"),
        ({"cwd": b"/" + b"a/" * 2040}, "no_cwd", None),
        ({"cwd": b"/" + b"\xff" * 4000}, "no_cwd", None),
        ({"cwd": b"/" + b"a" * 5000}, "bad_request", "cwd"),
        ({"argv": [b"x" * 5000]}, "no_program", None),
        ({"argv": [b"/" + b"\n" * 100_000]}, "no_program", None),
    ],
)
def test_bad_runs_are_refused_by_name(
    box: tuple[Client, str], over: dict[str, Any], code: str, field: str | None
) -> None:
    c, s = box
    with pytest.raises(RuntimeFault) as e:
        c.call("run.start", **(run_plan(s, "r", ["true"]) | over))
    assert e.value.code == code
    if field:
        assert e.value.detail["field"] == field
    assert c.call("run.list", sandbox=s)["runs"] == []


def test_a_loop_of_links_is_named(box: tuple[Client, str]) -> None:
    c, s = box
    c.call("run.start", **run_plan(s, "ln", ["ln", "-s", "/loop", "/loop"]))
    for over, code in (({"cwd": b"/loop"}, "no_cwd"), ({"argv": [b"/loop"]}, "no_program")):
        with pytest.raises(RuntimeFault) as e:
            c.call("run.start", **(run_plan(s, "r", ["true"]) | over))
        assert (e.value.code, e.value.detail["errno"]) == (code, errno.ELOOP)


@pytest.mark.same_everywhere
@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "x" * 300, "a\0", "-a", ".a"])
def test_bad_sandbox_ids(shared: Node, name: str) -> None:
    with shared.client() as c, pytest.raises(RuntimeFault) as e:
        create(c, name)
    assert (e.value.code, e.value.detail["field"]) == ("bad_request", "id")


@pytest.mark.same_everywhere
def test_an_id_exists_once(box: tuple[Client, str]) -> None:
    c, s = box
    with pytest.raises(RuntimeFault) as e:
        create(c, s)
    assert e.value.code == "exists"


@pytest.mark.same_everywhere
def test_hello_comes_first(shared: Node) -> None:
    with shared.client(hello=False) as c:
        with pytest.raises(RuntimeFault) as e:
            c.call("sandbox.list")
        assert e.value.code == "bad_request"
        with pytest.raises(RuntimeFault) as e:
            c.call("hello", protocol=99)
        assert e.value.code == "unsupported"


@pytest.mark.same_everywhere
def test_unknown_operation(shared: Node) -> None:
    with shared.client() as c, pytest.raises(RuntimeFault) as e:
        c.call("fly")
    assert e.value.code == "bad_request"


@pytest.mark.same_everywhere
def test_garbage_ends_only_its_own_connection(box: tuple[Client, str], shared: Node) -> None:
    c, s = box
    rnd = random.Random(7)
    for i in range(300):
        raw = socket.socket(socket.AF_UNIX)
        raw.settimeout(5)
        raw.connect(str(shared.socket))
        body = rnd.randbytes(rnd.randrange(0, 200))
        length = len(body) if i % 3 else rnd.randrange(1 << 32)
        try:
            raw.sendall(struct.pack(">I", length) + body)
            if i % 2:
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
        except (BrokenPipeError, ConnectionResetError):
            pass
        raw.close()
    assert c.call("run.start", **run_plan(s, "r", ["true"]))["exit_code"] == 0


@pytest.mark.same_everywhere
def test_a_client_that_does_not_read_hurts_only_itself(box: tuple[Client, str], shared: Node) -> None:
    c, s = box
    deaf = shared.client()
    for i in range(20):
        deaf.send("run.start", run_plan(s, f"d{i}", ["seq", "400000"], head_bytes=1 << 20, tail_bytes=1 << 20))
    for i in range(20):
        assert c.call("run.attach", sandbox=s, run=f"d{i}")["exit_code"] == 0
    assert c.call("run.start", **run_plan(s, "r", ["true"]))["exit_code"] == 0
    assert memory_kib(shared.runtime_pid()) < 60 << 10
    deaf.close()
    assert c.call("run.start", **run_plan(s, "q", ["true"]))["exit_code"] == 0


# Sandboxes


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


def frozen_file(node: Node, sandbox: str) -> Path:
    for base in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        if (base / "cgroup.procs").exists():
            payload = base / node.cgroup / sandbox / "payload"
            return (payload if payload.exists() else payload.parent) / "cgroup.freeze"
    raise AssertionError("no cgroup v2")


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


# Deaths


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


@pytest.mark.parametrize("point", ["run.marked", "run.cloned", "run.put_pid", "run.ended", "run.reaped"])
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
            with pytest.raises((ConnectionError, BrokenPipeError)):
                stream(c, c.send("run.start", plan))
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


def test_a_btrfs_that_became_read_only_holds_up_nobody(node: Node) -> None:
    """As it does for good when the disk below it is full: sandboxes end, and the next get a new one."""
    btrfs = {"kind": "btrfs", "bytes": 64 << 20, "inodes": 0}
    image = str(node.state_dir / "upper.btrfs")
    with node.client() as c:
        if "btrfs" not in c.call("probe")["upper"]:
            kernel_lacks("upper.btrfs", "btrfs with simple quotas came with 6.7")
        for name in ("a", "b"):
            create(c, name, upper=btrfs)
        files = Path("/sys/block").glob("loop*/loop/backing_file")
        (loop,) = [file.parents[1].name for file in files if file.read_text().strip() == image]
        at = node.dir / "at"
        at.mkdir()
        try:
            subprocess.run(["mount", f"/dev/{loop}", at], check=True)
            subprocess.run(["mount", "-o", "remount,ro", at], check=True)
        finally:
            subprocess.run(["umount", at], check=False)
        assert c.call("sandbox.stop", id="a")["state"] == "ended"
        create(c, "c", upper=btrfs)
        plan = run_plan("c", "r", ["sh", "-c", "echo kept > /f && cat /f"])
        assert c.call("run.start", **plan)["streams"][0]["head"] == b"kept\n"
        assert c.call("sandbox.stop", id="b")["state"] == "ended"


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
