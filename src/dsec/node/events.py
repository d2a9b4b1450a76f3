"""Events of sandboxes, read from what is kept of them: the rows are written by the database's triggers (`schema`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.model.errors import InvalidSpec
from dsec.model.events import Event
from dsec.model.limits import MIB
from dsec.model.states import SandboxInfo, Usage
from dsec.node.box import SELECT, read_row
from dsec.node.core import Core
from dsec.node.steps import BEGUN, FAILED, WireError
from dsec.node.store import Statement

# The last of each sandbox; up to 63 more until they are removed. The schema's trigger has the number, too.
EVENTS_KEEP_MAX: Final = 1000
PAGE: Final = 100
# A follower is woken when anything was written, and looks this often at most: one read of an index.
LOOK_S: Final = 0.1
SEQ_MAX: Final = 2**53

_STARTED: Final = ".started"
_ENDED: Final = ".ended"

_COLUMNS: Final = (
    "e.seq, e.at, e.kind, s.state, s.step, s.subject, s.command, s.response, s.spool, v.detail "
    "FROM events AS e LEFT JOIN steps AS s ON s.scope = e.sandbox AND s.key = e.key AND e.key <> '' "
    "LEFT JOIN verdicts AS v ON v.sandbox = e.sandbox AND v.seq = e.seq AND e.kind = 'verdict'"
)
_AFTER: Final = f"SELECT {_COLUMNS} WHERE e.sandbox = ? AND e.seq > ? ORDER BY e.seq LIMIT {PAGE}"
_ADD: Final = (
    "INSERT INTO events SELECT ?, coalesce(max(seq), 0) + 1, ?, ?, '' FROM events WHERE sandbox = ? "
    "HAVING EXISTS (SELECT 1 FROM sandboxes WHERE id = ?)"
)


class _Ended(msgspec.Struct):
    """Of a RunResult what an event tells: all but the output."""

    exit_code: int
    cause: str
    signal: int | None = None
    limits_hit: tuple[str, ...] = ()
    duration_s: float = 0.0
    usage: Usage = Usage()


_decode_ended = msgspec.msgpack.Decoder(_Ended).decode
_decode_error = msgspec.msgpack.Decoder(WireError).decode
_decode_detail = msgspec.msgpack.Decoder(dict[str, Any]).decode
_decode_info = msgspec.msgpack.Decoder(SandboxInfo).decode


class Events:
    """Events of a node's sandboxes."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def restarted(self, sandboxes: Iterable[str]) -> list[Statement]:
        """What notes that an agent has started and found these again."""
        now = self._core.clock.wall()
        return [(_ADD, (id_, now, "node_restarted", id_, id_)) for id_ in sandboxes]

    async def of(self, ref: str, since: int = 0, *, follow: bool = False) -> AsyncIterator[Event]:
        """Events after `since`, the oldest first; with `follow` also those to come, until the sandbox has ended.

        Raises NotFound, and InvalidSpec for a `since` that is no number of an event.
        """
        if not 0 <= since <= SEQ_MAX:
            raise InvalidSpec.field("since", since, "0 or more: the seq of the last event that is known")
        box = self._core.alive(ref)
        id_ = (self._core.past(ref) if box is None else box.info).id
        over = False
        loop = asyncio.get_running_loop()
        while True:
            changed, looked = self._core.store.changed.next(), loop.time()
            # Looked at before the page: what a sandbox that has gone by now has left is in it.
            over = over or id_ not in self._core.boxes
            page = await self._page(id_, since)
            for event in page:
                since = event.seq
                yield event
            if page:
                continue
            if over or not follow:
                return
            await asyncio.shield(changed)
            await asyncio.sleep(max(0.0, looked + LOOK_S - loop.time()))

    async def _page(self, id_: str, since: int) -> list[Event]:
        rows = self._core.store.read(_AFTER, (id_, since))
        if not rows:
            return []
        info = self._info(id_)
        spool = self._core.store.spool
        if any(row[8] is not None for row in rows):
            events = await asyncio.to_thread(lambda: [_event(row, info, spool) for row in rows])
        else:
            events = [_event(row, info, spool) for row in rows]
        return list(_with_gaps(events, since))

    def _info(self, id_: str) -> SandboxInfo | None:
        box = self._core.boxes.get(id_)
        if box is not None:
            return box.info
        rows = self._core.store.read(f"{SELECT} WHERE id = ?", (id_,))
        return read_row(rows[0]).info if rows else None


