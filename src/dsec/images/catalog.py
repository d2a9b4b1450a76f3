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
from dsec.linux.full import is_full
from dsec.model.errors import Conflict, NodeDiskFull

Role = Literal["base", "workspace", "toolkit"]

VERSION: Final = 2
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
    role TEXT NOT NULL DEFAULT '', config TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (name, kind, label)
) STRICT;
CREATE INDEX names_by_digest ON names(digest);
"""


# Before version 2 a name had the settings its layer got when it was first imported.
_TO_2: Final = """
ALTER TABLE names ADD COLUMN role TEXT NOT NULL DEFAULT '';
ALTER TABLE names ADD COLUMN config TEXT NOT NULL DEFAULT '';
UPDATE names SET (role, config) = (SELECT role, config FROM layers WHERE layers.digest = names.digest);
"""


class Config(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a command gets that names nothing itself: environment, directory, user."""

    env: dict[str, str] = {}
    cwd: str | None = None
    user: str | None = None


class Row(msgspec.Struct, frozen=True):
    """What is known of a layer by a name: its files by their digest, and the settings that go with the name.

    `names` are those that mean the same files with the same settings.
    """

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
        """A layer and names for it, in one transaction.

        Role and config are the names' own: the same files may be there under another name with others. By its digest
        alone a layer has those it came with first, so other ones without a name are a Conflict.
        """
        config = msgspec.json.encode(row.config).decode()
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute(
                "INSERT INTO layers VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (digest) DO NOTHING",
                (row.digest, row.size, row.created, row.role, row.source, config),
            )
            if not refs:
                _same_settings(db, row, config)
            for ref in refs:
                self._name(db, ref, row.digest, row.role, config)
            db.execute("COMMIT")

    def find(self, ref: Ref) -> Row | None:
        """The layer a reference means now."""
        with self._open() as db:
            state = _state(db)
            if self._local.seen[0] != state:
                self._local.seen = (state, {})
            answers: dict[Ref, Row | None] = self._local.seen[1]
            if ref not in answers:
                if len(answers) >= REMEMBERED_MAX:
                    answers.clear()
                answers[ref] = self._find(db, ref)
            return answers[ref]

    def state(self) -> tuple[int, int]:
        """As long as a thread gets the same, every reference means to it what it meant before."""
        with self._open() as db:
            return _state(db)

    def all(self) -> list[Row]:
        """Every layer, oldest first; one whose names have several settings is there once with each."""
        with self._open() as db:
            return self._rows(db)

    def count_names(self, digest: str) -> int:
        """How many names a layer has."""
        with self._open() as db:
            return int(db.execute("SELECT count(*) FROM names WHERE digest = ?", (digest,)).fetchone()[0])

    def unname(self, ref: Ref) -> None:
        """Forget a name; the layer stays."""
        with self._open() as db:
            db.execute("DELETE FROM names WHERE name = ? AND kind = ? AND label = ?", (ref.name, ref.kind, ref.label))

    def remove(self, digest: str) -> None:
        """Forget a layer and its names."""
        with self._open() as db:
            db.execute("DELETE FROM layers WHERE digest = ?", (digest,))

    def _find(self, db: sqlite3.Connection, ref: Ref) -> Row | None:
        if ref.kind == "digest":
            found = db.execute("SELECT * FROM layers WHERE digest = ?", (ref.label,)).fetchone()
            if found is None:
                return None
            rows = self._rows(db, ref.label)
            names = tuple(sorted(name for row in rows for name in row.names))
            digest, size, created, role, source, config = found
            return Row(digest, size, created, role, source, _decode(config), names)
        key = (ref.name, ref.kind, ref.label)
        digest = db.execute("SELECT digest FROM names WHERE name = ? AND kind = ? AND label = ?", key).fetchone()
        rows = [] if digest is None else self._rows(db, digest[0])
        return next((row for row in rows if str(ref) in row.names), None)

    @staticmethod
    def _name(db: sqlite3.Connection, ref: Ref, digest: str, role: Role, config: str) -> None:
        if ref.kind == "version":
            query = "SELECT digest, role, config FROM names WHERE kind = ? AND name = ? AND label = ?"
            found = db.execute(query, (ref.kind, ref.name, ref.label)).fetchone()
            if found is not None and found[0] != digest:
                raise Conflict(
                    f"{ref} is {found[0]} already and a version never changes; take a new version",
                    detail={"ref": str(ref), "digest": found[0]},
                )
            if found is not None and found[1:] != (role, config):
                raise Conflict(
                    f"{ref} is there already with role {found[1]} and settings {found[2]}, not {role} and {config}; a "
                    "version never changes; take a new version",
                    detail={"ref": str(ref), "digest": digest},
                )
        db.execute(
            "INSERT OR REPLACE INTO names (kind, name, label, digest, role, config) VALUES (?, ?, ?, ?, ?, ?)",
            (ref.kind, ref.name, ref.label, digest, role, config),
        )

    @staticmethod
    def _rows(db: sqlite3.Connection, digest: str | None = None) -> list[Row]:
        where, values = ("", ()) if digest is None else ("WHERE layers.digest = ?", (digest,))
        query = (
            "SELECT layers.digest, size, created, coalesce(names.role, layers.role), source, "
            "coalesce(names.config, layers.config), kind, name, label FROM layers "
            f"LEFT JOIN names ON names.digest = layers.digest {where} "
            "ORDER BY created, layers.digest, name, kind, label"
        )
        names: dict[tuple[str, int, float, Role, str, str], list[str]] = {}
        for *known, kind, name, label in db.execute(query, values):
            mine = names.setdefault(tuple(known), [])
            if name is not None:
                mine.append(str(Ref(kind, name, label)))
        return [Row(*known[:5], _decode(known[5]), tuple(mine)) for known, mine in names.items()]

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
        except sqlite3.OperationalError as error:
            if is_full(error, self._path.parent):
                raise NodeDiskFull(f"the layer catalogue {self._path}: {error}; free space on its disk") from error
            raise
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
        elif version == 1:
            for statement in filter(str.strip, _TO_2.split(";")):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {VERSION}")
        elif version > VERSION:
            raise Conflict(f"the layer catalogue has version {version}, written by a newer dsec ({VERSION} here)")
        db.execute("COMMIT")


def _state(db: sqlite3.Connection) -> tuple[int, int]:
    # Both numbers stand still as long as nobody, here or elsewhere, writes.
    return db.execute("PRAGMA data_version").fetchone()[0], db.total_changes


def _same_settings(db: sqlite3.Connection, row: Row, config: str) -> None:
    role, there = db.execute("SELECT role, config FROM layers WHERE digest = ?", (row.digest,)).fetchone()
    if (role, there) != (row.role, config):
        raise Conflict(
            f"these files are here already as {row.digest} with role {role} and settings {there}, not {row.role} and "
            f"{config}; settings belong to a name: give it one",
            detail={"digest": row.digest},
        )


def _decode(config: str) -> Config:
    return msgspec.json.decode(config, type=Config)
