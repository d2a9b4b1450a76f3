"""Time, injectable. Deadlines are kept in CLOCK_BOOTTIME: it is not moved when somebody sets the wall clock, it counts
while the machine is suspended, and it goes on over a restart of the agent. A host reboot ends every sandbox anyway."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Protocol

from dsec.linux import proc

# A timer of the event loop runs on CLOCK_MONOTONIC, which stands still in suspend; look again at least this often.
_TIMER_MAX_S = 3600.0


class Cancellable(Protocol):
    """What `call_later` gives back."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Where a node takes the time from."""

    def wall(self) -> float:
        """Seconds since the epoch, for people."""
        ...

    def boot(self) -> float:
        """Seconds since boot, for deadlines."""
        ...

    def boot_id(self) -> str:
        """Changes with every boot of the machine."""
        ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancellable:
        """Call once, `delay_s` from now."""
        ...


class SystemClock:
    """The machine's clocks and the running event loop's timers."""

    def wall(self) -> float:
        return time.time()

    def boot(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def boot_id(self) -> str:
        return proc.boot_id()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancellable:
        return asyncio.get_running_loop().call_later(delay_s, callback)


class Deadlines:
    """A heap of moments with one timer armed for the earliest.

    A deadline that moves later costs nothing: its entry stays, fires early and is put back by the callback's answer.
    So a busy sandbox whose idle limit moves with every call does no work here.
    """

    def __init__(self, clock: Clock, due: Callable[[str], float | None]) -> None:
        """`due(key)` acts on what is due for the key and returns its next moment, or None when there is none."""
        self._clock = clock
        self._due = due
        self._heap: list[tuple[float, str]] = []
        self._earliest: dict[str, float] = {}
        self._timer: Cancellable | None = None
        self._armed_for = 0.0

    def __len__(self) -> int:
        return len(self._earliest)

    def watch(self, key: str, when: float | None) -> None:
        """Look at the key at `when` at the latest."""
        if when is None or self._earliest.get(key, float("inf")) <= when:
            return
        self._earliest[key] = when
        heapq.heappush(self._heap, (when, key))
        self._arm()

    def forget(self, key: str) -> None:
        """Nothing more is due for the key; its entries lapse."""
        self._earliest.pop(key, None)
        if len(self._heap) > 2 * len(self._earliest) + 64:
            self._heap = [(when, k) for when, k in self._heap if self._earliest.get(k) == when]
            heapq.heapify(self._heap)

    def close(self) -> None:
        """No callback comes any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._heap.clear()
        self._earliest.clear()

    def _arm(self) -> None:
        if not self._heap:
            return
        when = self._heap[0][0]
        if self._timer is not None:
            if self._armed_for <= when:
                return
            self._timer.cancel()
        self._armed_for = when
        delay = min(max(when - self._clock.boot(), 0.0), _TIMER_MAX_S)
        self._timer = self._clock.call_later(delay, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = self._clock.boot()
        while self._heap and self._heap[0][0] <= now:
            when, key = heapq.heappop(self._heap)
            if self._earliest.get(key) != when:
                continue
            del self._earliest[key]
            self.watch(key, self._due(key))
        self._arm()
