"""Lanes, for every test."""

from tests.kit.lanes import (
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_makereport", "pytest_terminal_summary"]
