"""The store: order, grouping, durability, files, failures, older schemas."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from pathlib import Path

import pytest

from dsec.backends.base import Handle
from dsec.linux.flush import Done
from dsec.model import failpoint
from dsec.model.errors import NodeDiskFull, Unavailable
from dsec.model.specs import Spec
from dsec.model.states import SandboxInfo
from dsec.node import schema, store
from dsec.node.box import SELECT, encode_value, read_row
from dsec.node.store import Store

PUT = "INSERT OR REPLACE INTO meta VALUES (?, ?)"


@pytest.fixture(autouse=True)
def _disarm():
    yield
    failpoint.disarm()


def test_changes_keep_their_order_whoever_writes_them(tmp_path: Path):
    async def main() -> None:
        s = Store(tmp_path)
        futures = [s.commit((PUT, ("k", str(i))), durable=i % 3 == 0) for i in range(300)]
        await asyncio.gather(*futures)
        assert s.read("SELECT value FROM meta WHERE key = 'k'") == [("299",)]
        s.close()
        again = Store(tmp_path)
        assert again.read("SELECT value FROM meta WHERE key = 'k'") == [("299",)]
        again.close()

    asyncio.run(main())


def test_what_waits_is_written_together(tmp_path: Path):
    async def main() -> None:
        s = Store(tmp_path)
        await asyncio.gather(*(s.commit((PUT, (str(i), "x"))) for i in range(500)))
        assert s.commits < 100
        s.close()

    asyncio.run(main())


def test_one_bad_change_does_not_fail_its_neighbours(tmp_path: Path):
    async def main() -> None:
        s = Store(tmp_path)
        futures = [s.commit((PUT, (str(i), "x")) if i != 7 else ("NONSENSE", ())) for i in range(20)]
        done = await asyncio.gather(*futures, return_exceptions=True)
        assert [isinstance(result, Unavailable) for result in done] == [i == 7 for i in range(20)]
        assert len(s.read("SELECT * FROM meta")) == 19
        s.close()

    asyncio.run(main())


def test_a_change_is_whole_or_not_at_all(tmp_path: Path):
    async def main() -> None:
        s = Store(tmp_path)
        with pytest.raises(Unavailable):
            await s.commit((PUT, ("a", "1")), ("NONSENSE", ()), durable=False)
        failpoint.arm("store.before_commit")
        with pytest.raises(Unavailable):
            await s.commit((PUT, ("a", "1")))
        assert s.read("SELECT * FROM meta") == []
        await s.commit((PUT, ("a", "2")))
        s.close()
        with pytest.raises(Unavailable):
            s.commit((PUT, ("a", "3")))

    asyncio.run(main())


def test_a_file_is_there_before_its_row_and_a_full_disk_has_its_own_error(tmp_path: Path, monkeypatch):
    async def main() -> None:
        s = Store(tmp_path)
        path = s.spool / "x" / "y"
        await s.commit((PUT, ("a", "1")), files=((path, b"z" * 100_000),))
        assert path.read_bytes() == b"z" * 100_000

        def full(path: Path, content: bytes) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store, "write_whole", full)
        with pytest.raises(NodeDiskFull):
            await s.commit((PUT, ("b", "1")), files=((path, b"new"),))
        assert s.read("SELECT key FROM meta") == [("a",)]
        await s.commit(gone=(s.spool / "x",))
        assert not path.exists()
        s.close()

    asyncio.run(main())


class ScriptedFlusher:
    """Flushes when it is told to."""

    def __init__(self, fd: int) -> None:
        self.waiting: list[Done] = []

    def start(self, done: Done) -> None:
        self.waiting.append(done)

    def end(self, error: OSError | None = None) -> None:
        self.waiting.pop(0)(error)

    def close(self) -> OSError | None:
        return None


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedFlusher]:
    made: list[ScriptedFlusher] = []

    def make(fd: int) -> ScriptedFlusher:
        made.append(ScriptedFlusher(fd))
        return made[-1]

    monkeypatch.setattr(store, "flusher", make)
    return made


def test_a_durable_change_waits_for_a_flush_that_began_after_it(tmp_path: Path, scripted: list[ScriptedFlusher]):
    async def main() -> None:
        s = Store(tmp_path)
        first, quick = s.commit((PUT, ("a", "1"))), s.commit((PUT, ("q", "1")), durable=False)
        await quick
        second = s.commit((PUT, ("b", "1")))
        await s.commit((PUT, ("q", "2")), durable=False)
        assert len(scripted[0].waiting) == 1
        scripted[0].end()
        await asyncio.sleep(0)
        # The second was written while the first's flush was under way, which may have missed it.
        assert first.done()
        assert not second.done()
        assert not s.idle
        scripted[0].end()
        await second
        assert s.idle
        s.close()

    asyncio.run(main())


def test_after_a_flush_that_failed_nothing_is_answered(tmp_path: Path, scripted: list[ScriptedFlusher]):
    async def main() -> None:
        s = Store(tmp_path)
        change = s.commit((PUT, ("a", "1")))
        await s.commit((PUT, ("q", "1")), durable=False)
        scripted[0].end(OSError(5, "Input/output error"))
        for refused in (change, s.commit((PUT, ("b", "1"))), s.commit((PUT, ("b", "1")), durable=False)):
            with pytest.raises(Unavailable):
                await refused
        with pytest.raises(Unavailable):
            s.read("SELECT * FROM meta")
        s.close()

    asyncio.run(main())


def test_closing_writes_what_waits_once(tmp_path: Path):
    async def main() -> None:
        s = Store(tmp_path)
        path = s.spool / "x"
        await s.commit((PUT, ("n", "0")), files=((path, b"x"),))
        count = "INSERT INTO meta VALUES ('n', '1') ON CONFLICT DO UPDATE SET value = value + 1"
        waiting = [s.commit((count, ())), s.commit((count, ()), files=((s.spool / "y", b"y"),))]
        removing = s.commit((count, ()), gone=(path,))
        s.close()
        assert all(future.done() and future.exception() is None for future in (*waiting, removing))
        assert not path.exists()
        again = Store(tmp_path)
        assert again.read("SELECT value FROM meta WHERE key = 'n'") == [("3",)]
        again.close()

    asyncio.run(main())


def test_the_log_does_not_grow_without_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(store, "_CHECKPOINT_EVERY", 8)

    async def main() -> None:
        s = Store(tmp_path)
        for i in range(200):
            await s.commit((PUT, (str(i % 5), "x" * 20_000)))
            # The store writes on beside a checkpoint; how much, and so how long the log gets, is the machine's load.
            while s._checkpointing:  # noqa: ASYNC110 - the store has no event for it
                await asyncio.sleep(0.001)
        assert (tmp_path / "node.db-wal").stat().st_size < 2_000_000
        s.close()

    asyncio.run(main())


def test_the_log_has_room_ahead_and_room_is_no_content(tmp_path: Path):
    async def main() -> None:
        s = Store(tmp_path / "s")
        log = tmp_path / "s" / "node.db-wal"
        await s.commit((PUT, ("k", "0")))
        room = log.stat().st_size
        assert room > store._LOG_STEP_BYTES
        for i in range(50):
            await s.commit((PUT, ("k", str(i))))
        assert log.stat().st_size == room
        for i in range(8):
            await s.commit((PUT, (str(i), "x" * (store._LOG_STEP_BYTES // 4))))
        assert log.stat().st_size > room + store._LOG_STEP_BYTES
        await s.commit((PUT, ("k", "last")))
        # As after a death: the same files, and nobody closed them.
        shutil.copytree(tmp_path / "s", tmp_path / "dead", ignore=shutil.ignore_patterns("*-shm"))
        s.close()
        again = Store(tmp_path / "dead")
        assert again.read("SELECT value FROM meta WHERE key = 'k'") == [("last",)]
        await again.commit((PUT, ("k", "more")))
        again.close()
        assert Store(tmp_path / "dead").read("SELECT value FROM meta WHERE key = 'k'") == [("more",)]

    asyncio.run(main())


def test_an_older_database_is_brought_up_and_read(tmp_path: Path):
    db = sqlite3.connect(tmp_path / "node.db", isolation_level=None)
    schema.migrate(db, upto=1)
    info = SandboxInfo(id="sbx-n1-aaaaaaaaaaaaa", node="n1", state="running", backend="container", spec=Spec())
    handle = Handle(backend="container", id=info.id)
    db.execute(
        "INSERT INTO sandboxes VALUES (?, ?, NULL, NULL, ?, ?, ?, 5.0, 6.0, NULL)",
        (info.id, info.state, info.backend, encode_value(info), encode_value(handle)),
    )
    db.execute("INSERT INTO steps VALUES (?, 'k', x'00', 'run', 1, 3, 'p-1', 1.0, 2.0, 2.0, x'80', NULL)", (info.id,))
    db.close()
    s = Store(tmp_path)
    row = read_row(s.read(SELECT)[0])
    assert (row.info, row.handle, row.expires_boot, row.idle_boot) == (info, handle, 5.0, 6.0)
    assert "PATH" in row.base.env
    assert s.read("SELECT command, step FROM steps") == [("", 3)]
    # Creations that are open are found by an index; a run is in none, which would be written twice for it.
    (plan,) = s.read("EXPLAIN QUERY PLAN DELETE FROM steps WHERE scope = '' AND subject = ? AND state = 0", ("x",))
    assert "step_open" in plan[-1]
    assert s.read("SELECT count(*) FROM pragma_index_list('steps') WHERE origin = 'c'") == [(1,)]
    s.close()


def test_a_newer_database_is_refused(tmp_path: Path):
    db = sqlite3.connect(tmp_path / "node.db")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(schema.SchemaTooNew):
        Store(tmp_path)
