"""The tar reader against archives GNU tar and Python's tarfile wrote, and against damaged ones."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.images import tarstream
from dsec.images.tarstream import Entry, Reader, TarError, Writer


def read(archive: bytes) -> list[tuple[Entry, bytes]]:
    reader = Reader(io.BytesIO(archive))
    return [(entry, b"".join(reader.data())) for entry in reader]


def written(*entries: tuple[Entry, bytes]) -> bytes:
    sink = io.BytesIO()
    writer = Writer(sink)
    for entry, data in entries:
        writer.add(entry, iter([data]))
    writer.close()
    return sink.getvalue()


names = st.binary(min_size=1, max_size=300).filter(lambda name: b"\0" not in name and not name.endswith(b"/"))


@given(
    name=names,
    data=st.binary(max_size=2000),
    mode=st.integers(0, 0o7777),
    uid=st.integers(0, 2**31),
    mtime_ns=st.integers(0, 10**19) | st.integers(-(10**10), -1).map(lambda seconds: seconds * 10**9),
    xattrs=st.dictionaries(st.sampled_from([b"user.a", b"security.capability"]), st.binary(max_size=300)),
)
def test_what_is_written_reads_the_same(
    name: bytes, data: bytes, mode: int, uid: int, mtime_ns: int, xattrs: dict[bytes, bytes]
) -> None:
    entry = Entry(name, tarstream.REGULAR, mode, uid, uid, mtime_ns, len(data), xattrs=xattrs)
    assert read(written((entry, data))) == [(entry, data)]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tarfiles_archives(form: int) -> None:
    buffer = io.BytesIO()
    long = "d/" * 60 + "n" * 80 if form != tarfile.USTAR_FORMAT else "d/" * 60 + "n" * 30
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        info = tarfile.TarInfo(long)
        info.size, info.mtime, info.mode = 5, 12345, 0o4755
        archive.addfile(info, io.BytesIO(b"hello"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "t" * 90
        archive.addfile(link)
    (first, data), (second, nothing) = read(buffer.getvalue())
    assert (first.name, first.mode, first.mtime_ns, data) == (long.encode(), 0o4755, 12345 * 10**9, b"hello")
    assert (second.type, second.link, nothing) == (tarstream.SYMLINK, b"t" * 90, b"")


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar")
@pytest.mark.parametrize("form", ["gnu", "posix --sparse-version=0.1", "posix --sparse-version=1.0"])
def test_sparse_files_of_gnu_tar(form: str, tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        for block in range(0, 200, 2):  # more segments than one header holds
            file.seek(block * 8192)
            file.write(os.urandom(4096))
        file.truncate(10_000_000)
    format_, *options = form.split()
    command = ["tar", "--sparse", f"--format={format_}", *options, "-C", str(tmp_path), "-c", "sparse"]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    assert len(archive) < 2_000_000
    [(entry, data)] = read(archive)
    assert (entry.name, entry.size, data == path.read_bytes()) == (b"sparse", 10_000_000, True)


def test_a_sparse_bomb_costs_nothing_until_read() -> None:
    segments = b"1\n%d\n0\n" % 2**50
    pax = b"".join(
        tarstream._record(key, value)
        for key, value in {
            b"GNU.sparse.major": b"1",
            b"GNU.sparse.minor": b"0",
            b"GNU.sparse.name": b"bomb",
            b"GNU.sparse.realsize": b"%d" % 2**50,
        }.items()
    )
    archive = written(
        (Entry(b"x", b"x", size=len(pax)), pax), (Entry(b"n", tarstream.REGULAR, size=512), segments.ljust(512, b"\0"))
    )
    entry = next(iter(Reader(io.BytesIO(archive))))
    assert entry.size == 2**50


def damaged() -> list[bytes]:
    good = written((Entry(b"name", tarstream.REGULAR, size=1000), bytes(1000)))
    huge = bytearray(good)
    huge[156:157] = b"L"
    return [b"", good[:700], good[:1024], b"x" * 512, good[:100] + b"!" + good[101:], bytes(huge)]


@pytest.mark.parametrize("archive", damaged())
def test_damaged_archives_are_refused(archive: bytes) -> None:
    with pytest.raises(TarError):
        read(archive)


def test_noise_never_crashes_the_reader() -> None:
    good = written((Entry(b"n" * 200, tarstream.REGULAR, size=10, xattrs={b"user.a": b"b"}), bytes(10)))
    source = random.Random(7)
    for _ in range(3000):
        noisy = bytearray(good)
        for _ in range(source.randrange(1, 4)):
            noisy[source.randrange(len(noisy))] = source.randrange(256)
        for at in range(0, len(noisy) - 511, 512):  # with right checksums, so that the rest is reached
            noisy[at + 148 : at + 156] = b" " * 8
            noisy[at + 148 : at + 156] = b"%06o\0 " % sum(noisy[at : at + 512])
        with contextlib.suppress(TarError):
            read(bytes(noisy))
