"""The store against real tools and this kernel: what went in is what is mounted."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import stat
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec.images import Config, LayerStore
from dsec.model import failpoint
from dsec.model.errors import Conflict, CorruptLayer, InvalidSpec, NodeDiskFull, NotFound, Unavailable
from dsec.model.states import LayerInfo
from tests.kit.erofs import mounted, overlay


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "state")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with one of everything."""
    top = tmp_path / "tree"
    (top / "sub/empty").mkdir(parents=True)
    (top / "file").write_bytes(b"content")
    os.chown(top / "file", 1000, 1001)
    (top / "file").chmod(0o4755)
    os.utime(top / "file", ns=(0, 1_600_000_000_123_456_789))
    os.setxattr(top / "file", "user.note", b"a\0b")
    os.setxattr(top / "file", "security.capability", bytes.fromhex("0000000200200000000000000000000000000000"))
    os.link(top / "file", top / "sub/hard")
    (top / "sub/link").symlink_to("/etc/passwd")
    os.mkfifo(top / "fifo")
    os.mknod(top / "kvm", stat.S_IFCHR | 0o666, os.makedev(10, 232))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(top / "socket"))
    with (top / "sparse").open("wb") as file:
        file.truncate(100_000_000)
    (top / ("n" * 255)).touch()
    (top / "bytes\udcff\n".encode(errors="surrogateescape").decode(errors="surrogateescape")).touch()
    return top


def leftovers(store: LayerStore) -> list[str]:
    """Files of the store that belong to no layer."""
    known = {Path(store.path(layer.digest)).name for layer in store.list()}
    names = set(os.listdir(store._dir)) - known
    return sorted(name for name in names if not name.startswith(("catalog", "lock")))


Add = Callable[[tarfile.TarFile], None]


def archive(path: Path, add: Add, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as opened:  # type: ignore[call-overload] # the mode is a parameter
        add(opened)
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"") -> Add:
    def add(opened: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, link, len(data)
        opened.addfile(info, io.BytesIO(data))

    return add


def test_a_directory_comes_out_as_it_was(store: LayerStore, tree: Path) -> None:
    made = store.import_source(f"dir:{tree}", "tree:1")
    assert made.report.dropped == {"device nodes": 1, "sockets": 1}
    assert os.stat(store.path(made.layer.digest)).st_size < 1_000_000  # the sparse file stays small
    with mounted(store.path(made.layer.digest)) as root:
        info = (root / "file").stat()
        assert (root / "file").read_bytes() == b"content"
        assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode), info.st_nlink) == (1000, 1001, 0o4755, 2)
        assert info.st_mtime_ns == 1_600_000_000_123_456_789
        assert os.getxattr(root / "file", "user.note") == b"a\0b"
        assert os.getxattr(root / "file", "security.capability")[:4] == bytes.fromhex("00000002")
        assert (root / "sub/hard").stat().st_ino == info.st_ino
        assert os.readlink(root / "sub/link") == "/etc/passwd"
        assert stat.S_ISFIFO((root / "fifo").stat().st_mode)
        assert (root / "sparse").stat().st_size == 100_000_000
        assert set(os.listdir(root)) == set(os.listdir(tree)) - {"kvm", "socket"}


@pytest.mark.same_everywhere
def test_the_same_content_is_the_same_layer_however_it_comes(store: LayerStore, tree: Path, tmp_path: Path) -> None:
    for name in ("kvm", "socket"):
        (tree / name).unlink()
    packed = tmp_path / "tree.tar"
    command = [
        "tar",
        "--xattrs",
        "--xattrs-include=*",
        "--sparse",
        "--format=posix",
        "-C",
        str(tree),
        "-cf",
        str(packed),
        ".",
    ]
    subprocess.run(command, check=True)
    subprocess.run(["gzip", "-k", str(packed)], check=True)
    digests = [
        store.import_dir(tree, "a:1").digest,
        store.import_dir(tree, "b@2").digest,
        store.import_tar(packed, "c:1").digest,
        store.import_tar(tmp_path / "tree.tar.gz").digest,
    ]
    assert len(set(digests)) == 1
    assert store.resolve("c:1").names == ("a:1", "b@2", "c:1")
    assert len(store.list()) == 1


