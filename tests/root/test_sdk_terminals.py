"""Terminals over the SDK and the dsec command, in real containers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import dsec
from dsec.model.errors import Exhausted, InvalidSpec, InvalidState
from tests.kit.home import COMMAND, Home
from tests.kit.ptyuser import PtyUser

TAKE_ALL = """
import os, sys
held = []
try:
    while True:
        held.append(os.openpty())
except OSError:
    print("all taken", flush=True)
sys.stdin.read()
"""


class Shown:
    """What a program on a terminal shows, as it comes."""

    def __init__(self, process: dsec.Process) -> None:
        self._pieces = iter(process.stdout)
        self.text = b""

    def until(self, text: bytes) -> bytes:
        while text not in self.text:
            self.text += next(self._pieces)
        seen, found, self.text = self.text.partition(text)
        return seen + found


def test_a_program_has_a_terminal_of_the_size_asked_for(sbx: dsec.Sandbox) -> None:
    with sbx.spawn("stty size; tty; echo err >&2; exit 3", tty=(30, 100)) as process:
        result = process.wait()
    lines = result.stdout.split("\r\n")
    assert (lines[0], lines[2], result.stderr) == ("30 100", "err", "")
    assert lines[1].startswith("/dev/pts/")
    assert (result.exit_code, process.info().tty) == (3, True)
    process.resize(1, 1)  # nothing happens after its end


def test_a_program_knows_what_it_draws_for(sbx: dsec.Sandbox) -> None:
    ask = "echo $TERM; tput cols 2>&1; exit"
    assert sbx.spawn(ask, tty=(30, 100)).wait().stdout.split() == ["xterm-256color", "100"]
    assert sbx.spawn(ask, tty=True, env={"TERM": "vt220"}).wait().stdout.split() == ["vt220", "80"]
    assert sbx.run("echo [$TERM]").stdout == "[]\n", "without a terminal there is nothing to draw for"


def test_a_shell_is_talked_to_and_told_of_another_size(sbx: dsec.Sandbox) -> None:
    with sbx.spawn(["bash", "--norc", "-i"], tty=(24, 80), env={"PS1": "ready> ", "TERM": "vt220"}) as shell:
        screen = Shown(shell)
        screen.until(b"ready> ")
        shell.stdin.write("echo $COLUMNS $((6 * 7))\n")
        screen.until(b"80 42\r\n")
        shell.resize(50, 132)
        shell.stdin.write("echo $COLUMNS $LINES; stty size\n")
        screen.until(b"132 50\r\n50 132\r\n")
        shell.stdin.write("sh -c 'echo beg''un; exec sleep 600'\n")
        screen.until(b"begun\r\n")
        shell.stdin.write(b"\x1a")
        screen.until(b"Stopped")
        shell.stdin.write("kill -9 %1; exec sh -c 'exit 7'\n")
        assert shell.wait().exit_code == 7


def test_much_output_is_whole(sbx: dsec.Sandbox) -> None:
    with sbx.spawn("seq 1 200000; exit 3", tty=True) as process:
        got = b"".join(process.stdout)
        assert process.wait().exit_code == 3
    assert got == b"".join(b"%d\r\n" % n for n in range(1, 200_001))


def test_what_a_terminal_has_not(sbx: dsec.Sandbox) -> None:
    with sbx.spawn("cat", tty=True) as process:
        with pytest.raises(InvalidSpec) as end:
            process.stdin.close()
        assert end.value.detail["field"] == "eof"
        process.stdin.write(b"\x04")
        assert process.wait().exit_code == 0
    with pytest.raises(InvalidSpec):
        sbx.spawn("true", tty=(0, 80))
    with sbx.spawn("true") as plain, pytest.raises(InvalidState):
        plain.resize(24, 80)


def test_all_terminals_taken(sbx: dsec.Sandbox) -> None:
    if sbx.run("command -v python3").exit_code:
        pytest.skip("the layer has no python3")
    with sbx.spawn(["python3", "-c", TAKE_ALL], stdin=True) as holder:
        Shown(holder).until(b"all taken\n")
        with pytest.raises(Exhausted) as full:
            sbx.spawn("true", tty=True)
        assert full.value.detail["resource"] == "terminals"
        holder.stdin.close()
        holder.wait()
    assert sbx.spawn("true", tty=True).wait().exit_code == 0


def test_the_agent_and_the_runtime_die_under_a_shell(home: Home, sbx: dsec.Sandbox) -> None:
    with sbx.spawn(["sh", "-i"], tty=(24, 80), env={"PS1": "ready> "}) as shell:
        screen = Shown(shell)
        screen.until(b"ready> ")
        shell.stdin.write("x=kept; echo on$((1 + 1))\n")
        screen.until(b"\r\non2\r\n")
        runtime = children(int((home.place.run_dir / "keeper.pid").read_text().split()[0]))
        os.kill(runtime, signal.SIGKILL)
        shell.stdin.write("echo $x; stty size\n")
        screen.until(b"\r\nkept\r\n24 80\r\n")
        os.kill(home.agent(), signal.SIGKILL)
        home.dsec("up")
        shell.resize(10, 20)
        shell.stdin.write("stty size; exit 5\n")
        screen.until(b"\r\n10 20\r\n")
        assert shell.wait().exit_code == 5


def children(keeper: int) -> int:
    """The runtime: the keeper's child that serves."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for pid in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
            if b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    raise AssertionError("no runtime")


