"""Ports of sandboxes that can be reached from outside: each has an origin of its own and a token.

An origin is an address of this machine's loopback (127.0.0.0/8), another for each sandbox, so that neither pages nor
cookies of one are seen by another. What is exposed is kept, and served again by the next agent at the same place.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from ipaddress import IPv4Address
from typing import Final

from dsec.model.errors import Denied, Exhausted, NodeFull, NotFound
from dsec.model.ports import Exposed, check_port
from dsec.node.box import Box
from dsec.node.core import Core
from dsec.node.door import Door
from dsec.node.store import Statement

log = logging.getLogger("dsec.node.ports")

TOKEN_BYTES: Final = 24
PORTS_MAX: Final = 64  # of one sandbox
BACKLOG: Final = 128
# 127.64.0.0 to 127.255.255.254: what else is on the loopback is mostly at its beginning.
FIRST: Final = int(IPv4Address("127.64.0.0"))
COUNT: Final = 3 << 22
_TRIES: Final = 16
_ROWS: Final = "SELECT sandbox, port, address, at, token FROM exposures"


class _Open:
    """One that is served."""

    def __init__(self, exposed: Exposed, door: Door, server: asyncio.Server) -> None:
        self.exposed = exposed
        self.door = door
        self.server = server

    def close(self) -> None:
        """Take no connection any more, and end those there are."""
        self.server.close()
        self.door.close()


class Ports:
    """What is exposed of a node's sandboxes."""

    def __init__(self, core: Core, ready: Callable[[str], Awaitable[Box]], may: Callable[[Box, int], bool]) -> None:
        """`may`: whether a sandbox's policy leaves a port to be exposed."""
        self._core = core
        self._ready = ready
        self._may = may
        self._open: dict[str, dict[int, _Open]] = {}
        self._addresses: dict[str, str] = {}  # whose an address is
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Serve again what was exposed."""
        for id_, port, address, at, token in self._core.store.read(_ROWS):
            box = self._core.boxes.get(id_)
            if box is None or not self._may(box, port):
                continue
            try:
                await self._serve(box, port, (address, at), token)
            except OSError as error:
                log.warning("port %d of %s is not served at %s:%d any more: %s", port, id_, address, at, error)

    def close(self) -> None:
        """Serve nothing any more. It stays exposed."""
        for id_ in list(self._open):
            self._close_all(id_)

    def ended(self, box: Box) -> None:
        """A sandbox is gone, and its origins with it."""
        self._close_all(box.id)

    def _close_all(self, id_: str) -> None:
        for one in self._open.pop(id_, {}).values():
            one.close()
        self._addresses = {address: owner for address, owner in self._addresses.items() if owner != id_}

    async def dial(self, ref: str, port: int) -> socket.socket:
        """A connection to what listens on a port inside. InvalidState: nothing does."""
        check_port(port)
        box = await self._ready(ref)
        with self._core.going_on(box):
            return await box.running_guest().dial(port)

    async def expose(self, ref: str, port: int) -> tuple[Exposed, bool]:
        """Make a port reachable; asked again, the same. Whether it was made now. Nothing need listen on it yet."""
        check_port(port)
        box = await self._ready(ref)
        box.running_guest()
        async with self._turn:
            opened = self._open.get(box.id, {})
            if port in opened:
                return opened[port].exposed, False
            if not self._may(box, port):
                text = (
                    f"port {port}: the sandbox's network policy names the ports that may be exposed, and not this one"
                )
                raise Denied(text, detail={"port": port}, sandbox_id=box.id)
            if len(opened) >= PORTS_MAX:
                detail = {"resource": "exposed_ports", "limit": PORTS_MAX}
                raise Exhausted(f"the sandbox has {PORTS_MAX} exposed ports, the most allowed", detail=detail)
            token = secrets.token_urlsafe(TOKEN_BYTES)
            one = await self._first_place(box, port, token)
            try:
                await self._core.store.commit(self._row(box, one), durable=True)
            except BaseException:  # also cancelled: nobody knows of it
                self._drop(box.id, port)
                raise
            if box.id not in self._core.boxes:
                self._drop(box.id, port)
                box.running_guest()  # raises how it ended
            return one.exposed, True

    def exposed(self, ref: str) -> list[Exposed]:
        """What is exposed of a sandbox, by port."""
        box = self._core.alive(ref)
        if box is None:
            self._core.past(ref)
            return []
        return [one.exposed for _, one in sorted(self._open.get(box.id, {}).items())]

    async def unexpose(self, ref: str, port: int) -> None:
        """Close it for good: its token is worth nothing from now on, and its connections end. NotFound."""
        box = await self._ready(ref)
        async with self._turn:
            if port not in self._open.get(box.id, {}):
                raise NotFound(f"port {port} of {box.id} is not exposed", sandbox_id=box.id)
            await self._core.store.commit(_gone(box, port), durable=True)
            self._drop(box.id, port)

    async def close_denied(self, box: Box) -> None:
        """After a change of its policy: close for good what that does not leave open."""
        async with self._turn:
            denied = [port for port in self._open.get(box.id, {}) if not self._may(box, port)]
            for port in denied:
                self._drop(box.id, port)
            if denied:
                await self._core.store.commit(*(_gone(box, port) for port in denied), durable=True)

    def _drop(self, id_: str, port: int) -> None:
        one = self._open.get(id_, {}).pop(port, None)
        if one is not None:
            one.close()

    def _row(self, box: Box, one: _Open) -> Statement:
        address, at = one.server.sockets[0].getsockname()
        sql = "INSERT OR REPLACE INTO exposures (sandbox, port, address, at, token) VALUES (?, ?, ?, ?, ?)"
        return sql, (box.id, one.exposed.port, address, at, one.exposed.token)

    async def _first_place(self, box: Box, port: int, token: str) -> _Open:
        """Served at its own address, with its own number if that is free there."""
        failure: OSError | None = None
        for address in self._candidates(box.id):
            for at in (port, 0):
                try:
                    return await self._serve(box, port, (address, at), token)
                except OSError as error:
                    failure = error
        raise NodeFull(f"no address of this machine's loopback can be listened on: {failure}") from failure

    def _candidates(self, id_: str) -> Iterator[str]:
        """Addresses that no other sandbox has; the first is always the same for one, unless another has it."""
        own = [address for address, owner in self._addresses.items() if owner == id_]
        if own:
            yield own[0]
            return
        digest = int.from_bytes(hashlib.sha256(id_.encode()).digest()[:8], "big")
        for step in range(_TRIES):
            address = str(IPv4Address(FIRST + (digest + step) % COUNT))
            if self._addresses.get(address, id_) == id_:
                yield address

    async def _serve(self, box: Box, port: int, place: tuple[str, int], token: str) -> _Open:
        async def dial() -> socket.socket:
            return await self.dial(box.id, port)

        sock = _listening(place)
        address, at = sock.getsockname()
        exposed = Exposed.at(port, f"http://{address}:{at}", token)
        door = Door(port, token, dial, lambda: self._core.going_on(box))
        server = await asyncio.start_server(door.connected, sock=sock, backlog=BACKLOG, limit=Door.HEAD_MAX_BYTES)
        one = _Open(exposed, door, server)
        self._open.setdefault(box.id, {})[port] = one
        self._addresses[address] = box.id
        return one


def _gone(box: Box, port: int) -> Statement:
    return "DELETE FROM exposures WHERE sandbox = ? AND port = ?", (box.id, port)


def _listening(place: tuple[str, int]) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
    except OSError:
        sock.close()
        raise
    return sock
