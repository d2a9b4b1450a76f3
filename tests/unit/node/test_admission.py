"""Admission: what fits, who waits, in which order; and that nothing leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.model.errors import NodeDiskFull, NodeFull
from dsec.node.admission import RESOURCES, Admission, Need, Room
from tests.kit.simnode import VirtualClock, settle


class Gauge:
    def __init__(self) -> None:
        self.now: dict[str, float] = {}

    def free(self) -> Mapping[str, float]:
        return self.now


def room(memory: float = 100.0) -> Room:
    return Room(total={**dict.fromkeys(RESOURCES, 1e9), "memory_mib": memory}, keep_free={"memory_mib": 10.0})


def need(memory: float) -> Need:
    return Need(memory_mib=memory, disk_mib=1, pids=1)


def test_refuses_naming_the_resource():
    async def main() -> None:
        admission = Admission(room(), Gauge(), VirtualClock())
        await admission.reserve("a", need(60), 0)
        with pytest.raises(NodeFull) as caught:
            await admission.reserve("b", need(50), 0)
        assert caught.value.detail == {"resource": "memory_mib", "asked": 50, "left": 40}
        with pytest.raises(NodeFull):  # never possible: no waiting for it
            await admission.reserve("c", need(101), 1000)
        admission.release("a")
        admission.release("a")
        await admission.reserve("b", need(100), 0)

    asyncio.run(main())


def test_output_counts_as_promised_disk_and_leaves_what_stays_free():
    async def main() -> None:
        gauge = Gauge()
        room_ = Room(total={**dict.fromkeys(RESOURCES, 1e9), "disk_mib": 100.0}, keep_free={"disk_mib": 50.0})
        admission = Admission(room_, gauge, VirtualClock())
        await admission.reserve("a", Need(memory_mib=1, disk_mib=60, pids=1), 0)
        admission.hold_spool("p", 30)
        admission.restore_spool("p", 30)
        assert admission.snapshot()["disk_mib"]["promised"] == 90
        with pytest.raises(NodeFull) as full:
            admission.hold_spool("q", 11)
        assert full.value.detail == {"resource": "disk_mib", "asked": 11, "left": 10}
        gauge.now = {"disk_mib": 55.0}
        with pytest.raises(NodeDiskFull) as disk:
            admission.hold_spool("q", 6)
        assert disk.value.detail == {"resource": "disk_mib", "asked": 6, "left": 55, "keep": 50}
        admission.hold_spool("q", 5)
        admission.hold_spool("none", 0)
        waiting = asyncio.create_task(admission.reserve("b", Need(memory_mib=1, disk_mib=30, pids=1), 100))
        await settle()
        assert not waiting.done()
        admission.release_spool("p")
        admission.release_spool("p")
        await waiting
        assert admission.holders() == {"a", "b"}
        assert admission.snapshot()["disk_mib"]["promised"] == 95

    asyncio.run(main())


def test_first_come_first_served_and_a_small_one_does_not_overtake():
    async def main() -> None:
        admission = Admission(room(), Gauge(), VirtualClock())
        await admission.reserve("a", need(60), 0)
        order: list[str] = []

        async def wait(name: str, memory: float) -> None:
            await admission.reserve(name, need(memory), 100)
            order.append(name)

        tasks = [asyncio.create_task(wait(name, size)) for name, size in (("big", 90), ("s1", 5), ("s2", 5))]
        await settle()
        with pytest.raises(NodeFull):
            await admission.reserve("s3", need(5), 0)  # would fit, but others wait
        assert order == [] and admission.waiting == 3
        admission.release("a")
        await asyncio.gather(*tasks)
        assert order == ["big", "s1", "s2"]
        assert admission.holders() == {"big", "s1", "s2"}

    asyncio.run(main())


def test_waiting_ends_at_its_time_and_lets_the_next_through():
    async def main() -> None:
        clock = VirtualClock()
        admission = Admission(room(), Gauge(), clock)
        await admission.reserve("a", need(60), 0)
        big = asyncio.create_task(admission.reserve("big", need(90), 5))
        small = asyncio.create_task(admission.reserve("small", need(10), 50))
        await clock.advance(4)
        assert not big.done() and not small.done()
        await clock.advance(2)
        with pytest.raises(NodeFull):
            await big
        await small
        assert admission.holders() == {"a", "small"}

    asyncio.run(main())


def test_a_machine_short_of_memory_refuses_whatever_was_promised():
    async def main() -> None:
        clock, gauge = VirtualClock(), Gauge()
        admission = Admission(room(), gauge, clock)
        gauge.now = {"memory_mib": 9.0}
        with pytest.raises(NodeFull):
            await admission.reserve("a", need(1), 0)
        waiting = asyncio.create_task(admission.reserve("a", need(1), 60))
        await clock.advance(3)
        gauge.now = {"memory_mib": 11.0}
        await clock.advance(1.5)
        await waiting

    asyncio.run(main())


def test_all_or_none():
    async def main() -> None:
        admission = Admission(room(), Gauge(), VirtualClock())
        with pytest.raises(NodeFull):
            await admission.reserve_all({"a": need(60), "b": need(60)}, 0)
        assert not admission.holders()
        await admission.reserve_all({"a": need(50), "b": need(50)}, 0)
        assert admission.holders() == {"a", "b"}

    asyncio.run(main())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "give", "cancel", "time"]), st.integers(0, 7), st.integers(1, 100)),
        max_size=60,
    )
)
def test_whatever_happens_nothing_leaks_or_is_promised_twice(actions):
    async def main() -> None:
        clock = VirtualClock()
        admission = Admission(room(), Gauge(), clock)
        tasks: dict[str, asyncio.Task[None]] = {}
        for number, (action, which, amount) in enumerate(actions):
            names = list(tasks)
            if action == "take":
                name = f"x{number}"
                tasks[name] = asyncio.create_task(admission.reserve(name, need(amount), amount))
            elif action == "give" and names:
                admission.release(names[which % len(names)])
            elif action == "cancel" and names:
                tasks[names[which % len(names)]].cancel()
            elif action == "time":
                for _ in range(3):
                    await asyncio.sleep(0)
                clock._now += amount / 10
            await asyncio.sleep(0)
            assert admission.snapshot()["memory_mib"]["promised"] <= 100
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        for name in tasks:
            admission.release(name)
        assert not admission.holders() and not admission.waiting
        assert all(abs(value["promised"]) < 1e-6 for value in admission.snapshot().values())

    asyncio.run(main())
