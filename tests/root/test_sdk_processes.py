"""Programs that are talked to in real containers by asyncio and by the dsec command; and through an agent that dies."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

import dsec
from tests.contract import test_sdk_processes as cases
from tests.kit.home import COMMAND, Home, standing

globals().update({name: case for name, case in vars(cases).items() if name.startswith("test_")})


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with standing() as made:
        yield made


@pytest.fixture
def url(home: Home) -> str:
    return f"unix://{home.place.run_dir}/api.sock"


@pytest.fixture
def sbx(home: Home) -> Iterator[dsec.Sandbox]:
    with home.client() as client, client.create(disk_mib=64) as made:
        yield made


def agent_dies(home: Home) -> None:
    os.kill(home.agent(), signal.SIGKILL)
    home.dsec("up")


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
