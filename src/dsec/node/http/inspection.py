"""What happened to a sandbox, and to its files."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from dsec.model.events import Event
from dsec.model.files import DiffReport, FileChange
from dsec.node.agent import Node
from dsec.node.http.codec import flag, number, path
from dsec.node.http.exchange import Exchange
from dsec.node.http.route import Route, S
from dsec.node.http.streams import next_or_none, until
from dsec.node.steps import WireError


class EventItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One item of a stream of events. The stream is whole when its last item is `done`."""

    event: Event | None = None
    done: bool | None = None
    error: WireError | None = None


async def events(node: Node, ex: Exchange, _: None) -> None:
    """Each is read when the client has taken the one before: a slow one waits in the database, not in memory."""
    follow = flag(ex.fields, "follow")
    items = node.events.of(ex.params[0], number(ex.fields, "since", 0, int), follow=follow)
    gone = asyncio.ensure_future(ex.gone())
    step: asyncio.Future[Event | None] | None = None
    try:
        while True:
            step = asyncio.ensure_future(next_or_none(items))
            if not await until(ex, gone, (step,)):
                return
            event = step.result()
            if event is None:
                break
            await ex.item({"event": event})
        await ex.item({"done": True})
        await ex.finish()
    finally:
        gone.cancel()
        if step is not None:
            step.cancel()


class DiffItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One item of a diff: some changes, or at its end how many there were."""

    changes: tuple[FileChange, ...] = ()
    report: DiffReport | None = None
    error: WireError | None = None


async def diff(node: Node, ex: Exchange, _: None) -> None:
    """A client that reads slowly holds up the helper; one that leaves ends it."""

    async def sink(changes: tuple[FileChange, ...]) -> None:
        await ex.item({"changes": changes})

    limit = number(ex.fields, "limit", 0, int) if "limit" in ex.fields else None
    where = path(ex.fields, "path") if "path" in ex.fields else b"/"
    telling = asyncio.ensure_future(node.files.diff(ex.params[0], where, sink, limit=limit))
    gone = asyncio.ensure_future(ex.gone())
    try:
        if not await until(ex, gone, (telling,)):
            return
        await ex.item({"report": telling.result()})
        await ex.finish()
    finally:
        telling.cancel()
        gone.cancel()


INSPECTION_ROUTES: tuple[Route, ...] = (
    Route(
        "GET",
        f"{S}/{{ref}}/events",
        events,
        "What happened to it; with follow=1 also what will",
        item=EventItem,
        query=(("since", int), ("follow", Literal["0", "1"])),
    ),
    Route(
        "GET",
        f"{S}/{{ref}}/diff",
        diff,
        "What of its files is not as in its layers",
        item=DiffItem,
        query=(("path", bytes), ("limit", int)),
    ),
)
