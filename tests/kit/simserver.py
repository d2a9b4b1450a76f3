"""A simulated node that really listens: the server's code, sockets and clocks, over the fake backend."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, Self

import aiohttp

from dsec.backends.fake import FakeBackend, World
from dsec.node.agent import Node
from dsec.node.capacity import EndlessGauge
from dsec.node.clock import SystemClock
from dsec.node.http.app import App
from dsec.node.http.auth import Guard, Pages, PeerGuard
from dsec.node.http.bodies import Bodies
from dsec.node.http.server import Listener, tcp_socket, unix_socket
from dsec.node.simulated import SimulatedLayers
from dsec.node.store import Store
from tests.kit.simnode import ENDLESS

# Of pages that may ask.
ORIGIN = "https://ui.example:8443"


class SimServer:
    """Serves on a Unix socket; with a guard, on a loopback port as well."""

    def __init__(self, directory: Path, guard: Guard | None = None, bodies: Bodies | None = None) -> None:
        self.directory = directory
        self.path = directory / "api.sock"
        self.world = World()
        self.layers = SimulatedLayers()
        self.port = 0
        self._guard = guard
        self._bodies = bodies or Bodies()
        self.listeners: list[Listener] = []

    async def start(self) -> None:
        """A new agent over the same world."""
        clock = SystemClock()
        self.node = Node(
            name="n1",
            backends={"container": FakeBackend(self.world, name="container")},
            layers=self.layers,
            store=Store(self.directory / "state"),
            room=ENDLESS,
            gauge=EndlessGauge(),
            clock=clock,
        )
        await self.node.start()
        app = App(self.node, PeerGuard(), Pages([ORIGIN]), self._bodies)
        self.listeners = [Listener(app, unix_socket(self.path), peer=True)]
        if self._guard is not None:
            sock = tcp_socket("127.0.0.1", 0)
            self.port = sock.getsockname()[1]
            app = App(self.node, self._guard, Pages([ORIGIN], names=True), self._bodies)
            self.listeners.append(Listener(app, sock, peer=False))
        for listener in self.listeners:
            await listener.start()

    async def stop(self) -> None:
        """As at SIGTERM."""
        await asyncio.gather(*(listener.close() for listener in self.listeners))
        await self.node.close()

    def connections(self) -> list[Any]:
        """Those that are open, of all listeners."""
        return [connection for listener in self.listeners for connection in listener.connections]

    async def __aenter__(self) -> Self:
        await self.start()
        self.http = aiohttp.ClientSession("http://node", connector=aiohttp.UnixConnector(str(self.path), limit=0))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.http.close()
        await self.stop()

    async def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        """Status and body of a JSON call."""
        headers = {"Idempotency-Key": key} if key else {}
        async with self.http.request(method, path, json=body, headers=headers) as answer:
            return answer.status, await answer.json(content_type=None)

    async def raw(self, data: bytes, *, until_closed: bool = True) -> bytes:
        """What comes back for some bytes."""
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        writer.write(data)
        if until_closed:
            writer.write_eof()
        received = b""
        try:
            async with asyncio.timeout(5):
                while chunk := await reader.read(65536):
                    received += chunk
                    if not until_closed and b"\r\n\r\n" in received:
                        break
        except (ConnectionError, TimeoutError):
            pass
        writer.close()
        return received

    def tcp(self) -> socket.socket:
        """A connection to the TCP port."""
        return socket.create_connection(("127.0.0.1", self.port))
