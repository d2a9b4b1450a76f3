"""Sessions in real containers: what a shell keeps, what it answers, what ends it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import dsec
from dsec.backends.container.keeper import living_keeper
from tests.kit.home import Home
from tests.kit.rtclient import Client


@pytest.fixture(params=["/bin/bash", "/bin/dash"])
def sh(request: pytest.FixtureRequest, sbx: dsec.Sandbox) -> Iterator[dsec.Session]:
    old = request.param == OLD_BASH
    with sbx.session(shell="/bin/bash" if old else request.param) as made:
        if old:
            made.run("BASH_VERSION=5.0.17", check=True)
        yield made


def gone(sbx: dsec.Sandbox, program: str) -> None:
    """Wait until no process of that name is left: what is killed is still seen for a moment."""
    until = time.monotonic() + 60
    while left := [process for process in sbx.processes() if program in process.argv]:
        assert time.monotonic() < until, left


def out(sh: dsec.Session, command: str) -> str:
    return sh.run(command, check=True).stdout


def test_directory_variables_and_functions_last(sh: dsec.Session) -> None:
    sh.run("cd /tmp; export A=1; B='two words'; f() { echo \"f $1\"; }", check=True)
    assert out(sh, "pwd; echo $A $B; f x") == "/tmp\n1 two words\nf x\n"
    assert out(sh, 'sh -c "echo $A"') == "1\n"


def test_what_a_text_leaves_is_there_for_the_next(sbx: dsec.Sandbox) -> None:
    with sbx.session(shell="/bin/bash") as sh:
        sh.run("declare -A M=([a]=1); set -- x y; exec 9>/tmp/nine; alias a=b; shopt -s expand_aliases; return 3; X=1")
        assert out(sh, "echo $? ${M[a]} $1 $2 $# ${X-not}; echo nine >&9; cat /tmp/nine; alias a") == (
            "3 1 x y 2 not\nnine\nalias a='b'\n"
        )
        # However long it is, no program is given it in its environment.
        assert out(sh, "set -a; Y=1; " + "# " * 150_000 + "\nenv | grep -c '^Y=1'; echo ${_dsec-none}") == "1\nnone\n"


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/dash"])
def test_lines_are_counted_from_the_texts_first(sbx: dsec.Sandbox, shell: str) -> None:
    with sbx.session(shell=shell) as sh:
        for _ in range(2):
            said = sh.run("nosuch\n\nf() {\n  nosuch2\n}\nf; false").stderr.splitlines()
            assert [re.findall(r": (?:line )?(\d+): (?:eval: )?nosuch", line) for line in said] == [["1"], ["4"]], said
        wrong = sh.run("\necho )").stderr
        assert re.search(r"\b2: (eval: )?[Ss]yntax error", wrong) and "_dsec" not in wrong
        if shell == "/bin/bash":
            assert out(sh, "\necho $LINENO") == "2\n"
            sh.run("readonly LINENO")
            assert out(sh, "echo on") == "on\n"


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


def test_a_command_whose_input_is_gone_has_not_failed(sbx: dsec.Sandbox, sh: dsec.Session) -> None:
    sh.run("rm /dev/null", check=True)
    for _ in range(2):
        with pytest.raises(dsec.ProgramNotStarted) as caught:
            sh.run("echo x; touch /ran")
        assert caught.value.detail["field"] == "stdin"
    assert not sbx.run(["test", "-e", "/ran"]).ok
    assert sh.run("cat; echo $?; false", stdin=b"in\n").stdout == "in\n0\n"
    sbx.run(["touch", "/dev/null"], check=True)
    result = sh.run("echo $?")
    assert (result.stdout, result.stderr) == ("1\n", "")


def test_a_command_that_finds_no_descriptor_has_not_failed(sbx: dsec.Sandbox, sh: dsec.Session) -> None:
    if sh.run("echo ${BASH_VERSION+bash}").stdout != "bash\n":
        sh.run("ulimit -n 20", check=True)
        assert sh.run("touch /ran").ok, "it needs none that high"
        return
    sh.run("ulimit -Sn 40", check=True)
    for _ in range(2):
        with pytest.raises(dsec.ProgramNotStarted) as caught:
            sh.run("touch /ran; echo ran")
        assert caught.value.detail["field"] == "descriptors"
    assert not sbx.files.exists("/ran")


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


# After each what is cut there is more in its text, which must not be begun.
CUT = {
    "list": "sleep 1234; touch /ran",
    "lines": "sleep 1234\ntouch /ran\ntouch /ran",
    "loop": "until false; do sleep 1234; touch /ran; done; touch /ran",
    "busy": "while :; do :; done; touch /ran",
    "subshell": "(sleep 1234); touch /ran",
    "subshells": "for i in 1 2; do (sleep 1234; touch /ran); touch /ran; done; touch /ran",
    "pipe": "sleep 1234 | cat; touch /ran",
    "and": "sleep 1234 && touch /ran || touch /ran",
    "condition": "if sleep 1234; then touch /ran; else touch /ran; fi",
    "wait": "sleep 1234 & wait; touch /ran",
    "substitution": "x=$(sleep 1234); touch /ran",
    "group": "{ sleep 1234; touch /ran; } > /tmp/o; touch /ran",
    "eval": "eval 'sleep 1234\ntouch /ran'\ntouch /ran",
    "function": "f() { sleep 1234; touch /ran; }; f; { :; } > /ran",
    "functions": "f() { sleep 1234; touch /ran; }; g() { for i in 1 2; do f; (:) > /ran; done; touch /ran; }; "
    "until g || g; do { :; } > /ran; done; touch /ran",
    "busy function": "f() { while :; do :; done; }; f || { :; } > /ran; touch /ran",
    "word": "touch /ran$(sleep 1234)",
    "output": 'echo "$(sleep 1234)" > /ran',
    "nothing": ": > /ran$(sleep 1234)",
    "branch": "if (sleep 1234); then touch /ran; else touch /ran; fi",
    "or": "(sleep 1234) || touch /ran",
    "test": "[ $(sleep 1234) ] && touch /ran || touch /ran",
    "nested": "f() { (sleep 1234); touch /ran$(sleep 1234); }; for i in 1 2; do f; touch /ran; done; touch /ran",
    "read": "while read x; do touch /ran; done < <(sleep 1234); touch /ran",
    "source": "printf 'sleep 1234; touch /ran' > /tmp/s; . /tmp/s; touch /ran",
}


# A shell says of itself which bash it is. One before 5.1 is told its texts otherwise.
OLD_BASH = "bash before 5.1"
# A command whose substitution was cut is carried out by others than bash, which has one that others lack.
BASH_ONLY = {"word", "output", "nothing", "nested", "read"}
# And before 5.1 it begins what stands behind a subshell.
NOT_OLD = BASH_ONLY - {"read"} | {"subshells", "branch", "or"}
LEFT = {"/bin/bash": CUT.keys(), "/bin/dash": CUT.keys() - BASH_ONLY, OLD_BASH: CUT.keys() - NOT_OLD}


@pytest.mark.parametrize(
    ("sh", "kind"), [(shell, kind) for shell, kinds in LEFT.items() for kind in CUT if kind in kinds], indirect=["sh"]
)
def test_a_text_that_is_cut_is_left_and_the_session_goes_on(sbx: dsec.Sandbox, sh: dsec.Session, kind: str) -> None:
    sh.run("Y=kept", check=True)
    result = sh.run("cd /tmp; X=kept; g() { :; }; " + CUT[kind], timeout_s=0.3)
    assert (result.cause, result.exit_code, result.session_ended) == ("timeout", 137, False)
    assert out(sh, "echo $?; pwd; echo $X $Y; break") == "137\n/tmp\nkept kept\n"
    assert not sbx.run(["test", "-e", "/ran"]).ok
    assert not [process for process in sbx.processes() if "1234" in process.argv]
    again = sh.run(CUT[kind], timeout_s=0.3)
    assert (again.cause, again.stdout) == ("timeout", "")
    result = sh.run("echo out; echo err >&2; (exit 4)")
    assert (result.exit_code, result.stdout, result.stderr) == (4, "out\n", "err\n")


def test_a_first_command_that_is_cut_at_once_costs_no_session(sbx: dsec.Sandbox) -> None:
    """Until its shell minds being told to give up, it is not told: it would end."""
    for number in range(12):
        with sbx.session() as sh:
            result = sh.run(f"X={number}", timeout_s=0.001 * (1 + number % 3))
            assert (result.cause, result.session_ended) in (("timeout", False), ("exited", False))
            assert out(sh, "echo on") == "on\n"


def test_a_program_that_a_shell_has_become_leaves_nothing_when_it_is_cut(sbx: dsec.Sandbox, sh: dsec.Session) -> None:
    result = sh.run("exec sh -c 'sleep 1234; sleep 1234; touch /ran'", timeout_s=0.3)
    assert (result.cause, result.session_ended) == ("timeout", True)
    assert not [process for process in sbx.processes() if "1234" in process.argv]


def test_a_text_that_is_cut_while_the_runtime_dies_is_left(home: Home, sbx: dsec.Sandbox) -> None:
    for number in range(6):
        with sbx.session() as sh:
            sh.run("true")
            killing = threading.Timer(0.28 + 0.02 * number, kill_runtime, (home,))
            killing.start()
            with contextlib.suppress(dsec.Unknown):
                assert sh.run("sleep 1234 || touch /ran; touch /ran", timeout_s=0.3).cause == "timeout"
            killing.join()
        assert not sbx.run(["test", "-e", "/ran"]).ok, number
        assert not [process for process in sbx.processes() if "1234" in process.argv]


def kill_runtime(home: Home) -> None:
    with contextlib.suppress(OSError), Client(home.place.run_dir / "runtime.sock") as runtime:
        os.kill(runtime.hello["pid"], signal.SIGKILL)


def test_a_shell_that_cannot_be_reached_ends_with_its_timeout(sh: dsec.Session) -> None:
    result = sh.run("trap '' 16; while :; do :; done", timeout_s=0.2)
    assert (result.cause, result.exit_code, result.session_ended) == ("timeout", 137, True)
    for _ in range(2):
        with pytest.raises(dsec.InvalidState, match=r"stopped after its timeout of 0\.2 s") as caught:
            sh.run("echo on")
        assert caught.value.detail["cause"] == "timeout"


@pytest.mark.parametrize(
    ("before", "last", "code"),
    [("true", "exit 7", 7), ("true", "exec sh -c 'exit 9'", 9), ("set -e", "false", 1), ("true", "kill -9 $$", 137)],
)
def test_the_end_of_the_shell_is_the_end_of_its_command(sh: dsec.Session, before: str, last: str, code: int) -> None:
    sh.run(before, check=True)
    result = sh.run(f"echo last; {last}")
    assert (result.exit_code, result.stdout, result.session_ended) == (code, "last\n", True)
    with pytest.raises(dsec.InvalidState, match=r"its shell answered.*; start another, under another key"):
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
            kill_runtime(home)

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


def test_what_ended_in_time_while_the_agent_was_dead_is_no_timeout(home: Home, sbx: dsec.Sandbox) -> None:
    sh = sbx.session()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sh.run, "touch /dev/shm/begun; sleep 0.5; (exit 3)", timeout_s=2, key="in-time")
        while not sbx.files.exists("/dev/shm/begun"):
            time.sleep(0.01)
        os.kill(home.agent(), signal.SIGKILL)
        time.sleep(2.5)
        home.dsec("up")
        done = running.result(60)
    assert (done.exit_code, done.cause) == (3, "exited")
    assert sh.run("echo on").stdout == "on\n"


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


@pytest.mark.parametrize("end", ["exit 0", "kill -9 $$", "set -e; false"])
def test_its_jobs_end_with_it_also_after_its_shell(sbx: dsec.Sandbox, end: str) -> None:
    with sbx.session() as sh:
        sh.run("setsid sleep 5678 & sleep 6789 &", check=True)
        until = time.monotonic() + 60
        while len([process for process in sbx.processes() if "sleep" in process.argv]) < 2:
            assert time.monotonic() < until, "what is begun is a shell for a moment"
        assert sh.run(end).session_ended
        assert len([process for process in sbx.processes() if "sleep" in process.argv]) == 2
    gone(sbx, "sleep")


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/dash"])
def test_each_command_that_met_the_memory_limit_says_so(home: Home, shell: str) -> None:
    eat = "tail /dev/zero"
    texts = [(eat, 137, "oom"), (f"{eat}; echo $?", 0, "exited"), (f"cd /tmp && {eat}; true", 0, "exited")]
    with home.client() as client, client.create(base="debian:12", memory_mib=128) as sbx:
        sh = sbx.session(shell=shell)
        for text, code, cause in [*texts, *texts]:
            result = sh.run(text)
            assert (result.exit_code, result.cause, result.limits_hit) == (code, cause, ("memory",))
            assert sh.run("true").limits_hit == ()
        result = sbx.run(f"{eat}; true")
        assert (result.exit_code, result.cause, result.limits_hit) == (0, "exited", ("memory",))
        result = sh.run(f"exec {eat}")
        assert (result.exit_code, result.cause, result.limits_hit) == (137, "oom", ("memory",))


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
    assert result[0].duration_s >= 2, "its time is its own, not that since the agent is there again"
    assert out(sh, "echo $X") == "kept\n"


def test_a_command_that_was_begun_when_all_died_is_not_known(home: Home, sbx: dsec.Sandbox, sh: dsec.Session) -> None:
    """Whoever is told to begin it in another session would run it twice."""
    got: list[dsec.DsecError] = []

    def ask() -> None:
        with pytest.raises(dsec.DsecError) as told:
            sh.run("echo begun >>/ran; sleep 1000", key="once")
        got.append(told.value)

    caller = threading.Thread(target=ask)
    caller.start()
    while not sbx.files.exists("/ran"):
        time.sleep(0.02)
    agent = home.agent()
    keeper = living_keeper(home.place.run_dir)
    assert keeper is not None
    kill_runtime(home)
    os.kill(keeper.pid, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    home.dsec("up")
    caller.join(60)
    with pytest.raises(dsec.Unknown):
        sh.run("echo begun >>/ran; sleep 1000", key="once")
    assert [type(error) for error in got] == [dsec.Unknown]
    assert sbx.files.read_text("/ran") == "begun\n"
    assert "command.ended" in [event.kind for event in sbx.events()]
    sh.close()
    assert not [process for process in sbx.processes() if "1000" in process.argv]


def test_what_cannot_be_a_session_is_refused(sbx: dsec.Sandbox) -> None:
    with pytest.raises(dsec.ProgramNotStarted):
        sbx.session(shell="/none/such")
    with pytest.raises(dsec.ProgramNotStarted, match=r"a name for the session itself is key="):
        sbx.session(shell="mine")
    with sbx.session(shell="sh") as by_name:
        assert by_name.run("X=1; echo $0 $X").stdout.endswith("sh 1\n")
    none = sbx.session(shell="/bin/true")
    with pytest.raises(
        dsec.InvalidState, match=r"its shell, /bin/true, ended with 0 before any command: is it a shell\?"
    ):
        none.run("echo")
    with pytest.raises(dsec.ProgramNotStarted):
        sbx.session(cwd="/none/such")
    with sbx.session() as sh, pytest.raises(dsec.InvalidSpec):
        sh.run("echo \0")
    program = sbx.spawn(["sleep", "1000"])
    with pytest.raises(dsec.NotFound):
        sbx.get_session(program.id).run("echo")


def test_who_follows_a_shell_harms_nobody(sbx: dsec.Sandbox) -> None:
    """A session's id is that of a program: it can be looked at, but not given input."""
    sh = sbx.session()
    shell = sbx.process(sh.id)
    beside = sbx.spawn("read -r line; echo got $line")
    with shell.stdout.follow() as looking, shell.attach() as attached:
        assert sh.run("echo one").stdout == "one\n"
        assert next(looking) == b"one\n"
        assert next(attached) == (1, b"one\n")
        assert sh.run("echo two; exit 3").exit_code == 3
    with pytest.raises(dsec.InvalidState, match="session"):
        shell.stdin.write("exit\n")
    beside.stdin.write("it\n")
    assert beside.wait().stdout == "got it\n"
