"""What comes down from a sandbox is not trusted: nothing of it lands outside."""

from __future__ import annotations

import errno
import io
import os
import resource
import tarfile
from pathlib import Path

import pytest

from dsec.model.errors import FileError, InvalidSpec
from dsec.model.files import TreeReport
from dsec.sdk import bodies, local

pytestmark = pytest.mark.unit


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644, size: int = 0
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode, made.size = kind, link, mode, size
    return made


def archive(*members: tarfile.TarInfo, content: bytes = b"x") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for one in members:
            if one.isreg():
                one.size = len(content)
            tar.addfile(one, io.BytesIO(content))
    return out.getvalue()


def unpack(data: bytes, target: Path) -> TreeReport:
    tree = local.Tree(target, None)
    try:
        for start in range(0, len(data), 1000):
            tree.feed(data[start : start + 1000])
        return tree.done(TreeReport(entries=1))
    finally:
        tree.close()


OUTSIDE = {
    "absolute": (member("/evil"),),
    "up": (member("../evil"),),
    "up within": (member("a/../../evil"),),
    "through a link": (member("l", tarfile.SYMTYPE, ".."), member("l/evil")),
    "through an absolute link": (member("l", tarfile.SYMTYPE, "/"), member("l/tmp/evil")),
    "through a link within": (
        member("d", tarfile.DIRTYPE),
        member("d/l", tarfile.SYMTYPE, "../.."),
        member("d/l/evil"),
    ),
    "a hard link to what is outside": (member("h", tarfile.LNKTYPE, "../secret"),),
    "a hard link through a link": (member("l", tarfile.SYMTYPE, ".."), member("h", tarfile.LNKTYPE, "l/secret")),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_nothing_lands_outside(case: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host's")
    target = tmp_path / "target"
    report = unpack(archive(*OUTSIDE[case], member("fine")), target)
    assert (target / "fine").read_bytes() == b"x"
    assert report.skipped.count >= 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["secret", "target"]
    assert (tmp_path / "secret").stat().st_nlink == 1


@pytest.mark.parametrize("link", ["/etc/passwd", "../outside", "a/../../x", "l/.."])
def test_links_that_could_lead_outside_are_left_out(link: str, tmp_path: Path) -> None:
    report = unpack(archive(member("l", tarfile.SYMTYPE, link)), tmp_path / "t")
    assert report.skipped.named[0].path == "l"
    assert not (tmp_path / "t" / "l").is_symlink()


def test_links_inside_are_kept(tmp_path: Path) -> None:
    unpack(
        archive(
            member("d", tarfile.DIRTYPE, mode=0o755),
            member("d/up", tarfile.SYMTYPE, "../f"),
            member("f"),
            member("h", tarfile.LNKTYPE, "f"),
        ),
        tmp_path / "t",
    )
    assert (tmp_path / "t/d/up").read_bytes() == b"x"
    assert (tmp_path / "t/h").stat().st_ino == (tmp_path / "t/f").stat().st_ino


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    report = unpack(
        archive(member("d", tarfile.DIRTYPE, mode=0o755), member("l", tarfile.SYMTYPE, "d"), member("l/f")),
        tmp_path / "t",
    )
    assert [one.path for one in report.skipped.named] == ["l/f"]
    assert not list((tmp_path / "t/d").iterdir())


def test_no_device_no_owner_no_set_id(tmp_path: Path) -> None:
    odd = [member("c", tarfile.CHRTYPE), member("b", tarfile.BLKTYPE), member("p", tarfile.FIFOTYPE)]
    suid = member("s", mode=0o6777)
    suid.uid = suid.gid = 12345
    report = unpack(archive(*odd, suid), tmp_path / "t")
    assert report.skipped.count == 3
    status = (tmp_path / "t/s").stat()
    assert (status.st_mode & 0o7777, status.st_uid) == (0o777, os.getuid())


def test_a_read_only_directory_takes_what_belongs_into_it(tmp_path: Path) -> None:
    unpack(archive(member("d", tarfile.DIRTYPE, mode=0o555), member("d/f")), tmp_path / "t")
    assert (tmp_path / "t/d/f").read_bytes() == b"x"
    assert (tmp_path / "t/d").stat().st_mode & 0o777 == 0o555


def test_what_is_no_archive_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no tar archive"):
        unpack(b"\x07" * 4096, tmp_path / "t")


def test_a_cut_archive_does_not_hang(tmp_path: Path) -> None:
    data = archive(member("f"), content=b"y" * 100_000)
    tree = local.Tree(tmp_path / "t", None)
    tree.feed(data[:50_000])
    tree.close()
    assert not tree._thread.is_alive()


def test_a_full_local_disk_is_its_error_not_the_sandboxs(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("in the way")
    with pytest.raises(FileExistsError):
        unpack(archive(member("f")), tmp_path / "t")


def test_the_progress_of_a_file_and_its_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    with local.File(tmp_path / "f", lambda done, total: seen.append((done, total))) as file:
        file.expect(4)
        file.write(b"ab")
        file.write(b"cd")
        assert not (tmp_path / "f").exists()
        file.done()
    assert seen == [(2, 4), (4, 4)]
    assert (tmp_path / "f").read_bytes() == b"abcd"


def test_a_file_that_does_not_come_whole_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    with pytest.raises(KeyError), local.File(tmp_path / "f", None) as file:
        file.write(b"new")
        raise KeyError
    assert (tmp_path / "f").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "f"]


@pytest.mark.parametrize("old", [None, b"old"])
def test_of_a_cut_archive_no_file_is_half(tmp_path: Path, old: bytes | None) -> None:
    target = tmp_path / "t"
    target.mkdir()
    if old is not None:
        (target / "b").write_bytes(old)
    whole = archive(member("a"), member("b"), member("c"), content=b"new" * 1000)
    for at in range(0, len(whole), 700):
        tree = local.Tree(target, None)
        tree.feed(whole[:at]) if at else None
        tree.close()
        for path in target.iterdir():
            assert path.name in ("a", "b", "c"), at
            assert path.read_bytes() == b"new" * 1000 or (path.name, path.read_bytes()) == ("b", old), at


def test_a_file_has_the_mode_of_any_new_one_and_nobodys_umask_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o027)
    try:
        monkeypatch.delattr(os, "umask")
        with local.File(tmp_path / "f", None) as file:
            file.write(b"x")
            file.done()
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640


def test_a_file_may_have_the_longest_name(tmp_path: Path) -> None:
    name = "\U0001f600" * 63
    with local.File(tmp_path / name, None) as file:
        file.write(b"x")
        file.done()
    unpack(archive(member(name)), tmp_path / "t")
    assert (tmp_path / name).read_bytes() == (tmp_path / "t" / name).read_bytes() == b"x"


def test_a_tree_goes_up_as_it_is(tmp_path: Path) -> None:
    source = tmp_path / "s"
    (source / "d").mkdir(parents=True)
    (source / "d/big").write_bytes(os.urandom(1_000_000))
    (source / "empty").touch()
    (source / "hard").hardlink_to(source / "empty")
    (source / "link").symlink_to("/anywhere")
    os.mkfifo(source / "pipe")
    (source / os.fsdecode(b"\xff\n")).write_text("odd")
    data = b"".join(bodies.LocalTree(source).pieces())
    assert len(data) % tarfile.RECORDSIZE == 0
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = {one.name for one in tar}
        content = tar.extractfile("d/big")
        assert content is not None
        assert content.read() == (source / "d/big").read_bytes()
        assert tar.getmember("link").linkname == "/anywhere"
        assert all(one.uid == 0 for one in tar)
    assert names >= {".", "d", "d/big", "empty", "hard", "link", os.fsdecode(b"\xff\n")}


def test_a_file_that_shrinks_while_it_is_sent_is_said(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 600_000)
    pieces = bodies.LocalFile(path).pieces()
    next(pieces)
    path.write_bytes(b"")
    with pytest.raises(InvalidSpec, match="stays as it is"):
        list(pieces)


def test_only_files_and_directories_go_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidSpec, match="regular file"):
        bodies.of_local(tmp_path / "pipe", None)
    with pytest.raises(FileNotFoundError):
        bodies.of_local(tmp_path / "none", None)


