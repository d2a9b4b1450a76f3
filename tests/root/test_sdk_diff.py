"""`sbx.diff()` with real containers: the same cases as over the fake backend, and what only a kernel can answer."""

from __future__ import annotations

import io
import os
import signal
import tarfile
import time
from pathlib import Path

import pytest

import dsec
from dsec.images.store import LayerStore
from tests.contract import test_sdk_diff as cases
from tests.kit.home import BASE, Home, standing
from tests.kit.rtclient import Client
from tests.root.test_sdk_files import of_host

globals().update({name: case for name, case in vars(cases).items() if name.startswith("test_")})


# Every path of the sandbox's own tree, with what a diff compares; a NUL ends each field.
SEEN = r"find / -xdev -printf '%p\0%y\0%s\0%m\0%U\0%G\0%T@\0%l\0'"
# Content, where CHANGES has a hand in it; elsewhere sizes and times will do.
HASHES = (
    r"find /etc /srv /opt /media /usr/share/doc* /var/lib/dpkg/info $(ls -d /d) -xdev -type f -exec sha256sum -z {} +"
)
FIELDS = 8


def seen(sbx: dsec.Sandbox) -> dict[bytes, tuple[object, ...]]:
    """What `find` sees: an answer that has nothing of ours in it."""
    listed, hashed = sbx.run(SEEN, check=True), sbx.run(HASHES, check=True)
    assert not listed.truncated
    assert not hashed.truncated
    fields = listed.stdout_bytes.split(b"\0")[:-1]
    rows = [fields[at : at + FIELDS] for at in range(0, len(fields), FIELDS)]
    hashes = {line[66:]: line[:64] for line in hashed.stdout_bytes.split(b"\0") if line}
    found = {}
    for path, kind, size, mode, uid, gid, mtime, target in rows:
        directory = kind == b"d"
        content = None if directory else (size, hashes.get(path), target)
        found[path] = (kind, content, mode, (uid, gid), None if directory else mtime)
    mounts = {line.split(b" ")[4] for line in sbx.run("cat /proc/self/mountinfo").stdout_bytes.splitlines()} - {b"/"}
    return {path: what for path, what in found.items() if path not in mounts}


def expected(before: dict[bytes, tuple[object, ...]], now: dict[bytes, tuple[object, ...]]) -> dict[bytes, object]:
    """What a diff has to tell."""
    found: dict[bytes, object] = {}
    for path in before.keys() | now.keys():
        if path not in now:
            found[path] = "deleted"
        elif path not in before:
            found[path] = "added"
        elif before[path][0] != now[path][0]:
            found[path] = ("type",)
        elif before[path] != now[path]:
            pairs = zip(("content", "mode", "owner", "mtime"), before[path][1:], now[path][1:], strict=True)
            found[path] = tuple(name for name, old, new in pairs if old != new)
    return found


def found(sbx: dsec.Sandbox, path: str = "/") -> dict[bytes, object]:
    """What it tells."""
    changes = list(sbx.diff(path))
    assert all(change.unsure is None for change in changes)
    told = {os.fsencode(one.path): one.what if one.kind == "changed" else one.kind for one in changes}
    assert len(told) == len(changes)
    return told


CHANGES = r"""
cd /etc
echo more >> passwd                       # content
touch -d @1 group                         # time alone
chmod 600 debian_version                  # mode
chown 1:2 shells                          # owner
cp -p issue /tmp/kept; rm issue; cp -p /tmp/kept issue          # the same again
sed -i s/a/a/ profile                     # another file, the same content
ln -sfn elsewhere mtab; rm -f localtime; ln -s /usr/share/zoneinfo/UTC localtime
rm -r apt; mkdir apt; echo new > apt/new  # hides all it had
rm -r skel; ln -s /etc skel               # a link where there was a directory
rm fstab environment; mkdir fstab; echo x > fstab/below 2>/dev/null
rm -r cron.daily; echo x > cron.daily
mv alternatives /srv/moved                # renamed, with all below
mv /usr/share/doc /usr/share/doc2; mkdir /usr/share/doc; echo 1 > /usr/share/doc/one
mkdir -p /d/e/f; ln /etc/passwd /d/hard; mkfifo /d/fifo; ln -s fifo /d/link
printf x > "$(printf '/d/\377\n')"
truncate -s 5M /d/sparse
rm -r /var/lib/dpkg/info; mkdir /var/lib/dpkg/info
mkdir /d/opaque; mv /opt /d/opaque; mkdir /opt
rm -r /media; mkdir -m 755 /media; touch -d @1 /media
echo made > /d/gone; rm /d/gone
"""


