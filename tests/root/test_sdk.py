"""The SDK and the dsec command with real containers: the documentation's examples, and an agent that dies."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

import dsec
from dsec.backends.container.keeper import living_keeper
from dsec.wire.runtime import RuntimeClient
from tests.kit.examples import examples
from tests.kit.home import BASE, COMMAND, Home
from tests.kit.lanes import fewer


@pytest.mark.same_everywhere
@pytest.mark.parametrize(("where", "code"), examples(), ids=[where for where, _ in examples()])
def test_examples_of_the_documentation(home: Home, where: str, code: str) -> None:
    subprocess.run([sys.executable, "-c", code], env=home.env, check=True)


@pytest.mark.same_everywhere
def test_command_line(home: Home) -> None:
    assert home.dsec("run", "--", "cat", "/etc/debian_version").startswith(b"12")
    home.dsec("run", "-d", "--name", "work", "--memory-mib", "64")
    home.dsec("exec", "work", "echo 1 >/f; exit 7", code=7)
    assert home.dsec("exec", "work", "cat /f -", stdin=b"2\n") == b"1\n2\n"
    assert (
        home.dsec("exec", "-e", "A=b", "-w", "/tmp", "-u", "nobody", "work", "echo $A $PWD; id -un")
        == b"b /tmp\nnobody\n"
    )
    about = json.loads(home.dsec("inspect", "work"))
    assert about["sandbox"]["state"] == "running"
    home.dsec("exec", "work", "--timeout-s", "0.2", "sleep 60", code=None)
    assert home.dsec("exec", "--timeout-s", "0.2", "work", "sleep 60", code=137) == b""
    assert home.dsec("stop", "work") == b"work\n"
    home.dsec("exec", "work", "true", code=125)


@pytest.mark.same_everywhere
def test_interrupt_kills_the_tree(home: Home) -> None:
    with home.client().create(base=BASE) as sbx:
        line = [*COMMAND, "exec", sbx.id, "(setsid sleep 4321 &) ; echo up; sleep 4321"]
        with subprocess.Popen(line, env=home.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"up\n"
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=30) == 130
            finally:
                process.kill()
        assert sbx.run("pgrep -f 'sleep 4321' | grep -v $$").stdout == ""


@pytest.mark.same_everywhere
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("streaming", [False, True])
def test_agent_that_dies_during_a_run_changes_nothing(home: Home, number: int, streaming: bool) -> None:
    """The same key finds the same run again: its result is exact, its effect is there once."""
    script = "echo begin; echo x >>/effect; until [ -e /go ]; do sleep 0.02; done; seq 1 20000; exit 42"
    got = bytearray()

    def on_output(stream: int, data: bytes) -> None:
        got.extend(data)

    with home.client().create(base=BASE) as sbx:
        results: list[dsec.RunResult] = []

        def work() -> None:
            results.append(sbx.run(script, on_output=on_output if streaming else None))

        thread = threading.Thread(target=work)
        thread.start()
        other = home.client().get(sbx.id)
        while not other.run("test -e /effect").ok:
            time.sleep(0.02)
        pid = home.agent()
        os.kill(pid, number)
        while Path(f"/proc/{pid}/exe").exists() and not _ended(pid):
            time.sleep(0.02)
        home.dsec("up")
        assert home.client().get(sbx.id).run("touch /go").ok
        thread.join()
        (result,) = results
        expected = "begin\n" + "".join(f"{n}\n" for n in range(1, 20001))
        assert (result.exit_code, result.stdout) == (42, expected)
        assert sbx.run("cat /effect").stdout == "x\n"
        if streaming:
            assert got.decode() == expected


def _ended(pid: int) -> bool:
    """A zombie: its parent is this process's past."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.same_everywhere
