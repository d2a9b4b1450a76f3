"""What has happened and could not be written, since the disk is full: told from memory, and written when there is room.

An end of a sandbox cannot be taken back when its row cannot be written, and it is what makes room. Should the agent
die before it is written, the next one finds a row that says "stopping" and no sandbox: it has ended all the same.

Nor can a program that has ended be run again because its result finds no room. The runtime keeps it until it is
written, and the next agent asks there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dsec.model.errors import DsecError
from dsec.model.limits import MIB
from dsec.model.states import SandboxInfo
from dsec.node.clock import Clock
from dsec.node.store import Statement, Store

log = logging.getLogger("dsec.node.owed")

RETRY_S: Final = 5.0
# Of results; each may be 4 MiB. What is beyond is asked for again under its key.
RESULTS_MAX_BYTES: Final = 64 * MIB

Key = tuple[str, str]


class Result(msgspec.Struct, frozen=True):
    """What came of a row: its state and answer, and how that is written."""

    state: int
    body: bytes
    statement: Statement
    files: Sequence[tuple[Path, bytes]]
    written: Callable[[], None]


class Owed:
    """Ends of sandboxes, results of what ran, and answers of other calls under their scope and key."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._infos: dict[str, SandboxInfo] = {}
        self._answers: dict[Key, tuple[bytes, bytes]] = {}
        self._results: dict[Key, Result] = {}
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

    def result(self, scope: str, key: str) -> Result | None:
        """What came of a row that says that it was begun."""
        return self._results.get((scope, key))

    def add_end(self, info: SandboxInfo, *statements: Statement) -> None:
        """A sandbox has ended."""
        self.add(*statements)
        self._infos[info.id] = info

    def add_answer(self, scope: str, key: str, digest: bytes, answer: bytes, *statements: Statement) -> None:
        """A call has done what it was to do."""
        self.add(*statements)
        self._answers[scope, key] = (digest, answer)

    def add_result(self, scope: str, key: str, result: Result) -> bool:
        """What ran has ended; False when there is no more room for it here either."""
        held = sum(len(other.body) for other in self._results.values())
        if held + len(result.body) > RESULTS_MAX_BYTES:
            return False
        self._results[scope, key] = result
        self._later()
        return True

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
        if self._store.closed:
            return
        if self._store.owes:
            self._store.commit().add_done_callback(self._tried)
        elif self._results:
            self._write_result()

    def _tried(self, written: asyncio.Future[None]) -> None:
        if not self._failed(written):
            self._try()

    def _write_result(self) -> None:
        """The first of them; each takes room of its own, and must not keep the ends from being written."""
        key, result = next(iter(self._results.items()))
        if not self._store.read("SELECT 1 FROM steps WHERE scope = ? AND key = ?", key):
            del self._results[key]  # the sandbox has been forgotten meanwhile
            self._try()
            return

        def tried(written: asyncio.Future[None]) -> None:
            if self._failed(written):
                return
            del self._results[key]
            result.written()
            self._try()

        self._store.commit(result.statement, files=result.files).add_done_callback(tried)

    def _failed(self, written: asyncio.Future[None]) -> bool:
        error = None if written.cancelled() else written.exception()
        if isinstance(error, DsecError):
            count = len(self._infos) + len(self._answers) + len(self._results)
            log.warning("%d ends and answers are not written yet: %s", count, error)
            self._later()
        return error is not None or written.cancelled()
