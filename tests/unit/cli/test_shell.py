"""`dsec shell`, `attach`, `logs` and `exec -i` in a real terminal; the sandbox is this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dsec.cli.rawtty import Keys
from tests.kit.ptynode import COMMAND, SANDBOX, Place
from tests.kit.ptyuser import PtyUser

# A shell without anybody's start files, with a prompt that nothing else looks like.
SHELL = ("env", "PS1=ready> ", "ENV=", "sh", "-i")


def test_keys_that_detach() -> None:
    keys = Keys()
    assert keys.feed(b"ls\n") == b"ls\n"
    assert (keys.feed(b"a\x10"), keys.held) == (b"a", True)
    assert keys.feed(b"b") == b"\x10b"
    assert keys.feed(b"\x10\x10") == b"\x10"
    assert keys.release() == b"\x10"
    assert keys.feed(b"\x11") == b"\x11"
    assert (keys.feed(b"x\x10\x11y"), keys.detached) == (b"x", True)


def test_a_shell_has_our_size_our_keys_and_its_exit_code(place: Place) -> None:
    with place.user("shell", SANDBOX, *SHELL) as user:
        user.expect(b"ready> ")
        assert user.raw()
        user.type(b"stty size; echo $TERM\r")
        user.expect(b"30 100\r\nvt220\r\n.*ready> ")
        user.resize(41, 90)
        user.type(b"while [ \"$(stty size)\" != '41 90' ]; do sleep 0.01; done; echo resized\r")
        user.expect(b"\nresized\r\n.*ready> ")
        user.type(b"sh -c 'echo beg''un; exec sleep 600'\r")
        user.expect(b"begun")
        user.type(b"\x03")  # ^C is the program's
        user.expect(b"ready> ")
        user.type(b"cat\r")
        user.type(b"typed\r")
        user.expect(b"typed\r\ntyped\r\n")
        user.type(b"\x04")  # ^D too
        user.expect(b"ready> ")
        user.type(b"exit 7\r")
        assert user.ends() == 7
        assert user.as_before()


def test_a_job_is_stopped_inside(place: Place) -> None:
    with place.user("shell", SANDBOX, "env", "PS1=ready> ", "bash", "--norc", "-i") as user:
        user.expect(b"ready> ")
        user.type(b"sh -c 'echo beg''un; exec sleep 600'\r")
        user.expect(b"begun")
        user.type(b"\x1a")
        user.expect(b"Stopped.*ready> ")
        user.type(b"kill -9 %1; exec sh -c 'exit 3'\r")
        assert user.ends() == 3


def test_what_comes_raw_is_not_escaped(place: Place) -> None:
    with place.user("shell", SANDBOX, r"printf '\033[31mred\033[0m\007'") as user:
        user.expect(rb"\x1b\[31mred\x1b\[0m\x07")
        assert user.ends() == 0


def test_detached_and_attached_again(place: Place) -> None:
    with place.user("shell", SANDBOX, *SHELL) as user:
        user.expect(b"ready> ")
        user.type(b"x=kept; echo before\r")
        user.expect(b"\nbefore\r\n.*ready> ")
        user.type(b"\x10\x11")
        user.expect(rb"detached; `dsec attach \S+ p-1` returns")
        assert (user.ends(), user.as_before()) == (0, True)
    with place.user("attach", SANDBOX, "p-1") as user:
        user.expect(b"before\r\n.*ready> ")  # the screen as it was
        user.type(b"echo $x; stty size\r")
        user.expect(b"\nkept\r\n30 100\r\n")
        user.type(b"\x10")  # alone: the program's, after a moment
        user.expect(rb"\^P")
        user.type(b"\x15exit 4\r")
        assert user.ends() == 4
        assert user.as_before()


def test_two_terminals_of_one_program(place: Place) -> None:
    with place.user("shell", SANDBOX, *SHELL) as first:
        first.expect(b"ready> ")
        first.type(b"echo one\r")
        first.expect(b"\none\r\n.*ready> ")
        with place.user("attach", SANDBOX, "p-1") as second:
            second.expect(b"one\r\n.*ready> ")
            second.type(b"echo two\r")
            second.expect(b"\ntwo\r\n.*ready> ")
            first.expect(b"\ntwo\r\n.*ready> ")
            second.type(b"exit 5\r")
            assert (first.ends(), second.ends()) == (5, 5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_the_terminal_is_given_back_when_we_are_killed(place: Place, number: signal.Signals) -> None:
    with place.user("shell", SANDBOX, *SHELL) as user:
        user.expect(b"ready> ")
        assert user.raw()
        user.signal(number)
        assert user.ends() == 128 + number
        assert user.as_before()


def test_a_window_that_is_closed_hangs_up_the_shell(place: Place) -> None:
    with place.user("shell", SANDBOX, "sleep 600") as user:
        user.until_raw()
        user.signal(signal.SIGHUP)
        user.ends()
        program = place.node.programs["p-1"]
        with program.changed:
            program.changed.wait_for(lambda: program.result is not None)
        assert program.result is not None and program.result["signal"] == signal.SIGHUP


def test_the_terminal_is_given_back_when_the_command_breaks(place: Place) -> None:
    broken = (
        "import sys, dsec.cli.talk as t\n"
        "def bad(self): raise RuntimeError('broken')\n"
        "t.Talk._turn = bad\n"
        "from dsec.cli.main import main; sys.exit(main())"
    )
    plain = place.env | {"PYTHON_COLORS": "0"}  # since Python 3.13 a traceback is coloured
    with PtyUser([sys.executable, "-c", broken, "shell", SANDBOX, *SHELL], plain) as user:
        user.expect(b"RuntimeError: broken")
        assert user.ends() == 1
        assert user.as_before()


def test_stopped_and_continued_from_outside(place: Place) -> None:
    with place.user("shell", SANDBOX, *SHELL) as user:
        user.expect(b"ready> ")
        user.signal(signal.SIGTSTP)
        _, status = os.waitpid(user.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert user.as_before()
        user.signal(signal.SIGCONT)
        user.until_raw()
        user.type(b"exit 6\r")
        assert user.ends() == 6


def test_a_node_that_goes_and_comes_back(place: Place) -> None:
    with place.user("shell", SANDBOX, *SHELL) as user:
        user.expect(b"ready> ")
        place.server.away()
        user.expect(b"connection lost; making it again")
        user.type(b"echo while away\r")
        place.server.back()
        user.expect(b"connected again")
        user.expect(b"\nwhile away\r\n.*ready> ")
        user.type(b"exit 8\r")
        assert user.ends() == 8
        assert user.as_before()


def test_a_node_that_is_away_can_be_left(place: Place) -> None:
    with place.user("shell", SANDBOX, *SHELL) as user:
        user.expect(b"ready> ")
        place.server.away()
        user.expect(b"connection lost")
        user.type(b"\x10\x11")
        user.expect(b"detached")
        assert (user.ends(), user.as_before()) == (0, True)
        place.server.back()


def test_without_a_terminal_it_is_refused(place: Place) -> None:
    for words in (["shell", SANDBOX], ["exec", "-it", SANDBOX, "sh"]):
        done = place.dsec(*words)
        assert (done.returncode, done.stdout) == (125, b"")
        assert b"no terminal" in done.stderr and b"`dsec exec -i" in done.stderr
    assert not place.node.specs


def test_a_missing_program_or_sandbox_leaves_the_terminal_alone(place: Place) -> None:
    with place.user("attach", SANDBOX, "p-9") as user:
        user.expect(b"no such program")
        assert (user.ends(), user.as_before()) == (125, True)


def test_exec_i_streams_any_length_and_keeps_the_streams_apart(place: Place) -> None:
    data = os.urandom(1 << 20) * 6
    done = place.dsec("exec", "-i", SANDBOX, "cat; echo end >&2; exit 3", stdin=data)
    assert (done.returncode, done.stderr) == (3, b"end\n")
    assert done.stdout == data


def test_exec_i_hands_on_lines_as_they_come(place: Place) -> None:
    with subprocess.Popen(
        [*COMMAND, "exec", "-i", SANDBOX, "cat"], env=place.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as command:
        assert command.stdin is not None and command.stdout is not None
        for line in (b"one\n", b"two\n"):
            command.stdin.write(line)
            command.stdin.flush()
            assert command.stdout.readline() == line
        command.stdin.close()
        assert command.wait() == 0


def test_exec_i_that_is_killed_kills_the_program(place: Place) -> None:
    with subprocess.Popen(
        [*COMMAND, "exec", "-i", SANDBOX, "echo began; exec sleep 600"],
        env=place.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"began\n"
        command.send_signal(signal.SIGTERM)
        assert command.wait() == 143
    program = place.node.programs["p-1"]
    with program.changed:
        assert program.changed.wait_for(lambda: program.result is not None, 60)


def test_exec_i_of_a_program_that_reads_nothing_ends_with_it(place: Place) -> None:
    done = place.dsec("exec", "-i", SANDBOX, "exec 0<&-; echo done", stdin=bytes(3 << 20))
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_exec_t_is_a_terminal(place: Place) -> None:
    with place.user("exec", "-it", "-e", "A=b", SANDBOX, "tty >/dev/null && echo on a terminal $A") as user:
        user.expect(b"on a terminal b")
        assert user.ends() == 0


def test_attach_to_a_program_without_a_terminal(place: Place) -> None:
    with subprocess.Popen(
        [*COMMAND, "exec", "-i", SANDBOX, "echo first; cat; exit 2"],
        env=place.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as command:
        assert command.stdin is not None and command.stdout is not None
        assert command.stdout.readline() == b"first\n"
        done = place.dsec("attach", SANDBOX, stdin=b"second\n")  # the newest
        assert (done.returncode, done.stdout) == (2, b"second\n")
        assert command.stdout.read() == b"second\n"
        assert command.wait() == 2


def test_logs_are_what_was_written_and_made_safe_for_a_terminal(place: Place) -> None:
    assert place.dsec("logs", SANDBOX).returncode == 1
    assert place.dsec("exec", "-i", SANDBOX, r"printf 'out\033]0;x\007\n'; echo err >&2").returncode == 0
    done = place.dsec("logs", SANDBOX)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"out\x1b]0;x\x07\n", b"err\n")
    with place.user("logs", "-f", SANDBOX, "p-1") as user:
        user.expect(rb"out\\x1b\]0;x\\x07")
        assert user.ends() == 0


def test_exec_i_whose_output_nobody_takes_can_be_ended(place: Place) -> None:
    with subprocess.Popen(
        [*COMMAND, "exec", "-i", SANDBOX, "exec cat /dev/zero"],
        env=place.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        assert command.stdout is not None and command.stderr is not None
        first = os.read(command.stdout.fileno(), 1)
        assert first == b"\0", command.stderr.read()
        program = place.node.programs["p-1"]
        with program.changed:
            assert program.changed.wait_for(lambda: len(program.out[1]) > 1 << 22, 60)
        command.send_signal(signal.SIGTERM)
        assert command.wait() == 143
        assert command.stderr.read() == b""
