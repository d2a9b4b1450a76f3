"""The room of a machine: reserves, and what is really free."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsec.linux import proc
from dsec.model.errors import NodeFull
from dsec.node.admission import Admission, Need, Room
from dsec.node.capacity import PIDS_RESERVE, MachineGauge, machine_room
from tests.kit.simnode import VirtualClock


def test_a_machine_short_of_processes_lets_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 32_768
    monkeypatch.setattr(proc, "pid_max", lambda: most)
    room = machine_room(tmp_path, {"pids": 2.0})
    assert room.total["pids"] == (most - PIDS_RESERVE) * 2
    # Only what this is about: the machine of the test may be short of anything else.
    room = Room(total=room.total, keep_free={"pids": room.keep_free["pids"]})
    need = Need(memory_mib=1, disk_mib=1, pids=4)

    async def reserve(processes: int) -> None:
        monkeypatch.setattr(proc, "processes", lambda: processes)
        clock = VirtualClock()
        await Admission(room, MachineGauge(tmp_path, clock), clock).reserve("a", need, 0)

    asyncio.run(reserve(int(most - PIDS_RESERVE)))
    with pytest.raises(NodeFull) as caught:
        asyncio.run(reserve(int(most - PIDS_RESERVE) + 1))
    assert caught.value.detail["resource"] == "pids"
