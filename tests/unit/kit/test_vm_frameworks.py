"""The frameworks' disk of the guests: what is on it, what it is named by, and what a report of too few tests says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit import adapters
from tests.kit.vm import cache, emulator, frameworks
from tests.kit.vm.channel import GuestError

pytestmark = pytest.mark.unit


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one framework, and one thing that no suite needs."""
    path = tmp_path / "venv"
    for name in ("framework", "framework-1.dist-info", frameworks.UNUSED[0]):
        (path / frameworks.SITE / name).mkdir(parents=True)
        (path / frameworks.SITE / name / "content").write_text(name)
    (path / "bin").mkdir()
    (path / "bin/python").write_text("#!/bin/sh\n")
    (path / "bin/python").chmod(0o755)
    monkeypatch.setenv("DSEC_ADAPTERS_VENV", str(path))
    monkeypatch.setenv("DSEC_CACHE", str(tmp_path / "cache"))
    return path


def listed(image: Path, path: str) -> str:
    debugfs = emulator.find("debugfs")
    assert debugfs is not None
    return subprocess.run([debugfs, "-R", path, image], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(emulator.find("debugfs") is None, reason="e2fsprogs is not installed")
def test_disk_has_the_frameworks_and_the_guests_interpreter(venv: Path) -> None:
    image = frameworks.disk()
    assert image.stat().st_mode & 0o777 == 0o644, "QEMU runs as nobody"
    assert f"/usr/bin/python{frameworks.PYTHON}" in listed(image, "stat /bin/python")
    assert listed(image, f"cat /{frameworks.SITE}/framework/content") == "framework"
    assert frameworks.UNUSED[0] not in listed(image, f"ls /{frameworks.SITE}")
    assert list(image.parent.iterdir()) == [image]


def test_disk_is_kept_by_what_was_installed(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(work: Path, site: Path) -> None:
        (work / "frameworks.ext4").write_text(" ".join(sorted(path.name for path in site.glob("*.dist-info"))))

    monkeypatch.setattr(frameworks, "_build", build)
    first = frameworks.disk()
    assert frameworks.disk() == first
    (venv / frameworks.SITE / "framework-1.dist-info").rename(venv / frameworks.SITE / "framework-2.dist-info")
    second = frameworks.disk()
    assert (first.read_text(), second.read_text()) == ("framework-1.dist-info", "framework-2.dist-info")
    assert len(list(cache.guests_dir().glob("frameworks-*"))) == 2


def test_what_is_not_installed_or_for_another_python_is_told(venv: Path) -> None:
    assert frameworks.missing() is None
    shutil.rmtree(venv / "lib")
    assert frameworks.PYTHON in (frameworks.missing() or "")
    shutil.rmtree(venv)
    assert "not installed" in (frameworks.missing() or "")
    with pytest.raises(GuestError, match="not installed"):
        frameworks.disk()


def report(*cases: tuple[str, str]) -> bytes:
    inner = "".join(f'<testcase classname="tests.adapters.{name}" name="t">{body}</testcase>' for name, body in cases)
    return f"<testsuites><testsuite>{inner}</testsuite></testsuites>".encode()


def test_a_suite_that_was_not_collected_whole_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(adapters.AT_LEAST, "one", 2)
    files = ["tests/adapters/one_suite.py", "tests/adapters/two_suite.py"]
    whole = report(("one_suite", ""), ("one_suite.TestClass", ""), ("two_suite", ""))
    assert frameworks.too_few(whole, files) == []
    parts = report(("one_suite", ""), ("one_suite", "<skipped/>"), ("two_suite", "<failure/>"))
    assert frameworks.too_few(parts, files) == ["one: 1 passed, of at least 2", "two: 0 passed, of at least 1"]
