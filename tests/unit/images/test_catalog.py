"""Names of layers: tags move, versions do not."""

from __future__ import annotations

import threading
from pathlib import Path

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
