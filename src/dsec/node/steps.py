"""The step table, which is the idempotency table: what was asked under which key, and what came back.

A row is *begun* (written before anything happens), then *answered* (on the disk before the caller hears of it), with a
value or with the error that came of it. A key is scoped to its sandbox; creations and layers to the node (scope "").
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.model.errors import Conflict, DsecError, Retry, from_wire
from dsec.model.limits import KIB
from dsec.node.clock import Clock
from dsec.node.owed import Owed
from dsec.node.store import Statement, Store

BEGUN: Final = 0
ANSWERED: Final = 1
FAILED: Final = 2

# Larger answers go to a file: rows of this size still fit a few pages of the table's tree.
SPOOL_FROM_BYTES: Final = 16 * KIB

_encoder = msgspec.msgpack.Encoder(order="deterministic")


class WireError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it crosses the wire and as it is kept."""

    code: str
    message: str
    detail: dict[str, Any]
    retry: Retry
    request_id: str | None = None
    sandbox_id: str | None = None

    @classmethod
    def of(cls, error: DsecError) -> WireError:
        """The wire form of an error."""
        return cls(
            code=error.code,
            message=error.message,
            detail=error.detail,
            retry=error.retry,
            request_id=error.request_id,
            sandbox_id=error.sandbox_id,
        )

    def error(self) -> DsecError:
        """The error itself."""
        return from_wire(self.code, self.message, dict(self.detail), self.retry, sandbox_id=self.sandbox_id)


_error_decoder = msgspec.msgpack.Decoder(WireError)

Answer = bytes | DsecError  # msgpack of the value, or the error


class Step(msgspec.Struct, frozen=True):
    """One row."""

    scope: str
    key: str
    hash: bytes
    kind: str
    state: int
    step: int
    subject: str  # the process or sandbox it is about
    begun_at: float
    command: str = ""
    response: bytes | None = None
    spool: str | None = None
    extra: bytes | None = None  # what its kind keeps with it


_COLUMNS = "scope, key, hash, kind, state, step, subject, begun_at, command, response, spool, extra"


def content_hash(kind: str, content: object) -> bytes:
    """What is compared when a key comes again: the same content gives the same hash in JSON and msgpack."""
    return hashlib.blake2b(_encoder.encode((kind, content)), digest_size=16).digest()


def conflict(key: str, kind: str, command: str = "") -> Conflict:
    """The error for a key that was used for something else: of what there was, only the command is kept."""
    before = f" (of {command!r})" if command else ""
    return Conflict(
        f"idempotency key {key!r} was used before with other content{before}; every field counts, also a timeout; use "
        f"a new key for a new {kind}",
        detail={"key": key},
    )


