"""What a call of the API is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dsec.node.agent import Node
from dsec.node.http.exchange import Exchange

S: Final = "/v1/sandboxes"

Handler = Callable[[Node, Exchange, Any], Awaitable[None]]


class Empty(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """It is done, and there is nothing to say."""


@dataclass(frozen=True)
class Route:
    """One call."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: Any = None
    answer: Any = None
    item: Any = None  # what a stream consists of
    status: int = 200
    query: tuple[tuple[str, Any], ...] = ()  # bytes: a path or name, any bytes percent-encoded
    keyed: bool = False
    open: bool = False  # no authentication
    body_optional: bool = False
    octets_in: str = ""  # the media type of a body that is taken as it comes
    octets_out: str = ""  # the media type of an answer that is bytes
    socket: bool = False  # a WebSocket, which OpenAPI has no words for: docs/reference/http-api.md has
