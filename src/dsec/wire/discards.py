"""Results of runs that are not wanted any more: told to the runtime together, and on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dsec.wire.values import RunRef

# So many are told at once, or after so long.
DISCARDS_MAX: Final = 64
DISCARD_WITHIN_S: Final = 0.05


class Discards:
    """Waits for the next request, or a little, with what is to be sent.

    A frame by itself wakes the runtime and then, with its answer, us: a tenth of what a run costs both.
    """

    def __init__(self, send: Callable[[list[RunRef]], None]) -> None:
        self._send = send
        self._waiting: list[RunRef] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, ref: RunRef) -> None:
        """One more."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DISCARD_WITHIN_S, self._late)
        self._waiting.append(ref)
        if len(self._waiting) >= DISCARDS_MAX:
            self._send(self.take())

    def _late(self) -> None:
        self._timer = None
        if self._waiting:
            self._send(self.take())

    def take(self) -> list[RunRef]:
        """What waits, for who sends it. The timer stays: one for each run would cost more than it fires too early."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def close(self) -> None:
        """Nothing is sent any more."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