def test_sandboxes_live_on_over_down_and_up(home: Home) -> None:
    sbx = home.client().create(base=BASE, name="stays")
    sbx.run("echo kept >/f", check=True)
    home.dsec("down")
    home.dsec("ps", code=1)
    home.dsec("up")
    assert home.client().get("stays").run("cat /f").stdout == "kept\n"
    home.dsec("stop", "stays")


def test_many(home: Home) -> None:
    with home.client().create_many(fewer(40), base=BASE, memory_mib=32, job="many", wait_s=60) as boxes:
        results = [
            box.run(["sh", "-c", f"echo {n}"]).stdout for n, box in enumerate(boxes) if isinstance(box, dsec.Sandbox)
        ]
    assert results == [f"{n}\n" for n in range(fewer(40))]
    assert list(home.client().job("many").list()) == []


def test_doctor(home: Home) -> None:
    report = json.loads(home.dsec("doctor", "--json", code=None))
    assert report["backends"]["container"]["available"] is True
    assert {line["name"] for line in report["machine"]} >= {"privilege", "cgroups", "core_pattern"}


def test_programs_directories_and_users_that_are_not_there(home: Home) -> None:
    """One class for what the sandbox does not have, whoever took it away; it can be used afterwards."""
    client = home.client()
    with client.create(base=BASE, memory_mib=64) as sbx:
        sbx.run("mkdir /srv/task && cd /srv/task && rm -rf /srv/task", check=True)
        for arguments, field, code in (
            ({"command": ["nosuch"]}, "command", 127),
            ({"command": ["/etc/passwd"]}, "command", 126),
            ({"command": "true", "cwd": "/srv/task"}, "cwd", 126),
            ({"command": "true", "user": "bob"}, "user", 126),
        ):
            with pytest.raises(dsec.ProgramNotStarted) as caught:
                sbx.run(**arguments)  # type: ignore[arg-type] # as in the table
            assert (caught.value.detail["field"], caught.value.exit_code) == (field, code)
        assert sbx.run("nosuch").exit_code == 127
    for wrong in ({"cwd": "/nowhere"}, {"user": "bob"}):
        with pytest.raises(dsec.InvalidSpec):
            client.create(base=BASE, memory_mib=64, **wrong)  # type: ignore[arg-type] # as in the table
    assert client.create(base=BASE, memory_mib=64, cwd="/tmp", user="nobody").stop().end_reason == "stopped"
    assert list(client.list()) == []


def test_a_run_that_outlives_its_sandbox_is_told_why(home: Home) -> None:
    sbx = home.client().create(base=BASE, memory_mib=64, lifetime_s=1)
    for _ in range(2):
        with pytest.raises(dsec.SandboxLost) as caught:
            sbx.run("sleep 60")
        assert caught.value.end_reason == "lifetime"


def test_another_node_is_refused_the_cgroup(home: Home, tmp_path: Path) -> None:
    with home.client().create(base=BASE, memory_mib=64) as sbx:
        other = Home(msgspec.structs.replace(home.place, run_dir=tmp_path / "run", state_dir=tmp_path / "state"))
        other.dsec("up", code=1)
        log = (tmp_path / "state" / "agent.log").read_text()
        assert f"is that of the node of {home.place.run_dir}" in log
        assert sbx.run("true").ok


@pytest.mark.same_everywhere
@pytest.mark.parametrize("keeper_dies", [False, True])
def test_an_agent_with_another_state_is_refused_and_ends_nothing(home: Home, tmp_path: Path, keeper_dies: bool) -> None:
    """As `sudo dsec up` is, which lacks the variables of the shell it was typed in."""
    sbx = home.client().create(base=BASE, memory_mib=64, name="lives")
    sbx.run("echo kept >/f", check=True)
    home.dsec("down")
    if keeper_dies:
        keeper = living_keeper(home.place.run_dir)
        assert keeper is not None
        os.kill(keeper.pid, signal.SIGKILL)
        while living_keeper(home.place.run_dir) is not None:
            time.sleep(0.02)
    other = Home(msgspec.structs.replace(home.place, state_dir=tmp_path / "state"))
    said = other.dsec_says("up", code=1)
    assert f"with its state in {home.place.state_dir}" in said and str(other.place.state_dir) in said
    assert f"DSEC_RUN_DIR={home.place.run_dir} DSEC_STATE_DIR={home.place.state_dir} dsec up" in said
    assert ("dsec down --stop-all" in said) is not keeper_dies
    assert not (other.place.state_dir / "node.lock").exists()
    home.dsec("up")
    assert home.client().get("lives").run("cat /f").stdout == "kept\n"
    home.dsec("stop", "lives")


