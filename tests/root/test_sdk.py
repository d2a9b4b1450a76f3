"""The SDK and the dsec command with real containers: the documentation's examples, and an agent that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from tests.kit.examples import examples
from tests.kit.home import BASE, COMMAND, Home, standing
from tests.kit.lanes import fewer


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with standing() as made:
        yield made


@pytest.mark.parametrize(("where", "code"), examples(), ids=[where for where, _ in examples()])
def test_examples_of_the_documentation(home: Home, where: str, code: str) -> None:
    subprocess.run([sys.executable, "-c", code], env=home.env, check=True)


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
