"""The SDK and the dsec command against a real node agent (over the fake backend)."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import dsec
from dsec.libdsec import DSecClient, DSecContainerRunArgs
from tests.kit.agent import Agent

COMMAND = [sys.executable, "-c", "import sys; from dsec.cli.main import main; sys.exit(main())"]


@pytest.fixture
def client(agent: Agent) -> Iterator[dsec.Client]:
    with dsec.Client(agent.url) as made:
        yield made
        for sandbox in made.list():
            sandbox.stop(grace_s=0)


def until_running(sandbox: dsec.Sandbox) -> None:
    while not sandbox.processes().programs:
        time.sleep(0.01)


def test_create_run_stop(client: dsec.Client) -> None:
    with client.create(name="a", job="j", labels={"k": "v"}, memory_mib=64) as sbx:
        result = sbx.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
        assert (result.exit_code, result.stdout, result.stderr, result.ok) == (3, "out\n", "err\n", False)
        assert sbx.run("cat", stdin="hello").stdout == "hello"
        assert client.get("a").id == sbx.id
        assert [x.id for x in client.list(labels={"k": "v"}, job="j")] == [sbx.id]
        assert pickle.loads(pickle.dumps(sbx)).info().id == sbx.id
        assert sbx.set_labels({"n": "1"}).labels == {"n": "1"}
        assert (sbx.extend(600).expires_at or 0) > time.time()
        assert sbx.usage().cpu_user_s >= 0
        assert (sbx.info().spec.base, sbx.info().spec.memory_mib) == ("debian:12", 64)  # also what nobody has given
    assert client.get(sbx.id).state == "stopped"
    with pytest.raises(dsec.SandboxLost):
        sbx.run("true")


def test_streaming_and_check(client: dsec.Client) -> None:
    with client.create() as sbx:
        got: list[tuple[int, bytes]] = []
        result = sbx.run("echo a; echo b >&2", on_output=lambda stream, data: got.append((stream, data)))
        assert {stream: b"".join(d for s, d in got if s == stream) for stream in (1, 2)} == {1: b"a\n", 2: b"b\n"}
        assert result.stdout == "a\n"
        with pytest.raises(dsec.CommandFailed, match="exit code 1"):
            sbx.run("false", check=True)
        assert sbx.run("sleep 60", timeout_s=0.2).cause == "timeout"


def test_refusals_name_what_is_wrong(client: dsec.Client) -> None:
    with pytest.raises(dsec.NotFound):
        client.get("nobody")
    with pytest.raises(dsec.Unsupported) as caught:
        client.create(network={"pypi": True})
    assert caught.value.detail["mechanism"]
    with client.create(name="twice", network={"pypi": False}) as sbx:
        with pytest.raises(dsec.Conflict):
            client.create(name="twice")
        assert client.create(name="twice", network={"pypi": False}, if_exists="get").id == sbx.id
        assert sbx.set_network({"npm": False}).state == "running"
        with pytest.raises(dsec.Unsupported):
            sbx.patch_network({"npm": True})


def test_create_many_and_job(client: dsec.Client) -> None:
    with client.create_many(50, job="many", cpu=0.1, memory_mib=16) as boxes:
        made = [box for box in boxes if isinstance(box, dsec.Sandbox)]
        assert len({box.id for box in made}) == 50
        assert len(list(client.job("many").list())) == 50
    assert list(client.job("many").list()) == []
    specs = [dsec.Spec(name="x"), dsec.Spec(name="x"), dsec.Spec(name="y")]
    with client.create_many(specs) as boxes:
        items = list(boxes)
        assert sum(isinstance(item, dsec.CreateFailed) for item in items) == 1
    with pytest.raises(dsec.CreateFailed), client.create_many(specs, atomic=True):
        pass
    assert list(client.list()) == []


def test_cancelled_task_kills_its_program(agent: Agent) -> None:
    async def body() -> None:
        async with dsec.AsyncClient(agent.url) as client, await client.create() as sbx:
            task = asyncio.create_task(sbx.run("sleep 600"))
            while not (await sbx.processes()).programs:  # noqa: ASYNC110 - another process does it: there is no event to wait for
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while any(process.state == "running" for process in (await sbx.processes()).programs):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
            assert (await sbx.run("echo still usable")).ok

    asyncio.run(body())


def test_vanished_client_stops_nothing(client: dsec.Client) -> None:
    with client.create() as sbx:
        pid = os.fork()
        if pid == 0:
            sbx.run("sleep 600")
            os._exit(0)
        until_running(sbx)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        time.sleep(0.1)
        assert [process.state for process in sbx.processes().programs] == ["running"]


KEYED_CLIENT = """
import sys, dsec
def show(stream, data):
    print(data.decode(), end="", flush=True)
