# Generated from dsec/sdk/_async/events.py by scripts/generate_sync.py: edit that file.

"""Events of one sandbox, taken up again where a connection broke."""

from __future__ import annotations

from collections.abc import Iterator

from dsec.model.events import Event
from dsec.sdk import codec
from dsec.sdk._sync.transport import Items, Retry, Transport
from dsec.sdk.http1 import Broken, Garbage
from dsec.sdk.keywords import explained


@explained
class Events:
    """What `events` returns: iterate over it. `close` (or the end of the iteration) lets go of its connection."""

    def __init__(self, transport: Transport, sandbox: str, since: int, follow: bool) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self._since = since
        self._follow = follow
        self._items: Items | None = None
        self._over = False

    def close(self) -> None:
        """Follow no longer."""
        self._over = True
        self._let_go()

    def __iter__(self) -> Iterator[Event]:
        """Each event once, the oldest first."""
        retry = Retry(self._transport)
        try:
            while not self._over:
                try:
                    event = self._next()
                except Broken as error:
                    self._let_go()
                    retry.after(error)
                    continue
                except Garbage as error:
                    raise self._transport.garbage(error) from error
                if event is not None:
                    retry = Retry(self._transport)
                    self._since = event.seq
                    yield event
        finally:
            self._let_go()

    def _next(self) -> Event | None:
        if self._items is None:
            query = codec.query(since=self._since, follow=self._follow)
            self._items = self._transport.stream("GET", f"{self._sandbox}/events{query}")
        item = self._items.next(codec.EventItem)
        if item.error is not None:
            raise item.error.error()
        if item.done:
            self._items.drain()
            self._over = True
        return item.event

    def _let_go(self) -> None:
        if self._items is not None:
            self._items.close()
            self._items = None
