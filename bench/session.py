"""One run of the bench: a directory and a cgroup name of its own, the tools built, the peers, and all of it removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench import cgroups, root
from bench.peers.base import Env, Peer
from bench.peers.docker import Docker, DockerCli
from bench.peers.dsec import Dsec
from bench.peers.raw import Raw
from bench.peers.reference import Reference, ReferenceTmpfs
from bench.peers.tools import Bwrap, Runc

PEERS: tuple[type[Peer], ...] = (Dsec, Reference, ReferenceTmpfs, Docker, DockerCli, Runc, Bwrap, Raw)
SOURCES = Path(__file__).parent / "ref"
PROGRAMS = {"reference": ("reference.c", "sandbox.c", "run.c"), "loop": ("loop.c",)}
CFLAGS = ("-O2", "-Wall", "-Wextra", "-Werror", "-static", "-pthread")


@contextmanager
def environment(base: Path | None = None) -> Iterator[Env]:
    """A fresh one. At the end nothing of it is left: processes, cgroups, mounts, files."""
    work = Path(tempfile.mkdtemp(prefix="dsec-bench-", dir=base))
    work.chmod(0o755)  # the sandboxes' ids must be able to walk through
    name = work.name
    layout = cgroups.detect()
    try:
        (work / "root").mkdir()
        (work / "tools").mkdir()
        build(work / "tools")
        yield Env(work, name, layout, root.build(work / "root"), work / "tools")
    finally:
        cgroups.remove(layout, name)
        unmount_below(work)
        shutil.rmtree(work)


def build(target: Path) -> None:
    """Compile the C programs; without gcc there are none, and their peers say so."""
    if shutil.which("gcc") is None:
        return
    for program, sources in PROGRAMS.items():
        paths = [str(SOURCES / source) for source in sources]
        subprocess.run(["gcc", *CFLAGS, "-o", str(target / program), *paths], check=True)


def unmount_below(path: Path) -> None:
    """What a peer that was killed left mounted."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed([mount for mount in mounts if mount.startswith(f"{path}/")]):
        subprocess.run(["umount", "-l", point], check=True)


@contextmanager
def started(env: Env, wanted: tuple[str, ...]) -> Iterator[tuple[list[Peer], dict[str, str]]]:
    """The peers asked for that can run here, started; and why the others cannot."""
    absent: dict[str, str] = {}
    peers: list[Peer] = []
    with ExitStack() as stack:
        for kind in PEERS:
            if kind.name not in wanted:
                continue
            reason = kind.missing(env)
            if reason is None and os.geteuid() != 0:
                reason = "root is needed"
            if reason is not None:
                absent[kind.name] = reason
                continue
            peer = kind(env)
            stack.callback(peer.close)
            peer.start()
            peers.append(peer)
        yield peers, absent