class Steps:
    """Reads and builds rows of the step table."""

    def __init__(self, store: Store, owed: Owed, clock: Clock) -> None:
        self._store = store
        self._owed = owed
        self._clock = clock

    def find(self, scope: str, key: str, digest: bytes, kind: str) -> Step | None:
        """The row of a key. Raises Conflict when it was used with other content."""
        rows = self._store.read(f"SELECT {_COLUMNS} FROM steps WHERE scope = ? AND key = ?", (scope, key))
        if not rows:
            return None
        step = self._step(rows[0])
        if step.hash != digest:
            raise conflict(key, kind, step.command)
        return step

    def open(self, scope: str) -> list[Step]:
        """Rows of a scope that were begun and never answered, of an agent before this one. Reads all its rows, but for
        the node's own scope."""
        # Written out: the index of the node's scope serves only a query that names it.
        where = "scope = ''" if not scope else "scope = ?"
        sql = f"SELECT {_COLUMNS} FROM steps WHERE {where} AND state = {BEGUN}"
        return [Step(*row) for row in self._store.read(sql, (scope,) if scope else ())]

    def by_subject(self, scope: str, subject: str) -> Step | None:
        """The row about a process of a sandbox."""
        kinds = "kind IN ('run', 'spawn', 'session', 'command')"
        sql = f"SELECT {_COLUMNS} FROM steps WHERE scope = ? AND subject = ? AND {kinds}"
        rows = self._store.read(sql, (scope, subject))
        return self._step(rows[0]) if rows else None

    def of_kind(self, scope: str, kind: str) -> Iterator[Step]:
        """The rows of one kind of a sandbox, the newest first."""
        sql = f"SELECT {_COLUMNS} FROM steps WHERE scope = ? AND kind = ? ORDER BY step DESC"
        yield from (self._step(row) for row in self._store.read(sql, (scope, kind)))

    def kept(self, scope: str, count: int) -> list[Step]:
        """The newest ended programs of a sandbox that were talked to, the oldest of them first."""
        sql = (
            f"SELECT {_COLUMNS} FROM steps WHERE scope = ? AND kind IN ('spawn', 'session') AND state <> 0 "
            "ORDER BY step DESC LIMIT ?"
        )
        return [Step(*row) for row in reversed(self._store.read(sql, (scope, count)))]

    def last(self, scope: str) -> tuple[int, float | None]:
        """The highest step number of a sandbox and when (boot clock) its last call was answered."""
        number, boot = self._store.read("SELECT max(step), max(ended_boot) FROM steps WHERE scope = ?", (scope,))[0]
        return int(number or 0), boot

    def _step(self, row: Sequence[Any]) -> Step:
        """A row, with what came of it also where that could not be written yet."""
        step = Step(*row)
        result = self._owed.result(step.scope, step.key)
        if result is None:
            return step
        return msgspec.structs.replace(step, state=result.state, response=result.body, spool=None)

    def answer(self, step: Step) -> Answer:
        """What came back for an answered row."""
        body = step.response or b""
        if step.spool is not None:
            body = (self._store.spool / step.spool).read_bytes()
        return _error_decoder.decode(body).error() if step.state == FAILED else body

    def begin(
        self,
        scope: str,
        key: str,
        digest: bytes,
        kind: str,
        *,
        step: int = 0,
        subject: str = "",
        command: str = "",
        extra: bytes | None = None,
    ) -> Statement:
        """The statement that begins a row."""
        sql = f"INSERT INTO steps ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, ?)"
        return sql, (scope, key, digest, kind, BEGUN, step, subject, self._clock.wall(), command, extra)

    def note(self, scope: str, key: str, extra: bytes) -> Statement:
        """The statement that replaces what a row keeps for its kind."""
        return "UPDATE steps SET extra = ? WHERE scope = ? AND key = ?", (extra, scope, key)

    def end(
        self, scope: str, key: str, answer: Answer, subject: str = "", *, spooled: bool = True
    ) -> tuple[Statement, tuple[tuple[Path, bytes], ...]]:
        """The statement that answers a row, and the files that must be there before (none, unless `spooled`)."""
        state, body = state_and_body(answer)
        spool: str | None = None
        files: tuple[tuple[Path, bytes], ...] = ()
        inline: bytes | None = body
        if spooled and len(body) > SPOOL_FROM_BYTES:
            spool = f"{scope or 'node'}/{subject or hashlib.sha256(key.encode()).hexdigest()}"
            files = ((self._store.spool / spool, body),)
            inline = None
        fields = "state = ?, ended_at = ?, ended_boot = ?, response = ?, spool = ?"
        sql = f"UPDATE steps SET {fields} WHERE scope = ? AND key = ?"
        return (sql, (state, self._clock.wall(), self._clock.boot(), inline, spool, scope, key)), files

    def drop(self, scope: str, key: str) -> Statement:
        """The statement that frees a key: nothing came of what was begun."""
        return "DELETE FROM steps WHERE scope = ? AND key = ?", (scope, key)


def state_and_body(answer: Answer) -> tuple[int, bytes]:
    """An answer as a row has it."""
    if isinstance(answer, DsecError):
        return FAILED, _encoder.encode(WireError.of(answer))
    return ANSWERED, answer
