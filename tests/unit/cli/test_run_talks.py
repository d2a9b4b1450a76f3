"""`dsec run -it` and `dsec run -i`: the sandbox is made for one program that is talked to, and ends with it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.kit.ptynode import SANDBOX, Place

SHELL = ("env", "PS1=ready> ", "ENV=", "sh", "-i")
STOPPED = [f"/v1/sandboxes/{SANDBOX}?grace_s=0"]


def test_a_program_in_our_terminal_and_its_sandbox_ends_with_it(place: Place) -> None:
    with place.user("run", "-it", "--base", "b:1", *SHELL) as user:
        user.expect(b"ready> ")
        assert user.raw()
        assert not place.asked("DELETE")
        user.type(b"stty size; echo $TERM\r")
        user.expect(b"30 100\r\nvt220\r\n.*ready> ")
        user.type(b"exit 7\r")
        assert (user.ends(), user.as_before()) == (7, True)
    created, *_ = place.server.requests
    assert (created.path, created.value()["base"]) == ("/v1/sandboxes", "b:1")
    assert place.asked("DELETE") == STOPPED


def test_without_a_program_it_is_a_login_shell(place: Place) -> None:
    with place.user("run", "-t") as user:
        user.until_raw()
        user.type(b"exit 9\r")
        assert (user.ends(), user.as_before()) == (9, True)
    assert "exec bash -l" in place.node.specs[0]["command"]
    assert place.asked("DELETE") == STOPPED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_killed_it_gives_back_the_terminal_and_stops_the_sandbox(place: Place, number: signal.Signals) -> None:
    with place.user("run", "-it", *SHELL) as user:
        user.expect(b"ready> ")
        user.signal(number)
        assert (user.ends(), user.as_before()) == (128 + number, True)
    assert place.asked("DELETE") == STOPPED


def test_what_was_left_by_its_keys_lives_on(place: Place) -> None:
    with place.user("run", "-it", *SHELL) as user:
        user.expect(b"ready> ")
        user.type(b"\x10\x11")
        user.expect(f"detached; `dsec attach {SANDBOX} p-1` returns.*`dsec stop {SANDBOX}` stops it".encode())
        assert (user.ends(), user.as_before()) == (0, True)
    assert not place.asked("DELETE")
    with place.user("attach", SANDBOX, "p-1") as user:
        user.expect(b"ready> ")
        user.type(b"exit 4\r")
        assert user.ends() == 4


def test_kept_it_is_not_stopped(place: Place) -> None:
    with place.user("run", "-it", "--keep", "exit 5") as user:
        user.expect(SANDBOX.encode())
        assert user.ends() == 5
    assert not place.asked("DELETE")


def test_input_of_any_length_comes_as_it_is(place: Place) -> None:
    data = os.urandom(1 << 20) * 6
    done = place.dsec("run", "-i", "cat; echo end >&2; exit 3", stdin=data)
    assert (done.returncode, done.stderr) == (3, b"end\n")
    assert done.stdout == data
    assert place.asked("DELETE") == STOPPED


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-it", "sh"], b"no terminal; without -t `dsec run -i` is for pipes"),
        (["-dit"], b"--detach only creates the sandbox"),
        (["-i"], b"no program"),
    ],
)
def test_refused_before_anything_is_made(place: Place, words: list[str], told: bytes) -> None:
    done = place.dsec("run", *words)
    assert (done.returncode, done.stdout) == (125, b"")
    assert told in done.stderr
    assert not place.server.requests
