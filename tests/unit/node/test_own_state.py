"""Two nodes never share a state directory, nor a cgroup by accident."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.linux import proc
from dsec.model.errors import Conflict
from dsec.node.claim import check_run_dir, note_places, own_state
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


def test_a_run_directory_whose_runtime_lives_is_kept_for_its_state(tmp_path: Path) -> None:
    has = tmp_path / "has"
    has.mkdir()
    (tmp_path / "same").symlink_to(has)
    line = [sys.executable, "-c", "print(flush=True); input()", f"--state-dir={has}", "--cgroup", "kept"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as keeper:
        assert keeper.stdout is not None and keeper.stdout.readline() == b"\n"
        (tmp_path / "keeper.pid").write_text(f"{keeper.pid}\n{proc.start_time(keeper.pid)}\nabc\n")
        with pytest.raises(Conflict, match="is a disk not mounted there") as caught:
            check_run_dir(NodeConfig(run_dir=tmp_path, state_dir=has), None)
        assert caught.value.message.endswith(
            f"removed for good, end them: DSEC_RUN_DIR={tmp_path} dsec down --stop-all"
        )
        (has / "node.lock").touch()
        for name in ("has", "same"):
            check_run_dir(NodeConfig(run_dir=tmp_path, state_dir=tmp_path / name), None)
        with pytest.raises(Conflict) as caught:
            check_run_dir(NodeConfig(run_dir=tmp_path, state_dir=tmp_path / "other"), None)
        assert f"DSEC_STATE_DIR={has} dsec up" in caught.value.message
        assert caught.value.detail == {
            "run_dir": str(tmp_path), "owner": str(has), "state_dir": str(tmp_path / "other"),
        }  # fmt: skip
        note_places(NodeConfig(run_dir=tmp_path, state_dir=has, cgroup="asked"))
        assert (tmp_path / "node.places").read_text() == f"{has}\nkept\n"
    check_run_dir(NodeConfig(run_dir=tmp_path, state_dir=tmp_path / "other"), None)


def test_a_run_directory_whose_runtime_has_died_is_kept_while_something_lives_in_its_cgroup(tmp_path: Path) -> None:
    first, second = (NodeConfig(run_dir=tmp_path, state_dir=tmp_path / name, cgroup=name) for name in ("a", "b\nc"))
    note_places(first)
    check_run_dir(second, tmp_path)  # no cgroup
    (tmp_path / "a").mkdir()
    for events, kept in (("populated 0\n", False), ("populated 1\nfrozen 0\n", True)):
        (tmp_path / "a" / "cgroup.events").write_text(events)
        check_run_dir(first, tmp_path)
        with pytest.raises(Conflict, match="lives in the cgroup a") if kept else contextlib.nullcontext():
            check_run_dir(second, tmp_path)
    note_places(NodeConfig(run_dir=tmp_path, state_dir=second.state_dir, cgroup="a"))
    check_run_dir(second, tmp_path)
