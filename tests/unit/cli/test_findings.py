"""What `dsec inspect` makes of numbers: why a sandbox is slow, stuck or gone."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dsec.cli import findings
from dsec.model.errors import FileNotFound, PermissionDenied, Unsupported
from dsec.model.events import Event
from dsec.model.files import Entry
from dsec.model.specs import Spec
from dsec.model.states import Pressure, SandboxInfo, Usage
from dsec.sdk.programs import ProcessInfo

pytestmark = pytest.mark.unit
MIB = 1 << 20


def info(**over: Any) -> SandboxInfo:
    spec = Spec(cpu=0.5, memory_mib=64, disk_mib=100, pids=20)
    over = {"state": "running", "started_at": time.time() - 100, **over}
    return SandboxInfo(id="sbx-1", node="n", backend="container", spec=spec, **over)


def process(status: str, pid: int = 7) -> ProcessInfo:
    return ProcessInfo(pid=pid, ppid=1, name="dd", status=status, wait_channel="io_schedule")


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    usage = Usage(cpu_user_s=90.0, memory_bytes=60 * MIB, disk_bytes=50 * MIB, pids=3, cpu_throttled_s=0.1,
                  memory_limit_hits=0, pressure=Pressure(cpu_s=0.5, memory_s=0.0, io_s=1.0))  # fmt: skip
    assert findings.of_running(info(), usage, [process("S"), process("R")]) == []
    assert findings.of_running(info(), Usage(), []) == []


def test_a_program_whose_output_nobody_reads_is_held_back() -> None:
    yes = ProcessInfo(pid=9, ppid=1, id="p-1", name="yes", status="S", wait_channel="anon_pipe_write")
    (found,) = findings.of_running(info(), Usage(), [process("S"), yes])
    assert found.startswith("held back: process 9 (yes) of p-1 waits until its output is read")


def test_processes_that_were_refused() -> None:
    def ended(seq: int, *hit: str) -> Event:
        return Event(seq=seq, at=1.0, kind="run.ended", process_id=f"p-{seq}", detail={"limits_hit": list(hit)})

    assert findings.of_programs(info(), [ended(1, "memory"), Event(seq=2, at=1.0, kind="created")]) == []
    (found,) = findings.of_programs(info(), [ended(1, "pids"), ended(2, "output", "pids"), ended(3)])
    assert found == "pids: the limit of 20 processes and threads was met by 2 programs, last p-2"


def test_a_short_wait_is_not_slow() -> None:
    usage = Usage(cpu_user_s=0.2, pressure=Pressure(cpu_s=0.2))
    assert findings.of_running(info(started_at=time.time() - 0.5), usage, []) == []


class Stat:
    """The files of a sandbox of which not more can be asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def stat(self, path: str, *, follow: bool) -> Entry:
        answer = self.answers.get(path.removeprefix("/dev/"), "char")
        assert not follow
        if isinstance(answer, Exception):
            raise answer
        return Entry(name="", path=path, type=answer)


def test_devices_that_are_gone() -> None:
    assert findings.of_devices(Stat()) == []
    (found,) = findings.of_devices(Stat(null="file"))
    assert found.startswith("broken: /dev/null is no device any more")
    (found,) = findings.of_devices(Stat(null="symlink", tty=FileNotFound("gone")))
    assert found.startswith("broken: /dev/null, /dev/tty are no devices any more")
    # Nothing is said where nothing is known.
    assert findings.of_devices(Stat(null=Unsupported("no files"), zero=PermissionDenied("no"))) == []


@pytest.mark.parametrize(
    ("usage", "says"),
    [
        (Usage(cpu_user_s=10.0, cpu_throttled_s=30.0, pressure=Pressure(cpu_s=30.5)), "CPUs held it back for 30.0 s"),
        (Usage(cpu_user_s=10.0, pressure=Pressure(cpu_s=40.0)), "waited 40.0 of 100.0 s for a CPU that others had"),
        (Usage(pressure=Pressure(memory_s=20.0)), "waited 20.0 of 100.0 s for memory"),
        (Usage(pressure=Pressure(io_s=20.0)), "waited 20.0 of 100.0 s for the disk"),
        (Usage(memory_limit_hits=3, memory_peak_bytes=64 * MIB), "the limit of 64 MiB was met 3 times, peak 64 MiB"),
        (Usage(disk_bytes=99 * MIB), "disk: 99 of 100 MiB"),
        (Usage(pids=20), "pids: 20 of 20"),
    ],
)  # fmt: skip
def test_each_of_them_is_said_alone(usage: Usage, says: str) -> None:
    (found,) = findings.of_running(info(), usage, [])
    assert says in found


def test_processes_that_cannot_go_on_are_named_up_to_a_number() -> None:
    found = findings.of_running(info(), Usage(), [process("D", pid) for pid in range(2, 8)] + [process("T", 9)])
    assert found[0] == "stuck: process 2 (dd) cannot be interrupted in io_schedule"
    assert found[3] == "stuck: 3 more like the last"
    assert found[4] == "stuck: process 9 (dd) is stopped in io_schedule"
    assert len(found) == 5


def test_an_end_is_told_with_who_made_it_and_what_met_a_limit() -> None:
    ended = Event(seq=3, at=1.0, kind="run.ended", process_id="p-1", detail={
        "cause": "oom", "memory_peak_bytes": 64 * MIB, "memory_limit_bytes": 64 * MIB})  # fmt: skip
    quiet = Event(seq=4, at=2.0, kind="run.ended", process_id="p-2", detail={"cause": "exited"})
    found = findings.of_ended(info(state="stopped", end_reason="stopped", ended_by="stop by uid 0"), [ended, quiet])
    assert found == ["it was stopped (stop by uid 0)", "p-1 ended by oom (peak 64 of 64 MiB)"]
