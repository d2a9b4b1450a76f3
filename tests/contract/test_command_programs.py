"""Programs of a sandbox from the command line, after their end too: `ps -a`, `logs`, `attach`, `kill`; and `stop`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import dsec
from dsec.cli.commands.programs import piped_in
from dsec.cli.main import main
from tests.kit.agent import Agent

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def _node(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_URL", agent.url)


Said = pytest.CaptureFixture[str]


def spawned(sbx: dsec.Sandbox, said: Said, *words: str) -> str:
    assert main(["exec", "-d", *words[:-1], sbx.id, words[-1]]) == 0
    return said.readouterr().out.strip()


def test_what_has_ended_is_listed_and_shown(sbx: dsec.Sandbox, capsys: Said) -> None:
    runs = spawned(sbx, capsys, "echo begun; sleep 1000")
    failed = spawned(sbx, capsys, "echo why >&2; exit 3")
    sbx.process(failed).wait(60)
    assert sbx.process(runs).wait_for("begun", 60) == "begun"
    sbx.run("true")
    assert main(["ps", "-a", sbx.id]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["PROGRAM", "KIND", "STATE", "STARTED", "COMMAND"]
    assert [row.split()[1] for row in rows] == ["run", "spawn", "spawn"]
    assert rows[1].split()[:4] == [failed, "spawn", "exit", "3"] and rows[2].split()[:3] == [runs, "spawn", "runs"]
    assert main(["ps", sbx.id, "-aq"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [failed, runs]
    assert main(["ps", "-a", "--json", sbx.id]) == 0
    assert [one["how"] for one in json.loads(capsys.readouterr().out)] == ["exit 0", "exit 3", ""]
    # The newest, though another runs; and which it is.
    assert main(["logs", sbx.id]) == 0
    told = capsys.readouterr()
    assert told.err == f"dsec: of {failed} (echo why >&2; exit 3), which has ended: exit 3\nwhy\n"
    assert main(["attach", sbx.id, "--no-stdin", failed]) == 3
    assert main(["logs", sbx.id, "--raw", runs]) == 0
    assert capsys.readouterr().out == "begun\n"


def test_what_ran_in_a_sandbox_that_has_ended(sbx: dsec.Sandbox, capsys: Said) -> None:
    program = spawned(sbx, capsys, "echo said; sleep 1000")
    assert sbx.process(program).wait_for("said", 60) == "said"
    sbx.stop()
    assert main(["ps", "-a", sbx.id]) == 0
    assert program in capsys.readouterr().out
    assert main(["logs", sbx.id]) == 0 and capsys.readouterr().err == ""


def test_nothing_was_spawned(sbx: dsec.Sandbox, capsys: Said) -> None:
    sbx.run("true")
    for command in ("logs", "attach"):
        assert main([command, sbx.id]) in (1, 125)
        assert "no program was spawned in this sandbox (`dsec exec -d`, `spawn`)" in capsys.readouterr().err
    program = spawned(sbx, capsys, "exit 4")
    sbx.process(program).wait(60)
    assert main(["attach", sbx.id]) == 125
    assert f"the newest was {program} (exit 4)" in capsys.readouterr().err


def test_programs_are_ended_by_their_ids(sbx: dsec.Sandbox, capsys: Said) -> None:
    programs = [spawned(sbx, capsys, "sleep 1000") for _ in range(3)]
    assert main(["kill", sbx.id, *programs[:2]]) == 0
    assert capsys.readouterr().out.split() == programs[:2]
    assert [sbx.process(one).wait(60).cause for one in programs[:2]] == ["killed", "killed"]
    assert sbx.process(programs[2]).info().state == "running"
    assert main(["kill", "-s", "TERM", sbx.id, programs[2]]) == 0
    assert sbx.process(programs[2]).wait(60).signal == signal.SIGTERM
    capsys.readouterr()
    assert main(["kill", sbx.id, programs[0], "p-none"]) == 1
    told = capsys.readouterr()
    assert told.out == f"{programs[0]}\n" and f"{programs[0]} had ended" in told.err and "'p-none'" in told.err


@pytest.mark.parametrize("words", [["-9"], ["-KILL"], ["-SIGKILL"], ["-s", "9"], ["--signal", "sigkill"]])
def test_a_signal_as_kill_takes_it(sbx: dsec.Sandbox, capsys: Said, words: list[str]) -> None:
    program = spawned(sbx, capsys, "sleep 1000")
    assert main(["kill", *words, sbx.id, program]) == 0
    assert sbx.process(program).wait(60).signal == signal.SIGKILL


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["w"], "no program of w is named: `dsec stop w` ends the sandbox"),
        (["p-abc"], "no program of p-abc is named: `dsec kill SANDBOX p-abc`"),
        (["w", "42"], "42 is a process's number"),
        (["-s", "NOPE", "w", "p-1"], "a number, such as signal.SIGTERM, or a name"),
    ],
)
def test_what_kill_does_not_take(agent: Agent, capsys: Said, words: list[str], told: str) -> None:
    assert main(["kill", *words]) == 1
    assert told in capsys.readouterr().err


def test_a_program_is_no_sandbox_to_be_stopped(sbx: dsec.Sandbox, capsys: Said) -> None:
    program = spawned(sbx, capsys, "sleep 1000")
    assert main(["stop", sbx.id, program]) == 1
    told = capsys.readouterr()
    assert "`dsec kill SANDBOX PROGRAM` ends one; nothing was stopped" in told.err and not told.out
    assert sbx.info().state == "running"
    # A slip in one name leaves the others as they were meant.
    assert main(["stop", "none", sbx.id]) == 1
    assert sbx.info().state == "stopped"


def test_what_is_piped_where_nothing_reads_it_is_told(
    sbx: dsec.Sandbox, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cli.commands.programs.piped_in", lambda: True)
    monkeypatch.setattr("dsec.cli.commands.terminals.piped_in", lambda: True)
    assert main(["exec", "-di", sbx.id, "true"]) == 0
    assert "what is piped in is not read" in capsys.readouterr().err
    assert main(["exec", "-d", sbx.id, "exit 5"]) == 0  # a loop over a list is not told each time
    told = capsys.readouterr()
    assert told.err == ""
    assert main(["attach", sbx.id, told.out.strip()]) == 5
    assert "has no input" in capsys.readouterr().err


def test_what_is_there_to_be_read_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who calls may leave any pipe or file of his own open: only one with something in it counts."""

    def seen(fd: int) -> bool:
        with os.fdopen(fd) as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            return piped_in()

    for content, expected in ((b"x", True), (b"", False)):
        read, write = os.pipe()
        os.write(write, content)
        assert seen(read) is expected
        os.close(write)
    file = tmp_path / "list"
    file.write_text("rest")
    assert seen(os.open(file, os.O_RDONLY))
    at_end = os.open(file, os.O_RDONLY)
    os.lseek(at_end, 0, os.SEEK_END)
    assert not seen(at_end)
    assert not seen(os.open("/dev/null", os.O_RDONLY))
