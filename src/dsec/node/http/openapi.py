"""The OpenAPI document, made from the table of routes. `python -m dsec.node.http.openapi` prints it."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import msgspec

from dsec.model.limits import KEY_MAX_CHARS
from dsec.node.agent import VERSION
from dsec.node.http.route import Route
from dsec.node.http.routes import ROUTES as ALL_ROUTES
from dsec.node.steps import WireError

ROUTES = tuple(route for route in ALL_ROUTES if not route.socket)

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_MSGPACK = "application/msgpack"
_NDJSON = "application/x-ndjson"
_SEQ = "application/vnd.dsec.msgpack-seq"

_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key with the same content is answered with what came back the first time.",
    "schema": {"type": "string", "minLength": 1, "maxLength": KEY_MAX_CHARS, "pattern": r"^[!-~]+$"},
}


_EXACT = {"type": "string", "description": "any bytes, percent-encoded", "minLength": 1}
_OCTETS = {"type": "string", "contentEncoding": "binary"}


def document() -> dict[str, Any]:
    """The whole document."""
    schemas, components = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dsec node",
            "version": VERSION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


@functools.cache
def text() -> bytes:
    """The document as it is committed and served."""
    return json.dumps(document(), indent=1, sort_keys=True).encode() + b"\n"


def _types(route: Route) -> list[Any]:
    return [kind for kind in (route.body, route.answer, route.item, *(kind for _, kind in route.query)) if kind]


def _schemas() -> tuple[dict[Any, Any], dict[str, Any]]:
    kinds = [kind for route in ROUTES for kind in _types(route)]
    kinds.append(WireError)
    unique = list({repr(kind): kind for kind in kinds}.values())
    found, components = msgspec.json.schema_components(unique, ref_template=_REF)
    return {repr(kind): schema for kind, schema in zip(unique, found, strict=True)}, components


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": _EXACT if kind is bytes else schemas[repr(kind)]}
        for name, kind in route.query
    ]
    if route.keyed:
        parameters.append(_KEY)
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "responses": _responses(route, schemas),
    }
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        schema = schemas[repr(route.body)]
        operation["requestBody"] = {
            "required": not route.body_optional,
            "content": {_JSON: {"schema": schema}, _MSGPACK: {"schema": schema}},
        }
    if route.octets_in:
        operation["requestBody"] = {"required": True, "content": {route.octets_in: {"schema": _OCTETS}}}
    if route.open:
        operation["security"] = []
    return operation


def _responses(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer is not None:
        content[_JSON] = content[_MSGPACK] = {"schema": schemas[repr(route.answer)]}
    if route.item is not None:
        item = schemas[repr(route.item)]
        content[_NDJSON] = {"schema": {"type": "string", "description": "one JSON item a line"}, "x-item": item}
        content[_SEQ] = {"schema": {"type": "string", "contentEncoding": "binary"}, "x-item": item}
    if route.octets_out:
        content[route.octets_out] = {"schema": _OCTETS}
    error = {"schema": schemas[repr(WireError)]}
    responses = {str(route.status): {"description": route.summary, "content": content}}
    if route.status == 201:
        responses["200"] = {"description": "It was there already", "content": content}
    responses["default"] = {"description": "An error", "content": {_JSON: error, _MSGPACK: error}}
    return responses


if __name__ == "__main__":
    print(text().decode(), end="")
