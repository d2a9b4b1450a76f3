"""Cache entries: whole or not at all, once for everyone who asks."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.kit.vm import cache


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSEC_CACHE", str(tmp_path))
    return tmp_path


def test_built_once_for_many_at_once() -> None:
    calls: list[Path] = []

    def build(work: Path) -> None:
        calls.append(work)
        (work / "file").write_text("content")

    threads = [threading.Thread(target=cache.entry, args=("image", "k", build)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert (cache.entry("image", "k", build) / "file").read_text() == "content"


def test_failed_build_leaves_nothing_and_is_tried_again() -> None:
    def broken(work: Path) -> None:
        (work / "half").write_text("half")
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        cache.entry("image", "k", broken)
    assert [path for path in cache.guests_dir().iterdir() if path.is_dir()] == []
    assert cache.entry("image", "k", lambda work: (work / "file").touch()).is_dir()


def test_what_a_dead_builder_left_is_removed() -> None:
    left = cache.guests_dir() / ".tmp-image-k-1"
    left.mkdir()
    (left / "half").touch()
    assert list(cache.entry("image", "k", lambda _work: None).iterdir()) == []
    assert not left.exists()


def test_prune_removes_the_unused_and_the_unfinished_only() -> None:
    old, new, kept = (cache.entry("image", name, lambda _work: None) for name in ("old", "new", "kept"))
    left = cache.guests_dir() / ".tmp-snapshot-6.1-gone-1"
    left.mkdir()
    for path in (old, kept):
        os.utime(path, (0, 0))
    assert set(cache.prune(keep={kept})) == {old, left}
    assert new.is_dir()
    assert kept.is_dir()


def test_prune_leaves_what_is_being_built() -> None:
    with cache.locked("image-busy"):
        work = cache.guests_dir() / ".tmp-image-busy-1"
        work.mkdir()
        assert cache.prune(keep=set()) == []
        assert work.is_dir()


def test_key_depends_on_every_part_and_where_it_ends() -> None:
    keys = {cache.key_of("ab", "c"), cache.key_of("a", "bc"), cache.key_of("abc"), cache.key_of(b"ab", "d")}
    assert len(keys) == 4
