"""The node's durable memory: SQLite in WAL mode, one writer thread, group commit.

Every change is a `Change` (statements that belong together); whatever is waiting when the writer is free goes into one
transaction and, if any of it asks for it, one fdatasync. A change that is not `durable` is written to the file before
it is acknowledged: it survives the death of the agent, not a power cut.

Such a change is written by the caller itself when the writer is idle: it takes 50 us, and handing it to the thread
and back costs 250 us of the interpreter's time, on the path of every run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from dsec.model import failpoint
from dsec.model.errors import DsecError, NodeDiskFull, Unavailable
from dsec.node import schema

log = logging.getLogger("dsec.node.store")

Statement: TypeAlias = tuple[str, Sequence[Any]]

_GROUP_MAX: Final = 512  # changes in one transaction: bounds how long a reader of the file waits for its fdatasync
_WAL_BYTES: Final = 16 * 1024 * 1024  # between checkpoints
_CHECK_EVERY: Final = 64  # transactions between looks at the size of the WAL
_BUSY_MS: Final = 10_000


class Change:
    """Statements that are written together, files that must be there before them, and who waits for it."""

    __slots__ = ("durable", "files", "future", "gone", "loop", "statements")

    def __init__(
        self,
        statements: Iterable[Statement],
        *,
        durable: bool,
        files: Sequence[tuple[Path, bytes]],
        gone: Sequence[Path],
    ) -> None:
        self.statements = list(statements)
        self.durable = durable
        self.files = files
        self.gone = gone
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()


class Store:
    """The database of one node. Reads run on the caller's thread (WAL: they never wait for the writer)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spool = directory / "spool"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.spool.mkdir(exist_ok=True, mode=0o700)
        self._path = directory / "node.db"
        self._writer = self._connect()
        schema.migrate(self._writer)
        self._reader = self._connect()
        self._queue: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_loop, name="dsec-store", daemon=True)
        self._turn = threading.Lock()  # who has it may use the writing connection
        self._full: bool | None = None  # which `synchronous` is set
        self.closed = False
        self.commits = 0  # transactions so far: how well grouping works is commits per change
        self._handed = 0
        self._written = 0
        self._checked = 0
        self._wal = directory / "node.db-wal"
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        # Each connection is used by one thread at a time; sqlite3's check would only see who opened it.
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, cached_statements=256)
        db.execute("PRAGMA journal_mode = WAL")
        # A checkpoint waits for the disk; left to itself sqlite would make one on the event loop's thread.
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        return db

    def read(self, sql: str, args: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows as of the last acknowledged change."""
        return self._reader.execute(sql, args).fetchall()

    def commit(
        self,
        *statements: Statement,
        durable: bool = True,
        files: Sequence[tuple[Path, bytes]] = (),
        gone: Sequence[Path] = (),
    ) -> asyncio.Future[None]:
        """Write statements together. The future is done once they are written (durable: on the disk).

        `files` are written whole before; `gone` (files or directories) are removed after.
        """
        if self.closed:
            raise Unavailable("the node is shutting down")
        change = Change(statements, durable=durable, files=files, gone=gone)
        if durable or files or gone or not self._write_here(change):
            self._handed += 1
            self._queue.put(change)
        return change.future

    def _write_here(self, change: Change) -> bool:
        """Write it on this thread, unless the writer is at work or has work that came before."""
        # Order is kept: nothing overtakes what the writer has been handed. Each counter is changed by one thread only.
        if self._handed != self._written or not self._turn.acquire(blocking=False):
            return False
        try:
            error = self._try_write([change])
        finally:
            self._turn.release()
        if error is None:
            change.future.set_result(None)
        else:
            log.error("a change could not be written", exc_info=error)
            change.future.set_exception(error)
        return True

    @property
    def idle(self) -> bool:
        """Whether everything handed in so far has been written."""
        return self._handed == self._written

    def close(self) -> None:
        """Write what is waiting and let go of the file."""
        if self.closed:
            return
        self.closed = True
        self._queue.put(None)
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _write_loop(self) -> None:
        stopping = False
        while not stopping:
            group = [self._queue.get()]
            while len(group) < _GROUP_MAX:
                try:
                    group.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            stopping = None in group
            changes = [change for change in group if change is not None]
            if changes:
                with self._turn:
                    self._write_group(changes)
                    self._written += len(changes)
                    self._checkpoint()

    def _write_group(self, changes: list[Change]) -> None:
        error = self._try_write(changes)
        if error is not None and len(changes) > 1:
            # One bad change must not fail the others: write them one by one.
            for change in changes:
                self._write_group([change])
            return
        if error is not None:
            log.error("a change could not be written", exc_info=error)
        by_loop: dict[asyncio.AbstractEventLoop, list[Change]] = {}
        for change in changes:
            by_loop.setdefault(change.loop, []).append(change)
        for loop, mine in by_loop.items():
            try:
                # One wake-up of the loop for the whole group.
                loop.call_soon_threadsafe(_settle, mine, error)
            except RuntimeError:
                log.warning("nobody waits any more for %d changes: the event loop is closed", len(mine))

    def _transact(self, statements: list[Statement]) -> None:
        db = self._writer
        if len(statements) == 1:
            # It is a transaction by itself. Each call into sqlite gives the interpreter away and must win it back.
            failpoint.at("store.before_commit")
            db.execute(*statements[0])
            return
        db.execute("BEGIN IMMEDIATE")
        for sql, args in statements:
            db.execute(sql, args)
        failpoint.at("store.before_commit")
        db.execute("COMMIT")

    def _checkpoint(self) -> None:
        if self.commits - self._checked < _CHECK_EVERY:
            return
        self._checked = self.commits
        try:
            if self._wal.stat().st_size > _WAL_BYTES:
                self._writer.execute("PRAGMA wal_checkpoint(RESTART)")
        except (sqlite3.Error, OSError) as error:
            log.warning("the write-ahead log could not be taken into the database yet: %s", error)

    def _try_write(self, changes: list[Change]) -> DsecError | None:
        durable = any(change.durable for change in changes)
        db = self._writer
        try:
            for change in changes:
                for path, content in change.files:
                    write_whole(path, content)
            # NORMAL writes the WAL without waiting for the disk, FULL adds the fdatasync.
            if durable is not self._full:
                db.execute("PRAGMA synchronous = FULL" if durable else "PRAGMA synchronous = NORMAL")
                self._full = durable
            self._transact([statement for change in changes for statement in change.statements])
        except (sqlite3.Error, OSError, failpoint.Injected) as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            return _translate(error)
        self.commits += 1
        for change in changes:
            for path in change.gone:
                _remove(path)
        return None


def _settle(changes: list[Change], error: DsecError | None) -> None:
    for change in changes:
        if change.future.done():
            continue
        if error is None:
            change.future.set_result(None)
        else:
            change.future.set_exception(error)


def _translate(error: Exception) -> DsecError:
    full = isinstance(error, OSError) and error.errno in (28, 122)
    if full or (isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"):
        return NodeDiskFull(f"the node's state could not be written: {error}; free space on the node's disk")
    if isinstance(error, failpoint.Injected):
        return Unavailable(f"the node's state could not be written: fault injected at {error}")
    return Unavailable(f"the node's state could not be written: {error}", detail={"error": str(error)})


def write_whole(path: Path, content: bytes) -> None:
    """The file is there with all its bytes, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(path.name + ".part")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fdatasync(fd)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    temporary.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
