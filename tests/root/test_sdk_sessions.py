"""Sessions in real containers: what a shell keeps, what it answers, what ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

import dsec
from tests.kit.home import Home, standing
from tests.kit.rtclient import Client


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with standing() as made:
        yield made


@pytest.fixture
def sbx(home: Home) -> Iterator[dsec.Sandbox]:
    with home.client() as client, client.create(disk_mib=64) as made:
        yield made


@pytest.fixture(params=["/bin/bash", "/bin/dash"])
def sh(request: pytest.FixtureRequest, sbx: dsec.Sandbox) -> Iterator[dsec.Session]:
    with sbx.session(shell=request.param) as made:
        yield made


def out(sh: dsec.Session, command: str) -> str:
    return sh.run(command, check=True).stdout


def test_directory_variables_and_functions_last(sh: dsec.Session) -> None:
    sh.run("cd /tmp; export A=1; B='two words'; f() { echo \"f $1\"; }", check=True)
    assert out(sh, "pwd; echo $A $B; f x") == "/tmp\n1 two words\nf x\n"
    assert out(sh, 'sh -c "echo $A"') == "1\n"


def test_exit_codes_and_streams_are_the_commands_own(sh: dsec.Session) -> None:
    for code in (0, 1, 3, 130, 255):
        result = sh.run(f"echo out {code}; echo err {code} >&2; (exit {code})")
        assert (result.exit_code, result.cause) == (code, "exited")
        assert (result.stdout, result.stderr) == (f"out {code}\n", f"err {code}\n")
    assert sh.run("false").exit_code == 1
    assert out(sh, "echo $?") == "1\n"
    assert out(sh, "printf 'no newline'") == "no newline"
    assert out(sh, "printf '\\n\\n  x  \\n\\n'") == "\n\n  x  \n\n"


def test_texts_of_many_lines(sh: dsec.Session) -> None:
    assert out(sh, "cat <<E\n$((1+1))\n'quoted'\nE") == "2\n'quoted'\n"
    assert out(sh, "for i in 1 2; do\n  echo $i\ndone # end") == "1\n2\n"
    assert out(sh, "echo 'it'\\''s' \"$(echo deep)\" \\") == "it's deep\n"
    assert sh.run("if").exit_code == 2
    assert sh.run("echo 'open").exit_code == 2
    assert out(sh, "echo alive") == "alive\n"
    assert sh.run(["printf", "%s|", "a b", "$HOME", "it's"], check=True).stdout == "a b|$HOME|it's|"


def test_a_command_reads_what_it_is_given_and_nothing_of_the_session(sh: dsec.Session) -> None:
    assert out(sh, "cat; read x; echo $?") == "1\n"
    result = sh.run("cat | wc -c; cat", stdin=b"\0\xff" * 100_000)
    assert result.stdout == "200000\n"
    assert out(sh, "echo after; ls -A /dev/shm") == "after\n"


def test_large_outputs_are_of_the_command_that_wrote_them(sh: dsec.Session) -> None:
    size = 10 << 20
    result = sh.run(f"head -c {size} /dev/zero >&2; head -c {size} /dev/zero; echo end")
    assert (result.out.total, result.err.total) == (size + 4, size)
    assert result.stdout_bytes.endswith(b"end\n")
    assert result.limits_hit == ("output",)
    assert out(sh, "echo next") == "next\n"


def test_a_long_text(sh: dsec.Session) -> None:
    text = "x='" + "a" * (1 << 20) + "'; echo ${#x}"
    assert out(sh, text) == f"{1 << 20}\n"
    assert out(sh, "echo ${#x}") == f"{1 << 20}\n"


def test_output_comes_as_it_is_written(sbx: dsec.Sandbox, sh: dsec.Session) -> None:
    seen: list[tuple[int, bytes]] = []

    def on_output(stream: int, data: bytes) -> None:
        seen.append((stream, data))
        sbx.files.write("/tmp/go", b"")  # it waits for this

    result = sh.run("echo one; until [ -e /tmp/go ]; do sleep 0.01; done; echo two >&2", on_output=on_output)
    assert seen == [(1, b"one\n"), (2, b"two\n")]
    assert result.ok


def test_a_timeout_ends_the_command_and_the_session_goes_on(sbx: dsec.Sandbox, sh: dsec.Session) -> None:
    sh.run("X=kept; sleep 4321 & echo $!", check=True)
    result = sh.run("setsid sleep 1234 & trap '' TERM; sleep 1234", timeout_s=0.3)
    assert (result.cause, result.exit_code, result.ok) == ("timeout", 137, False)
    assert out(sh, "echo $X") == "kept\n"
    alive = [" ".join(process.argv) for process in sbx.processes()]
    assert "sleep 4321" in alive
    assert "sleep 1234" not in alive


def test_a_shell_that_is_busy_itself_ends_with_its_timeout(sh: dsec.Session) -> None:
    result = sh.run("while :; do :; done", timeout_s=0.2)
    assert (result.cause, result.exit_code) == ("timeout", 137)
    with pytest.raises(dsec.InvalidState):
        sh.run("echo on")


@pytest.mark.parametrize(
    ("before", "last", "code"),
    [("true", "exit 7", 7), ("true", "exec sh -c 'exit 9'", 9), ("set -e", "false", 1), ("true", "kill -9 $$", 137)],
)
def test_the_end_of_the_shell_is_the_end_of_its_command(sh: dsec.Session, before: str, last: str, code: int) -> None:
    sh.run(before, check=True)
    result = sh.run(f"echo last; {last}")
    assert (result.exit_code, result.stdout) == (code, "last\n")
    with pytest.raises(dsec.InvalidState):
        sh.run("echo on")
    assert sh.info().state == "ended"


def test_many_callers_are_served_one_after_the_other(sh: dsec.Session) -> None:
    results: list[str] = []

    def call(number: int) -> None:
        results.append(out(sh, f"echo begin {number}; sleep 0.05; echo end {number}"))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(16)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert sorted(results) == sorted(f"begin {n}\nend {n}\n" for n in range(16))


def test_the_runtime_dies_and_the_commands_go_on(home: Home, sbx: dsec.Sandbox, sh: dsec.Session) -> None:
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.7):
            with contextlib.suppress(OSError), Client(home.place.run_dir / "runtime.sock") as runtime:
                os.kill(runtime.hello["pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    unknown = set()
    try:
        for number in range(20):
            try:
                result = sh.run(
                    f"sleep 0.1; echo {number} >> /tmp/log; seq {number}; echo {number} >&2; (exit {number})"
                )
            except dsec.Unknown:  # typed, and no wrong answer
                unknown.add(number)
                continue
            assert (result.exit_code, result.cause) == (number, "exited")
            assert result.stdout.split() == [str(n + 1) for n in range(number)]
            assert result.stderr == f"{number}\n"
    finally:
        over.set()
        killer.join()
    ran = list(map(int, out(sh, "cat /tmp/log").split()))
    assert len(ran) == len(set(ran)), "a command ran twice"
    assert set(range(20)) - unknown <= set(ran)
    assert len(unknown) < 10


def test_a_timeout_holds_over_a_death_of_the_agent(home: Home, sbx: dsec.Sandbox, sh: dsec.Session) -> None:
    result: list[dsec.RunResult] = []
    caller = threading.Thread(target=lambda: result.append(sh.run("cat; sleep 1000", stdin=b"given", timeout_s=4)))
    caller.start()
    time.sleep(1)
    os.kill(home.agent(), signal.SIGKILL)
    home.dsec("up")
    caller.join(60)
    assert [(r.cause, r.stdout) for r in result] == [("timeout", "given")]
    assert out(sh, "ls -A /dev/shm") == ""


def test_what_was_answered_before_sets_off_no_trap(sbx: dsec.Sandbox) -> None:
    with sbx.session(shell="/bin/bash") as sh:
        assert sh.run("trap 'exit 9' ERR; (exit 3) || false && :").exit_code == 1
        assert out(sh, "echo $?") == "1\n"


def test_an_end_is_found_whatever_is_written_where_it_is_told(sbx: dsec.Sandbox) -> None:
    with sbx.session() as sh:
        assert out(sh, "printf '7 7\\nx' > /proc/$$/fd/3; echo on") == "on\n"
        assert out(sh, "echo next") == "next\n"


def test_its_end_ends_all_it_has_begun(sbx: dsec.Sandbox) -> None:
    with sbx.session() as sh:
        sh.run("setsid sleep 5678 & (trap '' TERM; sleep 6789) &", check=True)
    assert not [process for process in sbx.processes() if "sleep" in process.argv]


def test_a_key_gives_a_command_once(sh: dsec.Session) -> None:
    first = sh.run("echo x >> /tmp/once; wc -l < /tmp/once", key="once")
    again = sh.run("echo x >> /tmp/once; wc -l < /tmp/once", key="once")
    assert (first.stdout, again.stdout, again.step) == ("1\n", "1\n", first.step)
    with pytest.raises(dsec.Conflict):
        sh.run("echo y", key="once")


def test_the_agent_dies_and_the_command_goes_on(home: Home, sbx: dsec.Sandbox, sh: dsec.Session) -> None:
    result: list[dsec.RunResult] = []
    sh.run("X=kept", check=True)
    caller = threading.Thread(target=lambda: result.append(sh.run("echo begun; sleep 2; echo ended")))
    caller.start()
    time.sleep(0.5)
    os.kill(home.agent(), signal.SIGKILL)
    home.dsec("up")
    caller.join(60)
    assert [(r.stdout, r.exit_code) for r in result] == [("begun\nended\n", 0)]
    assert out(sh, "echo $X") == "kept\n"


def test_what_cannot_be_a_session_is_refused(sbx: dsec.Sandbox) -> None:
    with pytest.raises(dsec.ProgramNotStarted):
        sbx.session(shell="/none/such")
    with pytest.raises(dsec.ProgramNotStarted):
        sbx.session(cwd="/none/such")
    with sbx.session() as sh, pytest.raises(dsec.InvalidSpec):
        sh.run("echo \0")
    program = sbx.spawn(["sleep", "1000"])
    with pytest.raises(dsec.NotFound):
        sbx.get_session(program.id).run("echo")
