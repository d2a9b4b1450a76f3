"""The exit code of `dsec doctor`, and its advice."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from dsec.cli.commands import doctor
from dsec.cli.commands.doctor import Finding, Report
from dsec.linux import proc
from dsec.model.errors import NodeUnreachable
from dsec.model.states import Capabilities, Capability, NodeInfo

OK = Finding("node", "ok", "fine")
NETWORK = {"network_routed": Capability(available=False, reason="no policy")}


def code(monkeypatch: pytest.MonkeyPatch, report: Report) -> int:
    monkeypatch.setattr(doctor, "examine", lambda args: report)
    return doctor.doctor_command(argparse.Namespace(json=False))


def test_it_is_1_when_something_keeps_sandboxes_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Capabilities(backend="container", available=True, features=NETWORK)
    bad = Capabilities(backend="container", available=False, reason="no overlay")
    assert code(monkeypatch, Report((), OK, {"container": good})) == 0
    assert code(monkeypatch, Report((), OK, {"container": bad})) == 1
    assert code(monkeypatch, Report((Finding("cgroups", "problem", "none"),), OK, {})) == 1


def test_what_is_missing_comes_with_advice() -> None:
    shown = doctor.render(Report((), OK, {"c": Capabilities(backend="c", available=True, features=NETWORK)}))
    assert "missing  network_routed" in shown and "-> nothing to mend" in shown


def test_no_node_is_a_problem_only_where_there_should_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSEC_URL", raising=False)
    monkeypatch.setenv("DSEC_RUN_DIR", str(tmp_path))
    error = NodeUnreachable("no answer")
    assert doctor._unreachable(argparse.Namespace(url=None), error).level == "warning"
    assert doctor._unreachable(argparse.Namespace(url="http://x:1"), error).level == "problem"
    (tmp_path / "keeper.pid").write_text("1\n1\nabc\n")  # of a keeper that has ended
    assert doctor._unreachable(argparse.Namespace(url=None), error).level == "warning"
    (tmp_path / "keeper.pid").write_text(f"{os.getpid()}\n{proc.start_time(os.getpid())}\nabc\n")
    assert doctor._unreachable(argparse.Namespace(url=None), error).level == "problem"


def test_the_room_of_a_node_is_shown() -> None:
    capacity = {"memory_mib": {"promised": 512.0, "total": 1832020.0}}
    info = NodeInfo(node="n", version="1", started_at=0, sandboxes=1, capacity=capacity)
    assert doctor._room(info) == "memory_mib 512 of 1,832,020 promised"
