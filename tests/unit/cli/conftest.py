"""The command runs in the test's own process here; what it does to the process is undone."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.ptynode import Place, PtyNode
from tests.kit.scripted import Server


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A node whose sandbox is this machine, and the command that knows it."""
    node = PtyNode()
    server = Server(tmp_path / "s", node)
    yield Place(server, node)
    node.close()
    server.close()
