"""`sbx.files` against a real node agent over the fake backend."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

import dsec
from tests.kit.agent import Agent

pytestmark = pytest.mark.contract


def test_what_is_written_is_read(sbx: dsec.Sandbox) -> None:
    entry = sbx.files.write("/srv/task/data.bin", b"\0binary\xff", mode=0o600)
    assert (entry.path, entry.name, entry.size, entry.mode, entry.type) == (
        "/srv/task/data.bin",
        "data.bin",
        8,
        0o600,
        "file",
    )
    assert entry.atomic
    assert sbx.files.read("/srv/task/data.bin") == b"\0binary\xff"
    assert sbx.files.read("/srv/task/data.bin", offset=1, length=6) == b"binary"
    with pytest.raises(UnicodeDecodeError, match=r"in '/srv/task/data\.bin'; read\(path\) gives its bytes"):
        sbx.files.read_text("/srv/task/data.bin")
    assert sbx.files.read_text("/srv/task/data.bin", errors="replace") == "\0binary\ufffd"
    assert sbx.files.write("/srv/empty", "").size == 0
    assert sbx.files.read("/srv/empty") == b""
    assert sbx.files.append("/srv/log", "a\n").size == 2
    assert sbx.files.append("/srv/log", "b\n").size == 4
    assert sbx.files.read_text("/srv/log") == "a\nb\n"


@pytest.mark.same_everywhere
def test_large_ones_come_whole(sbx: dsec.Sandbox) -> None:
    data = os.urandom(1 << 20) * 20
    assert sbx.files.write("/big", data).size == len(data)
    assert sbx.files.read("/big") == data


def test_errors_are_those_of_files(sbx: dsec.Sandbox) -> None:
    with pytest.raises(dsec.FileNotFound) as missing:
        sbx.files.read("/nothing")
    assert isinstance(missing.value, FileNotFoundError)
    assert missing.value.detail["errno"] == "ENOENT"
    with pytest.raises(dsec.IsADirectory):
        sbx.files.read("/tmp")
    sbx.files.write("/x", "1", exclusive=True)
    with pytest.raises(dsec.FileExists):
        sbx.files.write("/x", "2", exclusive=True)
    with pytest.raises(dsec.FileNotFound):
        sbx.files.write("/no/where", "1", parents=False)
    with pytest.raises(dsec.NoSpace):
        sbx.files.write("/full", bytes(65 << 20))
    assert not sbx.files.exists("/full")
    with pytest.raises(dsec.InvalidSpec, match="path"):
        sbx.files.read("/a\0b")
    with pytest.raises(dsec.InvalidSpec, match="path"):
        sbx.files.read("")
    for mode, allowed in ((0o10000, "0 to 0o7777"), (755, "0o755"), (644, "0o644"), (777, "0o777")):
        with pytest.raises(dsec.InvalidSpec, match=f"mode={mode} .*{allowed}$"):
            sbx.files.write("/f", b"", mode=mode)
    with pytest.raises(dsec.ProgramNotStarted):
        sbx.files.read("/x", user="nosuchuser")


def test_below_a_file_nothing_is_there(sbx: dsec.Sandbox) -> None:
    sbx.files.write("/f", "1")
    assert sbx.files.exists("/f")
    assert not sbx.files.exists("/f/below")
    assert not sbx.files.exists("/f/")
    with pytest.raises(dsec.FileError, match="ENAMETOOLONG"):
        sbx.files.exists("/" + "n" * 256)


def test_a_slash_at_the_end_means_a_directory(sbx: dsec.Sandbox) -> None:
    sbx.files.write("/srv/f", "1")
    sbx.files.mkdir("/srv/d/")
    for refused in (
        lambda: sbx.files.remove("/srv/f/"),
        lambda: sbx.files.remove("/srv/f/", recursive=True),
        lambda: sbx.files.read("/srv/f/"),
        lambda: sbx.files.move("/srv/f/", "/srv/g"),
        lambda: sbx.files.move("/srv/f", "/srv/g/"),
        lambda: sbx.files.watch("/srv/f/").__enter__(),
    ):
        with pytest.raises(dsec.FileError) as told:
            refused()
        assert told.value.detail["errno"] == "ENOTDIR"
    for path in ("/srv/f/", "/srv/d/", "/srv/new/"):
        for write in (sbx.files.write, sbx.files.append):
            with pytest.raises(dsec.IsADirectory):
                write(path, "2")
    assert [(entry.name, entry.type) for entry in sbx.files.list("/srv/")] == [("d", "directory"), ("f", "file")]
    assert sbx.files.read("/srv/f") == b"1"
    sbx.files.move("/srv/d/", "/srv/e/")
    sbx.files.remove("/srv/e/")


def test_what_holds_everything_stays(sbx: dsec.Sandbox) -> None:
    sbx.files.write("/srv/a/b", "1")
    asked = {
        "EBUSY": (
            lambda: sbx.files.remove("/", recursive=True),
            lambda: sbx.files.move("/", "/srv/c"),
            lambda: sbx.files.move("/srv/a", "/", replace=True),
        ),
        "EINVAL": (lambda: sbx.files.move("/srv/a", "/srv/a/c"), lambda: sbx.files.move("/srv", "/srv/a/c")),
    }
    for errno, calls in asked.items():
        for call in calls:
            with pytest.raises(dsec.FileError) as refused:
                call()
            assert refused.value.detail["errno"] == errno
    assert sbx.files.read_text("/srv/a/b") == "1"


def test_directories(sbx: dsec.Sandbox) -> None:
    assert sbx.files.mkdir("/srv/a/b", parents=True).type == "directory"
    sbx.files.mkdir("/srv/a/b", parents=True)
    with pytest.raises(dsec.FileExists):
        sbx.files.mkdir("/srv/a/b")
    for name in ("z", "a b", "new\nline", "ü", os.fsdecode(b"\xff\xfe")):
        sbx.files.write(f"/srv/a/{name}", name.encode("utf-8", "surrogateescape"))
    found = sbx.files.list("/srv/a")
    assert [entry.name for entry in found] == ["a b", "b", "new\nline", "z", "ü", os.fsdecode(b"\xff\xfe")]
    assert sbx.files.read(found[-1].path) == b"\xff\xfe"
    assert sbx.files.move("/srv/a/z", "/srv/y").path == "/srv/y"
    with pytest.raises(dsec.FileExists):
        sbx.files.move("/srv/y", "/srv/a/ü")
    sbx.files.move("/srv/y", "/srv/a/ü", replace=True)
    assert sbx.files.read("/srv/a/ü") == b"z"
    assert sbx.files.chmod("/srv/a/ü", 0o4755).mode == 0o4755
    with pytest.raises(dsec.FileError):
        sbx.files.remove("/srv/a")
    sbx.files.remove("/srv/a", recursive=True)
    assert not sbx.files.exists("/srv/a")


@pytest.mark.same_everywhere
def test_a_page_after_the_other(sbx: dsec.Sandbox, tmp_path: Path) -> None:
    names = [f"{n:05}" for n in range(1200)]  # more than a page
    for name in names:
        (tmp_path / name).touch()
    sbx.files.upload(tmp_path, "/many")
    assert [entry.name for entry in sbx.files.list("/many")] == names


def test_trees_go_both_ways(sbx: dsec.Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / "deep").mkdir(parents=True)
    (source / "one").write_bytes(b"1" * 700_000)
    (source / "one").chmod(0o755)
    (source / "sub" / "deep" / "two").write_text("2")
    (source / "sub" / os.fsdecode(b"\xff")).write_text("odd")
    (source / "link").symlink_to("sub/deep/two")
    seen: list[int] = []
    report = sbx.files.upload(source, "/srv/tree", on_progress=lambda done, total: seen.append(done))
    assert (report.bytes, seen[-1], report.skipped.count) == (700_004, 700_004, 0)
    target = tmp_path / "target"
    report = sbx.files.download("/srv/tree", target)
    assert report.skipped.count == 0
    assert (target / "one").read_bytes() == b"1" * 700_000
    assert (target / "one").stat().st_mode & 0o777 == 0o755
    assert (target / "link").readlink() == Path("sub/deep/two")
    assert (target / "sub" / os.fsdecode(b"\xff")).read_text() == "odd"
    assert sorted(p.name for p in target.rglob("*")) == sorted(p.name for p in source.rglob("*"))
    assert sbx.files.upload(source / "one", "/srv/file").bytes == 700_000
    sbx.files.download("/srv/file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"1" * 700_000
    with pytest.raises(dsec.FileNotFound):
        sbx.files.download("/srv/none", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.same_everywhere
def test_what_is_there_is_replaced_unless_it_is_not_to_be(sbx: dsec.Sandbox, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir(mode=0o750)
    (tmp_path / "tree/same").write_text("new")
    sbx.files.write("/srv/there/same", "old")
    sbx.files.write("/srv/there/other", "kept")
    for source, target in (("tree/same", "/srv/there/same"), ("tree", "/srv/there"), ("tree", "/srv/there/same")):
        with pytest.raises(dsec.FileExists):
            sbx.files.upload(tmp_path / source, target, replace=False)
    assert sbx.files.read_text("/srv/there/same") == "old"
    for source, target in (("tree", "/srv/new/tree/"), ("tree/same", "/srv/new/file"), ("tree", "relative")):
        sbx.files.upload(tmp_path / source, target, replace=False)
        with pytest.raises(dsec.FileExists):
            sbx.files.upload(tmp_path / source, target, replace=False)
    assert sbx.files.stat("/srv/new/tree").mode == 0o750
    assert sbx.files.read_text("/srv/new/tree/same") == sbx.files.read_text("/srv/new/file") == "new"
    sbx.files.upload(tmp_path / "tree/same", "/srv/there/same")
    sbx.files.upload(tmp_path / "tree", "/srv/there")
    assert [sbx.files.read_text(f"/srv/there/{name}") for name in ("same", "other")] == ["new", "kept"]
    with pytest.raises(dsec.IsADirectory):
        sbx.files.upload(tmp_path / "tree/same", "/srv/there")
    with pytest.raises(dsec.InvalidSpec, match="replace"):
        sbx.files.upload(tmp_path / "tree", "/srv/x", replace="no")  # type: ignore[arg-type]  # as a caller may


def test_a_directory_whose_parent_is_missing_says_how_it_is_made(sbx: dsec.Sandbox) -> None:
    with pytest.raises(dsec.FileNotFound, match=r"mkdir\(path, parents=True\) makes that, too"):
        sbx.files.mkdir("/none/such")
    sbx.files.mkdir("/none/such", parents=True)


def test_a_directory_that_is_uploaded_has_its_own_mode(sbx: dsec.Sandbox, tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    (tmp_path / "top").chmod(0o700)
    sbx.files.upload(tmp_path / "top", "/srv/new/top")
    assert sbx.files.stat("/srv/new/top").mode == 0o700
    assert sbx.files.stat("/srv/new").mode == 0o755
    sbx.files.mkdir("/srv/there", mode=0o751)
    sbx.files.upload(tmp_path / "top", "/srv/there")
    assert sbx.files.stat("/srv/there").mode == 0o751


def test_a_progress_that_raises_ends_the_copy(sbx: dsec.Sandbox, tmp_path: Path) -> None:
    def stop(done: int, total: int | None) -> None:
        raise KeyError(done)

    (tmp_path / "big").write_bytes(bytes(2_000_000))
    sbx.files.write("/old", "old")
    with pytest.raises(KeyError):
        sbx.files.upload(tmp_path / "big", "/old", on_progress=stop)
    assert sbx.files.read_text("/old") == "old"
    with pytest.raises(KeyError):
        sbx.files.download("/old", tmp_path / "new", on_progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["big"]


def test_a_watch_tells_what_changes(sbx: dsec.Sandbox) -> None:
    sbx.files.mkdir("/watched")
    with sbx.files.watch("/watched") as changes:
        sbx.files.write("/elsewhere", "1")
        sbx.files.write("/watched/a", "1")
        seen = []
        for change in changes:
            seen.append((change.kind, change.path))
            if change.path == "/watched/a" and change.kind == "created":
                sbx.files.remove("/watched", recursive=True)  # which ends it
    assert ("created", "/watched/a") in seen
    assert ("deleted", "/watched/a") in seen
    assert all(path.startswith("/watched") for _, path in seen)


def test_a_key_appends_once(agent: Agent) -> None:
    async def main() -> None:
        async with dsec.AsyncClient(agent.url) as client, await client.create() as sbx:
            call = client.transport.upload
            from dsec.model.files import Entry
            from dsec.sdk.bodies import Bytes

            path = f"/v1/sandboxes/{sbx.id}/files:append?path=/log"
            entries = await asyncio.gather(*(call("POST", path, Entry, Bytes(b"x"), key="k") for _ in range(8)))
            assert {entry.size for entry in entries} == {1}
            assert await sbx.files.read("/log") == b"x"

    asyncio.run(main())


@pytest.mark.same_everywhere
def test_a_read_that_is_too_much_at_once_says_how_to_have_it(sbx: dsec.Sandbox, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("dsec.sdk.codec.REPLY_MAX_BYTES", 1 << 20)
    sbx.files.write("/big", bytes((1 << 20) + 1))
    with pytest.raises(dsec.InvalidSpec, match=r"more than 1048576 bytes, .* at once; .* files.download\(\)"):
        sbx.files.read("/big")
    process = sbx.spawn(["echo", "x" * 2000], stdin=False)
    process.wait()
    monkeypatch.setattr("dsec.sdk.codec.REPLY_MAX_BYTES", 1 << 10)
    with pytest.raises(dsec.InvalidSpec, match=r"more than 1024 bytes, .* by iterating"):
        process.output()
    assert process.output(1500) == b"x" * 500 + b"\n"
    assert len(sbx.files.read("/big", length=1 << 10)) == 1 << 10
    assert sbx.files.download("/big", tmp_path / "big").bytes == (1 << 20) + 1


def test_a_change_is_waited_for_so_long_and_a_watch_is_closed_from_another_thread(sbx: dsec.Sandbox) -> None:
    sbx.files.mkdir("/watched")
    with sbx.files.watch("/watched") as changes:
        with pytest.raises(TimeoutError, match=r"nothing has changed within 0\.05 s"):
            changes.next(timeout_s=0.05)
        sbx.files.write("/watched/a", "1")
        assert changes.next(timeout_s=60).path == "/watched/a"
        with pytest.raises(dsec.InvalidSpec, match="timeout_s"):
            changes.next(timeout_s="1")  # type: ignore[arg-type]  # what is refused
        ended: list[object] = []
        reader = threading.Thread(target=lambda: ended.extend([*changes, None]))
        reader.start()
        time.sleep(0.2)
        changes.close()
        reader.join(60)
        assert ended[-1:] == [None]
        with pytest.raises(dsec.InvalidState, match="has ended"):
            changes.next(timeout_s=60)


def test_many_threads_write_one_file(sbx: dsec.Sandbox) -> None:
    contents = [bytes([n]) * 10_000 for n in range(64)]
    threads = [threading.Thread(target=sbx.files.write, args=("/one", data)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sbx.files.read("/one") in contents


@pytest.mark.same_everywhere
def test_a_mode_that_is_text_is_refused_by_name(sbx: dsec.Sandbox) -> None:
    with pytest.raises(dsec.InvalidSpec, match=r"mode='0755'.*0o755"):
        sbx.files.write("/home/f", "", mode="0755")  # type: ignore[arg-type]  # what is refused
