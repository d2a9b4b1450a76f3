"""Programs that are talked to, in real containers: the cases of the fake backend, and what a kernel decides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dsec
from tests.contract import test_sdk_programs as cases
from tests.kit.home import Home, standing

globals().update({name: case for name, case in vars(cases).items() if name.startswith("test_")})


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with standing() as made:
        yield made


@pytest.fixture
def sbx(home: Home) -> Iterator[dsec.Sandbox]:
    with home.client() as client, client.create(disk_mib=64) as made:
        yield made
