"""The inventory sees each kind of thing that a node could leave behind: here they are left on purpose."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.kit import groups
from tests.kit.groups import CGROUPS
from tests.kit.home import Home
from tests.kit.inventory import Inventory, Scope

# Does in the pinned namespace what `mount` would, which is not there.
PLANT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
pinned, call, point = os.open(sys.argv[1], os.O_RDONLY), sys.argv[2], sys.argv[3].encode()
assert libc.setns(pinned, 0x20000) == 0
if call == "mount":
    os.mkdir(point)
    assert libc.mount(b"none", point, b"tmpfs", 0, None) == 0
else:
    assert libc.umount2(point, 0) == 0
    os.rmdir(point)
"""
LEFT = "/left-on-purpose"
IDLE = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def scope(home: Home) -> Scope:
    place = home.place
    return Scope(place.run_dir, place.state_dir, (place.cgroup,))


def tool(*line: str | Path) -> str:
    return subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@contextmanager
def pinned_mount(scope: Scope) -> Iterator[str]:
    line = [sys.executable, "-I", "-c", PLANT, str(scope.run_dir / "ns/mnt")]
    tool(*line, "mount", LEFT)
    try:
        yield f"+ mount: tmpfs none / on {LEFT} (pinned)"
    finally:
        tool(*line, "umount", LEFT)


@contextmanager
def mount(scope: Scope) -> Iterator[str]:
    point = scope.state_dir / "spool"
    tool("mount", "-t", "tmpfs", "none", point)
    try:
        yield f"+ mount: tmpfs none / on {point}"
    finally:
        tool("umount", point)


@contextmanager
def mount_elsewhere(scope: Scope) -> Iterator[str]:
    """In a namespace of a process that is nobody of ours, over a path of ours."""
    point = scope.state_dir / "spool"
    line = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && echo && cat', str(point)]
    with idle(line):
        yield f"+ mount: tmpfs none / on {point}"


@contextmanager
def network_namespace(scope: Scope) -> Iterator[str]:
    point = scope.run_dir / "ns/net-left"
    point.touch()
    tool("unshare", f"--net={point}", "true")
    try:
        yield f"+ mount: nsfs nsfs net on {point}"
    finally:
        tool("umount", point)
        point.unlink()


@contextmanager
def held_namespace(scope: Scope) -> Iterator[str]:
    """As the pool has them: nothing but a descriptor of one of our processes."""
    with idle(["unshare", "--net", sys.executable, "-c", IDLE]) as other:
        held = os.open(f"/proc/{other.pid}/ns/net", os.O_RDONLY)
        try:
            with idle([sys.executable, "-c", IDLE, str(scope.run_dir)], pass_fds=(held,)):
                other.kill()
                other.wait()
                yield "+ namespace: net"
        finally:
            os.close(held)


@contextmanager
def loop_device(scope: Scope) -> Iterator[str]:
    backing = scope.state_dir / "left.img"
    backing.write_bytes(bytes(1 << 20))
    device = tool("losetup", "--find", "--show", backing)
    try:
        yield f"+ loop device: {backing}"
    finally:
        tool("losetup", "--detach", device)
        backing.unlink()


@contextmanager
def loop_over_nothing(scope: Scope) -> Iterator[str]:
    """Its file has been removed."""
    with contextlib.suppress(FileNotFoundError), loop_device(scope) as change:
        (scope.state_dir / "left.img").unlink()
        yield f"{change} (deleted)"


def cgroup(hierarchy: str) -> Callable[[Scope], AbstractContextManager[str]]:
    @contextmanager
    def plant(scope: Scope) -> Iterator[str]:
        left = CGROUPS / hierarchy / scope.cgroups[0] / "sbx-left" / "payload"
        left.mkdir(parents=True)
        try:
            yield f"+ cgroup: {left}"
        finally:
            left.rmdir()
            left.parent.rmdir()

    return plant


