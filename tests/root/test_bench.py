"""The bench against the kernel: what it counts is true, what it compares is real, and nothing of it stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import cgroups
from bench.peers.base import Env, Failed
from bench.peers.docker import Docker
from bench.peers.raw import Raw
from bench.peers.reference import Reference, ReferenceTmpfs
from bench.peers.tools import Bwrap, Runc
from bench.session import environment
from tests.kit import groups

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="root is needed to make cgroups and namespaces"),
]

BURN_S = 0.3
BURN = f"import time\nwhile time.process_time() < {BURN_S}: pass"
NAMESPACES = ("user", "mnt", "pid", "net", "uts", "ipc", "cgroup")


@pytest.fixture
def env() -> Iterator[Env]:
    with environment() as made:
        yield made
    assert not made.work.exists()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{made.name}"))
    assert f"{made.work}/" not in Path("/proc/self/mountinfo").read_text()


def test_a_group_counts_a_grandchild_nobody_waited_for(env: Env) -> None:
    group = cgroups.Group(env.layout, f"{env.name}/count")
    # The middle process ends at once: the one that burns falls to another parent, whose rusage is not ours.
    orphan = f'{sys.executable} -c "{BURN}" & exit 0'
    subprocess.run([*group.prefix(), "/bin/sh", "-c", orphan], check=True)
    deadline = time.monotonic() + 30
    while group.cpu_s() < BURN_S and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group.cpu_s() >= BURN_S


def test_a_group_does_not_count_others(env: Env) -> None:
    group = cgroups.Group(env.layout, f"{env.name}/count")
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert group.cpu_s() < BURN_S / 2


@pytest.mark.parametrize("kind", [Reference, ReferenceTmpfs])
def test_the_reference_makes_real_sandboxes_and_takes_them_back(env: Env, kind: type[Reference]) -> None:
    if (reason := kind.missing(env)) is not None:
        pytest.skip(reason)
    peer = kind(env)
    peer.start()
    try:
        assert peer.perform("create", 3, 2)["count"] == 3
        inits = _processes(peer.server.v2 / "sandboxes")
        assert len(inits) == 3
        for pid in inits:
            assert all(_namespace(pid, name) != _namespace("self", name) for name in NAMESPACES)
            root = Path(f"/proc/{pid}/root")
            assert (root / "usr/bin/true").exists()
            assert (root / "repo/README").exists()
            assert (root / "opt/kit/README").exists()
            assert not (root / "uppers").exists()
            for hierarchy in peer.server.v1:
                held = {line for path in hierarchy.glob("s*/cgroup.procs") for line in path.read_text().split()}
                assert pid in held
        assert peer.measure("run", 2, 0.1, 2).count > 0
        assert peer.measure("cycle", 1, 0.1, 1).server_cpu_s > 0
        assert peer.perform("stop", 2)["count"] == 3
        assert _processes(peer.server.v2 / "sandboxes") == []
        assert not [path for path in (peer.server.v2 / "sandboxes").iterdir() if path.is_dir()]
        assert not list((peer.work / "uppers").iterdir())
    finally:
        peer.close()


@pytest.mark.parametrize("kind", [Runc, Bwrap])
def test_launchers_run_and_a_failure_is_no_figure(env: Env, kind: type[Runc] | type[Bwrap]) -> None:
    if (reason := kind.missing(env)) is not None:
        pytest.skip(reason)
    peer = kind(env)
    peer.start()
    try:
        done = peer.measure("cycle", 2, 0.1, 2)
        assert done.count == len(done.latencies_us) > 0
        assert done.server_cpu_s > 0
        with pytest.raises(Failed, match="failed with status"):
            peer.loop(peer.server, 0.1, 1, ["false"])
    finally:
        peer.close()


def test_the_raw_limit_is_measured_with_the_programs_of_the_others(env: Env) -> None:
    peer = Raw(env)
    peer.start()
    try:
        assert peer.measure("stream", 1, 256).server_cpu_s > 0
        echoed = peer.measure("echo", 1, 20)
        assert echoed.count == len(echoed.latencies_us) == 20
        (env.root.tree / "usr/bin/head").unlink()
        with pytest.raises(Failed, match="ended with"):
            peer.perform("stream", 1)
    finally:
        peer.close()


def test_docker_is_our_own_daemon_and_goes_away(env: Env) -> None:
    if (reason := Docker.missing(env)) is not None:
        pytest.skip(reason)
    peer = Docker(env)
    peer.start()
    try:
        assert peer.perform("create", 2, 2)["count"] == 2
        assert len(peer.docker("ps", "-q").split()) == 2
        assert peer.measure("run", 1, 0.1, 1).count > 0
        assert peer.perform("stop", 1)["count"] == 2
    finally:
        peer.close()
    assert all(process.poll() is not None for process in peer.processes)


def _processes(top: Path) -> list[str]:
    return [str(pid) for directory, _, _ in os.walk(top) for pid in groups.processes(Path(directory))]


def _namespace(pid: str, name: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{name}").readlink())
