"""Sandboxes whose writable part is lost with the disk below it end and say so: no program is said to have failed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.backends.base import LayerMount
from tests.kit import rootfs
from tests.kit.disk import MIB, Disk, small_disk
from tests.kit.lanes import kernel_lacks
from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan, sandbox_plan
from tests.kit.rtnode import BINARY, needs

pytestmark = needs

DIGEST = "sha256:" + "b" * 64
SHARED = ("btrfs",)
# More than the disk leaves, less than each sandbox may have.
LEFT = 30 * MIB
MORE = "dd if=/dev/urandom of=/more bs=1M count=60"


@pytest.fixture(scope="module")
def busybox(tmp_path_factory: pytest.TempPathFactory) -> LayerMount:
    return rootfs.busybox_layer(Path(tmp_path_factory.mktemp("rootfs")))


@pytest.fixture
def disk() -> Iterator[Disk]:
    with small_disk(640) as made:
        yield made


@pytest.fixture
def node(disk: Disk, busybox: LayerMount) -> Iterator[Node]:
    assert BINARY is not None
    made = Node(BINARY, state_dir=disk.path / "state")
    try:
        with made.client() as c:
            c.call("layer.mount", digest=DIGEST, path=str(busybox.path))
        yield made
    finally:
        disk.empty()
        made.stop()


def create(c: Client, name: str, kind: str) -> None:
    upper = {"kind": kind, "bytes": 200 * MIB, "inodes": 0}
    c.call("sandbox.create", plan=sandbox_plan(name, [DIGEST], upper=upper))


def has(c: Client, kind: str) -> None:
    if kind not in c.call("probe")["upper"]:
        if kind == "btrfs":
            kernel_lacks("upper.btrfs", "btrfs with simple quotas came with 6.7")
        pytest.skip(f"no {kind} for writable parts here")


@pytest.mark.parametrize("kind", ["btrfs", "ext4"])
def test_what_lost_something_ends_and_says_so(node: Node, disk: Disk, kind: str) -> None:
    with node.client() as c, node.client() as flying:
        has(c, kind)
        for name in ("a", "b"):
            create(c, name, kind)
        for name in ("a", "b"):  # what has not reached the disk yet when that is full is lost
            c.call("run.start", **run_plan(name, "sync", ["sync"]))
        idle = flying.send("run.start", run_plan("b", "idle", ["sleep", "1000"]))
        while flying.recv().get("ev") != "started":
            pass
        disk.fill(LEFT)
        # The program itself may well have been told that all is fine: what it wrote was in memory only.
        with pytest.raises(RuntimeFault) as caught:
            for number in range(100):
                c.call("run.start", **run_plan("a", f"r{number}", ["sh", "-c", MORE]))
        assert caught.value.code == "gone"
        assert c.call("sandbox.wait", id="a")["exit"]["reason"] == "disk_lost"
        if kind in SHARED:
            assert c.call("sandbox.wait", id="b")["exit"]["reason"] == "disk_lost"
            with pytest.raises(RuntimeFault, match="gone"):
                flying.wait(idle, [])
        else:
            assert c.call("sandbox.get", id="b")["state"] == "running"
        disk.empty()
        create(c, "c", kind)
        plan = run_plan("c", "r", ["sh", "-c", "echo kept > /f && cat /f"])
        assert c.call("run.start", **plan)["streams"][0]["head"] == b"kept\n"


def test_a_disk_that_is_nearly_full_ends_nobody(node: Node, disk: Disk) -> None:
    with node.client() as c:
        has(c, "ext4")
        boxes = [("a", "ext4"), ("b", "tmpfs")]
        if "tmpfs" not in c.call("probe")["upper"]:  # cannot be idmapped before 6.3
            boxes.pop()
        for name, kind in boxes:
            create(c, name, kind)
        c.call("run.start", **run_plan("a", "before", ["sh", "-c", "echo kept > /f; sync"]))
        disk.fill(LEFT)
        for number in range(4):
            for name, _ in boxes:
                r = c.call("run.start", **run_plan(name, f"r{number}", ["sh", "-c", "echo x > /x; sleep 0.5; exit 3"]))
                assert (r["exit_code"], r["limits_hit"]) == (3, [])
        assert c.call("sandbox.get", id="a")["state"] == "running"


def test_a_btrfs_that_became_read_only_ends_what_lives_on_it(node: Node) -> None:
    """As it does for good when the disk below it is full. The next sandboxes get a new one."""
    image = str(node.state_dir / "upper.btrfs")
    with node.client() as c:
        has(c, "btrfs")
        for name in ("a", "b"):
            create(c, name, "btrfs")
        files = Path("/sys/block").glob("loop*/loop/backing_file")
        (loop,) = [file.parents[1].name for file in files if file.read_text().strip() == image]
        at = node.dir / "at"
        at.mkdir()
        try:
            subprocess.run(["mount", f"/dev/{loop}", at], check=True)
            subprocess.run(["mount", "-o", "remount,ro", at], check=True)
        finally:
            subprocess.run(["umount", at], check=False)
        # One that was refused says what the program made of it, were it not for us.
        with pytest.raises(RuntimeFault, match="gone"):
            c.call("run.start", **run_plan("a", "r", ["touch", "/f"]))
        create(c, "c", "btrfs")
        plan = run_plan("c", "r", ["sh", "-c", "echo kept > /f && cat /f"])
        assert c.call("run.start", **plan)["streams"][0]["head"] == b"kept\n"
        for name in ("a", "b"):
            assert c.call("sandbox.wait", id=name)["exit"]["reason"] == "disk_lost"
