"""Golden vectors of the native protocol, this side. The other side: native/launch/tests/golden.rs."""

from __future__ import annotations

import msgspec
import pytest

from tests.contract import native_vectors as vectors

pytestmark = pytest.mark.contract


def test_the_file_is_what_the_code_says() -> None:
    assert vectors.stored() == vectors.encoded()


@pytest.mark.parametrize("name", vectors.SENT)
def test_what_is_sent(name: str) -> None:
    value = vectors.SENT[name]
    assert msgspec.msgpack.encode(value) == vectors.stored()[name]
    assert msgspec.msgpack.decode(vectors.stored()[name], type=type(value)) == value


@pytest.mark.parametrize("name", vectors.RECEIVED)
def test_what_is_received(name: str) -> None:
    kind, fields = vectors.RECEIVED[name]
    assert msgspec.msgpack.decode(vectors.stored()[name], type=kind) == msgspec.convert(fields, kind)


def test_fields_of_the_future_are_ignored() -> None:
    kind, fields = vectors.RECEIVED["usage"]
    newer = msgspec.msgpack.encode({**fields, "from_the_future": [1, {"a": b"b"}]})
    assert msgspec.msgpack.decode(newer, type=kind) == msgspec.convert(fields, kind)
