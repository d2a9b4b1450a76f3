"""A native runtime of a test's own: directories, control groups and keeper apart from every other on the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from dsec.backends.base import LayerMount, StartPlan
from dsec.backends.container import ContainerBackend, Place, ensure_runtime
from dsec.backends.container.keeper import living_keeper
from dsec.linux import proc
from dsec.model import ids
from dsec.wire.runtime import RuntimeClient
from tests.kit import groups
from tests.kit.lanes import runtime_binary

END_DEADLINE_S: Final = 10.0
MIB: Final = 1 << 20


MARK_BYTES: Final = 256


def marks(run_dir: Path) -> list[str]:
    """Marks of runs that were launched and are not forgotten: a free slot begins with a zero."""
    with contextlib.suppress(FileNotFoundError):
        content = (run_dir / "ns/marks").read_bytes()
        slots = [content[at : at + MARK_BYTES] for at in range(0, len(content), MARK_BYTES)]
        return [slot.partition(b"\n")[0].decode() for slot in slots if slot[0]]
    return []


def missing() -> str | None:
    """Why no runtime can be started here."""
    if os.geteuid() != 0:
        return "needs root"
    if runtime_binary() is None:
        return "dsec-runtime is not built (scripts/build)"
    return None


@contextlib.contextmanager
def own_place() -> Iterator[Place]:
    """A place for a runtime; whatever lives there is ended afterwards, and nothing of it stays."""
    # Short: a socket's path has at most 107 bytes.
    top = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    place = Place(top / "run", top / "state", f"dsec-t-{secrets.token_hex(4)}")
    try:
        yield place
    finally:
        asyncio.run(_shut(place))
        _remove_cgroups(place.cgroup)
        shutil.rmtree(top, ignore_errors=True)


async def _shut(place: Place) -> None:
    if (keeper := living_keeper(place.run_dir)) is None:
        return
    client = RuntimeClient(place.socket, deadline_s=5)
    try:
        for status in await client.sandboxes():
            await client.stop(status.id)
        await client.stop_keeper()
    finally:
        await client.close()
        deadline = time.monotonic() + END_DEADLINE_S
        while proc.start_time(keeper.pid) == keeper.start_time:
            if time.monotonic() > deadline:
                os.kill(keeper.pid, signal.SIGKILL)
            await asyncio.sleep(0.02)


def _remove_cgroups(name: str) -> None:
    for group in groups.below(name, topdown=False):
        with contextlib.suppress(OSError):
            group.rmdir()


class ContainerSubject:
    """The container backend over a runtime of its own, as the conformance suite wants it."""

    has = frozenset({"posix", "isolation", "memory", "pids", "disk", "layers"})
    memory_hog = "dd if=/dev/zero of=/dev/null bs={mib}M count=1"

    def __init__(self, place: Place, layers: tuple[LayerMount, ...]) -> None:
        self.place = place
        self.layers = layers

    async def revive(self) -> None:
        await ensure_runtime(self.place, runtime_binary())

    def backend(self) -> ContainerBackend:
        return ContainerBackend(self.place.run_dir, revive=self.revive)

    def plan(self, **changes: Any) -> StartPlan:
        fields: dict[str, Any] = {
            "id": ids.new_sandbox_id("t"),
            "hostname": "box",
            "layers": self.layers,
            "env": {},
            "cwd": "/",
            "user": "root",
            "cpu": 1.0,
            "cpu_weight": 100,
            "cpus": (),
            "memory_bytes": 256 * MIB,
            "disk_bytes": 64 * MIB,
            "pids": 256,
        }
        return StartPlan(**(fields | changes))

    def inventory(self) -> set[str]:
        """What exists because of sandboxes: everything whose path has a sandbox's id in it, and what runs there."""
        return {*self._cgroups(), *self._files(), *self._loops()}

    def _cgroups(self) -> Iterator[str]:
        for group in groups.below(self.place.cgroup):
            if "sbx-" in str(group):
                yield str(group)
                for pid in groups.processes(group):
                    yield f"process {pid} in {group}"

    def _files(self) -> Iterator[str]:
        """Files; the record of one that has ended is kept for a while on purpose and does not count."""
        for directory, subdirectories, files in os.walk(self.place.state_dir):
            yield from (f"{directory}/{name}" for name in (*subdirectories, *files) if "sbx-" in name)
        yield from marks(self.place.run_dir)

    def _loops(self) -> Iterator[str]:
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            with contextlib.suppress(OSError):
                text = backing.read_text().strip()
                if str(self.place.state_dir) in text and "sbx-" in text:
                    yield f"loop device over {text}"
