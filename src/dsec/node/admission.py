"""The node's final yes or no: what a sandbox reserves, what the node has, and a fair queue for those who wait.

Limits are not reservations: nine in ten sandboxes use at most a twentieth of what they asked for. So what is promised
may exceed what is there by a factor per resource, and, whatever has been promised, a new sandbox is only let in while
the machine itself has more free than a reserve (`Gauge`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from dsec.model.errors import Exhausted, NodeDiskFull, NodeFull
from dsec.model.specs import Spec
from dsec.node.clock import Clock

RESOURCES: Final = ("memory_mib", "disk_mib", "pids", "descriptors")

# Pipes, pidfds, namespaces and cgroup directories that runtime and keeper hold for one sandbox.
DESCRIPTORS_PER_SANDBOX: Final = 5
WAITERS_MAX: Final = 50_000
# Memory and disk of the machine become free without anybody telling: look this often, only while somebody waits.
GAUGE_INTERVAL_S: Final = 1.0


class Need(msgspec.Struct, frozen=True):
    """What one sandbox reserves."""

    memory_mib: float
    disk_mib: float
    pids: float
    descriptors: float = DESCRIPTORS_PER_SANDBOX

    @classmethod
    def of(cls, spec: Spec) -> Need:
        """What a spec promises its sandbox."""
        return cls(memory_mib=spec.memory_mib, disk_mib=spec.disk_mib, pids=spec.pids)

    def items(self) -> Iterator[tuple[str, float]]:
        """(resource, amount) pairs."""
        for name in RESOURCES:
            yield name, getattr(self, name)


class Gauge(Protocol):
    """How much the machine really has free now, for the resources that can be asked."""

    def free(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class Room:
    """What a node promises at most, and what must stay really free on the machine."""

    total: Mapping[str, float]
    keep_free: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Waiter:
    need: Need
    granted: asyncio.Future[None]


class Admission:
    """Reservations of one node. First come, first served: a small request never overtakes a big one that waits."""

    def __init__(self, room: Room, gauge: Gauge, clock: Clock) -> None:
        self._room = room
        self._gauge = gauge
        self._clock = clock
        self._held: dict[str, Need] = {}
        self._spools: dict[str, float] = {}
        self._promised = dict.fromkeys(RESOURCES, 0.0)
        self._queue: deque[_Waiter] = deque()
        self._ticking = False

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._queue)

    def holders(self) -> set[str]:
        """Who has reserved something."""
        return set(self._held)

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Promised and total per resource."""
        return {name: {"promised": self._promised[name], "total": self._room.total[name]} for name in RESOURCES}

    def restore(self, sandbox_id: str, need: Need) -> None:
        """Count a sandbox that is there already: after a restart, whatever it takes."""
        self._hold(sandbox_id, need)

    def release(self, sandbox_id: str) -> None:
        """Give back what a sandbox reserved; idempotent."""
        need = self._held.pop(sandbox_id, None)
        if need is None:
            return
        for name, amount in need.items():
            self._promised[name] -= amount
        self._serve_queue()

    def hold_spool(self, program: str, mib: float) -> None:
        """Reserve what a program's output may take of the disk; at once or not. Raises NodeFull, NodeDiskFull."""
        if not mib:
            return
        if self._promised["disk_mib"] + mib > self._room.total["disk_mib"]:
            raise _full("disk_mib", Need(0.0, mib, 0.0, 0.0), self._free(), ever=False)
        free = self._gauge.free().get("disk_mib")
        keep = self._room.keep_free.get("disk_mib", 0.0)
        if free is not None and free - mib < keep:
            raise NodeDiskFull(
                f"the node's disk has {free:,.0f} MiB free, of which {keep:,.0f} stay free, and this program's output "
                f"may take {mib:,.0f}: ask for less (spool_bytes), free space on it, or take another node",
                detail={"resource": "disk_mib", "asked": mib, "left": free, "keep": keep},
            )
        self.restore_spool(program, mib)

    def restore_spool(self, program: str, mib: float) -> None:
        """Count the output of a program that is there, whatever it takes; idempotent."""
        if mib and program not in self._spools:
            self._spools[program] = mib
            self._promised["disk_mib"] += mib

    def release_spool(self, program: str) -> None:
        """Its output is not kept any more; idempotent."""
        mib = self._spools.pop(program, None)
        if mib is not None:
            self._promised["disk_mib"] -= mib
            self._serve_queue()

    async def reserve_all(self, needs: Mapping[str, Need], wait_s: float) -> None:
        """Reserve for all or for none, waiting at most `wait_s`. Raises NodeFull, NodeDiskFull."""
        total = Need(*(sum(getattr(need, name) for need in needs.values()) for name in RESOURCES))
        batch = f"batch-{id(needs)}"
        await self.reserve(batch, total, wait_s)
        for sandbox_id, need in needs.items():
            self._hold(sandbox_id, need)
        self.release(batch)

    async def reserve(self, sandbox_id: str, need: Need, wait_s: float) -> None:
        """Reserve, waiting at most `wait_s` for room. Raises NodeFull naming the resource; NodeDiskFull."""
        self._refuse_impossible(need)
        lack = self._lacking(need)
        if not lack and not self._queue:
            self._hold(sandbox_id, need)
            return
        if wait_s <= 0 or len(self._queue) >= WAITERS_MAX:
            raise self._refusal(lack, need)
        await self._wait(sandbox_id, need, wait_s)

    async def _wait(self, sandbox_id: str, need: Need, wait_s: float) -> None:
        waiter = _Waiter(need, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)

        def late() -> None:
            if not waiter.granted.done():
                waiter.granted.set_exception(self._refusal(self._lacking(need), need, wait_s))

        timer = self._clock.call_later(wait_s, late)
        if not self._ticking:
            self._tick()
        try:
            # A grant is counted at once under a placeholder, so nothing can slip in between the grant and this task.
            await waiter.granted
            self._rename(waiter, sandbox_id)
        except BaseException:  # refused or cancelled: its place and what it was granted are free again
            if waiter in self._queue:
                self._queue.remove(waiter)
            self.release(_placeholder(waiter))
            self._serve_queue()
            raise
        finally:
            timer.cancel()

    def _rename(self, waiter: _Waiter, sandbox_id: str) -> None:
        self._held[sandbox_id] = self._held.pop(_placeholder(waiter))

    def _serve_queue(self) -> None:
        while self._queue:
            waiter = self._queue[0]
            if waiter.granted.done():  # timed out or cancelled; its own task has yet to notice
                self._queue.popleft()
                continue
            if self._lacking(waiter.need):
                return
            self._queue.popleft()
            self._hold(_placeholder(waiter), waiter.need)
            waiter.granted.set_result(None)

    def _tick(self) -> None:
        self._serve_queue()
        self._ticking = bool(self._queue)
        if self._ticking:
            self._clock.call_later(GAUGE_INTERVAL_S, self._tick)

    def _hold(self, sandbox_id: str, need: Need) -> None:
        self._held[sandbox_id] = need
        for name, amount in need.items():
            self._promised[name] += amount

    def _free(self) -> dict[str, float]:
        return {name: max(self._room.total[name] - self._promised[name], 0.0) for name in RESOURCES}

    def _refusal(self, lack: str, need: Need, waited_s: float = 0.0) -> Exhausted:
        free = self._gauge.free().get("disk_mib")
        keep = self._room.keep_free.get("disk_mib", 0.0)
        if lack == "disk_mib" and free is not None and free < keep:
            waited = f" after waiting {waited_s:g} s" if waited_s else ""
            return NodeDiskFull(
                f"the node's disk has {free:,.0f} MiB free{waited}, and no sandbox is made below {keep:,.0f}: what "
                "lives there keeps its room; free space on it, or take another node",
                detail={"resource": lack, "left": free, "keep": keep},
            )
        return _full(lack or "a place in the queue", need, self._free(), waited_s=waited_s)

    def _refuse_impossible(self, need: Need) -> None:
        for name, amount in need.items():
            if amount > self._room.total[name]:
                raise _full(name, need, self._room.total, ever=False)

    def _lacking(self, need: Need) -> str:
        for name, amount in need.items():
            if self._promised[name] + amount > self._room.total[name]:
                return name
        free = self._gauge.free()
        for name, keep in self._room.keep_free.items():
            if name in free and free[name] < keep:
                return name
        return ""


def _placeholder(waiter: _Waiter) -> str:
    return f"waiting-{id(waiter)}"


def _full(
    resource: str, need: Need, free: Mapping[str, float], waited_s: float = 0.0, *, ever: bool = True
) -> NodeFull:
    asked = getattr(need, resource, None)
    amounts = "" if asked is None else f": {asked:,.0f} asked, {max(free.get(resource, 0.0), 0.0):,.0f} left"
    waited = f" after waiting {waited_s:g} s" if waited_s else ""
    # More than all the node has: waiting would be in vain.
    advice = "wait longer (wait_s), ask for less" if ever else "ask for less"
    return NodeFull(
        f"this node has no room ({resource}{amounts}){waited}; {advice}, or take another node",
        detail={"resource": resource, "asked": asked, "left": free.get(resource)},
    )
