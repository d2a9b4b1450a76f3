"""What the suites share: a node that the dsec command has started."""

from collections.abc import Iterator

import pytest

from tests.kit.home import Home, standing


def pytest_configure(config: pytest.Config) -> None:
    for plugins in ("benchmark", "vcr"):
        config.addinivalue_line("markers", f"{plugins}: langchain's suite bears it, and a guest loads no such plugin")


@pytest.fixture(scope="session")
def home() -> Iterator[Home]:
    """One node for all suites of a run: each leaves none of its sandboxes behind."""
    with standing() as made:
        yield made