def test_it_tells_what_find_sees(sbx: dsec.Sandbox) -> None:
    before = seen(sbx)
    sbx.run(CHANGES)
    wanted = expected(before, seen(sbx))
    assert len(wanted) > 500
    for path, what in {
        b"/etc/group": ("mtime",),
        b"/etc/passwd": ("content", "mtime"),
        b"/etc/shells": ("owner",),
        b"/etc/skel": ("type",),
        b"/etc/apt/new": "added",
        b"/srv/moved/awk": "added",
        b"/etc/alternatives/awk": "deleted",
    }.items():
        assert wanted[path] == what, path
    assert b"/etc/issue" not in wanted
    assert found(sbx) == wanted
    for part in ("/etc", "/usr/share", "/d", "/srv/moved", "/etc/alternatives"):
        below = {at: what for at, what in wanted.items() if (at + b"/").startswith(part.encode() + b"/")}
        assert found(sbx, part) == below


SOME = "rm -r /etc/apt /opt; mkdir /etc/apt /opt; echo x > /etc/apt/new; rm /etc/issue; echo x >> /etc/passwd; mkdir /d"


def check_some(sbx: dsec.Sandbox) -> None:
    """That everything overlayfs marks is told by what it means."""
    assert found(sbx) == {}
    before = {os.fsencode(line) for line in sbx.run("find /etc/apt -mindepth 1").stdout.splitlines()}
    sbx.run(SOME, check=True)
    told = found(sbx)
    times = told.pop(b"/opt", ("mtime",))  # a directory's own time does not count
    assert times == ("mtime",)
    assert len(before) > 5
    assert told == {
        **dict.fromkeys(before, "deleted"),
        b"/etc/apt/new": "added",
        b"/etc/issue": "deleted",
        b"/etc/passwd": ("content", "mtime"),
        b"/d": "added",
    }


