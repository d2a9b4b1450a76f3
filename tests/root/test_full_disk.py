"""The disk of a node is full: it comes up, and can be emptied; and says why when it cannot come up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from dsec.backends.base import LayerMount
from dsec.backends.container import Place
from dsec.model.errors import DsecError, NodeDiskFull
from dsec.node.reserve import RESERVE_BYTES, Reserve
from dsec.node.store import Store
from tests.kit import rootfs
from tests.kit.disk import MIB, Disk, small_disk
from tests.kit.home import Home, standing
from tests.kit.realnode import BASE, RealNode, running
from tests.kit.runtime import own_place

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def busybox(tmp_path_factory: pytest.TempPathFactory) -> LayerMount:
    return rootfs.busybox_layer(Path(tmp_path_factory.mktemp("rootfs")))


@pytest.fixture
def disk() -> Iterator[Disk]:
    with small_disk(640) as made:
        yield made


def test_the_store_has_room_while_the_disk_is_full(disk: Disk) -> None:
    put = "INSERT OR REPLACE INTO meta VALUES (?, ?)"

    async def scenario() -> None:
        store = Store(disk.path)
        reserve = Reserve(disk.path)
        assert reserve.held_bytes == RESERVE_BYTES
        disk.fill()
        for number in range(40):
            await store.commit((put, (f"k{number}", "x" * 100_000)))
        assert 0 < reserve.held_bytes < RESERVE_BYTES
        store.close()
        disk.fill()
        again = Store(disk.path)
        assert len(again.read("SELECT key FROM meta WHERE key LIKE 'k%'")) == 40
        disk.fill()
        with pytest.raises(NodeDiskFull):
            for number in range(400):
                await again.commit((put, (f"m{number}", "x" * 100_000)))
                disk.fill()
        assert reserve.held_bytes == 0
        again.close()
        disk.empty()
        Store(disk.path).close()
        assert reserve.held_bytes == RESERVE_BYTES

    asyncio.run(scenario())


@pytest.fixture
def place() -> Iterator[tuple[Place, Disk]]:
    """A node's place, its state on a disk that has room for what a node keeps free."""
    with small_disk(6 << 10) as big, own_place() as made:
        state_dir = big.path / "state"
        yield Place(made.run_dir, state_dir, made.cgroup), big
        big.empty()


def without_room(state_dir: Path, disk: Disk) -> None:
    """What SQLite shares between its connections is made anew, and needs room for it."""
    (state_dir / "node.db-shm").unlink()
    disk.fill()


def test_a_node_whose_disk_is_full_comes_up_and_can_be_emptied(place: tuple[Place, Disk], busybox: LayerMount) -> None:
    where, disk = place

    async def scenario(node: RealNode) -> None:
        ids = [(await node.call("POST", "/v1/sandboxes", {"base": BASE}))["id"] for _ in range(3)]
        disk.fill()
        await node.end(signal.SIGKILL)
        without_room(node.place.state_dir, disk)
        await node.start()
        # They may have ended by now: their file system finds no room either.
        listed = await node.call("GET", "/v1/sandboxes?state=any")
        assert {info["id"] for info in listed["items"]} == set(ids)
        with pytest.raises(DsecError) as caught:
            await node.call("POST", "/v1/sandboxes", {"base": BASE})
        assert caught.value.code == "node_disk_full"
        for id_ in ids:
            assert (await node.call("DELETE", f"/v1/sandboxes/{id_}"))["state"] in ("stopped", "lost")
        assert (await node.call("GET", "/v1/sandboxes"))["items"] == []
        disk.empty()
        await node.call("POST", "/v1/sandboxes", {"base": BASE, "wait_s": 30})

    async def main() -> None:
        async with running(where, busybox) as node:
            await scenario(node)

    asyncio.run(main())


OUT_BYTES = 3_000_000


def test_what_ran_while_the_disk_was_full_is_told_and_is_no_less_later() -> None:
    """A run and a session's command, whose results find no room: told once and for all, run once."""
    with small_disk(6 << 10) as disk, standing(disk.path / "state") as home, contextlib.ExitStack() as last:
        last.callback(disk.empty)  # a node on a full disk could not be ended
        client = last.enter_context(home.client())
        sbx = last.enter_context(client.create(disk_mib=64))
        sh = last.enter_context(sbx.session())
        sh.run("true")

        def run() -> dsec.RunResult:
            return sbx.run(f"echo x >> /dev/shm/run; head -c {OUT_BYTES} /dev/zero; exit 3", key="r")

        def command() -> dsec.RunResult:
            return sh.run(f"echo x >> /dev/shm/command; head -c {OUT_BYTES} /dev/zero; (exit 4)", key="c")

        disk.fill(leave_bytes=2 * MIB)
        told = run(), command()
        assert [(done.exit_code, done.out.total) for done in told] == [(3, OUT_BYTES), (4, OUT_BYTES)]
        assert (run(), command()) == told
        killed(home)
        home.dsec("up")
        assert [(done.exit_code, done.out.total) for done in (run(), command())] == [(3, OUT_BYTES), (4, OUT_BYTES)]
        disk.empty()
        later = run(), command()
        assert [(done.exit_code, done.out.total) for done in later] == [(3, OUT_BYTES), (4, OUT_BYTES)]
        counted = sbx.run("wc -l < /dev/shm/run; wc -l < /dev/shm/command").stdout
        assert counted == "1\n1\n"
        assert sh.run("echo on").stdout == "on\n"


def killed(home: Home) -> None:
    """The agent is dead, and holds no lock."""
    fd = os.pidfd_open(home.agent())
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        select.select([fd], [], [], 10)
    finally:
        os.close(fd)


def test_up_says_why_it_cannot_when_there_is_no_room_for_its_log(disk: Disk) -> None:
    with own_place() as made:
        home = Home(Place(made.run_dir, disk.path / "state", made.cgroup))
        up = ("up", "--", "--backend", "fake")
        home.dsec(*up)
        killed(home)
        without_room(home.place.state_dir, disk)
        home.dsec(*up)
        assert "serves" in (home.place.state_dir / "agent.log").read_text()
        killed(home)
        Reserve(home.place.state_dir).path.unlink()
        without_room(home.place.state_dir, disk)
        done = home.dsec_says(*up, code=1)
        assert "free space on its disk" in done
        disk.empty()
        home.dsec(*up)
        home.dsec("down")
        shutil.rmtree(home.place.state_dir)