def test_the_command_joins_two_terminals(home: Home, sbx: dsec.Sandbox) -> None:
    env = {**home.env, "TERM": "vt220"}
    shell = ["env", "PS1=ready> ", "sh", "-i"]
    with PtyUser([*COMMAND, "shell", sbx.id, *shell], env) as user:
        user.expect(b"ready> ")
        user.type(b"stty size; echo $TERM\r")
        user.expect(b"30 100\r\nvt220\r\n.*ready> ")
        user.resize(41, 90)
        user.type(b"while [ \"$(stty size)\" != '41 90' ]; do sleep 0.01; done; echo resized\r")
        user.expect(b"\nresized\r\n.*ready> ")
        user.type(b"sh -c 'echo beg''un; exec sleep 600'\r")
        user.expect(b"begun")
        user.type(b"\x03")
        user.expect(b"ready> ")
        user.type(b"x=kept\r")
        user.expect(b"ready> ")
        user.type(b"\x10\x11")
        program = user.expect(rb"detached; `dsec attach \S+ (\S+)` returns").group(1).decode()
        assert (user.ends(), user.as_before()) == (0, True)
    with PtyUser([*COMMAND, "attach", sbx.id, program], env) as user:
        user.expect(b"ready> ")
        user.type(b"echo $x\r")
        user.expect(b"\nkept\r\n")
        user.type(b"exit 7\r")
        assert (user.ends(), user.as_before()) == (7, True)


def test_who_only_looks_at_a_terminal_sends_nothing(home: Home, sbx: dsec.Sandbox) -> None:
    program = sbx.spawn("read go; echo got $go; read end; echo got $end", tty=True)
    with PtyUser([*COMMAND, "attach", "--no-stdin", sbx.id, program.id], home.env) as user:
        program.stdin.write("first\n")
        user.expect(b"got first")
        user.type(b"typed\r")
        user.expect(b"typed")  # shown by its own terminal
        user.type(b"\x03")
        assert user.ends() == 130
    assert b"typed" not in program.output()
    program.stdin.write("second\n")
    assert program.wait(60).stdout.endswith("got second\r\n")


def test_exec_with_a_terminal(home: Home, sbx: dsec.Sandbox) -> None:
    with PtyUser([*COMMAND, "exec", "-t", sbx.id, "stty size; exit 4"], home.env) as user:
        user.expect(b"30 100\r\n")
        assert user.ends() == 4


def test_a_sandbox_for_one_program_in_our_terminal(home: Home) -> None:
    with PtyUser([*COMMAND, "run", "-it", "--name", "one-program"], {**home.env, "TERM": "vt220"}) as user:
        user.expect(rb"[#$] ")
        with home.client() as client:
            assert client.get("one-program").state == "running"
            user.type(b"test -t 0 && exit 6\r")
            assert (user.ends(), user.as_before()) == (6, True)
            with pytest.raises(dsec.SandboxLost):
                client.get("one-program").run("true")


def test_a_login_shell_as_it_comes(home: Home, sbx: dsec.Sandbox) -> None:
    with PtyUser([*COMMAND, "shell", sbx.id], {**home.env, "TERM": "vt220"}) as user:
        user.expect(rb"[#$] ")
        user.type(b"echo $0 $((6 * 7))\r")
        user.expect(rb"\r-?\S*sh 42\r\n")
        user.type(b"exit 9\r")
        assert user.ends() == 9
