"""Who may have a port exposed: the address is of the node's own machine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dsec.model.errors import Unsupported
from dsec.model.ports import Exposed, ExposeRequest
from dsec.node.http.ports import expose


class Asked:
    """A request from somewhere, a node that exposes, and what was answered."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.params = ["sbx"]
        self.ports = self
        self.answers: list[int] = []

    async def expose(self, ref: str, port: int) -> tuple[Exposed, bool]:
        return Exposed.at(port, "http://127.64.0.1:1", "token"), True

    async def reply(self, status: int, value: object) -> None:
        self.answers.append(status)


def ask(peer: str) -> list[int]:
    asked: Any = Asked(peer)
    asyncio.run(expose(asked, asked, ExposeRequest(port=1)))
    return list(asked.answers)


@pytest.mark.parametrize("peer", ["uid 0", "127.0.0.1", "127.9.9.9", "::1"])
def test_on_the_nodes_machine(peer: str) -> None:
    assert ask(peer) == [201]


@pytest.mark.parametrize("peer", ["192.0.2.1", "10.0.0.1", "2001:db8::1", "::ffff:192.0.2.1"])
def test_from_another_machine_it_is_refused(peer: str) -> None:
    with pytest.raises(Unsupported, match="on its own machine's loopback"):
        ask(peer)


def test_the_url_has_the_token() -> None:
    exposed = Exposed.at(8000, "http://127.64.0.1:8000", "t")
    assert (exposed.url, exposed.headers) == ("http://dsec:t@127.64.0.1:8000", {"X-Dsec-Token": "t"})