def test_many_pieces_and_many_files(tmp_path: Path) -> None:
    tree = local.Tree(tmp_path / "t", None)
    data = archive(*(member(f"f{n}") for n in range(200)), content=b"z" * 5000)
    for start in range(0, len(data), 4096):
        tree.feed(data[start : start + 4096])
    tree.done(TreeReport())
    assert len(list((tmp_path / "t").iterdir())) == 200


def test_directories_above_a_file_are_made(tmp_path: Path) -> None:
    with local.File(tmp_path / "a" / "b" / "f", None) as file:
        file.write(b"x")
        file.done()
    assert (tmp_path / "a" / "b" / "f").read_bytes() == b"x"


def test_a_directory_that_takes_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "no").touch()
    for parent in (tmp_path / "no", Path("/proc")):
        with pytest.raises(OSError) as caught, local.File(parent / "f", None):
            pass
        assert caught.value.filename == str(parent)
        assert local.PART_PREFIX not in str(caught.value)


def holes(name: str, size: int | str, pieces: list[tuple[int, int]], data: bytes, *, pax_size: bool = False) -> bytes:
    """A file with holes, in the form in which a sandbox sends it: GNU 1.0."""
    table = f"{len(pieces)}\n" + "".join(f"{start}\n{length}\n" for start, length in pieces)
    body = table.encode() + bytes(-len(table) % 512) + data
    made = tarfile.TarInfo("sparse")
    made.size = len(body)
    made.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": name,
        "GNU.sparse.realsize": str(size),
    }
    if pax_size:
        made.pax_headers["size"] = str(made.size)
    return made.tobuf(tarfile.PAX_FORMAT) + body + bytes(-len(body) % 512)


