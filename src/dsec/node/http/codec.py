"""Bodies in and out: JSON or msgpack, checked against structs; whatever is malformed is an InvalidSpec."""

from __future__ import annotations

import os
import re
import struct
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from dsec.model.convert import invalid
from dsec.model.errors import InvalidSpec

JSON: Final = b"application/json"
MSGPACK: Final = b"application/msgpack"
NDJSON: Final = b"application/x-ndjson"
MSGPACK_SEQ: Final = b"application/vnd.dsec.msgpack-seq"

QUERY_MAX_FIELDS: Final = 256

# As JSON has numbers: Python takes more for one (underscores, signs, digits of other scripts).
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,3})?\Z", re.ASCII)
_INT_END: Final = 2**63  # what msgpack, SQLite and files have room for

T = TypeVar("T")

encode_json = msgspec.json.Encoder().encode
encode_msgpack = msgspec.msgpack.Encoder().encode
_encode_into = msgspec.msgpack.Encoder().encode_into
_length = struct.Struct(">I")


class Codec:
    """Decodes bodies into one struct."""

    def __init__(self, type_: type[Any]) -> None:
        self._type = type_
        self._json = msgspec.json.Decoder(type_)
        self._msgpack = msgspec.msgpack.Decoder(type_)

    def decode(self, body: bytes, content_type: bytes) -> Any:
        """The struct. Raises InvalidSpec naming the field that is wrong."""
        kind = content_type.partition(b";")[0].strip().lower()
        try:
            if kind in (b"", JSON):
                return self._json.decode(body)
            if kind == MSGPACK:
                return self._msgpack.decode(body)
        except msgspec.ValidationError as error:
            raise invalid(error, self._type) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidSpec(f"the body could not be read as {(kind or JSON).decode('latin-1')}: {error}") from error
        shown = kind.decode("latin-1")
        raise InvalidSpec.field("Content-Type", shown, "application/json or application/msgpack")


def encode_item(item: object, msgpack: bool) -> bytes | bytearray:
    """One item of a stream."""
    if msgpack:
        body = bytearray(_length.size)
        _encode_into(item, body, _length.size)
        _length.pack_into(body, 0, len(body) - _length.size)
        return body
    return encode_json(item) + b"\n"


def path_segment(raw: bytes) -> str:
    """A percent-encoded segment as text. Raises InvalidSpec when it is not UTF-8."""
    try:
        return (unquote_to_bytes(raw) if b"%" in raw else raw).decode()
    except UnicodeDecodeError as error:
        raise InvalidSpec.field("path", raw, "percent-encoded UTF-8") from error


def query_fields(raw: bytes, allowed: frozenset[str], exact: frozenset[str] = frozenset()) -> dict[str, list[str]]:
    """The query's fields. Raises InvalidSpec for one that the call does not have.

    `exact` ones may be any bytes: what is not UTF-8 in them is escaped as by `os.fsdecode`.
    """
    if not raw:
        return {}
    fields: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, errors="surrogateescape", max_num_fields=QUERY_MAX_FIELDS
        )
        for name, value in pairs:
            (name if name in exact else name + value).encode()
    except ValueError as error:  # too many, or not UTF-8
        raise InvalidSpec.field("query", raw, f"at most {QUERY_MAX_FIELDS} fields in percent-encoded UTF-8") from error
    for name, value in pairs:
        if name not in allowed:
            raise InvalidSpec.field("query", name, ", ".join(sorted(allowed)) or "no query for this call")
        fields.setdefault(name, []).append(value)
    return fields


def one(fields: dict[str, list[str]], name: str) -> str | None:
    """A field that may stand once."""
    values = fields.get(name)
    if values is None:
        return None
    if len(values) > 1:
        raise InvalidSpec.field(name, values, "one value")
    return values[0]


def path(fields: dict[str, list[str]], name: str) -> bytes:
    """A field with a path in a sandbox."""
    text = one(fields, name)
    if text is None:
        raise InvalidSpec.field(name, None, "a path in the sandbox, percent-encoded")
    return os.fsencode(text)


def flag(fields: dict[str, list[str]], name: str) -> bool:
    """A field that is 1 or 0; without it, no."""
    text = one(fields, name)
    if text not in (None, "0", "1", "false", "true"):
        raise InvalidSpec.field(name, text, "1 or 0")
    return text in ("1", "true")


def number(fields: dict[str, list[str]], name: str, default: T, to: type[T]) -> T:
    """A numeric field."""
    text = one(fields, name)
    if text is None:
        return default
    try:
        if not _NUMBER.match(text) or (to is int and not -_INT_END <= int(text) < _INT_END):
            raise ValueError(text)
        return to(text)  # type: ignore[call-arg]  # int or float, both are called with text
    except ValueError as error:
        raise InvalidSpec.field(name, text, f"a number ({to.__name__})") from error
