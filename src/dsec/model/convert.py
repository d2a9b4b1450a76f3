"""Plain data as structs, and what is said when it does not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from dsec.model.errors import InvalidSpec

T = TypeVar("T")

_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


class Checked(msgspec.StructMeta):
    """Of structs that callers make: a wrong type and an unknown name are told when one is made, and by their field.

    msgspec itself takes any type there, which then is an error of Python's where it is first used.
    """

    if not TYPE_CHECKING:  # for whom the constructor has the fields, with their types

        def __call__(cls, *args, **fields):
            return super().__call__(*args, **fields) if args else convert(fields, cls)


def convert(fields: Mapping[str, Any], to: type[T]) -> T:
    """Plain data as a struct. Raises InvalidSpec naming the field whose type is wrong or that does not exist."""
    try:
        return msgspec.convert(dict(fields), to, strict=True)
    except msgspec.ValidationError as error:
        raise invalid(error, to) from error


def invalid(error: msgspec.ValidationError, to: Any) -> InvalidSpec:
    """An InvalidSpec for what msgspec found wrong: the field from its path, its own words and what could be meant."""
    text = str(error)
    _, marked, path = text.rpartition(" - at `$")
    field = path.rstrip("`").lstrip(".").partition("[")[0] if marked else ""
    if match := _UNKNOWN.search(text):
        field = match.group(1)
    hint = _meant(to, field, unknown=match is not None) if isinstance(to, type) else ""
    return InvalidSpec(f"{field}: {text}{hint}" if field else text, detail={"field": field or None})


def _meant(to: type, field: str, *, unknown: bool) -> str:
    """What stands in a field of a struct, or which field looks like an unknown one."""
    fields = getattr(to, "__struct_fields__", ())
    if unknown:
        from dsec.model.words import meant

        return meant(field, fields)
    if field not in fields:
        return ""
    if field == "environment" and "env" in fields:
        return "; variables are env={...}"
    if field == "network":
        return "; by default a sandbox has none but its own loopback"
    hint = get_type_hints(to)[field]
    return f"; allowed: {', '.join(map(str, get_args(hint)))}" if get_origin(hint) is Literal else ""
