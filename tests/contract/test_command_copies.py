"""`dsec cp`: which path a copy gets, in both directions, and what is left as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

import dsec
from dsec.cli.main import main
from tests.kit.agent import Agent

pytestmark = pytest.mark.contract
Said = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSEC_URL", agent.url)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/in").write_text("deep")
    (tmp_path / "one").write_text("1")
    (tmp_path / "two").write_text("2")
    return tmp_path


@pytest.mark.parametrize(
    ("source", "target", "path"),
    [
        ("tree", "/new", "/new/in"),
        ("tree", "/new/", "/new/in"),
        ("tree", "/tmp", "/tmp/tree/in"),
        ("tree", "/tmp/", "/tmp/tree/in"),
        ("tree/", "/", "/tree/in"),
        ("one", "/new", "/new"),
        ("one", "/new/", "/new/one"),
        ("one", "/tmp", "/tmp/one"),
        ("one", "/", "/one"),
        ("one", "", "one"),
    ],
)
def test_the_path_of_a_copy_inside(sbx: dsec.Sandbox, here: Path, source: str, target: str, path: str) -> None:
    assert main(["cp", source, f"{sbx.id}:{target}"]) == 0
    assert sbx.files.read_text(path) == ("deep" if "tree" in source else "1")


@pytest.mark.parametrize(
    ("source", "target", "path"),
    [
        ("/srv", "new", "new/in"),
        ("/srv", "new/", "new/in"),
        ("/srv", "tree", "tree/srv/in"),
        ("/srv/in", "new/", "new/in"),
        ("/srv/in", "new", "new"),
        ("/srv/in", ".", "in"),
    ],
)
def test_the_path_of_a_copy_here(sbx: dsec.Sandbox, here: Path, source: str, target: str, path: str) -> None:
    sbx.files.write("/srv/in", "out")
    assert main(["cp", f"{sbx.id}:{source}", target]) == 0
    assert (here / path).read_text() == "out"


def test_several_go_into_a_directory_that_is_there(sbx: dsec.Sandbox, here: Path, capsys: Said) -> None:
    assert main(["cp", "one", "tree", "-q", "two", f"{sbx.id}:/tmp"]) == 0
    assert [sbx.files.read_text(f"/tmp/{path}") for path in ("one", "tree/in", "two")] == ["1", "deep", "2"]
    assert main(["cp", f"{sbx.id}:/tmp/tree/in", f"{sbx.id}:/none", f"{sbx.id}:/tmp/two", "."]) == 1
    assert "/none" in capsys.readouterr().err
    assert ((here / "in").read_text(), (here / "two").read_text()) == ("deep", "2")
    assert main(["cp", "one", "two", f"{sbx.id}:/new"]) == 1
    assert f"{sbx.id}:/new is no directory that is there" in capsys.readouterr().err
    for words in (["one", "two"], ["one", f"{sbx.id}:/a", f"{sbx.id}:/b"], [f"{sbx.id}:/a", f"{sbx.id}:/b"]):
        assert main(["cp", *words]) == 1
        assert "must be SANDBOX:PATH" in capsys.readouterr().err


def test_what_is_there_is_left_when_that_is_asked_for(sbx: dsec.Sandbox, here: Path, capsys: Said) -> None:
    sbx.files.write("/tmp/one", "old")
    assert main(["cp", "-n", "one", f"{sbx.id}:/tmp"]) == 1
    assert sbx.files.read_text("/tmp/one") == "old"
    sbx.files.mkdir("/tmp/tree")
    assert main(["cp", "tree", f"{sbx.id}:/tmp", "--no-clobber"]) == 1
    assert sbx.files.list("/tmp/tree") == []
    assert main(["cp", "-n", f"{sbx.id}:/tmp/one", "."]) == 1
    assert (here / "one").read_text() == "1" and "--no-clobber leaves it" in capsys.readouterr().err
    assert main(["cp", "-n", "two", f"{sbx.id}:/tmp"]) == 0
    assert sbx.files.read_text("/tmp/two") == "2"
