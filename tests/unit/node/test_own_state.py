"""Two nodes never share a state directory, nor a cgroup by accident."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec.linux import proc
from dsec.model.errors import Conflict
from dsec.node.claim import own_state
from dsec.node.config import RUN_DIR, NodeConfig, default_cgroup, parse


def test_a_run_directory_of_its_own_has_a_cgroup_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSEC_CGROUP", raising=False)
    assert default_cgroup(RUN_DIR) == "dsec"
    names = {parse(["--run-dir", str(tmp_path / name), "--node", "n"]).cgroup for name in ("a", "b")}
    assert len(names) == 2
    assert "dsec" not in names


def test_a_state_directory_in_use_is_refused(tmp_path: Path) -> None:
    first, second = (NodeConfig(run_dir=tmp_path / name, state_dir=tmp_path) for name in ("a", "b"))
    with own_state(first), pytest.raises(Conflict, match="DSEC_STATE_DIR"), own_state(second):
        pass


def test_a_state_directory_whose_sandboxes_live_is_refused_though_its_agent_is_down(tmp_path: Path) -> None:
    first, second = (NodeConfig(run_dir=tmp_path / name, state_dir=tmp_path) for name in ("a", "b"))
    with own_state(first):
        pass
    first.run_dir.mkdir()
    (first.run_dir / "keeper.pid").write_text(f"{os.getpid()}\n{proc.start_time(os.getpid())}\nabc\n")
    with pytest.raises(Conflict, match="stop-all"), own_state(second):
        pass
    (first.run_dir / "keeper.pid").unlink()
    with own_state(second), pytest.raises(Conflict), own_state(first):
        pass