sbx = dsec.Client(sys.argv[1]).create(name="kept", if_exists="get")
result = sbx.run("echo began; sleep 600", key="test-1", on_output=show if sys.argv[2] else None)
print(result.process_id, result.exit_code, repr(result.stdout))
"""


@pytest.mark.parametrize("streamed", ["streamed", ""])
def test_a_client_that_was_killed_and_started_again_takes_up_its_run(client: dsec.Client, streamed: str) -> None:
    def started(streamed: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", KEYED_CLIENT, client.url, streamed]
        return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)

    with client.create(name="kept") as sbx:
        with started(streamed) as first:
            until_running(sbx)
            first.kill()
        with started("streamed") as again:
            assert again.stdout is not None
            assert again.stdout.readline() == "began\n"  # it is attached, in the middle of the run
            [process] = sbx.processes().programs  # one, and it goes on
            assert process.state == "running"
            kill = f"/v1/sandboxes/{sbx.id}/processes/{process.id}/kill"
            client.transport.call("POST", kill, dict, body=b"\x80", key="kill-1")
            said = again.stdout.read()
        assert said == f"{process.id} 137 {'began' + chr(10)!r}\n"
        with started("") as late:
            assert late.communicate()[0] == said
        with pytest.raises(dsec.Conflict, match="test-1"):
            sbx.run("echo other", key="test-1")
        assert sbx.run("echo other", key="test-2").stdout == "other\n"


def test_frozen_agent_is_found_out(tmp_path: Path) -> None:
    """SIGSTOP: the kernel still accepts connections, nobody answers."""
    agent = Agent(tmp_path)
    agent.start()
    client = dsec.Client(agent.url)
    sbx = client.create()
    client.transport.timing = replace(client.transport.timing, patience_s=0.3, health_s=5.0)
    assert agent._process is not None
    timer = threading.Timer(0.3, agent._process.send_signal, (signal.SIGSTOP,))
    timer.start()
    try:
        with pytest.raises(dsec.NodeUnreachable, match="does not answer"):
            sbx.run("sleep 600")
    finally:
        agent._process.send_signal(signal.SIGCONT)
        agent.stop()


def test_libdsec_listing(agent: Agent) -> None:
    with DSecClient(agent.url) as client:
        args = DSecContainerRunArgs(
            container_image="debian:12",
            memory_limit_mb=256,
            cpu_cores_limit=1,
            ttl_running_stop=600,
            network_rules={"npm": False, "pypi": False},
            init_user="root",
        )
        container = client.run_container(args)
        assert container.run_shell("echo hello").stdout == "hello\n"
        container.stop()
        container.stop()
        allowed = DSecContainerRunArgs(container_image="debian:12", network_rules={"npm": False, "pypi": True})
        with pytest.raises(dsec.Unsupported, match="pypi"):
            client.run_container(allowed)


def command(agent: Agent, *args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *args], env=agent.env, input=stdin, capture_output=True, check=False)


def test_command_line(agent: Agent) -> None:
    assert command(agent, "run", "--", "sh", "-c", "cat; exit 5", stdin=b"in").stdout == b"in"
    assert command(agent, "run", "-d", "--name", "cli", "--job", "clijob").returncode == 0
    done = command(agent, "exec", "cli", "echo oops >&2; exit 9")
    assert (done.returncode, done.stderr) == (9, b"oops\n")
    listed = json.loads(command(agent, "ps", "--json", "--job", "clijob").stdout)
    assert [one["name"] for one in listed] == ["cli"]
    assert command(agent, "job", "stop", "clijob").stdout == b"stopped 1\n"
    assert command(agent, "exec", "cli", "true").returncode == 125


def test_up_down(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    assert command(agent, "down").returncode == 0
    done = command(agent, "up", "--", "--backend", "fake", "--node", "t")
    assert done.returncode == 0, done.stderr
    again = command(agent, "up", "--", "--backend", "fake", "--node", "t")
    assert b"running already" in again.stdout
    assert command(agent, "run", "-d").returncode == 0
    done = command(agent, "down", "--stop-all")
    assert done.stdout.startswith(b"stopped 1 sandbox\n"), done
    assert command(agent, "ps").returncode == 1


DIES = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.write(fd, str(os.getpid()).encode())
fcntl.flock(fd, fcntl.LOCK_EX)
print(flush=True)
time.sleep(1)
"""


def test_up_behind_an_agent_that_is_dying(tmp_path: Path) -> None:
    """One that was killed holds its lock until the kernel is through with it."""
    agent = Agent(tmp_path)
    run_dir = Path(agent.env["DSEC_RUN_DIR"])
    run_dir.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen([sys.executable, "-c", DIES, run_dir / "agent.pid"], stdout=subprocess.PIPE) as dying:
        assert dying.stdout is not None and dying.stdout.readline() == b"\n"
        done = command(agent, "up", "--", "--backend", "fake", "--node", "t")
    assert done.returncode == 0 and b" is up " in done.stdout, done
    assert command(agent, "ps").returncode == 0
    assert command(agent, "down", "--stop-all").returncode == 0


def test_up_says_why_not(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    done = command(agent, "up", "--", "--listen", "0.0.0.0:1", "--backend", "fake")
    assert done.returncode == 1
    assert b"ended with code 2" in done.stderr
    assert b"loopback" in done.stderr