@pytest.mark.same_everywhere
def test_an_import_again_with_other_settings_is_what_the_name_has_then(store: LayerStore, tree: Path) -> None:
    store.import_source(f"dir:{tree}", "l2:1")
    made = store.import_source(f"dir:{tree}", "l2:1", role="workspace", config=Config({"A": "1"}, "/w", "root"))
    assert made.existed
    assert (made.layer.role, made.layer.env, made.layer.cwd) == ("workspace", {"A": "1"}, "/w")
    assert store.resolve("l2:1") == made.layer
    assert [layer.names for layer in store.list()] == [("l2:1",)]
    store.name("l2:1", "l3@1")
    with pytest.raises(Conflict, match="a version never changes"):
        store.import_source(f"dir:{tree}", "l3@1", role="toolkit")
    store.import_source(f"dir:{tree}", "l4:1", role="toolkit")
    store.remove("l4:1")
    assert store.resolve("l2:1").role == "workspace"
    store.remove("l2:1")
    store.remove("l3@1")
    assert store.list() == []


@pytest.mark.same_everywhere
@pytest.mark.parametrize(
    ("add", "message"),
    [
        (member("../escape"), "leads out"),
        (member("/etc/passwd"), "is absolute"),
        (member("hard", tarfile.LNKTYPE, "/etc/shadow"), "is absolute"),
        (member("hard", tarfile.LNKTYPE, "../../etc/shadow"), "leads out"),
    ],
)
def test_hostile_archives_are_refused_and_leave_nothing(
    store: LayerStore, tmp_path: Path, add: Callable[[tarfile.TarFile], None], message: str
) -> None:
    path = archive(tmp_path / "bad.tar", add)
    with pytest.raises(InvalidSpec, match=message) as caught:
        store.import_tar(path, "bad:1")
    assert caught.value.detail["field"] == "source"
    assert store.list() == [] and leftovers(store) == []


