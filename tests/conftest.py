"""Lanes, for every test; and signals as a terminal's user has them."""

import signal

from tests.kit.lanes import (
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)

__all__ = ["pytest_collection_modifyitems", "pytest_configure", "pytest_runtest_makereport", "pytest_terminal_summary"]


def pytest_configure() -> None:
    """A background job of a shell is started with SIGINT ignored, which every program started here would inherit.

    SIGTERM (`timeout`, a cancelled job) is answered like ^C: fixtures then remove the nodes they started.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
