"""Terminals when somebody dies, does not read, or means harm."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtnode import cpu_ticks, create, frozen_file, make_node, needs, sh
from tests.root.runtime.test_terminals import PATIENCE_S, SIZE, Screen, until

pytestmark = [*needs, pytest.mark.one_guest]

# What a terminal and its line discipline take at most before somebody reads; more waits with the runtime.
FULL_BYTES = 32 << 10


def test_a_runtime_that_dies_loses_no_output_and_repeats_none(node: Node) -> None:
    rnd = random.Random(3)
    with node.client() as c:
        create(c, "a")
    expected = b"".join(b"%d\r\n" % n for n in range(1, 200_001))
    with Screen(node, "a", sh("seq 1 200000; exit 3")) as screen:
        kills = 0
        while screen.result is None:
            target = screen.got + rnd.randrange(1, len(expected) // 6)
            try:
                while screen.got < target and screen.take():
                    pass
                if screen.result is None:
                    kills += 1
                    os.kill(screen.reader.hello["pid"], signal.SIGKILL)
                    screen.end()
            except (ConnectionError, BrokenPipeError):
                screen.back()
        assert kills >= 3
        assert bytes(screen.shown) == expected
        assert screen.result["exit_code"] == 3


def test_what_has_left_the_terminal_when_the_runtime_dies_needs_nothing_behind_it() -> None:
    """The program says one word and waits: nothing that happens in its terminal later wakes anybody."""
    node = make_node(env={"DSEC_NATIVE_FAILPOINTS": "output.relayed:1:kill"})
    try:
        with node.client() as c:
            create(c, "a")
            c.send("run.start", run_plan("a", "t", sh("printf word; sleep 1000"), tty=SIZE))
            with pytest.raises(ConnectionError):
                while c.recv():
                    pass
        deadline = time.monotonic() + PATIENCE_S
        with node.client() as c:
            while not c.call("run.read", sandbox="a", run="t", s=1, offset=0, max=100)["d"]:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        node.stop()


def test_a_runtime_that_dies_loses_no_key_and_repeats_none(node: Node) -> None:
    rnd = random.Random(5)
    data = rnd.randbytes(4 << 20)
    with node.client() as c:
        create(c, "a")
    script = f"stty raw -echo; echo ready; head -c {len(data)} | sha256sum"
    with Screen(node, "a", sh(script)) as screen:
        screen.until(b"ready\n")
        kills = 0
        while screen.typed < len(data):
            piece = data[screen.typed : screen.typed + rnd.choice([1, 1000, 65_536])]
            try:
                screen.type(piece)
                if rnd.random() < 0.1 and kills < 6:
                    kills += 1
                    os.kill(screen.reader.hello["pid"], signal.SIGKILL)
            except (ConnectionError, BrokenPipeError):
                screen.back()
                continue
        assert kills >= 3
        screen.back()
        screen.until(hashlib.sha256(data).hexdigest().encode())
        assert screen.end()["exit_code"] == 0


def test_after_a_death_a_size_can_be_given_and_the_end_is_known(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
    script = "trap 'stty size; exit 9' WINCH; echo ready; while :; do sleep 0.05; done"
    with Screen(node, "a", sh(script)) as screen:
        screen.until(b"ready\r\n")
        os.kill(screen.reader.hello["pid"], signal.SIGKILL)
        screen.back()
        screen.resize(11, 22)
        screen.until(b"11 22\r\n")
        assert screen.end()["exit_code"] == 9


def test_who_closes_and_opens_it_again_is_heard_and_costs_nothing_meanwhile(
    shared: Node, box: tuple[Client, str]
) -> None:
    script = (
        "echo one; tty=$(tty); exec </dev/null >/dev/null 2>&1; until [ -e /go ]; do sleep 0.05; done;"
        " echo two >/dev/tty; echo three >$tty; exit 4"
    )
    with Screen(shared, box[1], sh(script)) as screen:
        screen.until(b"one\r\n")
        pid = shared.runtime_pid()
        before = cpu_ticks(pid)
        time.sleep(1)
        # Hundredths of a second: one that spins takes them all.
        assert cpu_ticks(pid) - before < 30
        box[0].call("run.start", **run_plan(box[1], "go", ["touch", "/go"]))
        screen.until(b"two\r\nthree\r\n")
        assert screen.end()["exit_code"] == 4


def test_the_end_comes_with_the_program_and_hangs_up_who_is_left(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    script = (
        "(trap '' HUP; until [ -e /go ]; do sleep 0.02; done; echo late || echo hung up >/left) & seq 1 2000; exit 6"
    )
    with Screen(shared, name, sh(script)) as screen:
        result = screen.end()
        assert bytes(screen.shown) == b"".join(b"%d\r\n" % n for n in range(1, 2001))
    assert result["exit_code"] == 6
    assert result["leftover"] >= 1
    c.call("run.start", **run_plan(name, "go", ["touch", "/go"]))
    left = c.call("run.start", **run_plan(name, "left", sh("until [ -s /left ]; do sleep 0.02; done; cat /left")))
    assert left["streams"][0]["head"] == b"hung up\n"


def test_who_does_not_read_holds_nobody_up(shared: Node, box: tuple[Client, str]) -> None:
    """The terminal takes what it takes; the rest waits, whole, until somebody reads."""
    c, name = box
    lines = b"".join(b"%07d\n" % n for n in range(40_000))
    with Screen(shared, name, sh("stty -echo; echo ready; until [ -e /go ]; do sleep 0.05; done; sha256sum")) as screen:
        screen.until(b"ready\r\n")
        for at in range(0, 200_000, 50_000):
            screen.type(lines[at : at + 50_000])
        pid = shared.runtime_pid()
        before = cpu_ticks(pid)
        time.sleep(1)
        assert cpu_ticks(pid) - before < 30
        c.call("run.start", **run_plan(name, "go", ["touch", "/go"]))
        for at in range(200_000, len(lines), 50_000):
            screen.type(lines[at : at + 50_000])
        screen.type(b"\x04")
        screen.until(hashlib.sha256(lines).hexdigest().encode())
        assert screen.end()["exit_code"] == 0


@pytest.mark.parametrize("lines", [900, 12_000], ids=["with the terminal", "with the runtime"])
def test_an_interrupt_is_not_held_up_by_what_nobody_reads(shared: Node, box: tuple[Client, str], lines: int) -> None:
    before = b"unread\n" * lines
    with Screen(shared, box[1], sh("stty -echo; echo ready; exec sleep 1000")) as screen:
        screen.until(b"ready\r\n")
        screen.type(before)
        screen.type(b"\x03")
        assert screen.end()["signal"] == signal.SIGINT


def test_an_interrupt_takes_what_was_typed_before_with_it_and_nothing_after(
    shared: Node, box: tuple[Client, str]
) -> None:
    script = (
        "stty -echo; trap 'echo interrupted; touch /on' INT; echo ready; until [ -e /on ]; do sleep 0.05; done;"
        " while read -r line; do [ $line = unread ] || echo got $line; done; echo over"
    )
    with Screen(shared, box[1], sh(script)) as screen:
        screen.until(b"ready\r\n")
        screen.type(b"unread\n" * 5_000 + b"lost\n" + b"unread\n" * 5_000 + b"\x03kept\n\x04")
        screen.until(b"interrupted\r\n")
        assert screen.end()["exit_code"] == 0
        assert bytes(screen.shown) == b"got kept\r\nover\r\n"


def test_what_is_no_key_now_is_a_byte_as_others_also_when_it_waits(shared: Node, box: tuple[Client, str]) -> None:
    data = random.Random(9).randbytes(100_000)
    script = f"stty raw -echo; echo ready; sleep 2; head -c {len(data)} | sha256sum"
    with Screen(shared, box[1], sh(script)) as screen:
        screen.until(b"ready\n")
        screen.type(data)
        screen.until(hashlib.sha256(data).hexdigest().encode())


def test_a_reader_that_stops_holds_the_program_back(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    script = "stty -onlcr; head -c 3000000 /dev/zero; touch /through; exit 2"
    with Screen(shared, name, sh(script), window=4096) as screen:
        assert screen.take() and screen.take()
        with pytest.raises(RuntimeFault):
            r = c.call("run.start", **run_plan(name, "look", sh("sleep 0.5; exec cat /through")))
            assert r["exit_code"] == 1
            raise RuntimeFault({"code": "held", "message": "", "detail": {}})
        assert screen.end()["exit_code"] == 2
        assert len(screen.shown) == 3_000_000


def test_no_more_terminals_than_the_sandbox_may_have(node: Node) -> None:
    with node.client() as c:
        create(c, "a", pty_max=2)
        with Screen(node, "a", sh("echo ready; read x"), run="one") as one:
            one.until(b"ready")
            with Screen(node, "a", sh("echo ready; read x"), run="two") as two:
                two.until(b"ready")
                with pytest.raises(RuntimeFault) as full:
                    c.call("run.start", **run_plan("a", "three", ["true"], tty=SIZE))
                assert (full.value.code, full.value.detail["resource"]) == ("limit", "terminals")
                # No run, no cgroup, no process of it is left, and its id is free.
                assert {r["run"] for r in c.call("run.list", sandbox="a")["runs"]} == {"one", "two"}
                two.type(b"\n")
                two.end()
            # Kernel 6.1 is not always done with one when its last descriptor was closed.
            until(lambda: starts_three(c))
            one.type(b"\n")
            one.end()


def starts_three(c: Client) -> bool:
    try:
        return bool(c.call("run.start", **run_plan("a", "three", ["true"], tty=SIZE))["exit_code"] == 0)
    except RuntimeFault as error:
        assert error.detail["resource"] == "terminals"
        return False


def inside(node: Node, sandbox: str, *command: str) -> None:
    """As the host's root in the mount namespace of a sandbox, where its own root may not mount."""
    with node.client() as c:
        pid = c.call("sandbox.get", id=sandbox)["init_pid"]
    subprocess.run(["nsenter", "-t", str(pid), "-m", "-r", "/bin/busybox", *command], check=True, timeout=60)