@pytest.mark.same_everywhere
@pytest.mark.parametrize("damage", ["cut", "noise", "cut gzip", "cut xz", "bad bzip2", "empty"])
def test_damaged_archives_are_refused(store: LayerStore, tmp_path: Path, damage: str) -> None:
    mode = {"cut gzip": "w:gz", "cut xz": "w:xz"}.get(damage, "w")
    path = archive(tmp_path / "x.tar", member("a", data=os.urandom(100_000)), mode)
    content = path.read_bytes()
    known = {"noise": os.urandom(5000), "empty": b"", "bad bzip2": b"BZh9" + bytes(1000), "cut xz": content[:-10]}
    damaged = known.get(damage, content[: len(content) // 2])
    path.write_bytes(damaged)
    with pytest.raises(InvalidSpec):
        store.import_tar(path)
    assert leftovers(store) == []


@contextlib.contextmanager
def stacked(store: LayerStore, top: LayerInfo, bottom: LayerInfo) -> Iterator[Path]:
    with (
        mounted(store.path(top.digest)) as upper,
        mounted(store.path(bottom.digest)) as lower,
        overlay(upper, lower) as merged,
    ):
        yield merged


def test_whiteouts_hide_what_is_below(store: LayerStore, tmp_path: Path) -> None:
    lower = tmp_path / "lower"
    (lower / "dir").mkdir(parents=True)
    for name in ("gone", "stays", "dir/old"):
        (lower / name).touch()

    def add(opened: tarfile.TarFile) -> None:
        for name in (".wh.gone", "dir/.wh..wh..opq", "dir/new"):
            member(name)(opened)

    upper = store.import_tar(archive(tmp_path / "upper.tar", add), whiteouts=True)
    base = store.import_dir(lower)
    with (
        mounted(store.path(upper.digest)) as top,
        mounted(store.path(base.digest)) as below,
        overlay(top, below) as merged,
    ):
        assert sorted(os.listdir(merged)) == ["dir", "stays"]
        assert os.listdir(merged / "dir") == ["new"]


def test_an_upper_becomes_a_layer_with_its_deletions(store: LayerStore, tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    (upper / "dir").mkdir(parents=True)
    os.mknod(upper / "gone", stat.S_IFCHR, os.makedev(0, 0))
    os.setxattr(upper / "dir", "trusted.overlay.opaque", b"y")
    lower = tmp_path / "lower"
    (lower / "dir").mkdir(parents=True)
    (lower / "dir/old").touch()
    (lower / "gone").touch()
    packed = store.import_source(f"dir:{upper}", whiteouts=True).layer
    base = store.import_dir(lower)
    with (
        mounted(store.path(packed.digest)) as top,
        mounted(store.path(base.digest)) as below,
        overlay(top, below) as merged,
    ):
        assert os.listdir(merged) == ["dir"]
        assert os.listdir(merged / "dir") == []


@pytest.mark.same_everywhere
def test_removal(store: LayerStore, tree: Path) -> None:
    layer = store.import_dir(tree, "a:1")
    store.name("a:1", "b:1")
    store.remove("a:1", in_use={layer.digest})  # only a name
    with pytest.raises(Conflict, match="used by a sandbox"):
        store.remove("b:1", in_use={layer.digest})
    assert store.resolve("b:1").digest == layer.digest
    with pytest.raises(NotFound, match="did you mean b:1"):
        store.resolve("b:11")
    with pytest.raises(NotFound, match="there is b:1"):
        store.resolve("quite-another:7")
    store.remove("b:1")
    with pytest.raises(NotFound):
        store.resolve(layer.digest)
    assert leftovers(store) == []


@pytest.mark.same_everywhere
def test_a_version_that_is_taken_leaves_no_second_layer(store: LayerStore, tree: Path) -> None:
    store.import_dir(tree, "a@1")
    (tree / "more").touch()
    with pytest.raises(Conflict, match="never changes"):
        store.import_dir(tree, "a@1")
    assert len(LayerStore(store._dir.parent).list()) == 1
    assert leftovers(store) == []


@pytest.mark.same_everywhere
def test_config_and_role(store: LayerStore, tree: Path) -> None:
    config = Config(env={"A": "1"}, cwd="/repo", user="dev")
    store.import_source(f"dir:{tree}", "w@1", role="workspace", config=config)
    layer = store.resolve("w@1")
    assert (layer.role, layer.env, layer.cwd, layer.user) == ("workspace", {"A": "1"}, "/repo", "dev")


@pytest.mark.same_everywhere
def test_another_store_gives_its_layer_without_copying(store: LayerStore, tree: Path, tmp_path: Path) -> None:
    layer = store.import_dir(tree, "a:1")
    other = LayerStore(tmp_path / "other")
    adopted = other.import_source(f"store:{tmp_path}/state#a:1", None).layer
    assert adopted.digest == layer.digest and adopted.names == ("a:1",)
    assert os.stat(other.path(layer.digest)).st_ino == os.stat(store.path(layer.digest)).st_ino


@pytest.mark.same_everywhere
def test_an_image_can_be_taken_as_it_is(store: LayerStore, tree: Path, tmp_path: Path) -> None:
    layer = store.import_dir(tree)
    other = LayerStore(tmp_path / "other")
    assert other.import_source(f"erofs:{store.path(layer.digest)}", "x:1").layer.digest == layer.digest
    (tmp_path / "no.erofs").write_bytes(bytes(8192))
    with pytest.raises(InvalidSpec, match="an EROFS image"):
        other.import_source(f"erofs:{tmp_path}/no.erofs")


@pytest.mark.same_everywhere
def test_damage_is_noticed(store: LayerStore, tree: Path) -> None:
    path = Path(store.path(store.import_dir(tree, "a:1").digest))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    with pytest.raises(CorruptLayer):
        store.verify("a:1")
    path.write_bytes(content[:-4096])
    with pytest.raises(CorruptLayer):
        store.resolve("a:1")


@pytest.mark.same_everywhere
def test_concurrent_imports_of_the_same_content(store: LayerStore, tree: Path) -> None:
    digests: list[str] = []

    def work(number: int) -> None:
        digests.append(LayerStore(store._dir.parent).import_dir(tree, f"a:{number}").digest)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(digests) == 4 and len(set(digests)) == 1
    assert len(store.resolve("a:0").names) == 4
    assert leftovers(store) == []


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(point)], check=True)
    yield point
    subprocess.run(["umount", "--lazy", str(point)], check=True)  # the store keeps its catalogue open


@pytest.mark.same_everywhere
def test_a_full_disk_leaves_nothing(small: Path, tmp_path: Path) -> None:
    store = LayerStore(small)
    source = tmp_path / "big"
    source.mkdir()
    (source / "random").write_bytes(os.urandom(16 << 20))
    with pytest.raises(NodeDiskFull):
        store.import_dir(source)
    assert store.list() == [] and leftovers(store) == []
    (source / "random").write_bytes(b"small")
    filler = small / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as opened:
        while opened.write(bytes(4096)):
            pass
    with pytest.raises(NodeDiskFull):  # already when it makes its working directory
        store.import_dir(source)
    filler.unlink()
    assert store.import_dir(source).size_bytes > 0


POINTS = ("layer.staging", "layer.made", "layer.renamed", "layer.named")


@pytest.mark.same_everywhere
@pytest.mark.parametrize("point", POINTS)
def test_a_failure_at_any_step_leaves_all_or_nothing(store: LayerStore, tree: Path, point: str) -> None:
    failpoint.arm(point)
    try:
        with pytest.raises(failpoint.Injected):
            store.import_dir(tree, "a:1")
    finally:
        failpoint.disarm()
    again = LayerStore(store._dir.parent)  # as after a restart
    assert leftovers(again) == []
    assert len(again.list()) == (1 if point == "layer.named" else 0)
    assert again.import_dir(tree, "a:1").names == ("a:1",)


@pytest.mark.same_everywhere
def test_a_cancelled_import_ends_and_leaves_nothing(store: LayerStore, tmp_path: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    big = tmp_path / "big"
    big.mkdir()
    (big / "zeros").write_bytes(bytes(50_000_000))
    with pytest.raises(Unavailable, match="cancelled"):
        store.import_source(f"dir:{big}", cancel=cancel)
    assert leftovers(store) == []


@pytest.mark.same_everywhere
def test_a_link_to_a_directory_is_that_directory(store: LayerStore, tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree)
    assert store.import_source(f"dir:{tmp_path}/link").layer.digest == store.import_source(f"dir:{tree}").layer.digest


@pytest.mark.same_everywhere
@pytest.mark.parametrize(
    "source",
    [
        *("", "dir:", "dir:relative", "dir:/not/there", "tar:/etc", "ftp:/x", "debootstrap:../x", "store:/etc#a:1"),
        *(
            f"{scheme}:/{name}"
            for scheme in ("dir", "tar", "erofs", "store")
            for name in ("x" * 300 + "#a", "y/" * 3000 + "#a")
        ),
    ],
    ids=lambda source: source[:20],
)
def test_bad_sources_are_refused_by_field(store: LayerStore, source: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        store.import_source(source)
    assert caught.value.detail["field"] == "source"
    assert leftovers(store) == []


def test_a_source_that_is_not_there_is_said_with_what_is(store: LayerStore, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    store.import_source(f"dir:{tmp_path}/in", "app:1")
    other = LayerStore(tmp_path / "other")
    with pytest.raises(NotFound, match=rf"no layer app:2 in the store {tmp_path}/state; there is app:1"):
        other.import_source(f"store:{tmp_path}/state#app:2", "app:2")
    with pytest.raises(InvalidSpec, match=r"store:DIR#LAYER; there is app:1"):
        other.import_source(f"store:{tmp_path}/state", "app:2")
    (tmp_path / "archive.tar").touch()
    with pytest.raises(InvalidSpec, match=r"this is a file: tar: takes an archive"):
        store.import_source(f"dir:{tmp_path}/archive.tar", "app:3")
