"""Programs that are talked to, in real containers: the cases of the fake backend, and an agent that dies meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

import dsec
from tests.contract import test_sdk_programs as cases
from tests.kit.home import COMMAND, Home
from tests.kit.rtclient import Client

globals().update({name: case for name, case in vars(cases).items() if name.startswith("test_")})


@pytest.fixture
def url(home: Home) -> str:
    return f"unix://{home.place.run_dir}/api.sock"


def agent_dies(home: Home) -> None:
    os.kill(home.agent(), signal.SIGKILL)
    home.dsec("up")


def runtime_dies(home: Home) -> None:
    with Client(home.place.run_dir / "runtime.sock") as runtime:
        os.kill(runtime.hello["pid"], signal.SIGKILL)


def left(sbx: dsec.Sandbox) -> list[tuple[bytes | str, ...]]:
    return [tuple(process.argv) for process in sbx.processes() if "sleep" in process.argv]


def until_left(sbx: dsec.Sandbox, *seconds: int) -> None:
    """Wait until there are just these: what is begun is a shell for a moment, and what is killed still seen for one."""
    until = time.monotonic() + 60
    while sorted(found := left(sbx)) != [("sleep", str(number)) for number in sorted(seconds)]:
        assert time.monotonic() < until, found


def test_the_command_starts_one_with_a_terminal_and_goes(sbx: dsec.Sandbox, url: str) -> None:
    for no_stdin in ((), ("--no-stdin",)):
        done = cases.command(url, "exec", "-dt", *no_stdin, sbx.id, "echo up; exec cat")
        program = sbx.process(done.stdout.decode().strip())
        assert done.returncode == 0 and program.info().tty
        assert program.wait_for("up", 60) == "up"
        program.kill()


@pytest.mark.parametrize("before", [None, agent_dies, runtime_dies])
def test_what_a_program_has_left_behind_is_killed(
    sbx: dsec.Sandbox, home: Home, before: Callable[[Home], None] | None
) -> None:
    other = sbx.spawn(["sleep", "903"])
    process = sbx.spawn("sleep 901 & setsid sleep 902 & exit 3")
    assert process.wait(60).exit_code == 3
    until_left(sbx, 901, 902, 903)
    if before is not None:
        before(home)
    process.signal(signal.SIGTERM)  # of the program itself, which is no more
    assert len(left(sbx)) == 3
    process.kill()
    until_left(sbx, 903)
    process.kill()
    assert process.wait().exit_code == 3
    assert sbx.run("echo next", check=True).stdout == "next\n"
    assert other.info().state == "running"


def test_leaving_a_program_ends_what_it_has_left_behind(sbx: dsec.Sandbox) -> None:
    with contextlib.suppress(ZeroDivisionError), sbx.spawn("setsid sleep 901 & exit 0") as process:
        assert process.wait(60).ok
        until_left(sbx, 901)
        raise ZeroDivisionError
    until_left(sbx)


def findings(home: Home, sbx: dsec.Sandbox, start: str) -> str:
    """What `dsec inspect` finds, once it does."""
    until = time.monotonic() + 60
    while True:
        found = json.loads(home.dsec("inspect", sbx.id))["findings"]
        if mine := [line for line in found if line.startswith(start)]:
            return str(mine[0])
        assert time.monotonic() < until, found


def test_inspect_finds_what_holds_a_program_back(home: Home, sbx: dsec.Sandbox) -> None:
    process = sbx.spawn(["yes"])
    reader = process.stdout.follow()
    next(reader)  # and no more
    found = findings(home, sbx, "held back: ")
    assert "(yes)" in found and process.id in found
    process.kill()


def test_inspect_finds_processes_that_were_refused(home: Home) -> None:
    with home.client() as client, client.create(base="debian:12", pids=20) as sbx:
        result = sbx.run("for i in $(seq 40); do sleep 100 & done", timeout_s=20)
        assert "pids" in result.limits_hit
        assert "limit of 20" in findings(home, sbx, "pids: ")


def test_an_agent_that_dies_loses_and_doubles_nothing(sbx: dsec.Sandbox, home: Home) -> None:
    process = sbx.spawn(["cat"])
    reader = process.stdout.follow()
    process.stdin.write("before\n")
    got = next(reader)
    agent_dies(home)
    process.stdin.write("after\n")
    while len(got) < len(b"before\nafter\n"):
        got += next(reader)
    assert got == b"before\nafter\n"
    process.stdin.close()
    assert list(reader) == []
    assert process.wait().stdout == "before\nafter\n"
    agent_dies(home)
    assert sbx.process(process.id).output() == b"before\nafter\n"


def test_an_agent_that_dies_knows_whose_the_input_is(sbx: dsec.Sandbox, home: Home) -> None:
    first = sbx.spawn(["cat"])
    second = sbx.process(first.id)
    first.stdin.write("one\n")
    agent_dies(home)
    assert first.stdin._send(0, b"one\n", eof=False).size == 4
    second.stdin.write("two\n")
    agent_dies(home)
    assert second.stdin._send(4, b"two\n", eof=False).size == 8
    for offset, data in ((0, b"one\n"), (4, b"two\n")):
        with pytest.raises(dsec.Conflict):
            first.stdin._send(offset, data, eof=False)
    with pytest.raises(dsec.Conflict) as caught:
        first.stdin.write("lost\n")
    assert caught.value.detail["input_size"] == 8
    with first.attach() as attached:
        attached.write("three\n")
        agent_dies(home)
    first.stdin.write("four\n")
    with pytest.raises(dsec.Conflict):
        second.stdin.write("lost\n")
    first.stdin.close()
    assert first.wait(60).stdout == "one\ntwo\nthree\nfour\n"


def test_the_command_goes_on_through_an_agent_that_dies(sbx: dsec.Sandbox, home: Home) -> None:
    with subprocess.Popen(
        [*COMMAND, "exec", "-i", sbx.id, "cat; exit 3"],
        env=home.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        assert command.stdin is not None and command.stdout is not None and command.stderr is not None
        command.stdin.write(b"one\n")
        command.stdin.flush()
        assert command.stdout.readline() == b"one\n"
        agent_dies(home)
        command.stdin.write(b"two\n")
        command.stdin.close()
        assert command.stdout.read() == b"two\n"
        assert command.wait() == 3
        assert command.stderr.read() == b"dsec: connection lost; making it again\ndsec: connected again\n"
