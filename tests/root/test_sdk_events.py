"""Events with real containers: what ended a program, with the limit it met, still known after the agent has died."""

from __future__ import annotations

import json
import os
import select
import signal

import pytest

import dsec
from dsec.model.limits import MIB
from tests.kit.home import BASE, Home

pytestmark = pytest.mark.same_everywhere


def last(sandbox: dsec.Sandbox) -> dsec.Event:
    return list(sandbox.events())[-1]


def test_out_of_memory_is_told_with_limit_and_peak(home: Home) -> None:
    with home.client().create(base=BASE, memory_mib=64) as sbx:
        result = sbx.run(["python3", "-c", "x = bytearray(200 << 20)"])
        event = last(sbx)
        assert (event.kind, event.process_id) == ("run.ended", result.process_id)
        assert event.detail["cause"] == result.cause == "oom"
        assert event.detail["memory_limit_bytes"] == 64 * MIB
        assert 0 < event.detail["memory_peak_bytes"] <= 64 * MIB
        assert "memory" in event.detail["limits_hit"]


def test_a_full_disk_is_told(home: Home) -> None:
    with home.client().create(base=BASE, disk_mib=16) as sbx:
        result = sbx.run("head -c 64M /dev/zero >/f")
        assert result.exit_code != 0
        assert last(sbx).detail["limits_hit"] == ["disk"]


def test_too_many_processes_are_told(home: Home) -> None:
    with home.client().create(base=BASE, pids=16) as sbx:
        sbx.run("i=0; while [ $i -lt 40 ]; do sleep 5 & i=$((i + 1)); done; wait", timeout_s=20)
        assert last(sbx).detail["limits_hit"] == ["pids"]


def test_too_many_descriptors_cannot_be_seen_from_outside(home: Home) -> None:
    """EMFILE is an answer to the program alone: no counter of its cgroup knows of it."""
    with home.client().create(base=BASE) as sbx:
        result = sbx.run("ulimit -n 8; exec python3 -c '[open(\"/dev/null\") for _ in range(20)]'")
        assert result.exit_code != 0
        assert "limits_hit" not in last(sbx).detail


def test_a_timeout_and_a_kill_are_told(home: Home) -> None:
    with home.client().create(base=BASE) as sbx:
        sbx.run("sleep 60", timeout_s=0.2)
        assert last(sbx).detail["cause"] == "timeout"


def test_they_outlive_the_agent_and_the_sandbox(home: Home) -> None:
    with home.client().create(base=BASE) as sbx:
        sbx.run("exit 3")
        before = list(sbx.events())
        pid = os.pidfd_open(home.agent())
        signal.pidfd_send_signal(pid, signal.SIGKILL)
        select.select([pid], [], [])
        os.close(pid)
        home.dsec("up")
        after = list(sbx.events())
        assert after[: len(before)] == before
        assert [event.kind for event in after[len(before) :]] == ["node_restarted"]
    ended = list(sbx.events())
    assert ended[: len(after)] == after
    assert ended[-1].detail["reason"] == "stopped"


def test_what_holds_a_sandbox_up_is_found(home: Home) -> None:
    with home.client().create(base=BASE, cpu=0.05) as sbx:
        # On a machine with much other work it may have less than its quota for a while.
        while not sbx.usage().cpu_throttled_s:
            sbx.run("while :; do :; done", timeout_s=1)
        found = json.loads(home.dsec("inspect", sbx.id))
        assert any(line.startswith("slow: its quota of 0.05 CPUs") for line in found["findings"]), found
    assert json.loads(home.dsec("inspect", sbx.id))["findings"][0].startswith("it was stopped (stop by")


def test_a_device_that_is_gone_is_found(home: Home) -> None:
    with home.client().create(base=BASE) as sbx:
        assert not [line for line in json.loads(home.dsec("inspect", sbx.id))["findings"] if "broken" in line]
        # As a file it takes what is thrown away, and a link leads elsewhere.
        sbx.run("rm /dev/null /dev/zero /dev/tty; echo x >/dev/null; ln -s full /dev/zero", check=True)
        (found,) = [line for line in json.loads(home.dsec("inspect", sbx.id))["findings"] if "broken" in line]
        assert found.startswith("broken: /dev/null, /dev/zero, /dev/tty are no devices any more")
