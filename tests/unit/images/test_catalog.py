"""Names of layers: tags move, versions do not."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import msgspec
import pytest

from dsec.images.catalog import Catalog, Config, Row
from dsec.images.refs import parse
from dsec.model.errors import Conflict


def row(letter: str) -> Row:
    return Row("sha256:" + letter * 64, 4096, 1.0, "base", "dir:/x", Config(env={"A": "1"}, cwd="/w", user="u"))


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "catalog.sqlite")


def test_a_tag_moves_and_a_version_does_not(catalog: Catalog) -> None:
    catalog.add(row("a"), (parse("x:1"), parse("x@1")))
    catalog.add(row("b"), (parse("x:1"),))
    with pytest.raises(Conflict, match="never changes"):
        catalog.add(row("b"), (parse("x@1"),))
    tag, version = catalog.find(parse("x:1")), catalog.find(parse("x@1"))
    assert tag is not None and tag.digest == row("b").digest
    assert version is not None and version.digest == row("a").digest and version.names == ("x@1",)
    assert version.config == row("a").config


def test_settings_belong_to_the_name(catalog: Catalog) -> None:
    corrected = msgspec.structs.replace(row("a"), role="workspace", config=Config(cwd="/repo"))
    catalog.add(row("a"), (parse("x:1"), parse("x@1")))
    catalog.add(corrected, (parse("x:1"), parse("y@1")))
    found = {name: catalog.find(parse(name)) for name in ("x:1", "x@1", "y@1")}
    assert [(r.role, r.config.cwd, r.names) for r in found.values() if r] == [
        ("workspace", "/repo", ("x:1", "y@1")),
        ("base", "/w", ("x@1",)),
        ("workspace", "/repo", ("x:1", "y@1")),
    ]
    assert {(r.digest, r.role) for r in catalog.all()} == {(row("a").digest, "base"), (row("a").digest, "workspace")}
    by_digest = catalog.find(parse(row("a").digest))
    assert by_digest is not None and by_digest.config.cwd == "/w" and len(by_digest.names) == 3
    with pytest.raises(Conflict, match="x@1 is there already with role base"):
        catalog.add(corrected, (parse("x@1"),))
    with pytest.raises(Conflict, match="settings belong to a name"):
        catalog.add(corrected, ())
    catalog.add(row("a"), ())
    assert catalog.count_names(row("a").digest) == 3


def test_a_catalogue_of_version_1_is_read(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "catalog.sqlite")
    db.executescript("""
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
        INSERT INTO layers VALUES ('sha256:00', 4096, 1.0, 'toolkit', 'dir:/x', '{"cwd":"/w"}');
        INSERT INTO names VALUES ('tag', 'x', '1', 'sha256:00');
        PRAGMA user_version = 1;
    """)
    db.close()
    found = Catalog(tmp_path / "catalog.sqlite").find(parse("x:1"))
    assert found == Row("sha256:00", 4096, 1.0, "toolkit", "dir:/x", Config(cwd="/w"), ("x:1",))
    assert Catalog(tmp_path / "catalog.sqlite").all() == [found]


def test_a_refused_name_leaves_nothing(catalog: Catalog) -> None:
    catalog.add(row("a"), (parse("x@1"),))
    with pytest.raises(Conflict):
        catalog.add(row("b"), (parse("y:1"), parse("x@1")))
    assert [found.digest for found in catalog.all()] == [row("a").digest]
    assert catalog.find(parse("y:1")) is None


def test_removal_takes_the_names_along(catalog: Catalog) -> None:
    catalog.add(row("a"), (parse("x:1"),))
    catalog.remove(row("a").digest)
    assert catalog.find(parse("x:1")) is None
    assert catalog.all() == []


def test_many_threads(catalog: Catalog) -> None:
    threads = [threading.Thread(target=catalog.add, args=(row("a"), (parse(f"x:{n}"),))) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [found] = catalog.all()
    assert len(found.names) == 20


def test_a_newer_catalogue_is_left_alone(tmp_path: Path, catalog: Catalog) -> None:
    with catalog._open() as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(Conflict, match="newer dsec"):
        Catalog(tmp_path / "catalog.sqlite")


def test_what_another_process_writes_is_seen(tmp_path: Path, catalog: Catalog) -> None:
    other = Catalog(tmp_path / "catalog.sqlite")
    assert catalog.find(parse("x:1")) is None
    for letter in "ab":
        other.add(row(letter), (parse("x:1"),))
        found = catalog.find(parse("x:1"))
        assert found is not None and found.digest == row(letter).digest
    other.remove(row("b").digest)
    assert catalog.find(parse("x:1")) is None
