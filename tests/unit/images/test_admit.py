"""What may enter a layer."""

from __future__ import annotations

import pytest

from dsec.images import admit
from dsec.images.admit import Admission
from dsec.images.tarstream import BLOCKDEV, CHARDEV, DIRECTORY, HARDLINK, REGULAR, SYMLINK, Entry, TarError


def admission(whiteouts: bool = False, content_max_bytes: int = 1 << 40) -> Admission:
    return Admission(whiteouts=whiteouts, content_max_bytes=content_max_bytes)


@pytest.mark.parametrize(
    "name", [b"../a", b"a/../b", b"/etc/passwd", b"a/..", b"..", b"a\0b", b"n" * 256, b"a/" * 3000]
)
def test_names_that_lead_out_are_refused(name: bytes) -> None:
    with pytest.raises(TarError):
        admission().admit(Entry(name, REGULAR))


def test_a_name_through_a_link_is_refused() -> None:
    gate = admission()
    gate.admit(Entry(b"a", SYMLINK, link=b"/etc"))
    with pytest.raises(TarError, match="passes through"):
        gate.admit(Entry(b"a/passwd", REGULAR))


@pytest.mark.parametrize("target", [b"../../etc/shadow", b"/etc/shadow", b"not-there", b"dir", b"self"])
def test_hard_links_out_are_refused(target: bytes) -> None:
    gate = admission()
    gate.admit(Entry(b"dir", DIRECTORY))
    with pytest.raises(TarError):
        gate.admit(Entry(b"self", HARDLINK, link=target))


def test_a_hard_link_inside_is_kept() -> None:
    gate = admission()
    gate.admit(Entry(b"a", REGULAR))
    [entry] = gate.admit(Entry(b"b", HARDLINK, link=b"./a"))
    assert entry.link == b"a"


@pytest.mark.parametrize("kind", [CHARDEV, BLOCKDEV])
def test_device_nodes_are_dropped_and_reported(kind: bytes) -> None:
    gate = admission()
    assert gate.admit(Entry(b"dev/kvm", kind, device=(10, 232))) == []
    assert gate.report().dropped == {"device nodes": 1}
    assert gate.report().examples == {"device nodes": ["'dev/kvm'"]}


def test_attributes_of_the_host_are_dropped() -> None:
    gate = admission()
    given = {b"user.a": b"1", b"security.capability": b"2", b"trusted.overlay.redirect": b"/x", b"security.ima": b""}
    [entry] = gate.admit(Entry(b"a", REGULAR, xattrs=given))
    assert entry.xattrs == {b"user.a": b"1", b"security.capability": b"2"}
    assert gate.report().dropped == {"extended attributes": 2}


def test_missing_directories_are_made() -> None:
    entries = admission().admit(Entry(b"./a//b/c", REGULAR))
    assert [(entry.name, entry.type) for entry in entries] == [
        (b"a", DIRECTORY),
        (b"a/b", DIRECTORY),
        (b"a/b/c", REGULAR),
    ]


def test_a_file_cannot_become_a_directory() -> None:
    gate = admission()
    gate.admit(Entry(b"a", REGULAR))
    with pytest.raises(TarError, match="and as something else"):
        gate.admit(Entry(b"a", DIRECTORY))


def test_ids_a_sandbox_cannot_show_are_refused() -> None:
    with pytest.raises(TarError, match="ids in a layer"):
        admission().admit(Entry(b"a", REGULAR, uid=65_536))


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = admission(content_max_bytes=1000)
    gate.admit(Entry(b"a", REGULAR, size=1000))
    with pytest.raises(TarError, match="bytes of files"):
        gate.admit(Entry(b"b", REGULAR, size=1))
    monkeypatch.setattr(admit, "ENTRIES_MAX", 2)
    gate = admission()
    gate.admit(Entry(b"a/b", REGULAR))
    with pytest.raises(TarError, match="entries"):
        gate.admit(Entry(b"d", REGULAR))


def test_the_root_cannot_be_opaque_or_a_file() -> None:
    with pytest.raises(TarError, match="opaque"):
        admission(whiteouts=True).admit(Entry(b".wh..wh..opq", REGULAR))
    with pytest.raises(TarError, match="root"):
        admission().admit(Entry(b"./", SYMLINK, link=b"/"))


def test_a_directory_with_too_many_entries_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admit, "DIRECTORY_ENTRIES_MAX", 3)
    gate = admission()
    for name in (b"data/a", b"data/b", b"data/b", b"data/c", b"other/a"):  # a name that comes again is one entry
        gate.admit(Entry(name, REGULAR))
    with pytest.raises(TarError, match="'data' has more than 3 entries"):
        gate.admit(Entry(b"data/d", REGULAR))
    gate.admit(Entry(b"third", REGULAR))
    with pytest.raises(TarError, match="the root of the layer has more than 3 entries"):
        gate.admit(Entry(b"fourth", REGULAR))
