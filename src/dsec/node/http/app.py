"""The ASGI application: finds the call, checks who asks, decodes, answers; nothing a client sends makes a 500."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any, Final

from dsec.model import ids
from dsec.model.errors import DsecError, InvalidSpec, Unsupported
from dsec.node.agent import Node
from dsec.node.http import codec
from dsec.node.http.auth import Guard, Pages
from dsec.node.http.bodies import Bodies
from dsec.node.http.exchange import Exchange, Message, Receive, Send, Vanished
from dsec.node.http.routes import Entry, Table
from dsec.node.http.socket import SocketExchange
from dsec.wire import websocket

log = logging.getLogger("dsec.node.http")

SERVER_ERROR: Final = 500


class App:
    """The API of one node for one kind of listener."""

    def __init__(self, node: Node, guard: Guard, pages: Pages | None = None, bodies: Bodies | None = None) -> None:
        self._node = node
        self._guard = guard
        self._pages = pages or Pages()
        self._bodies = bodies or Bodies()
        self._table = Table()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            exchange: Exchange = SocketExchange(scope, receive, send, self._bodies)
        else:
            exchange = Exchange(scope, receive, send, self._bodies)
        try:
            await self._serve(scope, exchange)
        except DsecError as error:
            if error.status >= SERVER_ERROR:
                # Our own failures, for which the caller has but the request's id to ask about.
                log.warning(
                    "request %s: %s %s: %s: %s",
                    exchange.request_id,
                    scope["method"],
                    scope["raw_path"].decode("latin-1"),
                    error.code,
                    error,
                )
            await exchange.refuse(error)  # Cut, which the server below closes the connection for, comes out of it
        except Vanished:
            log.debug("%s: the client left within its request", exchange.request_id)
        except Exception:  # the edge of this request's task
            log.exception("request %s failed", exchange.request_id)
            await exchange.refuse(DsecError(f"the node failed; its log has request {exchange.request_id}"))
        finally:
            if isinstance(exchange, SocketExchange):
                exchange.socket.close(websocket.INTERNAL, "the node failed")  # where nothing has closed it before

    async def _serve(self, scope: Message, exchange: Exchange) -> None:
        self._pages.check(exchange.headers)
        methods, params = self._table.find(scope["raw_path"])
        entry: Entry | None = methods.get(scope["method"])
        if entry is None:
            allowed = ", ".join(sorted(methods))
            error = Unsupported.lacks(f"{scope['method']} on this path", "method", f"it takes {allowed}")
            await exchange.refuse(error, 405, ((b"allow", allowed.encode()),))
            return
        route = entry.route
        if not route.open:
            exchange.caller = self._guard.check(exchange.headers, exchange.peer)
        if route.socket and not isinstance(exchange, SocketExchange):
            error = Unsupported.lacks("this call over plain HTTP", "WebSocket", "it takes an Upgrade: websocket")
            await exchange.refuse(error, HTTPStatus.UPGRADE_REQUIRED, ((b"upgrade", b"websocket"),))
            return
        if isinstance(exchange, SocketExchange) and not route.socket:
            raise InvalidSpec.field("Upgrade", "websocket", "none: this call is plain HTTP")
        if route.keyed and exchange.key is not None:
            ids.check_key(exchange.key)
        exchange.params = [codec.path_segment(segment) for segment in params]
        exchange.fields = codec.query_fields(exchange.query, entry.allowed, entry.exact)
        body: Any = None
        if entry.codec is not None:
            raw = await exchange.body()
            if raw or not route.body_optional:
                body = entry.codec.decode(raw, exchange.headers.get(b"content-type", b""))
        await route.handler(self._node, exchange, body)
