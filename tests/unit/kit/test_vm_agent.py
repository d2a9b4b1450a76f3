"""The guest's agent and the host's end of its channel, joined by a pair of sockets instead of a guest."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.vm import agent
from tests.kit.vm.channel import Channel, GuestError, GuestTimeout

# The agent as the guest runs it, with a socket in place of the port.
SERVE = "import runpy, sys; runpy.run_path(sys.argv[1])['Agent'](int(sys.argv[2])).serve()"


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen()
        accepted: list[socket.socket] = []
        accepting = threading.Thread(target=lambda: accepted.append(listening.accept()[0]))
        accepting.start()
        made = Channel(path)
        accepting.join()
    with accepted[0] as port:
        port.setblocking(False)
        fd = port.fileno()
        argv = [sys.executable, "-c", SERVE, agent.__file__, str(fd)]
        server = subprocess.Popen(argv, pass_fds=[fd])
    try:
        yield made
    finally:
        made.close()
        server.kill()
        server.wait()


def test_hello_names_the_kernel(channel: Channel) -> None:
    assert channel.wait_hello(30)["kernel"]


@pytest.mark.parametrize("code", [0, 1, 255])
def test_exit_code(channel: Channel, code: int) -> None:
    assert channel.run(f"exit {code}").exit_code == code


def test_signal(channel: Channel) -> None:
    assert channel.run("kill -KILL $$").exit_code == 137


def test_streams_are_whole_and_apart(channel: Channel) -> None:
    data = bytes(range(256)) * 8192
    done = channel.run("cat; printf end >&2", stdin=data)
    assert (done.stdout, done.stderr) == (data, b"end")


def test_input_a_program_does_not_read_is_no_failure(channel: Channel) -> None:
    assert channel.run("exec 0<&-; exit 3", stdin=b"x" * (1 << 20)).exit_code == 3


def test_programs_run_at_once(channel: Channel, tmp_path: Path) -> None:
    """The first waits for what the second makes: one after the other would never end."""
    gate = tmp_path / "gate"
    waiting = f"until [ -e {gate} ]; do sleep 0.05; done; echo met"
    results: list[bytes] = []
    thread = threading.Thread(target=lambda: results.append(channel.run(waiting).stdout))
    thread.start()
    assert channel.run(["touch", str(gate)]).ok
    thread.join()
    assert results == [b"met\n"]


def test_late_child_does_not_hold_the_end(channel: Channel) -> None:
    assert channel.run("sleep 60 & echo started").stdout == b"started\n"


def test_what_cannot_be_started_is_an_error_of_its_own(channel: Channel) -> None:
    with pytest.raises(GuestError, match="No such file"):
        channel.run(["/nowhere"])


def test_timeout_kills_children_too_and_keeps_what_was_said(channel: Channel) -> None:
    with pytest.raises(GuestTimeout) as caught:
        channel.run("echo group $$; sleep 1000; true", timeout_s=1)
    match = re.search(r"^group (\d+)$", str(caught.value), re.M)
    assert match
    # Killed by now, but perhaps not gone: what still lives would be found again and again.
    assert channel.run(f"while kill -0 -- -{match[1]} 2>/dev/null; do sleep 0.05; done", timeout_s=30).ok


def test_a_vanished_guest_is_said_so(channel: Channel) -> None:
    channel.wait_hello(30)
    with pytest.raises(GuestError, match="gone"):
        channel.run("kill -9 $PPID; sleep 60", timeout_s=30)
