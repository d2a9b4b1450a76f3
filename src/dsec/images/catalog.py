"""The names of layers: a small SQLite database beside the image files, shared by every process of a node."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from dsec.images.refs import Ref
from dsec.model.errors import Conflict

Role = Literal["base", "workspace", "toolkit"]

VERSION: Final = 1
BUSY_TIMEOUT_S: Final = 30.0
REMEMBERED_MAX: Final = 10_000

_SCHEMA: Final = """
CREATE TABLE layers (
    digest TEXT PRIMARY KEY, size INTEGER NOT NULL, created REAL NOT NULL,
    role TEXT NOT NULL, source TEXT NOT NULL, config TEXT NOT NULL
) STRICT;
CREATE TABLE names (
    kind TEXT NOT NULL, name TEXT NOT NULL, label TEXT NOT NULL,
    digest TEXT NOT NULL REFERENCES layers(digest) ON DELETE CASCADE,
    PRIMARY KEY (name, kind, label)
) STRICT;
CREATE INDEX names_by_digest ON names(digest);
"""


class Config(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a command gets that names nothing itself: environment, directory, user."""

    env: dict[str, str] = {}
    cwd: str | None = None
    user: str | None = None


class Row(msgspec.Struct, frozen=True):
    """What is known of a layer."""

    digest: str
    size: int
    created: float
    role: Role
    source: str
    config: Config
    names: tuple[str, ...] = ()


class Catalog:
    """Any thread may call: each has a connection of its own, kept, since a node resolves names for every sandbox."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        with self._open() as db:
            self._migrate(db)

    def add(self, row: Row, refs: tuple[Ref, ...]) -> None:
        """A layer and names for it, in one transaction. A layer that is known keeps what is known of it."""
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute(
                "INSERT INTO layers VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (digest) DO NOTHING",
                (
                    row.digest,
                    row.size,
                    row.created,
                    row.role,
                    row.source,
                    msgspec.json.encode(row.config).decode(),
                ),
            )
            for ref in refs:
                self._name(db, ref, row.digest)
            db.execute("COMMIT")

    def find(self, ref: Ref) -> Row | None:
        """The layer a reference means now."""
        with self._open() as db:
            # Both numbers stand still as long as nobody, here or elsewhere, writes: then the answer is the last one.
            state = (db.execute("PRAGMA data_version").fetchone()[0], db.total_changes)
            if self._local.seen[0] != state:
                self._local.seen = (state, {})
            answers: dict[Ref, Row | None] = self._local.seen[1]
            if ref not in answers:
                if len(answers) >= REMEMBERED_MAX:
                    answers.clear()
                answers[ref] = self._find(db, ref)
            return answers[ref]

    def all(self) -> list[Row]:
        """Every layer, oldest first."""
        with self._open() as db:
            return self._rows(db, "ORDER BY created, digest")

    def unname(self, ref: Ref) -> None:
        """Forget a name; the layer stays."""
        with self._open() as db:
            db.execute("DELETE FROM names WHERE name = ? AND kind = ? AND label = ?", (ref.name, ref.kind, ref.label))

    def remove(self, digest: str) -> None:
        """Forget a layer and its names."""
        with self._open() as db:
            db.execute("DELETE FROM layers WHERE digest = ?", (digest,))

    def _find(self, db: sqlite3.Connection, ref: Ref) -> Row | None:
        digest = ref.label
        if ref.kind != "digest":
            key = (ref.name, ref.kind, ref.label)
            query = "SELECT digest FROM names WHERE name = ? AND kind = ? AND label = ?"
            found = db.execute(query, key).fetchone()
            if found is None:
                return None
            digest = found[0]
        rows = self._rows(db, "WHERE digest = ?", digest)
        return rows[0] if rows else None

    @staticmethod
    def _name(db: sqlite3.Connection, ref: Ref, digest: str) -> None:
        key = (ref.kind, ref.name, ref.label)
        if ref.kind == "version":
            found = db.execute("SELECT digest FROM names WHERE kind = ? AND name = ? AND label = ?", key).fetchone()
            if found is not None and found[0] != digest:
                raise Conflict(
                    f"{ref} is {found[0]} already and a version never changes; take a new version",
                    detail={"ref": str(ref), "digest": found[0]},
                )
        db.execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", (*key, digest))

    @staticmethod
    def _rows(db: sqlite3.Connection, where: str, *values: str) -> list[Row]:
        names: dict[str, list[str]] = {}
        of = "WHERE digest = ?" if values else ""
        query = f"SELECT kind, name, label, digest FROM names {of} ORDER BY name, kind, label"
        for kind, name, label, digest in db.execute(query, values):
            names.setdefault(digest, []).append(str(Ref(kind, name, label)))
        return [
            Row(
                digest,
                size,
                created,
                role,
                source,
                msgspec.json.decode(config, type=Config),
                tuple(names.get(digest, ())),
            )
            for digest, size, created, role, source, config in db.execute(f"SELECT * FROM layers {where}", values)
        ]

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        mine = getattr(self._local, "connection", None)
        if mine is None or mine[0] != os.getpid():  # a connection must not cross a fork
            db = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("PRAGMA synchronous = FULL")
            mine = self._local.connection = (os.getpid(), db)
            self._local.seen = (None, {})
        try:
            yield mine[1]
        finally:
            if mine[1].in_transaction:  # it was not committed
                mine[1].execute("ROLLBACK")

    @staticmethod
    def _migrate(db: sqlite3.Connection) -> None:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN IMMEDIATE")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {VERSION}")
        elif version > VERSION:
            raise Conflict(f"the layer catalogue has version {version}, written by a newer dsec ({VERSION} here)")
        db.execute("COMMIT")
