"""A process that no signal ends, by the SDK over a real node: what is said of its run and of its sandbox is so, its
room stays taken, and over the death of agent and runtime all of it ends when it can."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dsec
from tests.kit import groups
from tests.kit.home import BASE, Home
from tests.kit.inventory import Inventory, Scope
from tests.kit.lanes import kernel_lacks
from tests.kit.rtclient import Client
from tests.kit.stuck import FREEZER, Held, state

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _freezer() -> None:
    if not (FREEZER / "cgroup.procs").exists():
        kernel_lacks(
            "a freezer of cgroup v1", "tests/root/runtime/test_unkillable.py has a disk that is frozen instead"
        )


def host_pids(home: Home, sandbox: dsec.Sandbox) -> list[int]:
    runs = groups.below(f"{home.place.cgroup}/{sandbox.id}/payload")
    return sorted(pid for run in runs for pid in groups.processes(run) if run.name.startswith("run-"))


def of_sandbox(home: Home, id_: str) -> list[str]:
    """Everything with its name, but for the record that is kept for a while."""
    place = home.place
    kinds = Inventory.take(Scope(place.run_dir, place.state_dir, (place.cgroup,))).kinds.values()
    return [what for kind in kinds for what in kind if id_ in what and f"ns/sbx/{id_}" not in what]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def stuck(home: Home) -> Iterator[tuple[dsec.Sandbox, dsec.Process, Held]]:
    """A sandbox with a program that cannot die."""
    with home.client() as client:
        sbx = client.create(base=BASE, idle_timeout_s=None)
        program = sbx.spawn("echo on; exec sleep 1000", stdin=False)
        assert next(program.stdout.follow()) == b"on\n"
        until(lambda: [Path(f"/proc/{pid}/comm").read_text() for pid in host_pids(home, sbx)] == ["sleep\n"])
        held = Held(host_pids(home, sbx))
        try:
            yield sbx, program, held
        finally:
            held.thaw()
            sbx.stop()


def promised(client: dsec.Client) -> dict[str, float]:
    """What is taken of the node, but for the disk: a program's output counts with it."""
    rooms = client.node().capacity.items()
    return {name: room["promised"] for name, room in rooms if name not in ("waiting", "disk_mib")}


def test_a_program_that_cannot_die_is_over_when_it_is_killed(
    stuck: tuple[dsec.Sandbox, dsec.Process, Held],
) -> None:
    sbx, program, held = stuck
    program.kill()
    result = program.wait()
    assert (result.exit_code, result.cause, result.stdout) == (137, "killed", "on\n")
    assert [state(pid) for pid in held.pids] == ["D"]
    assert sbx.run("echo hi").stdout == "hi\n"


def test_a_sandbox_that_cannot_end_is_stopping_until_it_has(
    stuck: tuple[dsec.Sandbox, dsec.Process, Held], home: Home
) -> None:
    sbx, _, held = stuck
    with home.client() as client:
        taken = promised(client)
        with pytest.raises(dsec.DeadlineExceeded, match="waits for a device"):
            sbx.stop(grace_s=0)
        assert sbx.info().state == "stopping"
        assert promised(client) == taken
        assert of_sandbox(home, sbx.id) != []
        with pytest.raises((dsec.SandboxLost, dsec.InvalidState)):
            sbx.run("true")
        with client.create(base=BASE) as other:
            assert other.run("echo x >/f; exit 3").exit_code == 3
            # Who dies is nobody's excuse.
            with Client(home.place.run_dir / "runtime.sock") as runtime:
                os.kill(runtime.hello["pid"], signal.SIGKILL)
            os.kill(home.agent(), signal.SIGKILL)
            home.dsec("up")
            assert other.run("cat /f").stdout == "x\n"
        assert (sbx.info().state, promised(client)) == ("stopping", taken)
        with pytest.raises(dsec.DeadlineExceeded, match="waits for a device"):
            sbx.stop(grace_s=0)
        assert [state(pid) for pid in held.pids] == ["D"]
        held.thaw()
        until(lambda: sbx.info().state == "stopped")
        assert (sbx.info().end_reason, promised(client)) == ("stopped", dict.fromkeys(taken, 0.0))
        assert [state(pid) for pid in held.pids] == [""]
        assert of_sandbox(home, sbx.id) == []
