"""Plain data as structs, and what is said when it does not fit."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from dsec.model.errors import InvalidSpec

T = TypeVar("T")

USER = 'a name, or a number as 1000, or "1000:1000"'
_KINDS = {
    str: "a str",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    NoneType: "None",
    tuple: "a list of str",
    dict: "a dict",
}
_UNITS = {"_mib": " of MiB", "_s": " of seconds", "cpu": " of cores"}
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
        plain = {name: _plain(name, value) for name, value in fields.items()}
        if plain != fields:  # paths and numbers of users are looked for only where they are in the way
            return convert(plain, to)
        raise _told(invalid(error, to), fields, to) from error


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    return str(value) if name == "user" and isinstance(value, int) and not isinstance(value, bool) else value


def invalid(error: msgspec.ValidationError, to: Any) -> InvalidSpec:
    """An InvalidSpec for what msgspec found wrong: the field from its path, its own words and what could be meant."""
    text = str(error)
    _, marked, path = text.rpartition("`$")  # at `$.a`, or of a key in `$.a`
    field = path.rstrip("`").lstrip(".").partition("[")[0] if marked else ""
    if match := _UNKNOWN.search(text):
        field = match.group(1)
    hint = _meant(to, field, unknown=match is not None) if isinstance(to, type) else ""
    return InvalidSpec(f"{field}: {text}{hint}" if field else text, detail={"field": field or None})


def _told(error: InvalidSpec, fields: Mapping[str, Any], to: Any) -> InvalidSpec:
    """The error for what a caller gave, in the words of Python and not of the wire."""
    name = error.detail["field"]
    if name not in fields:
        return error
    known = getattr(to, "__struct_fields__", ())
    if name not in known:
        return InvalidSpec(f"{to.__name__} has no field {name}{_meant(to, name, unknown=True)}", detail=error.detail)
    value, hint = fields[name], get_type_hints(to)[name]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if get_origin(hint) is dict and isinstance(value, Mapping):
        for key, item in value.items():
            try:
                check_pair(name, key, item if hint == dict[str, str] else "")
            except InvalidSpec as wrong:
                return wrong
    more = _meant(to, name, unknown=False) if get_origin(hint) is not Literal else ""
    allowed = USER if name == "user" else " or ".join(_kind(name, kind) for kind in kinds) + more
    if value is None or isinstance(value, int | float) or (isinstance(value, str) and get_origin(hint) is not dict):
        return InvalidSpec.field(name, value, allowed)
    # What is in it may be a secret.
    text = f"{name} is of the type {type(value).__name__}; allowed: {allowed}"
    return InvalidSpec(text, detail={"field": name, "allowed": allowed})


def check_pair(field: str, key: object, value: object) -> None:
    """Raises InvalidSpec unless both are str; the value, which may be a secret, is not shown."""
    if not isinstance(key, str):
        raise InvalidSpec.field(field, key, f"names that are str, not {type(key).__name__}")
    if not isinstance(value, str):
        text = f"{field}: the value of {key!r} is of the type {type(value).__name__}; allowed: str"
        raise InvalidSpec(text, detail={"field": field, "allowed": "str"})


def _kind(field: str, kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if kind == dict[str, str]:
        return 'a dict, as {"name": "value"}'
    named = _KINDS.get(get_origin(kind) or kind, getattr(kind, "__name__", str(kind)))
    if kind in (int, float):
        unit = next((unit for end, unit in _UNITS.items() if field.endswith(end)), "")
        return named + unit
    return named


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
        return ' ({"pypi": True}); by default a sandbox has none but its own loopback'
    hint = get_type_hints(to)[field]
    return f"; allowed: {', '.join(map(str, get_args(hint)))}" if get_origin(hint) is Literal else ""