@pytest.mark.same_everywhere  # a guest has them by itself
@pytest.mark.parametrize("without", ["overlay.points", "overlay.fd", "overlay.fd,overlay.each"])
def test_with_what_other_kernels_have(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_NATIVE_DISABLE", without)
    with standing() as home, home.client() as client, client.create(disk_mib=64) as sbx:
        check_some(sbx)


def layer(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def test_layers_are_one_tree(home: Home, tmp_path: Path) -> None:
    """What a layer hides of the one below was not there before."""
    packed = tmp_path / "workspace.tar"
    packed.write_bytes(layer({"etc/.wh.issue": b"", "etc/motd": b"of the workspace", "etc/apt/.wh..wh..opq": b""}))
    LayerStore(home.place.state_dir).import_tar(packed, "work@1", role="workspace", whiteouts=True)
    with home.client() as client, client.create(base=BASE, workspace="work@1", disk_mib=64) as sbx:
        assert not sbx.files.exists("/etc/issue")
        assert found(sbx) == {}
        sbx.run("echo x > /etc/issue; rm /etc/motd; rmdir /etc/apt; mkdir -p /etc/apt/sources.list.d", check=True)
        assert found(sbx) == {
            b"/etc/issue": "added",
            b"/etc/motd": "deleted",
            b"/etc/apt/sources.list.d": "added",
        }


def test_it_is_whole_whatever_the_user_may_read(home: Home) -> None:
    with home.client() as client, client.create(disk_mib=64, user="nobody") as sbx:
        sbx.run("install -d -m 700 /secret; echo x > /secret/x; chmod 0 /secret/x /secret", user="root", check=True)
        with pytest.raises(dsec.PermissionDenied):
            sbx.files.read("/secret/x")
        assert found(sbx) == {b"/secret": "added", b"/secret/x": "added"}


def test_a_runtime_that_dies_changes_nothing(sbx: dsec.Sandbox, home: Home) -> None:
    sbx.files.write("/home/x", "1")
    with Client(home.place.run_dir / "runtime.sock") as runtime:
        os.kill(runtime.hello["pid"], signal.SIGKILL)
    assert found(sbx) == {b"/home/x": "added"}


@pytest.mark.same_everywhere
def test_a_full_disk_is_compared(sbx: dsec.Sandbox) -> None:
    sbx.run("head -c 100M /dev/zero > /home/full; rm -f /etc/issue")
    told = found(sbx)
    assert told[b"/home/full"] == "added"
    assert set(told) - {b"/home/full"} <= {b"/etc/issue"}


def test_no_link_leads_out(sbx: dsec.Sandbox, home: Home) -> None:
    own = home.place.run_dir / "runtime.sock"
    sbx.run(["ln", "-s", str(own.parent), "/home/out"], check=True)
    sbx.run(["ln", "-s", "/proc/1/root" + str(own.parent), "/home/around"], check=True)
    sbx.run("rm -r /srv && ln -s /proc/1/root /srv", check=True)
    assert found(sbx) == {b"/home/out": "added", b"/home/around": "added", b"/srv": ("type",)}
    for path in (f"/home/out/{own.name}", f"/home/around/{own.name}", "/srv/etc"):
        with pytest.raises(dsec.FileError) as link:
            list(sbx.diff(path))
        assert link.value.detail["errno"] == "ELOOP"


@pytest.mark.same_everywhere
def test_a_directory_that_is_swapped_leads_nowhere(sbx: dsec.Sandbox) -> None:
    """A program puts a link to /proc, and to the root, in place of a directory all the time."""
    sbx.run("mkdir -p /home/d/deep; touch /home/d/deep/x; ln -s / /home/l1; ln -s /proc /home/l2", check=True)
    swap = (
        "while :; do mv -T /home/d /home/k; mv -T /home/l1 /home/d; mv -T /home/d /home/l1; mv -T /home/k /home/d; done"
    )
    with sbx.spawn(swap):
        for _ in range(150):
            for change in sbx.diff("/home"):
                parts = change.path.split("/")
                assert len(parts) <= 5, change.path
                assert set(parts) <= {"", "home", "d", "k", "l1", "l2", "deep", "x"}, change.path


def rss(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.same_everywhere
def test_many_are_held_nowhere(home: Home) -> None:
    with home.client() as client, client.create(disk_mib=512) as sbx:
        sbx.run("mkdir /home/m; cd /home/m; seq -f %0200.0f 60000 | xargs touch", check=True)
        sum(1 for _ in sbx.diff("/home", limit=5000))
        before = rss(home.agent())
        changes = iter(sbx.diff("/home"))
        told = [next(changes) for _ in range(10)]
        assert [helper for helper in of_host(sbx) if rss(helper) > 16 << 20] == []
        held = rss(home.agent()) - before
        told += changes
        assert len({change.path for change in told}) == len(told) == 60_001
        # 200 bytes of each path alone are 12 MB.
        assert max(held, rss(home.agent()) - before) < 6 << 20


@pytest.mark.same_everywhere
def test_a_client_that_leaves_ends_it(sbx: dsec.Sandbox) -> None:
    sbx.run("mkdir /home/m; cd /home/m; seq -f %0200.0f 20000 | xargs touch", check=True)
    changes = iter(sbx.diff("/home"))
    next(changes)
    assert of_host(sbx)
    changes.close()  # type: ignore[attr-defined]  # a generator
    deadline = time.monotonic() + 30
    while of_host(sbx):
        assert time.monotonic() < deadline, "its helper goes on"
        time.sleep(0.01)
    assert len(list(sbx.diff("/home", limit=100))) == 100


@pytest.mark.same_everywhere
def test_a_sandbox_that_ends_meanwhile_is_said(sbx: dsec.Sandbox) -> None:
    sbx.run("mkdir /home/m; cd /home/m; seq -f %0200.0f 30000 | xargs touch", check=True)
    changes = iter(sbx.diff("/home"))
    next(changes)
    sbx.stop(grace_s=0)
    with pytest.raises(dsec.Unavailable):
        list(changes)
