"""`dsec policy`: what it sends, and what it shows."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import pytest

from dsec.cli.commands import policy
from dsec.model.errors import InvalidSpec
from dsec.model.network import NetworkReport, NetworkRow

pytestmark = pytest.mark.unit


class Sandbox:
    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def get(self, ref: str) -> Sandbox:
        return self

    def set_network(self, network: Any) -> None:
        self.sent.append(("set", network))

    def patch_network(self, network: Any) -> None:
        self.sent.append(("patch", network))

    def explain_network(self) -> NetworkReport:
        return REPORT


REPORT = NetworkReport(
    network={"pypi": True},
    phase="agent",
    steered=True,
    connections=2,
    sent_bytes=3,
    rules=(
        NetworkRow(id="a", source="own", text="allow mirror pypi", mechanisms=("BPF", "BPF"), hits=5),
        NetworkRow(id="b", source="own", text="allow domain \x1b.org", shadowed_by="floor/deny/domain:org"),
        NetworkRow(id="c", source="default", text="deny everything else", mechanisms=("netns",), hits=7),
    ),
)


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    made = Sandbox()
    monkeypatch.setattr(policy, "client", lambda args: made)
    return made


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    policy.policy_options(parser)
    return policy.policy_command(parser.parse_args(words))


def test_names_and_files_are_sent(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "policy.json"
    file.write_text('{"version": 1, "phase": "agent"}')
    assert (
        run("set", "w", "pypi=on", "npm=off") == run("set", "w", "none") == run("patch", "w", "--file", str(file)) == 0
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"npm": true}')))
    run("patch", "w", "--file", "-")
    assert sandbox.sent == [
        ("set", {"pypi": True, "npm": False}),
        ("set", {}),
        ("patch", {"version": 1, "phase": "agent"}),
        ("patch", {"npm": True}),
    ]


@pytest.mark.parametrize(
    "words", [["set", "w"], ["explain", "w", "pypi=on"], ["patch", "w", "pypi"], ["set", "w", "a=on", "--file", "x"]]
)
def test_what_makes_no_sense_is_refused(sandbox: Sandbox, words: list[str]) -> None:
    with pytest.raises(InvalidSpec):
        run(*words)
    assert sandbox.sent == []


def test_what_is_no_json_is_named(sandbox: Sandbox, tmp_path: Path) -> None:
    for text in ("[]", "{", "\xff"):
        (tmp_path / "p").write_text(text, "latin-1")
        with pytest.raises(InvalidSpec, match="no JSON object"):
            run("set", "w", "--file", str(tmp_path / "p"))


def test_a_report_is_for_people(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "w") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["own", "allow", "mirror", "pypi", "5", "BPF"]
    assert "\x1b" not in lines[2] and lines[2].endswith("nothing is left of it: floor/deny/domain:org")
    assert lines[3].split()[-2:] == ["7", "netns"]
    assert lines[4:] == ["2 connections; of ended ones 3 bytes sent, 0 received", "phase agent"]
    assert policy.text(NetworkReport(network={})).endswith("nothing was ever allowed: loopback only")
