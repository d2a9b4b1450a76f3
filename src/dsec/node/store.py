"""The node's durable memory: SQLite in WAL mode, written on the event loop, flushed beside it, group commit.

Every change is a `Change` (statements that belong together). All that is handed in within one turn of the event loop
goes into one transaction, and all that is written while a flush is under way shares the next one. A change that is
not `durable` is written to the file before it is acknowledged: it survives the death of the agent, not a power cut.

SQLite itself never waits for the disk here (`synchronous = NORMAL`): a small transaction takes 30 us, and a writer
thread cost 0.2-0.5 ms of the interpreter's time for handing over and back, on the path of every run. What SQLite does
with `FULL`, an fdatasync of the log after the transaction, is done by a `Flusher`. A helper thread does what takes
long: whole files, removals, checkpoints.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from dsec.linux.flush import flusher
from dsec.linux.full import is_full
from dsec.model import failpoint
from dsec.model.errors import DsecError, NodeDiskFull, Unavailable
from dsec.node import schema
from dsec.node.bell import Bell
from dsec.node.reserve import Reserve

log = logging.getLogger("dsec.node.store")

T = TypeVar("T")

Statement: TypeAlias = tuple[str, Sequence[Any]]
JobDone: TypeAlias = Callable[[Future[None], "Change"], None]

_GROUP_MAX: Final = 256  # changes in one transaction: bounds how long the event loop is kept
# Statements between checkpoints: a log of some 16 MiB. Counted, since the file keeps its size when it starts anew.
_CHECKPOINT_EVERY: Final = 4096
# The log grows in steps of this. A flush after bytes were appended waits for a commit of the file system's journal as
# well, and takes several times as long as one after bytes were replaced.
_LOG_STEP_BYTES: Final = 1 << 20
_REFILL_EVERY: Final = 64  # transactions between two attempts to fill a reserve that was spent
_BUSY_MS: Final = 10_000


class Change:
    """Statements that are written together, what is removed after them, and who waits for it."""

    __slots__ = ("durable", "future", "gone", "statements")

    def __init__(self, statements: Sequence[Statement], *, durable: bool, gone: Sequence[Path]) -> None:
        self.statements = statements
        self.durable = durable
        self.gone = gone
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(self, error: DsecError | None = None) -> None:
        """Tell who waits."""
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class Store:
    """The database of one node, used on its event loop only."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spool = directory / "spool"
        self._path = directory / "node.db"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._reserve = Reserve(directory)
        # One connection for reading and writing: another one's cache of pages would be empty after each change.
        self._db = self._open()
        self._reserve.fill()
        _sync_directory(directory)  # the log's name too: from now on only its content is flushed
        self._log = os.open(directory / "node.db-wal", os.O_RDWR | os.O_CLOEXEC)
        self._flusher = flusher(self._log)
        self._helper = ThreadPoolExecutor(1, "dsec-store")
        self._waiting: deque[Change] = deque()
        self._scheduled = False
        self._written: list[Change] = []  # not flushed yet
        self._flushing: list[Change] = []
        self._jobs: dict[Future[None], tuple[Change, JobDone]] = {}  # with the helper: files to write or to remove
        self._logged = 0
        self._log_bytes = os.fstat(self._log).st_size  # as far as we made it; sqlite appends when that is used up
        self._owed: list[Statement] = []
        self._checkpointing = False
        self._held = False  # the helper is writing
        self._broken: DsecError | None = None
        self.closed = False
        self.changed = Bell()  # rung when something was written
        self.commits = 0  # transactions so far: how well grouping works is commits per change

    def _open(self) -> sqlite3.Connection:
        """The database, as this version reads it. Gives up the reserve rather than not to start; NodeDiskFull."""
        while True:
            db = None
            try:
                self.spool.mkdir(exist_ok=True, mode=0o700)
                db = self._connect()
                schema.migrate(db)
                return db
            except (sqlite3.Error, OSError) as error:
                if db is not None:
                    db.close()
                if not is_full(error, self.directory):
                    raise
                if not self._reserve.spend():
                    raise NodeDiskFull(
                        f"the node's state in {self.directory} cannot be opened: {error}; free space on its disk"
                    ) from error

    def with_room(self, make: Callable[[], T]) -> T:
        """What needs room on the same disk to be opened, too: the reserve is given up for it. Raises NodeDiskFull."""
        while True:
            try:
                return make()
            except NodeDiskFull:
                if not self._reserve.spend():
                    raise

    def _connect(self) -> sqlite3.Connection:
        # Each connection is used by one thread at a time; sqlite3's check would only see who opened it.
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, cached_statements=256)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        # A checkpoint waits for the disk; left to itself sqlite would make one on the event loop's thread.
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        return db

    def read(self, sql: str, args: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows as of the last change that was written."""
        if self._broken is not None:
            raise self._broken
        return self._db.execute(sql, args).fetchall()

    def commit(
        self,
        *statements: Statement,
        durable: bool = True,
        files: Sequence[tuple[Path, bytes]] = (),
        gone: Sequence[Path] = (),
        alone: bool = False,
    ) -> asyncio.Future[None]:
        """Write statements together. The future is done once they are written (durable: on the disk).

        Changes are written in the order in which they come, but for one with `files`: these are written whole before,
        which takes a while. `gone` (files or directories) are removed after. `alone` writes a change that is not
        durable now, when nothing waits: where others seldom come within the same turn, the turn is what costs.
        """
        if self.closed:
            raise Unavailable("the node is shutting down")
        change = Change(statements, durable=durable, gone=gone)
        if self._broken is not None:
            change.settle(self._broken)
        elif files:
            self._help(change, self._files_there, _write_files, files)
        elif alone and not (durable or gone or self._waiting or self._held):
            self._write_group([change])
        else:
            self._enqueue(change)
        return change.future

    def owe(self, *statements: Statement) -> None:
        """Write these before the next change, in one transaction with it: there is no room for them now."""
        self._owed.extend(statements)

    @property
    def owes(self) -> bool:
        """Whether there is anything of `owe` left to write."""
        return bool(self._owed)

    @property
    def idle(self) -> bool:
        """Whether everything handed in so far has been written."""
        return not (self._waiting or self._written or self._flushing or self._jobs)

    def close(self) -> None:
        """Write what is waiting and let go of the file."""
        if self.closed:
            return
        self.closed = True
        self._helper.shutdown()
        self._held = False
        for job in list(self._jobs):
            self._helped(job)
        while self._waiting:
            self._write()
        self._flushed(self._flusher.close())
        self._flushing, self._written = self._written, []
        if self._flushing:
            self._flushed(_fdatasync(self._log))
        self._db.close()
        os.close(self._log)

    # Writing.

    def _enqueue(self, change: Change) -> None:
        self._waiting.append(change)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and not self._held and not self.closed:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self._held or self.closed:
            return
        self._write()
        self._flush()
        if self._waiting:
            self._schedule()
        elif self._logged >= _CHECKPOINT_EVERY and not self._checkpointing:
            self._checkpoint()

    def _write(self) -> None:
        waiting = self._waiting
        group = [waiting.popleft() for _ in range(min(len(waiting), _GROUP_MAX))]
        if group:
            self._write_group(group)

    def _write_group(self, changes: list[Change]) -> None:
        error = self._try_write(changes)
        if error is not None and len(changes) > 1:
            # One bad change must not fail the others: write them one by one.
            for change in changes:
                self._write_group([change])
            return
        if error is not None:
            log.error("a change could not be written", exc_info=error)
        for change in changes:
            if error is None and change.durable:
                self._written.append(change)
            else:
                self._acknowledge(change, error)

    def _try_write(self, changes: list[Change]) -> DsecError | None:
        statements = changes[0].statements
        if len(changes) > 1 or self._owed:
            statements = [*self._owed, *(statement for change in changes for statement in change.statements)]
        while (error := self._attempt(statements)) is not None:
            if not (is_full(error, self.directory) and self._reserve.spend()):
                return _translate(error, self.directory)
        self._owed.clear()
        self.commits += 1
        self._logged += len(statements)
        self.changed.ring()
        if self._reserve.short and self.commits % _REFILL_EVERY == 0:
            self._helper.submit(self._reserve.fill)
        return None

    def _attempt(self, statements: Sequence[Statement]) -> Exception | None:
        db = self._db
        try:
            self._transact(db, statements)
        except (sqlite3.Error, failpoint.Injected) as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            return error
        return None

    def _transact(self, db: sqlite3.Connection, statements: Sequence[Statement]) -> None:
        if len(statements) == 1:
            failpoint.at("store.before_commit")
            db.execute(*statements[0])  # it is a transaction by itself
            return
        db.execute("BEGIN IMMEDIATE")
        for sql, args in statements:
            db.execute(sql, args)
        failpoint.at("store.before_commit")
        db.execute("COMMIT")

    def _acknowledge(self, change: Change, error: DsecError | None) -> None:
        if error is None and change.gone and not self.closed:
            self._help(change, self._removed, _remove_all, change.gone)
            return
        if error is None and change.gone:
            _remove_all(change.gone)
        change.settle(error)

    # Flushing.

    def _grow_log(self) -> None:
        """Give the log room ahead of what is written: zeros, which to sqlite are no part of it."""
        size = os.fstat(self._log).st_size
        if size <= self._log_bytes:
            return
        # Nobody else writes to it now: this is the thread that does, and the helper's turn has not come.
        try:
            self._log_bytes = size + os.pwrite(self._log, bytes(_LOG_STEP_BYTES), size)
        except OSError as error:
            # Only its speed depends on it; a disk that is full is found by the next change that needs room.
            log.info("the node's log was not given room ahead: %s", error)
            self._log_bytes = size + _LOG_STEP_BYTES

    def _flush(self) -> None:
        if not self._written or self._flushing:
            return
        if not self._held:
            self._grow_log()
        self._flushing, self._written = self._written, []
        try:
            self._flusher.start(self._flush_ended)
        except OSError as error:
            self._flushed(error)

    def _flush_ended(self, error: OSError | None) -> None:
        self._flushed(error)
        self._flush()

    def _flushed(self, error: OSError | None) -> None:
        if error is not None:
            # What is in the file and on the disk may differ from now on, and the kernel reports it once. Nobody may be
            # given an answer from it: a node that starts again reads what is there.
            log.critical("the node's log could not be flushed: %s; nothing is read or written until a restart", error)
            self._broken = _translate(error, self.directory)
        changes, self._flushing = self._flushing, []
        for change in changes:
            self._acknowledge(change, self._broken)

    # With the helper.

    def _help(self, change: Change, then: JobDone, work: Callable[[Sequence[T]], None], argument: Sequence[T]) -> None:
        job = self._helper.submit(work, argument)
        self._jobs[job] = (change, then)
        loop = asyncio.get_running_loop()
        job.add_done_callback(lambda job: _tell(loop, self._helped, job))

    def _helped(self, job: Future[None]) -> None:
        found = self._jobs.pop(job, None)
        if found is not None:  # else the end of the store was faster
            change, then = found
            then(job, change)

    def _files_there(self, job: Future[None], change: Change) -> None:
        error = job.exception()
        if isinstance(error, OSError):
            log.error("a file could not be written", exc_info=error)
            change.settle(_translate(error, self.directory))
        elif self._broken is not None:
            change.settle(self._broken)
        else:
            self._enqueue(change)

    def _removed(self, job: Future[None], change: Change) -> None:
        change.settle()

    def _checkpoint(self) -> None:
        # Most of it beside the event loop's writing; only for the rest, and for the start of a new log, it must wait.
        self._logged = 0
        self._checkpointing = True
        loop = asyncio.get_running_loop()
        self._helper.submit(self._copy, False).add_done_callback(lambda job: _tell(loop, self._copied, job))

    def _copied(self, job: Future[None]) -> None:
        if self.closed:
            return
        self._held = True
        loop = asyncio.get_running_loop()
        self._helper.submit(self._copy, True).add_done_callback(lambda job: _tell(loop, self._renewed, job))

    def _renewed(self, job: Future[None]) -> None:
        self._held = self._checkpointing = False
        if self._waiting:
            self._schedule()

    def _copy(self, renew: bool) -> None:
        """Take the log into the database; `renew`: wholly, and begin a new one."""
        if renew:
            self._reserve.fill()
        try:
            db = self._connect()
            try:
                db.execute("PRAGMA wal_checkpoint(RESTART)" if renew else "PRAGMA wal_checkpoint(PASSIVE)")
                if renew:
                    # Whoever writes first into a new log waits for the disk: not the event loop.
                    db.execute("INSERT OR REPLACE INTO meta VALUES ('checkpoint', datetime('now'))")
            finally:
                db.close()
        except sqlite3.Error as error:
            log.warning("the write-ahead log could not be taken into the database yet: %s", error)


def _tell(loop: asyncio.AbstractEventLoop, then: Callable[[Future[None]], None], job: Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(then, job)
    except RuntimeError:
        log.warning("nobody waits any more for the store: the event loop is closed")


def _translate(error: Exception, directory: Path) -> DsecError:
    if is_full(error, directory):
        return NodeDiskFull(f"the node's state could not be written: {error}; free space on the node's disk")
    if isinstance(error, failpoint.Injected):
        return Unavailable(f"the node's state could not be written: fault injected at {error}")
    return Unavailable(f"the node's state could not be written: {error}", detail={"error": str(error)})


def _write_files(files: Sequence[tuple[Path, bytes]]) -> None:
    for path, content in files:
        write_whole(path, content)


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
    except BaseException:  # half of it may be written; it goes on
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    temporary.rename(path)
    _sync_directory(path.parent)


def _fdatasync(fd: int) -> OSError | None:
    try:
        os.fdatasync(fd)
    except OSError as error:
        return error
    return None


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _remove_all(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
