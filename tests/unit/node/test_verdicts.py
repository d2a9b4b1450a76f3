"""Verdicts as events: alike ones together, bounded, and never in the way of what else happened."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dsec.backends.base import Verdict
from dsec.node import verdicts
from dsec.node.verdicts import FLUSH_S, OF_ALL_MAX, OF_ONE_MAX, VERDICTS_KEEP_MAX, VerdictLog
from tests.kit.simnode import SimNode

pytestmark = pytest.mark.unit


def verdict(sandbox: str, **fields: Any) -> Verdict:
    return Verdict(**{"at": 5.0, "sandbox": sandbox, "kind": "connect", "allow": False, **fields})


async def details(s: SimNode, ref: str) -> list[dict[str, Any]]:
    return [event.detail async for event in s.node.events.of(ref, 0) if event.kind == "verdict"]


async def written(s: SimNode, log: VerdictLog) -> None:
    log.flush()
    await s.node.core.store.commit()


def test_alike_ones_are_one_event_and_what_is_not_known_is_left_out(sim: Any) -> None:
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        log = VerdictLog(s.node.core)
        log.told([verdict(id_, address="192.0.2.1", port=80)] * 3 + [verdict(id_, kind="dns", name="a.org")], {})
        assert await details(s, id_) == []
        await s.clock.advance(FLUSH_S)
        await s.node.core.store.commit()
        assert await details(s, id_) == [
            {"allow": False, "about": "connect", "address": "192.0.2.1", "port": 80, "count": 3},
            {"allow": False, "about": "dns", "name": "a.org"},
        ]

    sim(scenario)


def test_too_many_at_once_are_counted(sim: Any) -> None:
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        log = VerdictLog(s.node.core)
        log.told([verdict(id_, port=port) for port in range(100)], {id_: 7, "sbx-n1-gone": 3})
        log.told([verdict("sbx-n1-gone")], {})
        await written(s, log)
        found = await details(s, id_)
        assert [one.get("port") for one in found] == [*range(OF_ONE_MAX), None]
        assert found[-1] == {"dropped": 100 - OF_ONE_MAX + 7}
        others = [await s.create() for _ in range(OF_ALL_MAX // OF_ONE_MAX + 1)]
        for other in others:
            log.told([verdict(other, port=port) for port in range(OF_ONE_MAX)], {})
        await written(s, log)
        assert await details(s, others[-1]) == [{"dropped": OF_ONE_MAX}]

    sim(scenario)


def test_however_many_there_are_the_newest_stay_and_so_does_what_else_happened(sim: Any) -> None:
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        await s.run(id_, "true")
        log = VerdictLog(s.node.core)
        rounds = 100
        for number in range(rounds):
            log.told([verdict(id_, port=number * OF_ONE_MAX + at) for at in range(OF_ONE_MAX)], {})
            log.flush()
        await s.node.core.store.commit()
        events = [event async for event in s.node.events.of(id_, 0)]
        ports = [event.detail["port"] for event in events if event.kind == "verdict"]
        last = rounds * OF_ONE_MAX - 1
        assert ports == list(range(ports[0], last + 1))
        assert VERDICTS_KEEP_MAX <= len(ports) < VERDICTS_KEEP_MAX + 32
        assert [event.kind for event in events if event.kind != "verdict"] == ["created", "run.ended", "missed"]
        missed = next(event for event in events if event.kind == "missed")
        assert missed.detail["count"] == last + 1 - len(ports)

    sim(scenario)


def test_what_is_pending_is_written_at_the_end(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "FLUSH_S", 1e6)

    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        log = VerdictLog(s.node.core)
        log.told([verdict(id_)], {})
        log.close()
        await asyncio.sleep(0)
        await s.node.core.store.commit()
        assert len(await details(s, id_)) == 1

    sim(scenario)
