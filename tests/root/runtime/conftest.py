"""Nodes of keeper and runtime: one that the tests of a file share, or one of a test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.kit.rtclient import Client, Node
from tests.kit.rtnode import create, make_node


@pytest.fixture(scope="module")
def shared() -> Iterator[Node]:
    node = make_node()
    yield node
    node.stop()


@pytest.fixture
def node() -> Iterator[Node]:
    node = make_node()
    yield node
    node.stop()


@pytest.fixture
def box(shared: Node) -> Iterator[tuple[Client, str]]:
    name = f"s{os.urandom(4).hex()}"
    with shared.client() as c:
        create(c, name)
        yield c, name
    # On a connection of its own: answers to a stream's last acknowledgements may still come on the other.
    with shared.client() as c:
        c.call("sandbox.stop", id=name)
