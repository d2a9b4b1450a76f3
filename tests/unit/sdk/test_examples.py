"""Examples use names that exist. That they work is shown where there are containers (tests/root)."""

from __future__ import annotations

import ast

import pytest

import dsec
from tests.kit.examples import examples


@pytest.mark.parametrize(("where", "code"), examples(), ids=[where for where, _ in examples()])
def test_names_exist(where: str, code: str) -> None:
    for node in ast.walk(ast.parse(code, where)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dsec":
            assert hasattr(dsec, node.attr), node.attr


def test_there_are_examples() -> None:
    assert len(examples()) > 8
