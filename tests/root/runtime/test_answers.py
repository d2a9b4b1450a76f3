"""The native runtime: what a run answers, its output and its input."""

from __future__ import annotations

import hashlib
import random
import signal
import time

import pytest

from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtnode import WINDOW, cpu_ticks, create, memory_kib, needs, sh, shmem_kib, stream

pytestmark = needs


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


def test_a_signal_that_a_program_lives_on_with_is_not_what_ends_it(box: tuple[Client, str], shared: Node) -> None:
    c, s = box
    ends = {"exit 0": (0, None, "exited"), "exit 5": (5, None, "exited"), "kill -9 $$": (None, 9, "signalled")}
    for n, (end, told) in enumerate(ends.items()):
        script = f"trap 'echo reloaded; {end}' USR1; echo on; while :; do sleep 0.05; done"
        number = c.send("run.start", run_plan(s, f"r{n}", sh(script)) | {"stream": True, "window": 100})
        while c.recv().get("ev") != "out":
            pass
        with shared.client() as other:
            for harmless in (signal.SIGWINCH, signal.SIGCONT, signal.SIGURG, signal.SIGUSR1):
                other.call("run.kill", sandbox=s, run=f"r{n}", signal=int(harmless))
        _, r = stream(c, number, got=[bytearray(b"on\n"), bytearray()])
        assert (r["exit_code"], r["signal"], r["cause"]) == told
    # What is no signal is none, and changes nothing.
    number = c.send("run.start", run_plan(s, "r", sh("read x; exit 0"), stdin_open=True, stream=True, window=100))
    while c.recv().get("ev") != "started":
        pass
    with shared.client() as other:
        for wrong in (-1, 65, 1000):
            with pytest.raises(RuntimeFault) as refused:
                other.call("run.kill", sandbox=s, run="r", signal=wrong)
            assert (refused.value.code, refused.value.detail["field"]) == ("bad_request", "signal")
        other.call("run.stdin", sandbox=s, run="r", offset=0, d=b"go\n", eof=True)
    assert stream(c, number)[1]["cause"] == "exited"


def test_a_stop_is_what_ends_who_has_survived_a_signal(node: Node) -> None:
    with node.client() as c, node.client() as other:
        create(c, "a")
        script = "trap 'echo no' TERM; echo on; while :; do sleep 0.05; done"
        number = c.send("run.start", run_plan("a", "r", sh(script)) | {"stream": True, "window": 100})
        while c.recv().get("ev") != "out":
            pass
        other.call("run.kill", sandbox="a", run="r", signal=int(signal.SIGTERM))
        while c.recv().get("ev") != "out":
            pass
        other.call("sandbox.stop", id="a")
        with pytest.raises(RuntimeFault) as ended:
            stream(c, number, got=[bytearray(b"on\nno\n"), bytearray()])
        assert ended.value.code == "gone"


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
