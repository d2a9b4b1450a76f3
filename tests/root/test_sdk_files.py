"""`sbx.files` with real containers: the same cases as over the fake backend, and what only a kernel can answer."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

import dsec
from tests.contract import test_sdk_files as cases
from tests.kit.home import Home
from tests.kit.rtclient import Client

globals().update({name: case for name, case in vars(cases).items() if name.startswith("test_")})


def test_programs_and_files_see_the_same(sbx: dsec.Sandbox) -> None:
    assert sbx.run("mkdir -p /srv; printf 'by a program' > /srv/x; mkfifo /srv/fifo; ln -s /srv/x /srv/link").ok
    assert sbx.files.read_text("/srv/link") == "by a program"
    assert {entry.name: entry.type for entry in sbx.files.list("/srv")} == {
        "fifo": "fifo",
        "link": "symlink",
        "x": "file",
    }
    with pytest.raises(dsec.FileError) as fifo:
        sbx.files.read("/srv/fifo")
    assert fifo.value.detail["type"] == "fifo"
    with pytest.raises(dsec.FileError):
        sbx.files.read("/dev/zero")
    sbx.files.write("/srv/run.sh", "#!/bin/sh\necho ran\n", mode=0o755)
    assert sbx.run("/srv/run.sh").stdout == "ran\n"


def test_a_user_has_his_own_rights(sbx: dsec.Sandbox) -> None:
    sbx.run("install -d -m 700 /secret; install -d -m 700 -o nobody /his; echo x > /secret/x", check=True)
    with pytest.raises(dsec.PermissionDenied):
        sbx.files.read("/secret/x", user="nobody")
    sbx.files.write("/his/new", "1", user="nobody")
    assert sbx.run("stat -c %U /his/new").stdout == "nobody\n"


def test_what_cannot_be_replaced_is_overwritten_and_said(sbx: dsec.Sandbox) -> None:
    assert not sbx.files.write("/etc/hosts", "127.0.0.1 mine\n").atomic  # it is mounted
    assert sbx.run("cat /etc/hosts").stdout == "127.0.0.1 mine\n"
    sbx.run("install -o nobody /dev/null /srv/his; ln /srv/his /srv/link", check=True)
    assert not sbx.files.write("/srv/his", "1", user="nobody").atomic  # in a directory of root's
    assert sbx.run("cat /srv/link").stdout == "1"
    assert sbx.files.write("/srv/his", "2").atomic
    assert sbx.run("cat /srv/link").stdout == "1"


def test_holes_take_no_disk_where_they_come_down(sbx: dsec.Sandbox, tmp_path: Path) -> None:
    made = "mkdir /srv/t; cd /srv/t; truncate -s 2G hole; truncate -s 1G some; printf end >> some; echo x > after"
    sbx.run(made, check=True)
    report = sbx.files.download("/srv/t", tmp_path / "t")
    hole, some = (tmp_path / "t/hole").stat(), (tmp_path / "t/some").stat()
    assert (hole.st_size, some.st_size) == (2 << 30, (1 << 30) + 3)
    assert hole.st_blocks == 0
    assert some.st_blocks * 512 <= 1 << 20
    with (tmp_path / "t/some").open("rb") as file:
        file.seek(-4, os.SEEK_END)
        assert file.read() == b"\0end"
    assert (tmp_path / "t/after").read_text() == "x\n"
    assert report.bytes <= 1 << 20  # what came, not what the holes look like


def test_no_link_leads_out(sbx: dsec.Sandbox, home: Home) -> None:
    own = home.place.run_dir / "runtime.sock"
    sbx.run(["ln", "-s", str(own), "/out"], check=True)
    sbx.run(["ln", "-s", "/proc/1/root" + str(own), "/around"], check=True)
    for path in ("/out", "/around", "/../../.." + str(own)):
        with pytest.raises((dsec.FileNotFound, dsec.PermissionDenied)):
            sbx.files.stat(path)
    assert os.path.exists(own)


def test_a_runtime_that_dies_is_not_noticed(sbx: dsec.Sandbox, home: Home) -> None:
    sbx.files.write("/x", "before")
    socket = home.place.run_dir / "runtime.sock"
    with Client(socket) as runtime:
        os.kill(runtime.hello["pid"], signal.SIGKILL)
    assert sbx.files.read("/x") == b"before"
    sbx.files.write("/x", "after")
    assert sbx.run("cat /x").stdout == "after"


def test_idle_helpers_that_are_killed_are_replaced(sbx: dsec.Sandbox) -> None:
    sbx.files.write("/x", "1")
    end_helpers(sbx)
    assert sbx.files.read("/x") == b"1"
    end_helpers(sbx)
    sbx.files.write("/x", "2")
    assert sbx.run("cat /x").stdout == "2"


def end_helpers(sbx: dsec.Sandbox) -> None:
    """Not while they are asked: then the call says that it was cut short."""
    found = of_host(sbx)
    assert found
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    while of_host(sbx):
        time.sleep(0.01)


def of_host(sbx: dsec.Sandbox) -> list[int]:
    """The numbers of a sandbox's helpers outside."""
    found = []
    # By name alone: a glob looks at each, and raises when one has just gone.
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"/{sbx.id}/payload/files-" in Path(f"/proc/{pid}/cgroup").read_text():
                found.append(int(pid))
    return found
