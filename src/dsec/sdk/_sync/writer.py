# Generated from dsec/sdk/_async/writer.py by scripts/generate_sync.py: edit that file.

"""Who gives a program its input: a handle, over whichever of its connections."""

from __future__ import annotations

from typing import Protocol

from dsec.model.ids import new_key
from dsec.sdk._sync.net import Lock

# Where input goes on (None: where the server says it is), and what was on its way there and may have been taken.
Left = tuple[int | None, bytes]


class Channel(Protocol):
    """One way to give input."""

    def settle(self) -> Left:
        """What the next one has to know. Called with the writer's lock held; can be repeated."""
        ...

    def reached(self) -> int | None:
        """Where the next byte goes, as far as it is known."""
        ...


class Writer:
    """One for all channels of a handle. The server knows it by its `id`: what comes twice under it is a repeat, what
    comes where another has written is refused. Channels write in turns, under `lock`."""

    def __init__(self) -> None:
        self.id = new_key()
        self.lock = Lock()
        self._channel: Channel | None = None

    def left(self, channel: Channel) -> Left | None:
        """What another channel has left; None: none has written since this one. Then `begin`."""
        if self._channel is None or self._channel is channel:
            return None
        return self._channel.settle()

    def begin(self, channel: Channel) -> None:
        """From now on this one writes, having what was left."""
        self._channel = channel

    def reached(self, channel: Channel) -> int | None:
        """Where the next byte goes that this channel writes."""
        return (self._channel or channel).reached()
