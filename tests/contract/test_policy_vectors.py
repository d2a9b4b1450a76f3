"""The vectors of compiled policies are those that the code makes, and their bytes are their tables."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from dsec.policy import Artifact, Prefix, Query, Table, Verdict, decide, prefixes, resolves
from tests.contract import policy_vectors as vectors

pytestmark = pytest.mark.contract

STORED: dict[str, Any] = json.loads(vectors.FILE.read_text())
CASES = {case["case"]: case for case in STORED["cases"]}


def test_the_file_is_what_the_code_says() -> None:
    assert vectors.FILE.read_text() == vectors.text()


@pytest.mark.parametrize("name", vectors.POLICIES)
def test_a_reader_of_the_bytes_decides_the_same(name: str) -> None:
    case = CASES[name]
    table = msgspec.msgpack.decode(bytes.fromhex(case["msgpack"]), type=Table)
    assert table == msgspec.convert(case["table"], Table)
    artifact = Artifact(table=table, node=tuple(case["node"]))
    for asked in case["decide"]:
        query = Query(**{field: asked[field] for field in Query.__struct_fields__ if field in asked})
        assert decide(artifact, query) == msgspec.convert(asked, Verdict), asked
    for asked in case["resolves"]:
        assert resolves(artifact, asked["name"], asked.get("address")) == msgspec.convert(asked, Verdict), asked
    assert prefixes(artifact) == msgspec.convert(case["prefixes"], tuple[Prefix, ...])


def test_the_vectors_say_yes_and_no() -> None:
    """Of each kind of verdict there are some, so that no reader passes that has only one answer."""
    told = [(asked["allow"], asked["reason"]) for case in CASES.values() for asked in case["decide"] + case["resolves"]]
    for kind in ((True, "rule"), (False, "rule"), (False, "closed"), (False, "no rule"), (False, "no name")):
        assert told.count(kind) >= 10, kind
    assert {row["closed"] for row in STORED["closed"]} == {True, False}
    assert None in {row["name"] for row in STORED["names"]}


def test_a_table_from_the_future_is_not_taken() -> None:
    newer = msgspec.msgpack.encode({"format": 2, "generation": 0, "rules": []})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(newer, type=Table)
