"""Nodes of keeper and runtime: one that the tests of a file share, or one of a test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.rtclient import Client, Node
from tests.kit.rtnode import box_in, make_node


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
    with box_in(shared) as made:
        yield made
