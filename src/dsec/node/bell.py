"""A bell: wakes all who wait for something to have happened, whatever it was."""

from __future__ import annotations

import asyncio


class Bell:
    """Rings on the event loop. Nobody waits: ringing costs nothing."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def next(self) -> asyncio.Future[None]:
        """The next ring. Asked for before a look, so that nothing that happens after the look is missed. Shared:
        shield it where the waiting may be cancelled."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    def ring(self) -> None:
        """Wake all who wait."""
        waited, self._next = self._next, None
        if waited is not None and not waited.done():
            waited.set_result(None)
