"""The lanes plugin, by running pytest on a small tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import lanes

TEST = """
import pytest
from tests.kit import lanes

def test_it():
    pytest.skip("no reason")

def test_lacking():
    lanes.kernel_lacks("thing", "not built")
"""
MARKED = """
import pytest
from tests.kit import lanes

@pytest.mark.same_everywhere
def test_marked():
    pass

def test_often():
    assert lanes.fewer(100) == int(lanes.in_guest() and 10 or 100)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the plugin with one test that skips, in the lane `unit`."""
    (tmp_path / "tests/kit").mkdir(parents=True)
    (tmp_path / "tests/unit").mkdir()
    for name in ("__init__.py", "conftest.py", "kit/__init__.py", "kit/lanes.py"):
        (tmp_path / "tests" / name).write_text((lanes.TESTS / name).read_text())
    (tmp_path / "tests/unit/test_x.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    unit\n    same_everywhere\n    one_guest\n")
    return tmp_path


def run(tree: Path, require: str, guest: str = "", share: str = "0/1") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "tests", "-p", "no:cacheprovider", "-v"],
        cwd=tree,
        env={**os.environ, lanes.REQUIRE_ENV: require, lanes.GUEST_ENV: guest, lanes.SHARE_ENV: share},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_skip_passes_and_is_told(tree: Path) -> None:
    done = run(tree, "")
    assert done.returncode == 0, done.stdout
    assert "unit       2 skipped (no reason)" in done.stdout


def test_a_skip_in_a_required_lane_fails_unless_the_kernel_lacks_it(tree: Path) -> None:
    done = run(tree, "unit")
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 skipped" in done.stdout
    assert "skipped, but DSEC_REQUIRE names the lane unit" in done.stdout


@pytest.mark.parametrize(("guest", "told"), [("", "2 passed in"), ("1", "1 passed, 1 deselected in")])
def test_a_guest_leaves_out_what_is_the_same_everywhere(tree: Path, guest: str, told: str) -> None:
    (tree / "tests/unit/test_x.py").write_text(MARKED)
    done = run(tree, "unit", guest)
    assert done.returncode == 0, done.stdout
    assert told in done.stdout


DEALT = """
import pytest

@pytest.mark.one_guest
@pytest.mark.parametrize("number", range(40))
def test_dealt(number):
    pass

def test_everywhere():
    pass
"""


def test_two_guests_share_what_one_has_to_run(tree: Path) -> None:
    (tree / "tests/unit/test_x.py").write_text(DEALT)
    both = [set(re.findall(r"::(\S+) PASSED", run(tree, "unit", "1", share).stdout)) for share in ("0/2", "1/2")]
    assert both[0] & both[1] == {"test_everywhere"}
    assert both[0] | both[1] == {"test_everywhere", *(f"test_dealt[{number}]" for number in range(40))}
    assert min(map(len, both)) > 10
    for guest in ("", "1"):  # by name in a guest, and elsewhere
        assert "41 passed" in run(tree, "unit", guest).stdout


def test_another_required_lane_does_not_matter(tree: Path) -> None:
    assert run(tree, "vm").returncode == 0
