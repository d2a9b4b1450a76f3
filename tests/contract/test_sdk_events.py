"""Events through the SDK and the dsec command, against a real node agent (over the fake backend)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

import dsec
from tests.kit.agent import Agent

COMMAND = [sys.executable, "-c", "import sys; from dsec.cli.main import main; sys.exit(main())"]


def dsec_command(agent: Agent, *words: str) -> str:
    env = {**os.environ, "DSEC_URL": agent.url}
    return subprocess.run([*COMMAND, *words], env=env, capture_output=True, text=True, check=True).stdout


def test_a_follower_hears_all_until_the_end(agent: Agent) -> None:
    with dsec.Client(agent.url) as client, dsec.Client(agent.url) as other:
        sandbox = client.create()
        heard: list[dsec.Event] = []
        begun = threading.Event()

        def follow() -> None:
            for event in other.get(sandbox.id).events(follow=True):
                heard.append(event)
                begun.set()

        follower = threading.Thread(target=follow)
        follower.start()
        begun.wait()
        sandbox.run("exit 4")
        sandbox.stop(grace_s=0)
        follower.join()
        assert [event.kind for event in heard] == ["created", "run.ended", "ended"]
        assert heard == list(sandbox.events())
        assert heard[2:] == list(sandbox.events(since=2))


def test_the_command_tells_them_as_text_and_as_json(agent: Agent) -> None:
    with dsec.Client(agent.url) as client:
        sandbox = client.create()
        sandbox.run("echo '\x1b[31m'; exit 4")
        lines = [json.loads(line) for line in dsec_command(agent, "events", "--json", sandbox.id).splitlines()]
        assert [line["seq"] for line in lines] == [1, 2]
        assert lines[1]["detail"]["exit_code"] == 4
        text = dsec_command(agent, "events", sandbox.id)
        assert "run.ended step 1" in text and "exit_code=4" in text and "\x1b" not in text
        assert json.loads(dsec_command(agent, "inspect", sandbox.id))["events"] == lines
        sandbox.stop(grace_s=0)
        assert "reason=stopped" in dsec_command(agent, "events", "-f", sandbox.id)


def test_an_iteration_goes_on_where_it_was(agent: Agent) -> None:
    with dsec.Client(agent.url) as client:
        sandbox = client.create()
        events = iter(sandbox.events(follow=True))
        assert next(events).kind == "created"
        client.get(sandbox.id).run("true")
        assert next(events).kind == "run.ended"
        sandbox.stop(grace_s=0)
        assert [event.seq for event in events] == [3]


def test_refusals(agent: Agent) -> None:
    with dsec.Client(agent.url) as client:
        with client.create() as sandbox, pytest.raises(dsec.InvalidSpec):
            list(sandbox.events(since=-1))
        with pytest.raises(dsec.NotFound):
            client.get("nobody")
