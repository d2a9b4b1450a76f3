"""A node agent over the fake backend, for the contract tests of the SDK."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dsec
from tests.kit.agent import Agent


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    made = Agent(tmp_path_factory.mktemp("node"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def sbx(agent: Agent) -> Iterator[dsec.Sandbox]:
    with dsec.Client(agent.url) as client, client.create(disk_mib=64) as made:
        yield made
