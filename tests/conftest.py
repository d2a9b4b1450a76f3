"""Lanes, for every test; signals as a terminal's user has them; no node of the caller's."""

import os
import signal

from tests.kit.lanes import (
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)

__all__ = ["pytest_collection_modifyitems", "pytest_configure", "pytest_runtest_makereport", "pytest_terminal_summary"]


# What points the command, the SDK and an agent at a node: tests have nodes of their own. What chooses tests and
# binaries (DSEC_RUNTIME_BIN, DSEC_CACHE, DSEC_REQUIRE ...) stays.
NODE_ENV = ("URL", "API_KEY", "RUN_DIR", "STATE_DIR", "CGROUP", "NODE", "LOG", "FAILPOINTS")


def pytest_configure() -> None:
    """A background job of a shell is started with SIGINT and SIGQUIT ignored, one of nohup with SIGHUP, which every
    program started here would inherit.

    SIGTERM (`timeout`, a cancelled job) is answered like ^C: fixtures then remove the nodes they started.
    """
    for name in NODE_ENV:
        os.environ.pop(f"DSEC_{name}", None)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
