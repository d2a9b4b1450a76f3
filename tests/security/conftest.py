"""One node for all tries, a sandbox for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from tests.kit.home import Home, standing


@pytest.fixture(scope="session")
def home() -> Iterator[Home]:
    with standing() as made:
        yield made


@pytest.fixture(scope="session")
def client(home: Home) -> Iterator[dsec.Client]:
    with home.client() as made:
        yield made


@pytest.fixture
def sbx(client: dsec.Client) -> Iterator[dsec.Sandbox]:
    with client.create() as made:
        yield made


@pytest.fixture
def run_dir(home: Home) -> Path:
    return home.place.run_dir
