"""The calls for exposed ports."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final

import msgspec

from dsec.model.errors import InvalidSpec, Unsupported
from dsec.model.ports import Exposed, ExposeRequest
from dsec.node.agent import Node
from dsec.node.http.exchange import Exchange
from dsec.node.http.route import Empty, Route, S


class ExposedList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Ports of a sandbox that can be reached."""

    items: list[Exposed]


async def expose(node: Node, ex: Exchange, request: ExposeRequest) -> None:
    if not _of_this_machine(ex.peer):
        reason = "this node serves exposed ports on its own machine's loopback, which is not the caller's"
        raise Unsupported.lacks("expose", "an address that the caller reaches", reason)
    found, made = await node.ports.expose(ex.params[0], request.port)
    await ex.reply(201 if made else 200, found)


def _of_this_machine(peer: str) -> bool:
    """Whether the other end of the connection is on this machine: a uid of the Unix socket, or a loopback address."""
    try:
        return ip_address(peer).is_loopback
    except ValueError:
        return True


async def exposed(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, ExposedList(items=node.ports.exposed(ex.params[0])))


async def unexpose(node: Node, ex: Exchange, _: None) -> None:
    text = ex.params[1]
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        raise InvalidSpec.field("port", text, "a number")
    await node.ports.unexpose(ex.params[0], int(text))
    await ex.reply(200, Empty())


_P: Final = f"{S}/{{ref}}/ports"
PORT_ROUTES: Final = (
    Route("POST", _P, expose, "Make a port reachable", body=ExposeRequest, answer=Exposed, status=201),
    Route("GET", _P, exposed, "Ports that can be reached", answer=ExposedList),
    Route("DELETE", f"{_P}/{{port}}", unexpose, "Close a port for good", answer=Empty, keyed=True),
)
