"""The inventory sees what it is for, and nothing of others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.inventory import Inventory, Scope


@pytest.fixture
def scope(tmp_path: Path) -> Scope:
    for name in ("run", "state"):
        (tmp_path / name).mkdir()
    return Scope(tmp_path / "run", tmp_path / "state")


@pytest.fixture
def process(scope: Scope) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the scope: its command line names the run directory."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(scope.run_dir)], **pipes) as started:  # type: ignore[call-overload] # the pipes
        assert started.stdout.readline() == b"\n"
        yield started
        started.stdin.close()


def test_nothing_changes_when_nothing_happens(scope: Scope) -> None:
    before = Inventory.take(scope)
    assert Inventory.take(scope).changes_since(before) == []


def test_a_file_shows_and_a_log_does_not(scope: Scope) -> None:
    before = Inventory.take(scope)
    (scope.state_dir / "left").touch()
    (scope.state_dir / "node.log").touch()
    assert Inventory.take(scope).changes_since(before) == [f"+ file: {scope.state_dir}/left"]


def test_a_process_shows_with_its_descriptors(scope: Scope, process: subprocess.Popen[bytes]) -> None:
    now = Inventory.take(scope)
    assert sum(now.kinds["process"].values()) == 1
    assert sum(now.kinds["descriptors"].values()) >= 3


def test_a_directory_with_a_longer_name_is_not_ours(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    shorter = Scope(tmp_path / "ru", tmp_path / "none")
    assert not Inventory.take(shorter).kinds["process"]


def test_what_went_shows_too(scope: Scope, process: subprocess.Popen[bytes]) -> None:
    before = Inventory.take(scope)
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    changes = Inventory.settled(scope, before, within_s=0).changes_since(before)
    assert any(change.startswith("- process: ") for change in changes)
