"""Output by lines, in real containers: the cases of the fake backend, and what only a terminal and a death show."""

from __future__ import annotations

import os
import signal

import pytest

import dsec
from tests.contract import test_sdk_lines as cases
from tests.kit.home import Home

globals().update({name: case for name, case in vars(cases).items() if name.startswith("test_")})


@pytest.fixture
def url(home: Home) -> str:
    return f"unix://{home.place.run_dir}/api.sock"


def test_lines_of_a_terminal(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn("echo one; echo two >&2; printf three", tty=True)
    assert [(line.stream, line, line.ending) for line in program.lines()] == [
        (1, "one", "newline"),
        (1, "two", "newline"),
        (1, "three", "end"),
    ]


def test_output_that_never_has_a_newline_does_not_outrun_the_time(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn("while :; do printf .; done", stdin=False)
    with program.lines() as lines, pytest.raises(dsec.DeadlineExceeded, match="no line has come within"):
        lines.next(timeout_s=0.2)


def test_a_terminal_has_one_stream(sbx: dsec.Sandbox) -> None:
    """Its other one is empty at once, and not when it ends."""
    program = sbx.spawn(["cat"], tty=True)
    assert list(program.stderr) == list(sbx.process(program.id).stderr) == []
    assert program.output(stream=2) == b""
    assert program.info().state == "running"


def test_lines_go_on_over_an_agent_that_dies(sbx: dsec.Sandbox, home: Home) -> None:
    program = sbx.spawn(["cat"])
    lines = program.lines()
    program.stdin.write("one\nhal")
    assert next(lines) == "one"
    os.kill(home.agent(), signal.SIGKILL)
    home.dsec("up")
    program.stdin.write("ves\nend\n")
    assert program.wait_for("end", timeout_s=60) == "end"
    program.stdin.close()
    assert list(lines) == ["halves", "end"]
