"""Deadlines: one timer, exact, whatever moves."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.node.clock import Deadlines, SystemClock
from tests.kit.simnode import VirtualClock


def test_the_system_clocks_go():
    clock = SystemClock()
    assert clock.boot() <= clock.boot() and clock.wall() > 1e9 and len(clock.boot_id()) == 36


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(0, 10)), max_size=20))
def test_each_fires_at_its_moment_and_never_early(moves):
    async def main() -> None:
        clock = VirtualClock()
        due: dict[str, float] = {}
        fired: list[tuple[str, float]] = []

        def look(key: str) -> float | None:
            if due[key] <= clock.boot():
                fired.append((key, due.pop(key)))
                return None
            return due[key]

        deadlines = Deadlines(clock, lambda key: look(key) if key in due else None)
        for key, ahead, step in moves:
            when = clock.boot() + ahead
            due[key] = max(due.get(key, 0.0), when)  # deadlines move later, as an idle limit does
            deadlines.watch(key, when)
            await clock.advance(step)
        left = dict(due)
        await clock.advance(100)
        assert not due and not len(deadlines)
        assert set(left) <= {key for key, _ in fired}

    asyncio.run(main())


def test_what_is_forgotten_does_not_fire_and_costs_nothing():
    async def main() -> None:
        clock = VirtualClock()
        fired: list[str] = []
        deadlines = Deadlines(clock, fired.append)
        for number in range(1000):
            deadlines.watch(f"k{number}", clock.boot() + 10)
            deadlines.forget(f"k{number}")
        assert len(deadlines._heap) < 100
        deadlines.watch("x", clock.boot() + 5)
        await clock.advance(20)
        assert fired == ["x"]

    asyncio.run(main())
