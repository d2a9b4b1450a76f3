"""The examples of the adapters' documentation, each by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.examples import OF_ADAPTERS, examples
from tests.kit.home import Home

# Some frameworks take long to import on a busy machine.
pytestmark = pytest.mark.timeout(300)

EXAMPLES = examples(OF_ADAPTERS.values())


@pytest.mark.parametrize(("where", "code"), EXAMPLES, ids=[where for where, _ in EXAMPLES])
def test_example(home: Home, where: str, code: str) -> None:
    subprocess.run([sys.executable, "-c", code], env=home.env, check=True, stdin=subprocess.DEVNULL)
    with home.client() as client:
        assert list(client.list()) == [], "an example stops what it has started"


@pytest.mark.parametrize("page", OF_ADAPTERS.values(), ids=OF_ADAPTERS)
def test_every_page_has_one(page: Path) -> None:
    assert examples([page])
