"""Verdicts about connections as events: alike ones together, bounded, and counted where there were too many."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import msgspec

from dsec.backends.base import Verdict
from dsec.model.errors import DsecError
from dsec.node.clock import Cancellable
from dsec.node.core import Core
from dsec.node.store import Statement

log = logging.getLogger("dsec.node.verdicts")

# They are written so long after the first of them. In this time so many different ones of one sandbox are kept, and of
# all together: a program that scans ports costs the node no more.
FLUSH_S: Final = 0.25
OF_ONE_MAX: Final = 16
OF_ALL_MAX: Final = 256
# The last of each sandbox are kept; its other events are not counted with them. The schema has the number, too.
VERDICTS_KEEP_MAX: Final = 500

_EVENT: Final = (
    "INSERT INTO events SELECT ?, coalesce(max(seq), 0) + 1, ?, 'verdict', '' FROM events WHERE sandbox = ? "
    "HAVING EXISTS (SELECT 1 FROM sandboxes WHERE id = ?)"
)
_DETAIL: Final = (
    "INSERT OR IGNORE INTO verdicts SELECT sandbox, seq, coalesce((SELECT number FROM verdicts WHERE sandbox = ? "
    "ORDER BY seq DESC LIMIT 1), 0) + 1, ? FROM events WHERE sandbox = ? AND kind = 'verdict' ORDER BY seq DESC LIMIT 1"
)
_Key = tuple[Any, ...]
encode = msgspec.msgpack.Encoder().encode


class _Waiting:
    """Of one sandbox: alike ones and how often, and how many found no room."""

    def __init__(self) -> None:
        self.alike: dict[_Key, list[Any]] = {}
        self.dropped = 0


class VerdictLog:
    """Keeps verdicts until they are written."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: dict[str, _Waiting] = {}
        self._kept = 0
        self._timer: Cancellable | None = None

    def told(self, verdicts: list[Verdict], dropped: dict[str, int]) -> None:
        """Some came, of sandboxes that may have ended."""
        for one in verdicts:
            if one.sandbox in self._core.boxes:
                self._add(one)
        for sandbox_id, count in dropped.items():
            if sandbox_id in self._core.boxes:
                self._of(sandbox_id).dropped += count
        if self._waiting and self._timer is None:
            self._timer = self._core.clock.call_later(FLUSH_S, self.flush)

    def _of(self, sandbox_id: str) -> _Waiting:
        return self._waiting.setdefault(sandbox_id, _Waiting())

    def _add(self, one: Verdict) -> None:
        waiting = self._of(one.sandbox)
        key = (one.kind, one.allow, one.rule, one.why, one.name, one.address, one.port)
        if (alike := waiting.alike.get(key)) is not None:
            alike[1] += 1
        elif len(waiting.alike) >= OF_ONE_MAX or self._kept >= OF_ALL_MAX:
            waiting.dropped += 1
        else:
            waiting.alike[key] = [one, 1]
            self._kept += 1

    def flush(self) -> None:
        """Write what waits."""
        self._timer = None
        waiting, self._waiting, self._kept = self._waiting, {}, 0
        statements: list[Statement] = []
        for sandbox_id, found in waiting.items():
            for one, count in found.alike.values():
                statements += _event(sandbox_id, one.at, _detail(one, count))
            if found.dropped:
                statements += _event(sandbox_id, self._core.clock.wall(), {"dropped": found.dropped})
        if statements and not self._core.store.closed:
            self._core.store.commit(*statements, durable=False).add_done_callback(_log_failure)

    def close(self) -> None:
        """Nothing more comes."""
        if self._timer is not None:
            self._timer.cancel()
            self.flush()


def _event(sandbox_id: str, at: float, detail: dict[str, Any]) -> list[Statement]:
    event: Statement = (_EVENT, (sandbox_id, at, sandbox_id, sandbox_id))
    return [event, (_DETAIL, (sandbox_id, encode(detail), sandbox_id))]


def _detail(one: Verdict, count: int) -> dict[str, Any]:
    said: dict[str, Any] = {
        "allow": one.allow,
        "about": one.kind,
        "rule": one.rule,
        "why": one.why,
        "name": one.name,
        "address": one.address,
        "port": one.port,
        "count": count if count > 1 else None,
    }
    return {name: value for name, value in said.items() if value is not None}


def _log_failure(future: asyncio.Future[None]) -> None:
    if not future.cancelled() and isinstance(error := future.exception(), DsecError):
        log.warning("verdicts were not written: %s", error)