@pytest.mark.same_everywhere
def test_an_agent_whose_state_is_not_there_is_refused_and_ends_nothing(home: Home) -> None:
    """As on a machine that has not mounted its disk."""
    home.client().create(base=BASE, memory_mib=64, name="lives").run("echo kept >/f", check=True)
    home.dsec("down")
    state, away = home.place.state_dir, home.place.state_dir.with_name("away")
    state.rename(away)
    assert "is a disk not mounted there" in home.dsec_says("up", code=1)
    shutil.rmtree(state)  # which was made anew
    away.rename(state)
    home.dsec("up")
    assert home.client().get("lives").run("cat /f").stdout == "kept\n"
    home.dsec("down")
    state.rename(away)
    assert b"the runtime has stopped" in home.dsec("down", "--stop-all")
    shutil.rmtree(state)
    away.rename(state)
    home.dsec("up")
    assert list(home.client().list()) == []


@pytest.mark.same_everywhere
def test_a_run_directory_is_free_for_another_state_when_nothing_lives_there(home: Home, tmp_path: Path) -> None:
    home.dsec("down", "--stop-all")
    other = Home(msgspec.structs.replace(home.place, state_dir=tmp_path / "state"))
    assert f"DSEC_STATE_DIR={other.place.state_dir}" in other.dsec("up").decode()
    assert home.dsec_says("up", "--state-dir", str(home.place.state_dir), code=1)
    doctor = {line["name"]: line for line in json.loads(home.dsec("doctor", "--json", code=None))["machine"]}
    assert doctor["state"]["level"] == "warning" and str(other.place.state_dir) in doctor["state"]["found"]
    assert f"DSEC_STATE_DIR={other.place.state_dir}" in home.dsec_says("down", code=0)
    doctor = {line["name"]: line for line in json.loads(other.dsec("doctor", "--json", code=None))["machine"]}
    assert doctor["state"]["level"] == "ok"
    home.dsec_says("up", code=1)  # its runtime lives, without an agent
    assert b"the runtime has stopped" in home.dsec("down", "--stop-all")
    home.dsec("up")
    assert home.client().list() is not None


@pytest.mark.same_everywhere
def test_one_that_another_ended_is_lost(home: Home) -> None:
    """The runtime has a stop on record, and the agent no call that asked for one."""
    sbx = home.client().create(base=BASE, memory_mib=64)
    home.dsec("down")

    async def stop() -> None:
        runtime = RuntimeClient(home.place.socket)
        await runtime.connect()
        await runtime.stop(sbx.id)
        await runtime.close()

    asyncio.run(stop())
    home.dsec("up")
    with pytest.raises(dsec.SandboxLost) as caught:
        sbx.run("true")
    assert caught.value.end_reason == "lost"
    assert home.client().get(sbx.id).state == "lost"


@pytest.mark.same_everywhere
def test_everything_can_be_stopped_when_the_agent_has_died(home: Home) -> None:
    home.client().create(base=BASE, memory_mib=64)
    pid = home.agent()
    os.kill(pid, signal.SIGKILL)
    while not _ended(pid):
        time.sleep(0.02)
    assert b"stopped 1 sandbox\n" in home.dsec("down", "--stop-all")
    assert living_keeper(home.place.run_dir) is None
    home.dsec("up")
    assert list(home.client().list()) == []