@contextmanager
def process_by_name(scope: Scope) -> Iterator[str]:
    with idle([sys.executable, "-c", IDLE, str(scope.state_dir)]):
        yield f"+ process: {sys.executable} -c {IDLE} {scope.state_dir}"


def process_by_cgroup(hierarchy: str) -> Callable[[Scope], AbstractContextManager[str]]:
    @contextmanager
    def plant(scope: Scope) -> Iterator[str]:
        group = CGROUPS / hierarchy / scope.cgroups[0] / "sbx-left"
        group.mkdir()
        try:
            with idle([sys.executable, "-c", IDLE]) as process:
                (group / "cgroup.procs").write_text(str(process.pid))
                yield f"+ process: {sys.executable} -c {IDLE}"
        finally:
            group.rmdir()

    return plant


@contextmanager
def files(scope: Scope) -> Iterator[str]:
    left = scope.run_dir / "ns/sbx/left"
    left.write_text("x")
    try:
        yield f"+ file: {left}"
    finally:
        left.unlink()


@contextmanager
def planted(scope: Scope, insert: str, delete: str) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(scope.state_dir / "node.db", isolation_level=None)) as database:
        database.execute(insert)
        try:
            yield
        finally:
            database.execute(delete)


@contextmanager
def row(scope: Scope) -> Iterator[str]:
    insert = "INSERT INTO sandboxes (id, state, backend, info) VALUES ('left', 'stopping', '', '')"
    with planted(scope, insert, "DELETE FROM sandboxes WHERE id = 'left'"):
        yield "+ row: sandboxes of node.db"


@contextmanager
def open_step(scope: Scope) -> Iterator[str]:
    insert = "INSERT INTO steps VALUES ('', 'left', '', 'create', 0, 0, '', 0, NULL, NULL, NULL, NULL, '', NULL)"
    with planted(scope, insert, "DELETE FROM steps WHERE key = 'left'"):
        yield "+ row: steps of node.db"


@contextmanager
def listener(scope: Scope) -> Iterator[str]:
    """One whose file has gone."""
    path = scope.run_dir / "left.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        path.unlink()
        yield f"+ unix socket: {path}"


@contextmanager
def idle(line: list[str], pass_fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A process that says when it is there and waits."""
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=pass_fds) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process
        process.stdin.close()


def hierarchies(home: Home) -> list[str]:
    """Those in which the node has a group of its own."""
    return [str(path.relative_to(CGROUPS)) for path in groups.hierarchies() if (path / home.place.cgroup).is_dir()]


PLANTS = (
    pinned_mount, mount, mount_elsewhere, network_namespace, held_namespace, loop_device, loop_over_nothing,
    process_by_name, files, row, open_step, listener,
)  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_what_is_left_is_named(home: Home, scope: Scope, plant: Callable[[Scope], AbstractContextManager[str]]) -> None:
    named(scope, plant)


def test_in_every_hierarchy_groups_and_who_is_in_them_are_named(home: Home, scope: Scope) -> None:
    found = hierarchies(home)
    assert found
    for hierarchy in found:
        named(scope, cgroup(hierarchy))
        named(scope, process_by_cgroup(hierarchy))


def named(scope: Scope, plant: Callable[[Scope], AbstractContextManager[str]]) -> None:
    before = Inventory.take(scope)
    with plant(scope) as change:
        assert change in Inventory.take(scope).changes_since(before)
    assert Inventory.settled(scope, before).changes_since(before) == []


def test_a_living_sandbox_is_seen_in_all_its_kinds(home: Home, scope: Scope) -> None:
    with home.client() as client:
        client.create(disk_mib=64).stop()
        before = Inventory.take(scope)
        with client.create(disk_mib=64) as sbx:
            assert sbx.run("true").ok
            kinds = {change.split(":")[0] for change in Inventory.take(scope).changes_since(before)}
        assert {"+ cgroup", "+ process", "+ namespace", "+ row"} <= kinds
