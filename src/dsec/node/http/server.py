"""Listening: uvicorn's HTTP protocol over our own sockets, with limits that keep a bad client to itself."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import sys
from pathlib import Path
from typing import Any, Final, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from dsec.model.errors import InvalidSpec
from dsec.model.limits import KIB, MIB
from dsec.node.http import codec
from dsec.node.http.app import App
from dsec.node.http.auth import peer_allowed, peer_uid
from dsec.node.http.socket import Socket
from dsec.node.steps import WireError

# llhttp takes headers without end; a request of ours has some hundred bytes of them.
HEAD_MAX_BYTES: Final = 32 * KIB
_TOO_LARGE: Final = f"The head of the request is larger than {HEAD_MAX_BYTES} bytes."
# From the first byte of a request to its last, unless it makes progress: whoever drips bytes is cut off.
REQUEST_DEADLINE_S: Final = 60.0
BODY_RATE_MIN: Final = 64 * KIB  # bytes a second that a large body must keep up after the deadline
KEEP_ALIVE_S: Final = 300
CONNECTIONS_MAX: Final = 8192
# Of a Unix socket (TCP sees to its own): what is sent and not read yet. With less, which is what the kernel gives,
# both sides are woken for every piece of a program's output; it cost a fifth of their CPU time.
SEND_BUFFER_BYTES: Final = 1 * MIB
BACKLOG: Final = 2048
_SWEEP_S: Final = 5.0
# Whom these name must not depend on who reads them, us or whatever stands between.
_ONCE: Final = (b"host", b"origin", b"authorization", b"idempotency-key")
# Left out where a wish for another protocol is passed over.
_OF_A_WISH: Final = (b"connection", b"upgrade", b"http2-settings")
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


async def _nothing(message: Any = None) -> Any:
    """In place of ASGI's messages, which a WebSocket of ours does without."""
    raise AssertionError("a WebSocket is spoken to by its socket")


class NodeProtocol(HttpToolsProtocol):
    """One connection."""

    peer_check = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._begun_at: float | None = None
        self._received = 0
        self._last = b""
        self._wished = False
        self._over = False
        self._complaint = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX or not self._peer_allowed(transport):
            transport.abort()
            return
        self._begun_at = self.loop.time()  # whoever connects and says nothing is cut off as well
        if self.peer_check:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

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
        self._last = data
        if self._in_head:
            self._head_bytes += len(data)
        try:
            super().data_received(data)
        except httptools.HttpParserError:  # raised by a callback after the connection was given up
            self.transport.abort()
            return
        finally:
            self._last = b""
        if self._in_head and self._head_bytes > HEAD_MAX_BYTES and not self.transport.is_closing():
            self.send_400_response(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        # What comes behind the body are trailers, and nothing of ours is read there.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._check_head()
        before = self.cycle
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["http_version"] = self.parser.get_http_version()
        if self._is_wish():
            return
        super().on_headers_complete()
        # A response to HEAD has no body to go with.
        if self.cycle is not before and self.scope["method"] != "HEAD":
            self.cycle.transport = cast(asyncio.Transport, WholeResponse(self.transport))

    def _check_head(self) -> None:
        """Raises ValueError, by which the parser gives up; the complaint is answered."""
        names = [name for name, _ in self.headers]
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > HEAD_MAX_BYTES:
            self._complaint = _TOO_LARGE
        elif twice := [name.decode() for name in _ONCE if names.count(name) > 1]:
            self._complaint = f"The header {twice[0]} stands there more than once."
        if self._complaint:
            raise ValueError(self._complaint)

    def _should_upgrade(self) -> bool:
        # Only what could be a handshake for a WebSocket.
        is_get = self.scope["method"] == "GET" and self.scope["http_version"] == "1.1"
        return is_get and super()._should_upgrade()

    def _is_wish(self) -> bool:
        """Whether it asks for another protocol, which is passed over (RFC 9110, 7.8)."""
        asks = self.parser.should_upgrade() and self.scope["method"] != "CONNECT"
        return asks and not self._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        # Called where the parser's exception is handled: for it this message has ended with its head, and what follows
        # is none. So it begins again, as if it had not asked; and is the last one here, since whatever stands between
        # may have taken what follows for the other protocol.
        error = sys.exception()
        if not isinstance(error, httptools.HttpParserUpgrade) or not self._is_wish():
            return
        head = [b"%b %b HTTP/%b" % (self.scope["method"].encode(), self.url, self.scope["http_version"].encode())]
        head += [b"%b: %b" % header for header in self.headers if header[0] not in _OF_A_WISH]
        again = b"\r\n".join([*head, b"connection: close", b"", self._last[int(error.args[0]) :]])
        self._wished = True
        self.parser = httptools.HttpRequestParser(self)
        try:
            self.parser.feed_data(again)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def send_400_response(self, msg: str) -> None:
        if self._over:
            return  # it came behind the last request
        # As every other refusal is, and not uvicorn's line of text.
        body = codec.encode_json(WireError.of(InvalidSpec(self._complaint or msg)))
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (codec.JSON, len(body)) + body)
        self.transport.close()

    def handle_websocket_upgrade(self) -> None:
        # Called where the parser's exception is handled, which says where the request ended.
        error = sys.exception()
        behind = len(self._last) - int(error.args[0]) if isinstance(error, httptools.HttpParserUpgrade) else 0
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy or behind:
            self.send_400_response("A WebSocket begins once what was asked before is answered, and so is its request.")
        elif any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
            # Whatever stands between may read on where we would: what follows must be frames to both.
            self.send_400_response("The request for a WebSocket has no body.")
        else:
            self._become_socket()

    def _become_socket(self) -> None:
        url = httptools.parse_url(self.url)
        self.connections.discard(self)
        socket_ = Socket(self.transport, self.connections)
        self.transport.set_protocol(socket_)
        scope: dict[str, Any] = {
            **self.scope,
            "type": "websocket",
            "raw_path": url.path,
            "query_string": url.query or b"",
            "socket": socket_,
        }
        task = self.loop.create_task(self.config.loaded_app(scope, _nothing, _nothing))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_message_complete(self) -> None:
        if self._is_wish():
            return
        super().on_message_complete()
        self._over = self._wished
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
            ws=Socket,
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

    @property
    def connections(self) -> set[Any]:
        """Those that are open."""
        return self._state.connections

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
            if isinstance(connection, NodeProtocol | Socket) and connection.stalled(now):
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
