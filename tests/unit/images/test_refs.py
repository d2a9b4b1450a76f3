"""References: one grammar, and what is not in it is refused by name."""

from __future__ import annotations

import pytest

from dsec.images.refs import Ref, parse
from dsec.model.errors import InvalidSpec

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("debian:12", Ref("tag", "debian", "12")),
        ("flask-4045@1", Ref("version", "flask-4045", "1")),
        ("team/harness@7.1_x", Ref("version", "team/harness", "7.1_x")),
        ("debian", Ref("tag", "debian", "latest")),
        (DIGEST, Ref("digest", "", DIGEST)),
    ],
)
def test_references(text: str, expected: Ref) -> None:
    assert parse(text) == expected
    assert parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "a:",
        "a@",
        "A:1",
        "a:1:2",
        "a@1@2",
        "../a:1",
        "a/../b:1",
        "sha256:abc",
        "a:" + "x" * 300,
        "a\0:1",
        "a:1\n",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse(text, "base")
    assert caught.value.detail["field"] == "base"
