"""The node's database: its schema and how an older one becomes the current one."""

from __future__ import annotations

import sqlite3

VERSION = 7

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
    # Events are rows that say when and which; what happened is read from the step or the sandbox itself. Triggers
    # write them: in one transaction with what they tell of, whoever wrote that, with no turn of their own.
    # A run has one, at its end: that it has begun is in its step, and every run would pay for the row.
    # `1000`: EVENTS_KEEP_MAX as it was; `64`: how many more there may be for a moment, so that few writes remove any.
    """
    CREATE TABLE events (
        sandbox TEXT NOT NULL,
        seq INTEGER NOT NULL,
        at REAL NOT NULL,
        kind TEXT NOT NULL,
        key TEXT NOT NULL DEFAULT '',
        PRIMARY KEY (sandbox, seq)
    ) WITHOUT ROWID;
    CREATE TRIGGER event_of_step_begun AFTER INSERT ON steps
    WHEN NEW.scope <> '' AND NEW.state = 0 AND NEW.kind IN ('spawn', 'session', 'command') BEGIN
        INSERT INTO events VALUES (NEW.scope, (SELECT coalesce(max(seq), 0) + 1 FROM events WHERE sandbox = NEW.scope),
            NEW.begun_at, NEW.kind || '.started', NEW.key);
    END;
    CREATE TRIGGER event_of_step_ended AFTER UPDATE OF state ON steps
    WHEN NEW.scope <> '' AND OLD.state = 0 AND NEW.state <> 0
        AND NEW.kind IN ('run', 'spawn', 'session', 'command', 'kill', 'extend', 'labels', 'network') BEGIN
        INSERT INTO events VALUES (NEW.scope, (SELECT coalesce(max(seq), 0) + 1 FROM events WHERE sandbox = NEW.scope),
            NEW.ended_at,
            NEW.kind || CASE WHEN NEW.kind IN ('run', 'spawn', 'session', 'command') THEN '.ended' ELSE '' END,
            NEW.key);
    END;
    CREATE TRIGGER event_of_step_dropped AFTER DELETE ON steps
    WHEN OLD.scope <> '' AND OLD.state = 0 AND OLD.kind IN ('spawn', 'session', 'command') BEGIN
        INSERT INTO events VALUES (OLD.scope, (SELECT coalesce(max(seq), 0) + 1 FROM events WHERE sandbox = OLD.scope),
            OLD.begun_at, OLD.kind || '.not_started', '');
    END;
    CREATE TRIGGER event_of_sandbox_created AFTER INSERT ON sandboxes
    WHEN NEW.state = 'running' AND NOT EXISTS (SELECT 1 FROM events WHERE sandbox = NEW.id) BEGIN
        INSERT INTO events (sandbox, seq, at, kind) VALUES (NEW.id, 1, 0, 'created');
    END;
    CREATE TRIGGER event_of_sandbox_ended AFTER INSERT ON sandboxes
    WHEN NEW.ended_at IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM events WHERE sandbox = NEW.id AND kind = 'ended') BEGIN
        INSERT INTO events VALUES (NEW.id, (SELECT coalesce(max(seq), 0) + 1 FROM events WHERE sandbox = NEW.id),
            NEW.ended_at, 'ended', '');
    END;
    CREATE TRIGGER events_bound AFTER INSERT ON events WHEN NEW.seq > 1000 AND NEW.seq % 64 = 0 BEGIN
        DELETE FROM events WHERE sandbox = NEW.sandbox AND seq <= NEW.seq - 1000;
    END;
    CREATE TRIGGER events_gone AFTER DELETE ON sandboxes BEGIN
        DELETE FROM events WHERE sandbox = OLD.id;
    END;
    """,
    """
    CREATE TABLE exposures (
        sandbox TEXT NOT NULL,
        port INTEGER NOT NULL,
        address TEXT NOT NULL,
        at INTEGER NOT NULL,
        token TEXT NOT NULL,
        PRIMARY KEY (sandbox, port)
    ) WITHOUT ROWID;
    CREATE TRIGGER exposures_gone AFTER DELETE ON sandboxes BEGIN
        DELETE FROM exposures WHERE sandbox = OLD.id;
    END;
    CREATE TRIGGER exposures_ended AFTER INSERT ON sandboxes WHEN NEW.ended_at IS NOT NULL BEGIN
        DELETE FROM exposures WHERE sandbox = NEW.id;
    END;
    """,
    # Verdicts have a bound of their own: whoever makes many must not push out what else happened. `500`:
    # VERDICTS_KEEP_MAX as it was.
    """
    CREATE TABLE verdicts (
        sandbox TEXT NOT NULL,
        seq INTEGER NOT NULL,
        number INTEGER NOT NULL,
        detail BLOB NOT NULL,
        PRIMARY KEY (sandbox, seq)
    ) WITHOUT ROWID;
    CREATE TRIGGER verdicts_bound AFTER INSERT ON verdicts WHEN NEW.number > 500 AND NEW.number % 32 = 0 BEGIN
        DELETE FROM events WHERE sandbox = NEW.sandbox
            AND seq IN (SELECT seq FROM verdicts WHERE sandbox = NEW.sandbox AND number <= NEW.number - 500);
    END;
    CREATE TRIGGER verdict_gone AFTER DELETE ON events WHEN OLD.kind = 'verdict' BEGIN
        DELETE FROM verdicts WHERE sandbox = OLD.sandbox AND seq = OLD.seq;
    END;
    DROP TRIGGER events_bound;
    CREATE TRIGGER events_bound AFTER INSERT ON events WHEN NEW.seq > 1000 AND NEW.seq % 64 = 0 BEGIN
        DELETE FROM events WHERE sandbox = NEW.sandbox AND kind <> 'verdict' AND seq <= (
            SELECT seq FROM events WHERE sandbox = NEW.sandbox AND kind <> 'verdict'
            ORDER BY seq DESC LIMIT 1 OFFSET 1000);
    END;
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
