"""Listening: uvicorn's HTTP protocol over our own sockets, with limits that keep a bad client to itself."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
from pathlib import Path
from typing import Any, Final, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from dsec.model.limits import KIB
from dsec.node.http.app import App
from dsec.node.http.auth import peer_allowed, peer_uid

# llhttp takes headers without end; a request of ours has some hundred bytes of them.
HEAD_MAX_BYTES: Final = 32 * KIB
# From the first byte of a request to its last, unless it makes progress: whoever drips bytes is cut off.
REQUEST_DEADLINE_S: Final = 60.0
BODY_RATE_MIN: Final = 64 * KIB  # bytes a second that a large body must keep up after the deadline
KEEP_ALIVE_S: Final = 300
CONNECTIONS_MAX: Final = 8192
BACKLOG: Final = 2048
_SWEEP_S: Final = 5.0
_CONTINUE: Final = b"HTTP/1.1 100 "
# Longer bodies are not worth a copy.
_JOIN_MAX_BYTES: Final = 64 * KIB
_DRAIN_S: Final = 5.0


class WholeResponse:
    """What a response is written to: sends its head with the first bytes of its body, not by itself.

    The head alone, which the server below writes by itself, would wake the client for nothing.
    """

    __slots__ = ("_head", "_sent", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None
        self._sent = False

    def write(self, data: bytes) -> None:
        if self._sent or data.startswith(_CONTINUE):
            self._transport.write(data)
        elif self._head is None:
            self._head = data
        else:
            self._sent = True
            if len(data) > _JOIN_MAX_BYTES:
                self._transport.write(self._head)
                self._transport.write(data)
            else:
                self._transport.write(self._head + data)

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class NodeProtocol(HttpToolsProtocol):
    """One connection."""

    peer_check = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._begun_at: float | None = None
        self._received = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX or not self._peer_allowed(transport):
            transport.abort()
        else:
            self._begun_at = self.loop.time()  # whoever connects and says nothing is cut off as well

    def _peer_allowed(self, transport: asyncio.Transport) -> bool:
        if not self.peer_check:
            return True
        uid = peer_uid(transport.get_extra_info("socket"))
        self.client = (f"uid {uid}", 0)  # as every request's `client` has it
        return peer_allowed(uid)

    def data_received(self, data: bytes) -> None:
        if self._begun_at is None:
            self._begun_at = self.loop.time()
        self._received += len(data)
        if self._in_head:
            self._head_bytes += len(data)
        try:
            super().data_received(data)
        except httptools.HttpParserError:  # raised by a callback after the connection was given up
            self.transport.abort()
            return
        if self._in_head and self._head_bytes > HEAD_MAX_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request is larger than {HEAD_MAX_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        before = self.cycle
        super().on_headers_complete()
        # A response to HEAD has no body to go with.
        if self.cycle is not before and self.scope["method"] != "HEAD":
            self.cycle.transport = cast(asyncio.Transport, WholeResponse(self.transport))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._begun_at = None
        self._received = 0
        self._in_head = True

    def stalled(self, now: float) -> bool:
        """Whether it has been too slow in sending a request."""
        if self._begun_at is None or self.cycle_waits():
            return False
        return now - self._begun_at > REQUEST_DEADLINE_S + self._received / BODY_RATE_MIN

    def cycle_waits(self) -> bool:
        """Whether it is us who does not read: the body is whole or reading is paused."""
        return self.flow is not None and self.flow.read_paused


class PeerProtocol(NodeProtocol):
    """A connection of the Unix socket: its peer's uid is checked."""

    peer_check = True


class Listener:
    """One listening socket and its connections."""

    def __init__(self, app: App, sock: socket.socket, *, peer: bool, tls: ssl.SSLContext | None = None) -> None:
        self._socket = sock
        self._tls = tls
        self._protocol = PeerProtocol if peer else NodeProtocol
        self._config = Config(
            app,
            http=self._protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Take connections from now on."""
        self._config.load()
        loop = asyncio.get_running_loop()

        def protocol() -> NodeProtocol:
            return self._protocol(config=self._config, server_state=self._state, app_state={})

        if self._socket.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(protocol, sock=self._socket, backlog=BACKLOG)
        else:
            self._server = await loop.create_server(protocol, sock=self._socket, ssl=self._tls, backlog=BACKLOG)
        self._sweep()

    def _sweep(self) -> None:
        # One timer for all connections instead of one for each request.
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._state.connections):
            if isinstance(connection, NodeProtocol) and connection.stalled(now):
                connection.transport.abort()
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)

    async def close(self) -> None:
        """Take no more; give answers under way a moment, then hang up. What was started goes on."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_DRAIN_S)
        for task in list(self._state.tasks):
            task.cancel()
        for connection in list(self._state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=1.0)


def unix_socket(path: Path) -> socket.socket:
    """A listening socket at a path with mode 0600. A dead one that lies there is replaced."""
    if path.exists():
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(f"{path} is there and is no socket; remove it or choose another run directory")
        path.unlink()  # the caller holds the node's lock: nobody listens there
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)  # so that it never has another mode, not even for a moment
    try:
        sock.bind(str(path))
    finally:
        os.umask(before)
    return sock


def tcp_socket(host: str, port: int) -> socket.socket:
    """A TCP socket bound to an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    return sock