@pytest.mark.parametrize("pax_size", [False, True])
def test_holes_stay_holes(pax_size: bool, tmp_path: Path) -> None:
    data = os.urandom(8192)
    size = 1 << 30
    pieces = [(65536, 4096), (size // 2, 4096), (size, 0)]
    seen: list[int] = []
    tree = local.Tree(tmp_path / "t", lambda done, total: seen.append(done))
    tree.feed(holes("f", size, pieces, data, pax_size=pax_size) + holes("empty", size, [(size, 0)], b""))
    tree.feed(archive(member("after")))
    tree.done(TreeReport())
    status = (tmp_path / "t/f").stat()
    assert status.st_size == size
    assert status.st_blocks * 512 < 1 << 20
    with (tmp_path / "t/f").open("rb") as file:
        for start, want in (
            (0, bytes(4096)),
            (65536, data[:4096]),
            (size // 2, data[4096:]),
            (size - 4096, bytes(4096)),
        ):
            file.seek(start)
            assert file.read(4096) == want
    assert ((tmp_path / "t/empty").stat().st_size, (tmp_path / "t/empty").stat().st_blocks) == (size, 0)
    assert (tmp_path / "t/after").read_bytes() == b"x"
    assert seen[-1] == len(data) + 1


LIES = {
    "pieces that overlap": holes("f", 1 << 20, [(0, 512), (0, 512)], b"x" * 1024),
    "pieces backwards": holes("f", 1 << 20, [(4096, 512), (0, 512)], b"x" * 1024),
    "a length below nothing": holes("f", 1 << 20, [(0, 512), (8192, -512)], b"x" * 512),
    "an offset below nothing": holes("f", 1 << 20, [(-512, 512)], b"x" * 512),
    "a piece behind the end": holes("f", 512, [(0, 1024)], b"x" * 1024),
    "a size below nothing": holes("f", -1, [], b""),
    "more than its bytes": holes("f", 1 << 40, [(0, 1 << 40)], b"x" * 512) + archive(member("g"), content=b"y" * 4096),
    "of the bytes of others": holes("f", 8192, [(0, 4096)], b"x" * 512) + archive(member("g"), content=b"y" * 8192),
    "more than all bytes": holes("f", 1 << 40, [(0, 1 << 40)], b"x" * 512, pax_size=True),
    "a map of no numbers": holes("f", 1 << 20, [], b"").replace(b"\n0\n", b"\nx\n").replace(b"0\n\0", b"x\n\0"),
    "a size that is no number": holes("f", "many", [], b""),
    "a map that does not end": holes("f", 1 << 20, [(0, 0)] * 500, b"")[:2048],
}


@pytest.mark.parametrize("case", LIES)
def test_holes_that_cannot_be_are_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no tar archive"):
        unpack(LIES[case], tmp_path / "t")
    assert not list((tmp_path / "t").iterdir())


@pytest.mark.parametrize("size", [1 << 30, 1 << 63, 1 << 70])
def test_a_size_that_the_file_system_refuses_names_the_file(size: int, tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 29, old[1]))  # as of a file system: each has its own
    try:
        with pytest.raises(OSError, match=str(size)) as caught:
            unpack(holes("f", size, [(0, 512)], b"x" * 512), tmp_path / "t")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "t/f"))
    assert not list((tmp_path / "t").iterdir())
