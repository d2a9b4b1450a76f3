"""A cgroup is one node's: another node is refused it for as long as anything of the first lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.linux import cgroups, proc
from dsec.model.errors import Conflict, InvalidSpec, Unsupported
from dsec.node.claim import claim_cgroup
from dsec.node.config import NodeConfig


@pytest.fixture
def mount() -> Path:
    found = cgroups.detect().v2
    if found is None:
        pytest.skip("no cgroup v2 is mounted")
    return found


@pytest.fixture
def name(mount: Path) -> Iterator[str]:
    made = f"dsec-claim-{os.getpid()}"
    yield made
    with contextlib.suppress(FileNotFoundError):
        (mount / made).rmdir()


def node(directory: Path, cgroup: str) -> NodeConfig:
    directory.mkdir(exist_ok=True)
    return NodeConfig(run_dir=directory, state_dir=directory, cgroup=cgroup)


def test_a_cgroup_of_a_living_node_is_refused_and_that_of_a_dead_one_taken(
    tmp_path: Path, mount: Path, name: str
) -> None:
    first, second = node(tmp_path / "a", name), node(tmp_path / "b", name)
    claim_cgroup(first, mount)
    claim_cgroup(first, mount)  # its agent starts again
    keeper = first.run_dir / "keeper.pid"
    keeper.write_text(f"{os.getpid()}\n{proc.start_time(os.getpid())}\nabc\n")
    with pytest.raises(Conflict, match=f"that of the node of {first.run_dir}"):
        claim_cgroup(second, mount)
    keeper.unlink()
    with first.pid_file.open("w") as agent:
        fcntl.flock(agent, fcntl.LOCK_EX)
        with pytest.raises(Conflict, match="stop-all"):
            claim_cgroup(second, mount)
    claim_cgroup(second, mount)
    assert cgroups.owner(mount / name) == str(second.run_dir)


def test_what_still_lives_in_it_is_left_alone(tmp_path: Path, mount: Path, name: str) -> None:
    first, second = node(tmp_path / "a", name), node(tmp_path / "b", name)
    claim_cgroup(first, mount)
    with subprocess.Popen(["sleep", "600"]) as survivor:
        try:
            (mount / name / "cgroup.procs").write_text(str(survivor.pid))
            with pytest.raises(Conflict, match="start that one again"):
                claim_cgroup(second, mount)
            claim_cgroup(first, mount)
        finally:
            survivor.kill()
    claim_cgroup(second, mount)


def test_a_name_that_leads_out_is_refused(tmp_path: Path, mount: Path) -> None:
    for bad in ("../x", "a//b", "/a"):
        with pytest.raises(InvalidSpec):
            claim_cgroup(node(tmp_path / "a", bad), mount)


def test_where_no_cgroup_can_be_made_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "dsec").touch()
    with pytest.raises(Unsupported, match="could not be made"):
        claim_cgroup(node(tmp_path / "a", "dsec"), tmp_path)
