"""What the files of this directory share: a node that the dsec command has started, and a sandbox on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dsec
from tests.kit.home import Home, home

__all__ = ["home"]


class Standing:
    """As the agent of the cases that run over the fake backend, too: where it listens."""

    def __init__(self, home: Home) -> None:
        self.url = f"unix://{home.place.run_dir}/api.sock"


@pytest.fixture
def agent(home: Home) -> Standing:
    return Standing(home)


@pytest.fixture
def sbx(home: Home) -> Iterator[dsec.Sandbox]:
    with home.client() as client, client.create(disk_mib=64) as made:
        yield made
