"""The node's database: its schema and how an older one becomes the current one."""

from __future__ import annotations

import sqlite3

VERSION = 4

# The i-th entry takes a database from version i to i + 1. Entries are never changed once released, only added.
_MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY,
        state TEXT NOT NULL,
        name TEXT,
        job TEXT,
        backend TEXT NOT NULL,
        info BLOB NOT NULL,
        handle BLOB,
        expires_boot REAL,
        idle_boot REAL,
        ended_at REAL
    ) WITHOUT ROWID;
    CREATE UNIQUE INDEX sandbox_name ON sandboxes (name) WHERE name IS NOT NULL AND ended_at IS NULL;
    CREATE INDEX sandbox_ended ON sandboxes (ended_at) WHERE ended_at IS NOT NULL;
    CREATE TABLE steps (
        scope TEXT NOT NULL,
        key TEXT NOT NULL,
        hash BLOB NOT NULL,
        kind TEXT NOT NULL,
        state INTEGER NOT NULL,
        step INTEGER NOT NULL,
        subject TEXT NOT NULL,
        begun_at REAL NOT NULL,
        ended_at REAL,
        ended_boot REAL,
        response BLOB,
        spool TEXT,
        PRIMARY KEY (scope, key)
    ) WITHOUT ROWID;
    CREATE INDEX step_open ON steps (scope) WHERE state = 0;
    """,
    """
    ALTER TABLE sandboxes ADD COLUMN base BLOB;
    ALTER TABLE steps ADD COLUMN command TEXT NOT NULL DEFAULT '';
    CREATE INDEX sandbox_ended_name ON sandboxes (name, ended_at) WHERE name IS NOT NULL AND ended_at IS NOT NULL;
    """,
    # Only of creations: in an index of all that is open each run would write a page when it begins and one when it
    # ends, a third of what is flushed before it is answered. The open runs of a living sandbox are found by its rows.
    """
    DROP INDEX step_open;
    CREATE INDEX step_open ON steps (subject) WHERE scope = '' AND state = 0;
    """,
    """
    ALTER TABLE steps ADD COLUMN extra BLOB;
    """,
)
assert len(_MIGRATIONS) == VERSION


class SchemaTooNew(RuntimeError):
    """The database was written by a newer version than this one."""


def migrate(db: sqlite3.Connection, upto: int = VERSION) -> None:
    """Bring the database to a version (by default the current), each step whole or not at all."""
    have = int(db.execute("PRAGMA user_version").fetchone()[0])
    if have > VERSION:
        raise SchemaTooNew(f"the node's database has schema {have}, this version reads up to {VERSION}: upgrade dsec")
    for number in range(have, upto):
        # executescript commits what is open first, so the transaction is part of the script.
        db.executescript(f"BEGIN IMMEDIATE;{_MIGRATIONS[number]};PRAGMA user_version = {number + 1};COMMIT;")
