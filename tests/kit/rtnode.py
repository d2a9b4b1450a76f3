"""Nodes of keeper and runtime over one small layer, for the tests of the native runtime."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.kit.lanes import runtime_binary
from tests.kit.rtclient import Client, Node, RuntimeFault, busybox_image, sandbox_plan

BINARY: Final = runtime_binary()
LAYERS: Final = ["sha256:" + "b" * 64]
WINDOW: Final = 1 << 20

needs = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not BINARY, reason="dsec-runtime is not built (scripts/build)"),
    pytest.mark.timeout(300),
]


@functools.cache
def image() -> Path:
    home = Path(tempfile.mkdtemp(prefix="runtime-image-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return busybox_image(home)


def make_node(**kwargs: Any) -> Node:
    assert BINARY is not None
    node = Node(BINARY, **kwargs)
    with node.client() as c:
        for digest in LAYERS:
            c.call("layer.mount", digest=digest, path=str(image()))
    return node


def create(c: Client, name: str, **over: Any) -> dict[str, Any]:
    return c.call("sandbox.create", plan=sandbox_plan(name, LAYERS, **over))


@contextlib.contextmanager
def box_in(node: Node) -> Iterator[tuple[Client, str]]:
    """A sandbox of one test, and a connection."""
    name = f"s{os.urandom(4).hex()}"
    with node.client() as c:
        create(c, name)
        yield c, name
    # On a connection of its own: answers to a stream's last acknowledgements may still come on the other.
    with node.client() as c:
        c.call("sandbox.stop", id=name)


def until_known(c: Client, box: str, run: str) -> None:
    """A request on one connection may overtake the run that another one is starting."""
    deadline = time.monotonic() + 60
    while run not in {r["run"] for r in c.call("run.list", sandbox=box)["runs"]}:
        assert time.monotonic() < deadline, f"{run} was not started"
        time.sleep(0.005)


def until_running(c: Client, box: str, runs: set[str]) -> None:
    """Known is not launched: until then a run has no process and may have no cgroup."""
    deadline = time.monotonic() + 60
    while not runs <= {r["run"] for r in c.call("run.list", sandbox=box)["runs"] if r["state"] == "running"}:
        assert time.monotonic() < deadline, f"{runs} do not run"
        time.sleep(0.005)


def sh(script: str) -> list[str | bytes]:
    return ["sh", "-c", script]


def stream(c: Client, number: int, *, ack: bool = True, got: list[bytearray] | None = None) -> tuple[Any, Any]:
    """Follows a run to its end; the bytes of both streams and the result."""
    out = got if got is not None else [bytearray(), bytearray()]
    while True:
        frame = c.recv()
        if frame["id"] != number:
            continue
        if "err" in frame:
            raise RuntimeFault(frame["err"])
        if "ok" in frame:
            return out, frame["ok"]
        if frame["ev"] == "out":
            data = out[frame["s"] - 1]
            assert frame["o"] == len(data), "bytes are missing or came twice"
            data += frame["d"]
            if ack:
                c.send("run.ack", {"request": number, "bytes": len(frame["d"])})


def frozen_file(node: Node, sandbox: str) -> Path:
    for base in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        if (base / "cgroup.procs").exists():
            payload = base / node.cgroup / sandbox / "payload"
            return (payload if payload.exists() else payload.parent) / "cgroup.freeze"
    raise AssertionError("no cgroup v2")


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def memory_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise AssertionError("no Pss")


def shmem_kib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1])
    raise AssertionError("no Shmem")
