"""mini-swe-agent's own agents, model and configuration, to the end, in a real sandbox."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments import get_environment
from minisweagent.exceptions import Submitted
from minisweagent.models.test_models import DeterministicModel, make_output

import dsec
from dsec.adapters.mini_swe_agent import DsecEnvironment
from tests.kit.home import Home

CLASS = "dsec.adapters.mini_swe_agent.DsecEnvironment"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def made(home: Home, **fields: Any) -> DsecEnvironment:
    environment = get_environment(
        {"environment_class": CLASS, "url": f"unix://{home.place.run_dir}/api.sock", **fields}
    )
    assert isinstance(environment, DsecEnvironment)
    return environment


@pytest.fixture(scope="module")
def env(home: Home) -> Iterator[DsecEnvironment]:
    environment = made(home, timeout=60)
    yield environment
    environment.cleanup()


def ran(env: DsecEnvironment, command: str, **options: Any) -> dict[str, Any]:
    return env.execute({"command": command}, **options)


def test_agent_to_the_end(home: Home) -> None:
    """With the templates the framework comes with."""
    commands = ["echo kept >/tmp/f; echo no >&2; exit 3", "echo part; sleep 4321", f"{SUBMIT}; cat /tmp/f"]
    config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    environment = made(home, timeout=3)
    outputs = [make_output("", [{"command": line}], 0.0) for line in commands]
    templates = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    agent = DefaultAgent(DeterministicModel(outputs=outputs), environment, **templates)
    done = agent.run("count words")
    assert (done["exit_status"], done["submission"]) == ("Submitted", "kept\n")
    seen = [str(message["content"]) for message in agent.messages]
    assert any("count words" in text and "Linux" in text for text in seen)
    assert any("<returncode>3</returncode>" in text and "no\n" in text for text in seen)
    assert any("its timeout of 3 s" in text and "part" in text for text in seen)
    saved = agent.save(None)
    assert saved["info"]["config"]["environment_type"] == CLASS
    environment.cleanup()
    environment.cleanup()
    assert environment.sandbox.info().state == "stopped"


def test_streams_are_one_in_order(env: DsecEnvironment) -> None:
    assert ran(env, "echo 1; echo 2 >&2; echo 3") == {"output": "1\n2\n3\n", "returncode": 0, "exception_info": ""}


def test_directory_and_environment(home: Home) -> None:
    environment = made(home, cwd="/var", env={"A": "b"}, spec={"base": "debian:12", "user": "nobody"})
    assert ran(environment, "pwd; echo $A; id -un")["output"] == "/var\nb\nnobody\n"
    assert ran(environment, "pwd", cwd="/tmp")["output"] == "/tmp\n"
    environment.cleanup()


def test_timeout_ends_children_too(env: DsecEnvironment) -> None:
    done = ran(env, "setsid sleep 4321 & sleep 4321", timeout=1)
    assert (done["returncode"], "timeout" in done["exception_info"]) == (-1, True)
    assert not [process for process in env.sandbox.processes() if "4321" in process.argv]


@pytest.mark.parametrize("command", ["echo a\0b", "echo " + "x" * 200_000])
def test_command_that_cannot_be_is_an_answer(env: DsecEnvironment, command: str) -> None:
    done = ran(env, command)
    assert (done["returncode"], "command" in done["exception_info"]) == (-1, True)


def test_a_directory_of_the_configuration_that_is_not_there_is_refused_at_once(home: Home) -> None:
    with pytest.raises(dsec.ProgramNotStarted, match="/repo"):
        made(home, cwd="/repo", spec={"base": "debian:12", "name": "no-repo"})
    with home.client() as client, pytest.raises(dsec.SandboxLost):
        client.get("no-repo").run("true")


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("image", "dsec layer import tar:ROOT.tar NAME"),
        ("memory_mib", "it stands in spec: spec={'memory_mib': ...}"),
        ("executable", "which has spec, url, cwd, env, timeout, interpreter"),
    ],
)
def test_what_another_environment_has_is_told(home: Home, field: str, told: str) -> None:
    with pytest.raises(dsec.InvalidSpec) as caught:
        made(home, **{field: "python:3.12"})
    assert told in str(caught.value) and caught.value.detail["field"] == field


def test_what_an_agent_does_to_its_sandbox_does_not_end_the_run(home: Home) -> None:
    """No process is left for `uname`, and then no shell: what templates ask for is known, a command has an answer."""
    environment = made(home, spec={"base": "debian:12", "pids": 16})
    told = environment.get_template_vars()
    assert (told["system"], bool(told["release"]), bool(told["machine"])) == ("Linux", True, True)
    ran(environment, "for i in $(seq 40); do sleep 4321 & done")
    assert environment.get_template_vars(task="x") == {**told, "task": "x"}
    done = ran(environment, "uname; uname")
    assert done["returncode"] != 0 and (done["output"] or done["exception_info"])
    environment.cleanup()
    environment = made(home)
    ran(environment, "rm -f /bin/sh")
    assert environment.get_template_vars()["system"] == "Linux"
    done = ran(environment, "true")
    assert (done["returncode"], "/bin/sh" in done["exception_info"]) == (-1, True)
    environment.cleanup()


def test_a_user_that_is_gone_is_an_answer(home: Home) -> None:
    environment = made(home, spec={"base": "debian:12", "user": "games"})
    environment.sandbox.run("sed -i /^games/d /etc/passwd", user="root")
    done = ran(environment, "true")
    assert (done["returncode"], "games" in done["exception_info"]) == (-1, True)
    environment.cleanup()


def test_directory_that_is_not_there_is_an_answer(env: DsecEnvironment) -> None:
    done = ran(env, "true", cwd="/no/such")
    assert (done["returncode"], "/no/such" in done["exception_info"]) == (-1, True)


@pytest.mark.parametrize(
    ("command", "submission"),
    [
        (f"{SUBMIT}; printf 'a\\n\\nb'", "a\n\nb"),
        (f"echo; {SUBMIT}", ""),
        (f"{SUBMIT}; false", None),
        (f"echo first; {SUBMIT}", None),
    ],
)
def test_submission(env: DsecEnvironment, command: str, submission: str | None) -> None:
    if submission is None:
        ran(env, command)
        return
    with pytest.raises(Submitted) as caught:
        ran(env, command)
    assert caught.value.messages[0]["extra"]["submission"] == submission


def test_lost_sandbox_raises(home: Home) -> None:
    environment = made(home)
    environment.sandbox.stop(grace_s=0)
    with pytest.raises(dsec.SandboxLost):
        ran(environment, "true")


def test_wrong_configuration_is_refused(home: Home) -> None:
    with pytest.raises(dsec.InvalidSpec, match="tiemout"):
        made(home, tiemout=3)
    with pytest.raises(dsec.InvalidSpec, match="memory_mib"):
        made(home, spec={"memory_mb": 3})


def test_forgotten_environments_are_stopped(home: Home, tmp_path: Path) -> None:
    environment = made(home)
    sbx = environment.sandbox
    del environment
    gc.collect()
    assert sbx.info().state == "stopped"
    code = "from dsec.adapters.mini_swe_agent import DsecEnvironment as E; e = E(); exit(print(e.sandbox.id) or 3)"
    done = subprocess.run([sys.executable, "-c", code], env=home.env, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    with home.client() as client:
        assert client.get(done.stdout.split()[-1]).info().state == "stopped"
