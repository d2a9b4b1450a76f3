"""The conformance suite against the fake."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dsec.backends.base import StartPlan
from dsec.backends.conformance import Check, applicable, perform
from dsec.backends.fake import FakeBackend, World
from dsec.model import ids

pytestmark = [pytest.mark.unit, pytest.mark.contract]


class FakeSubject:
    has = frozenset({"memory"})
    memory_hog = "alloc {mib}000000"

    def __init__(self) -> None:
        self.world = World()

    def backend(self) -> FakeBackend:
        return FakeBackend(self.world)

    def plan(self, **changes: Any) -> StartPlan:
        fields: dict[str, Any] = {
            "id": ids.new_sandbox_id("n1"),
            "hostname": "box",
            "layers": (),
            "env": {},
            "cwd": "/",
            "user": "root",
            "cpu": 1.0,
            "cpu_weight": 100,
            "cpus": (),
            "memory_bytes": 128 << 20,
            "disk_bytes": 64 << 20,
            "pids": 256,
        }
        return StartPlan(**(fields | changes))

    def inventory(self) -> set[str]:
        return self.world.inventory()


@pytest.mark.parametrize("check", applicable(FakeSubject.has), ids=repr)
def test_fake(check: Check) -> None:
    asyncio.run(perform(check, FakeSubject()))