@pytest.mark.parametrize(
    "ptmx",
    [
        pytest.param("mkfifo /dev/pts/ptmx", id="one that blocks whoever opens it"),
        pytest.param("ln -s /proc/1/fd/0 /dev/pts/ptmx", id="a link"),
        pytest.param("mknod /dev/pts/ptmx c 5 0", id="another device"),
        pytest.param("true", id="nothing"),
    ],
)
def test_a_terminal_that_is_none_is_refused(node: Node, ptmx: str) -> None:
    with node.client() as c:
        create(c, "a")
        inside(node, "a", "mount", "-t", "tmpfs", "none", "/dev/pts")
        inside(node, "a", "sh", "-c", ptmx)
        with pytest.raises(RuntimeFault) as refused:
            c.call("run.start", **run_plan("a", "t", ["true"], tty=SIZE))
        assert refused.value.code == "launch"
        assert c.call("run.list", sandbox="a")["runs"] == []
        # Without a terminal all is as before.
        assert c.call("run.start", **run_plan("a", "t", ["true"]))["exit_code"] == 0


def test_something_over_the_device_is_not_opened(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        c.call("run.start", **run_plan("a", "fifo", ["mkfifo", "/fifo"]))
        inside(node, "a", "mount", "--bind", "/fifo", "/dev/pts/ptmx")
        with pytest.raises(RuntimeFault) as refused:
            c.call("run.start", **run_plan("a", "t", ["true"], tty=SIZE))
        assert refused.value.code == "launch"


def test_a_sandbox_that_holds_its_launch_up_delays_nobody(node: Node) -> None:
    with node.client() as c, node.client() as other:
        create(c, "a")
        create(c, "b")
        frozen = frozen_file(node, "a")
        frozen.write_text("1")
        waiting = [other.send("run.start", run_plan("a", f"t{n}", ["true"], tty=SIZE)) for n in range(8)]
        # More than there are threads that launch.
        assert c.call("run.start", **run_plan("b", "t", sh("stty size"), tty=SIZE))["exit_code"] == 0
        assert c.call("run.start", **run_plan("b", "p", ["true"]))["exit_code"] == 0
        c.call("run.resize", sandbox="a", run="t0", rows=5, cols=6)
        frozen.write_text("0")
        ends: dict[int, int] = {}
        while len(ends) < len(waiting):
            frame = other.recv()
            if "ok" in frame or "err" in frame:
                ends[frame["id"]] = frame["ok"]["exit_code"]
        assert set(ends.values()) == {0}


def test_one_that_never_gets_ready_is_given_up(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        frozen_file(node, "a").write_text("1")
        with pytest.raises(RuntimeFault) as late:
            c.call("run.start", **run_plan("a", "t", ["true"], tty=SIZE))
        assert late.value.code == "deadline"
        frozen_file(node, "a").write_text("0")
        assert c.call("run.list", sandbox="a")["runs"] == []
        assert c.call("run.start", **run_plan("a", "t", ["true"], tty=SIZE))["exit_code"] == 0


def test_a_stop_ends_what_opens_its_terminal(node: Node) -> None:
    with node.client() as c, node.client() as other:
        create(c, "a")
        frozen_file(node, "a").write_text("1")
        number = other.send("run.start", run_plan("a", "t", ["true"], tty=SIZE))
        until(lambda: c.call("run.list", sandbox="a")["runs"])
        c.call("sandbox.stop", id="a")
        with pytest.raises(RuntimeFault) as gone:
            other.wait(number)
        assert gone.value.code == "gone"


@pytest.mark.parametrize("point", ["run.cloned", "run.opened", "run.put_pid"])
def test_where_a_launch_fails_nothing_has_begun_and_all_is_as_before(point: str) -> None:
    node = make_node(env={"DSEC_NATIVE_FAILPOINTS": f"{point}:1:error"})
    try:
        with node.client() as c:
            create(c, "a")
            plan = run_plan("a", "t", sh("echo x >>/ran; read word; cat /ran; exit 7"), stdin=b"word\n", tty=SIZE)
            with pytest.raises(RuntimeFault):
                c.call("run.start", **plan)
            assert c.call("run.list", sandbox="a")["runs"] == []
            r = c.call("run.start", **plan)
            assert (r["exit_code"], r["streams"][0]["head"].count(b"x")) == (7, 1)
    finally:
        node.stop()


# Counted in each process: it happens to whoever opens a terminal.
@pytest.mark.parametrize("action", ["error", "kill"])
def test_who_fails_or_dies_where_it_opens_its_terminal_has_begun_nothing(action: str) -> None:
    node = make_node(env={"DSEC_NATIVE_FAILPOINTS": f"enter.terminal:1:{action}"})
    try:
        with node.client() as c:
            create(c, "a")
            for number in range(2):
                with pytest.raises(RuntimeFault) as failed:
                    c.call("run.start", **run_plan("a", f"t{number}", sh("echo x >>/ran"), tty=SIZE))
                assert failed.value.code == "launch", failed.value
            assert c.call("run.list", sandbox="a")["runs"] == []
            r = c.call("run.start", **run_plan("a", "r", sh("test ! -e /ran && ls /dev/pts")))
            assert (r["exit_code"], r["streams"][0]["head"]) == (0, b"ptmx\n")
    finally:
        node.stop()


def test_a_runtime_that_dies_before_the_terminal_is_there_has_begun_nothing(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        frozen = frozen_file(node, "a")
        frozen.write_text("1")
        c.send("run.start", run_plan("a", "t", sh("echo x >>/ran"), tty=SIZE))
        with node.client() as other:
            until(lambda: other.call("run.list", sandbox="a")["runs"])
            os.kill(other.hello["pid"], signal.SIGKILL)
    with node.client() as c:
        frozen.write_text("0")
        with pytest.raises(RuntimeFault) as none:
            c.call("run.attach", sandbox="a", run="t")
        assert none.value.code == "not_found"
        r = c.call("run.start", **run_plan("a", "t", sh("echo x >>/ran; cat /ran"), tty=SIZE))
        assert r["streams"][0]["head"] == b"x\r\n"


def test_nothing_stays_of_terminals_that_are_over(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        fds = Path(f"/proc/{c.hello['pid']}/fd")
        kept = Path(f"/proc/{node.keeper_pid()}/fd")

        def counts() -> tuple[int, int]:
            return len(list(fds.iterdir())), len(list(kept.iterdir()))

        first = counts()
        for n in range(12):
            if n == 4:  # the first ones open what stays open
                first = counts()
            with Screen(node, "a", sh("echo ready; read x; echo $x"), run=f"t{n}") as screen:
                screen.until(b"ready")
                screen.type(b"word\n")
                screen.end()
            c.call("run.forget", sandbox="a", run=f"t{n}")
        # The runtime and the keeper may close after they have answered; what is lost is lost once for each.
        until(lambda: all(now <= then for now, then in zip(counts(), first, strict=True)))
