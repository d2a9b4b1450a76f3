"""Who gives a program its input: a handle, over whichever of its connections."""

from __future__ import annotations

from typing import Protocol

from dsec.model.ids import new_key
from dsec.sdk._async.net import AsyncLock

# Where input goes on (None: where the server says it is), and what was on its way there and may have been taken.
Left = tuple[int | None, bytes]


class AsyncChannel(Protocol):
    """One way to give input."""

    async def settle(self) -> Left:
        """What the next one has to know. Called with the writer's lock held; can be repeated."""
        ...

    def reached(self) -> int | None:
        """Where the next byte goes, as far as it is known."""
        ...


class AsyncWriter:
    """One for all channels of a handle. The server knows it by its `id`: what comes twice under it is a repeat, what
    comes where another has written is refused. Channels write in turns, under `lock`."""

    def __init__(self) -> None:
        self.id = new_key()
        self.lock = AsyncLock()
        self._channel: AsyncChannel | None = None

    async def left(self, channel: AsyncChannel) -> Left | None:
        """What another channel has left; None: none has written since this one. Then `begin`."""
        if self._channel is None or self._channel is channel:
            return None
        return await self._channel.settle()

    def begin(self, channel: AsyncChannel) -> None:
        """From now on this one writes, having what was left."""
        self._channel = channel

    def reached(self, channel: AsyncChannel) -> int | None:
        """Where the next byte goes that this channel writes."""
        return (self._channel or channel).reached()
