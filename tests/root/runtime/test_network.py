"""Steering of sandboxes' namespaces, and the process that serves them under the keeper."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.netcontrol import Control, table
from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtnode import BINARY, create, make_node, needs, sh


def _cannot() -> str:
    if not BINARY or os.geteuid() != 0:
        return "not run"
    done = subprocess.run([BINARY, "net", "probe"], stderr=subprocess.PIPE, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


pytestmark = [*needs, pytest.mark.skipif(bool(_cannot()), reason=_cannot())]
# In a namespace that is not steered there is no way at all; in one that is and denies, a connection is reset.
PLACES = "cat /proc/net/fib_trie /proc/net/ipv6_route"
TO = "20.0.0.1"
PORT = 80


def run(c: Client, box: str, script: str) -> str:
    name = f"r{os.urandom(4).hex()}"
    done = c.call("run.start", **run_plan(box, name, sh(script)))
    c.call("run.forget", sandbox=box, run=name)
    return bytes(done["streams"][0]["head"]).decode()


def namespace(c: Client, box: str) -> int:
    """Which network namespace it has."""
    init = c.call("sandbox.get", id=box)["init_pid"]
    return Path(f"/proc/{init}/ns/net").stat().st_ino


def tries(c: Client, box: str, to: str = TO) -> str:
    """What comes of a connection."""
    return run(c, box, f"nc -w 5 {to} {PORT} </dev/null 2>&1; echo end $?")


def gone(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return " Z " in path.read_text()
    return True


def until(what: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def node() -> Iterator[Node]:
    node = make_node()
    yield node
    node.stop()


def test_the_process_is_started_when_a_sandbox_is_steered_and_ends_with_the_keeper(node: Node) -> None:
    with node.client() as c:
        assert c.call("probe")["network"]
        create(c, "a")
        assert not (node.run_dir / "net.sock").exists(), "nobody has asked for it"
        before = run(c, "a", PLACES)
        c.call("network.steer", id="a")
        assert run(c, "a", PLACES) != before
        with Control(node.run_dir) as control:
            assert control.ask("list")["sandboxes"] == ["a"]
            pid = control.pid()
            status = dict(
                line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
            )
            assert status["Uid"].split() == ["65534"] * 4
            assert (status["CapEff"], status["CapBnd"], status["Seccomp"]) == ("0" * 16, "0" * 16, "2")
            assert status["PPid"] == str(node.keeper_pid())
    node.kill_keeper()
    until(lambda: gone(Path(f"/proc/{pid}/stat")))
    node.start()


def test_it_is_closed_until_a_table_opens_it_and_when_the_process_is_dead(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        assert "unreachable" in tries(c, "a")
        c.call("network.steer", id="a")
        with Control(node.run_dir) as control:
            assert control.ask("status", sandbox="a")["status"]["connections"] == 0
            assert control.ask("set", sandbox="a", table=table())["cut"] == 0
            # It is taken and reset at once.
            assert "refused" not in tries(c, "a")
            assert control.ask("status", sandbox="a")["status"]["unmatched"] == 1
            first = control.pid()
            os.kill(first, signal.SIGKILL)
        until(lambda: gone(Path(f"/proc/{first}/stat")))
        assert "refused" in tries(c, "a")
        # The keeper starts another one, which knows of nothing.
        with Control(node.run_dir) as control:
            assert control.pid() != first
            assert control.ask("list")["sandboxes"] == []
            assert "refused" in tries(c, "a")
            c.call("network.steer", id="a")
            assert control.ask("list")["sandboxes"] == ["a"]


def test_it_is_started_for_who_only_wants_to_talk_to_it(node: Node) -> None:
    with node.client() as c:
        c.call("network.start")
        with Control(node.run_dir) as control:
            assert control.ask("list")["sandboxes"] == []
            pid = control.pid()
            c.call("network.start")
            assert control.pid() == pid and control.ask("hello", protocol=1)["protocol"] == 1


def test_while_it_hangs_nothing_else_does(node: Node) -> None:
    names = [f"n{at}" for at in range(10)]  # more than there are threads for everything else
    with node.client() as c, node.client() as other:
        for name in names:
            create(c, name)
        c.call("network.start")
        with Control(node.run_dir) as control:
            pid = control.pid()
        os.kill(pid, signal.SIGSTOP)
        waiting = {c.send("network.steer", {"id": name}) for name in names}
        create(other, "b")
        assert run(other, "b", "echo it works") == "it works\n"
        assert not select.select([c.sock], [], [], 0)[0], "they wait for one that hangs"
        os.kill(pid, signal.SIGKILL)
        while waiting:
            frame = c.recv()
            assert "ok" in frame, frame
            waiting.remove(frame["id"])
        with Control(node.run_dir) as control:
            assert sorted(control.ask("list")["sandboxes"]) == names


def test_it_outlives_the_runtime(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        c.call("network.steer", id="a")
    with Control(node.run_dir) as control:
        pid = control.pid()
        node.kill_runtime()
        with node.client() as c:
            assert control.ask("list")["sandboxes"] == ["a"]
            create(c, "b")
            c.call("network.steer", id="b")
            assert sorted(control.ask("list")["sandboxes"]) == ["a", "b"]
            assert control.pid() == pid


def test_a_namespace_that_was_steered_serves_again_with_nothing_of_it(node: Node) -> None:
    with node.client() as c:
        create(c, "plain")
        pristine = run(c, "plain", PLACES)
        number = 0
        for name in ("a", "b", "c"):
            create(c, name)
            number = namespace(c, name)
            c.call("network.steer", id=name)
            with Control(node.run_dir) as control:
                control.ask("remove", sandbox=name)
            c.call("sandbox.stop", id=name)
        seen = []
        for at in range(48):
            create(c, f"n{at}")
            seen.append(namespace(c, f"n{at}"))
            assert run(c, f"n{at}", PLACES) == pristine
            assert "unreachable" in tries(c, f"n{at}")
        assert number in seen, "it was not used again"


def test_a_namespace_whose_routes_stay_does_not_serve_again() -> None:
    node = make_node(env={"DSEC_NATIVE_DISABLE": "netns.clean"})
    try:
        with node.client() as c:
            create(c, "a")
            held = os.open(f"/proc/{c.call('sandbox.get', id='a')['init_pid']}/ns/net", os.O_RDONLY)
            number = os.fstat(held).st_ino
            c.call("network.steer", id="a")
            with Control(node.run_dir) as control:
                control.ask("remove", sandbox="a")
            c.call("sandbox.stop", id="a")
            numbers = []
            for at in range(48):
                create(c, f"n{at}")
                numbers.append(namespace(c, f"n{at}"))
            os.close(held)
            assert number not in numbers
    finally:
        node.stop()


def test_what_cannot_be_steered_is_refused(node: Node) -> None:
    with node.client() as c:
        with pytest.raises(RuntimeFault, match="not_found"):
            c.call("network.steer", id="none")
        create(c, "a")
        c.call("sandbox.stop", id="a")
        with pytest.raises(RuntimeFault, match="gone"):
            c.call("network.steer", id="a")


@pytest.mark.parametrize("name", ["network.steered", "network.added"])
@pytest.mark.parametrize("action", ["error", "kill"])
def test_wherever_it_fails_it_stays_closed_and_can_be_done_again(name: str, action: str) -> None:
    node = make_node(env={"DSEC_NATIVE_FAILPOINTS": f"{name}:1:{action}"})
    try:
        with node.client() as c:
            create(c, "a")
            with pytest.raises((RuntimeFault, ConnectionError)):
                c.call("network.steer", id="a")
        with node.client() as c:
            if name == "network.added":
                with Control(node.run_dir) as control:
                    assert control.ask("list")["sandboxes"] == ["a"]
                    control.ask("remove", sandbox="a")
            assert "refused" in tries(c, "a")
            if action == "error":  # one that is killed is killed at this point in each of its lives
                c.call("network.steer", id="a")
                assert "refused" not in tries(c, "a")
            c.call("sandbox.stop", id="a")
    finally:
        node.stop()
