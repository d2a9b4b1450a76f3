"""Finding and starting the runtime, with a shell script in its place."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dsec.backends.container import keeper
from dsec.backends.container.keeper import Place, ensure_runtime, find_binary, living_keeper
from dsec.linux import proc
from dsec.model.errors import LaunchFailed, Unsupported

pytestmark = pytest.mark.unit


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "run").mkdir()
    return Place(tmp_path / "run", tmp_path / "state", "dsec-none")


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "dsec-runtime"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def test_a_keeper_is_known_by_more_than_its_number(place: Place) -> None:
    assert living_keeper(place.run_dir) is None
    start = proc.start_time(os.getpid())
    file = place.run_dir / "keeper.pid"
    file.write_text(f"{os.getpid()}\n{start}\nabc\n")
    assert living_keeper(place.run_dir) == keeper.Keeper(os.getpid(), start or 0, "abc")
    file.write_text(f"{os.getpid()}\n{(start or 0) + 1}\nabc\n")  # the number belongs to another one now
    assert living_keeper(place.run_dir) is None
    file.write_text("half")
    assert living_keeper(place.run_dir) is None


def test_a_living_keeper_is_left_alone(place: Place, tmp_path: Path) -> None:
    (place.run_dir / "keeper.pid").write_text(f"{os.getpid()}\n{proc.start_time(os.getpid())}\nabc\n")
    binary = script(tmp_path, f"touch {tmp_path}/started")
    assert asyncio.run(ensure_runtime(place, binary)).instance == "abc"
    assert not (tmp_path / "started").exists()


def test_one_that_starts_is_found(place: Place, tmp_path: Path) -> None:
    start = proc.start_time(os.getpid())
    file = place.run_dir / "keeper.pid"
    binary = script(tmp_path, f'echo "$@" > {tmp_path}/args; printf "{os.getpid()}\\n{start}\\nnew\\n" > {file}\n')
    assert asyncio.run(ensure_runtime(place, binary)).instance == "new"
    wanted = f"keeper --run-dir {place.run_dir} --state-dir {place.state_dir} --cgroup dsec-none\n"
    assert (tmp_path / "args").read_text() == wanted


def test_one_that_does_not_start_says_why(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_POLL_S", 0.0)
    with pytest.raises(LaunchFailed, match="no cgroups here") as caught:
        asyncio.run(ensure_runtime(place, script(tmp_path, "echo no cgroups here >&2; exit 3")))
    assert caught.value.detail["exit_code"] == 3
    with pytest.raises(LaunchFailed, match="cannot be executed"):
        asyncio.run(ensure_runtime(place, tmp_path / "nothing"))


def test_one_that_hangs_is_given_up(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "START_DEADLINE_S", 0.2)
    with pytest.raises(LaunchFailed, match="did not get ready"):
        asyncio.run(ensure_runtime(place, script(tmp_path, "exec sleep 100")))


def test_the_binary_is_the_one_that_is_named_or_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = script(tmp_path, "")
    monkeypatch.setenv("DSEC_RUNTIME_BIN", str(binary))
    assert find_binary() == binary
    monkeypatch.delenv("DSEC_RUNTIME_BIN")
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert find_binary() == binary
    binary.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CARGO_TARGET_DIR", str(tmp_path / "target"))
    with pytest.raises(Unsupported, match="DSEC_RUNTIME_BIN"):
        find_binary()
    built = tmp_path / f"target/{os.uname().machine}-unknown-linux-gnu/release"
    built.mkdir(parents=True)
    made = script(built, "")
    assert find_binary() == made
