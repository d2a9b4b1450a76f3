"""What has happened and could not be written, since the disk is full: told from memory, and written when there is room.

An end of a sandbox cannot be taken back when its row cannot be written, and it is what makes room. Should the agent
die before it is written, the next one finds a row that says "stopping" and no sandbox: it has ended all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from dsec.model.errors import DsecError
from dsec.model.states import SandboxInfo
from dsec.node.clock import Clock
from dsec.node.store import Statement, Store

log = logging.getLogger("dsec.node.owed")

RETRY_S: Final = 5.0

Key = tuple[str, str]


class Owed:
    """Ends of sandboxes, and answers of calls under their scope and key."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._infos: dict[str, SandboxInfo] = {}
        self._answers: dict[Key, tuple[bytes, bytes]] = {}
        self._waiting = False

    @property
    def infos(self) -> Mapping[str, SandboxInfo]:
        """Sandboxes that have ended while their rows say otherwise."""
        self._forget_written()
        return self._infos

    def answer(self, scope: str, key: str) -> tuple[bytes, bytes] | None:
        """What a call was answered, behind the hash of what it was."""
        self._forget_written()
        return self._answers.get((scope, key))

    def add_end(self, info: SandboxInfo, *statements: Statement) -> None:
        """A sandbox has ended."""
        self.add(*statements)
        self._infos[info.id] = info

    def add_answer(self, scope: str, key: str, digest: bytes, answer: bytes, *statements: Statement) -> None:
        """A call has done what it was to do."""
        self.add(*statements)
        self._answers[scope, key] = (digest, answer)

    def add(self, *statements: Statement) -> None:
        """What no answer depends on."""
        self._forget_written()
        self._store.owe(*statements)
        self._later()

    def _forget_written(self) -> None:
        # Whoever writes next writes these before: nobody need wait for the timer.
        if not self._store.owes:
            self._infos.clear()
            self._answers.clear()

    def _later(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._clock.call_later(RETRY_S, self._try)

    def _try(self) -> None:
        self._waiting = False
        if not self._store.owes or self._store.closed:
            return
        self._store.commit().add_done_callback(self._tried)

    def _tried(self, written: asyncio.Future[None]) -> None:
        error = None if written.cancelled() else written.exception()
        if isinstance(error, DsecError):
            log.warning("%d ends and answers are not written yet: %s", len(self._infos) + len(self._answers), error)
        if self._store.owes:
            self._later()