def _with_gaps(events: Iterable[Event], since: int) -> Iterator[Event]:
    """What is not kept any more is told of: the oldest, and verdicts between others."""
    for event in events:
        lacking = event.seq - since - 1
        if lacking:
            yield Event(seq=event.seq - 1, at=event.at, kind="missed", detail={"count": lacking})
        since = event.seq
        yield event


def _event(row: tuple[Any, ...], info: SandboxInfo | None, spool: Path) -> Event:
    seq, at, kind, state, step, subject, command, response, spooled, verdict = row
    if kind == "created":
        return _created(seq, info)
    if kind == "ended":
        return Event(seq=seq, at=at, kind=kind, detail=_end_of(info))
    if verdict is not None:
        return Event(seq=seq, at=at, kind=kind, detail=_decode_detail(verdict))
    event = Event(seq=seq, at=at, kind=kind, step=step or None, process_id=subject or None, command=command or None)
    if state is None or state == BEGUN or kind.endswith(_STARTED):
        return event
    body = response
    if spooled is not None:
        try:
            body = (spool / spooled).read_bytes()
        except FileNotFoundError:  # forgotten meanwhile, with its sandbox
            return event
    return msgspec.structs.replace(event, detail=_outcome(kind, state, body or b"", info))


def _created(seq: int, info: SandboxInfo | None) -> Event:
    if info is None:
        return Event(seq=seq, at=0.0, kind="created")
    at = info.started_at or info.created_at
    detail: dict[str, Any] = {"took_s": max(at - info.created_at, 0.0), "layers": [layer.ref for layer in info.layers]}
    if info.admitted_at is not None:
        detail["waited_s"] = max(info.admitted_at - info.created_at, 0.0)
    return Event(seq=seq, at=at, kind="created", detail=detail)


def _end_of(info: SandboxInfo | None) -> dict[str, Any]:
    if info is None:
        return {}
    detail: dict[str, Any] = {"state": info.state, "reason": info.end_reason}
    if info.ended_by is not None:
        detail["by"] = info.ended_by
    return detail


def _outcome(kind: str, state: int, body: bytes, info: SandboxInfo | None) -> dict[str, Any]:
    """What came of a step."""
    if state == FAILED:
        error = _decode_error(body)
        return {"error": error.code, "message": error.message}
    if kind.endswith(_ENDED):
        return _run_ended(_decode_ended(body), info)
    if kind == "labels":
        return {"labels": _decode_info(body).labels}
    if kind == "extend":
        return {"expires_at": _decode_info(body).expires_at}
    if kind == "network":
        return {"network": dict(_decode_info(body).spec.network)}
    return {}


def _run_ended(ended: _Ended, info: SandboxInfo | None) -> dict[str, Any]:
    detail: dict[str, Any] = {
        "exit_code": ended.exit_code,
        "cause": ended.cause,
        "duration_s": ended.duration_s,
        "cpu_s": ended.usage.cpu_user_s + ended.usage.cpu_system_s,
    }
    if ended.signal is not None:
        detail["signal"] = ended.signal
    if ended.usage.memory_peak_bytes is not None:
        detail["memory_peak_bytes"] = ended.usage.memory_peak_bytes
    if ended.limits_hit:
        detail["limits_hit"] = list(ended.limits_hit)
    if info is not None and (ended.cause == "oom" or "memory" in ended.limits_hit):
        detail["memory_limit_bytes"] = info.spec.memory_mib * MIB
    return detail
