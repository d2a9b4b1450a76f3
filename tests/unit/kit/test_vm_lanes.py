"""What runs again in the guests is decided for every file of these lanes."""

from __future__ import annotations

import pytest

from tests.kit.lanes import TESTS
from tests.kit.vm import lanes

pytestmark = pytest.mark.unit


def test_every_file_is_either_inside_or_left_out_with_a_reason() -> None:
    root = TESTS.parent
    there = {str(path.relative_to(root)) for lane in lanes.INSIDE for path in (TESTS / lane).rglob("test_*.py")}
    inside = {path for paths in lanes.INSIDE.values() for path in paths}
    assert inside.isdisjoint(lanes.LEFT_OUT)
    assert there == inside | set(lanes.LEFT_OUT)
    assert all(lanes.LEFT_OUT.values())
