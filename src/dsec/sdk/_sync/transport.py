# Generated from dsec/sdk/_async/transport.py by scripts/generate_sync.py: edit that file.

"""Requests to one server: keys, repeats after a broken connection, silence found out."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, TypeVar

from dsec.model.errors import InvalidSpec, NodeUnreachable, Unsupported
from dsec.sdk import codec, http1
from dsec.sdk._sync.net import Conn, Pool, connect, sleep
from dsec.sdk.http1 import Broken, Garbage, Head, Late, Response, TooMuch, request
from dsec.sdk.options import advice
from dsec.sdk.target import Target
from dsec.sdk.timing import DEFAULT, Timing

if TYPE_CHECKING:
    from dsec.sdk.bodies import Body
    from dsec.sdk.tunnel import Tunnel

T = TypeVar("T")

# What a proxy between us and the server says when the server is away; ours has a code, theirs has none.
_PROXY_STATUS: Final = (502, 503, 504)
# How often a caller looks whether another's question for the server's health has been answered.
_CHECK_POLL_S: Final = 0.05
# What is there already is taken also by who is late: a time of 0 would ask nobody.
_LATE_S: Final = 0.001


class Answer:
    """One response being read."""

    def __init__(self, transport: Transport, conn: Conn, *, upgrade: bool = False) -> None:
        self._transport = transport
        self._conn = conn
        self._response = Response(upgrade=upgrade)
        self._last = False

    @property
    def head(self) -> Head:
        """Status and headers; there once the transport hands the answer out."""
        assert self._response.head is not None
        return self._response.head

    def start(self) -> None:
        """Read up to the end of the head."""
        while self._response.head is None:
            self._more()

    def piece(self, end: float | None = None) -> bytes:
        """The next bytes of the body; empty: it is complete. Late: the time `end` has come."""
        while True:
            data = self._response.take()
            if data:
                return data
            if self._response.done:
                self._release()
                return b""
            self._more(end)

    def read(self) -> bytes:
        """The whole body."""
        pieces = []
        size = 0
        while data := self.piece():
            pieces.append(data)
            size += len(data)
            if size > codec.REPLY_MAX_BYTES:
                raise TooMuch(f"an answer of more than {codec.REPLY_MAX_BYTES} bytes")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def switched(self) -> tuple[Conn, bytes]:
        """After status 101: its connection, and what came behind the answer."""
        return self._conn, self._response.rest()

    def last(self) -> None:
        """Nothing else can be asked on its connection."""
        self._last = True

    def close(self) -> None:
        """Drop it with its connection; after the end it does nothing."""
        if not self._response.done:
            self._conn.close()

    def _release(self) -> None:
        if self._response.clean and not self._last:
            self._conn.used = True
            self._transport.pool.give(self._conn)
        else:
            self._conn.close()

    def _more(self, end: float | None = None) -> None:
        self._response.feed(self._transport.received(self._conn, end))


class Items:
    """The items of a stream, each decoded."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._items = codec.Items()

    def next(self, to: type[T], end: float | None = None) -> T:
        """The next item. Broken: the stream was cut (it has a final item, after which nobody asks); Late: at `end`."""
        while (raw := self._items.take()) is None:
            data = self._answer.piece(end)
            if not data:
                raise Broken("the stream was cut before its final item")
            self._items.feed(data)
        return codec.decode(raw, to)

    def drain(self) -> None:
        """After the final item: take the end of the body, so that the connection can be used again."""
        while self._answer.piece():
            pass

    def close(self) -> None:
        """Drop it with its connection; after the end it does nothing."""
        self._answer.close()


class Retry:
    """How long a call whose connection breaks goes on being tried."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._timing = transport.timing
        self._deadline: float | None = None
        self._pause = self._timing.backoff_first_s
        self._began = time.monotonic()

    def after(self, error: Broken) -> None:
        """Wait before the next try, or raise NodeUnreachable."""
        now = time.monotonic()
        if self._deadline is None or now - self._began > self._timing.lived_s:
            self._deadline = now + self._timing.reconnect_s
            self._pause = self._timing.backoff_first_s
        if not self._transport.met or now + self._pause > self._deadline:
            raise self._transport.unreachable(str(error), error.__cause__) from error
        sleep(self._pause)
        self._pause = min(self._pause * 2, self._timing.backoff_max_s)
        self._began = time.monotonic()

    def went_on(self) -> None:
        """Something new came: what breaks next has all the tries."""
        self._deadline = None


class Transport:
    """Connections to one server and what is known of it."""

    def __init__(self, target: Target, api_key: str | None, timing: Timing = DEFAULT) -> None:
        self.target = target
        self.timing = timing
        self.pool = Pool()
        # Whether this server has ever answered: one that never did is not waited for.
        self.met = False
        # Whether what lies between us and it lets a WebSocket through, as far as we know.
        self.sockets = True
        self._tunnel = _tunnel(target)
        self._common = _common_headers(target, api_key)
        self._heard_at = 0.0
        self._checking = 0  # the pid of the process that is asking for the server's health
        self._failed_at = 0.0

    def call(
        self,
        method: str,
        path: str,
        to: type[T],
        *,
        body: bytes = b"",
        made: Body | None = None,
        media: str = codec.MSGPACK,
        key: str | None = None,
    ) -> T:
        """One request and its decoded answer. Safe to repeat: it reads, or it carries a key."""
        retry = Retry(self)
        while True:
            try:
                if made is None:
                    answer = self.open(method, path, body=body, media=media, key=key)
                else:
                    answer = self._accepted(self._send_body(method, path, made, key))
                try:
                    data = answer.read()
                finally:
                    answer.close()
                return codec.decode(data, to)
            except Broken as error:
                retry.after(error)
            except Garbage as error:
                raise self.garbage(error) from error

    def stream(self, method: str, path: str, *, body: bytes = b"", key: str | None = None) -> Items:
        """One try at a streaming request: Broken and Garbage are the caller's, who knows where to go on."""
        answer = self.open(method, path, body=body, key=key, accept=codec.SEQUENCE)
        if answer.head.media_type != codec.SEQUENCE:
            answer.close()
            raise Garbage(f"a stream of type {answer.head.media_type!r}")
        return Items(answer)

    def open(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        media: str = codec.MSGPACK,
        key: str | None = None,
        accept: str = codec.MSGPACK,
    ) -> Answer:
        """One try: sent, and the head of the answer read. An error status raises what it stands for."""
        headers = _headers(key, accept)
        if body:
            headers["Content-Type"] = media
        data = request(method, self.target.prefix + path, self._common, headers, body)
        return self._accepted(self._send(data))

    def upgrade(self, path: str, protocol: str) -> tuple[Conn, bytes]:
        """One try at a WebSocket: its connection, and what came on it already. An error status raises as in `open`."""
        from dsec.wire import websocket  # as whoever calls this

        key = websocket.new_key()
        headers = {
            **_headers(None, codec.MSGPACK),
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": key.decode("ascii"),
            "Sec-WebSocket-Protocol": protocol,
        }
        data = request("GET", self.target.prefix + path, self._common, headers, b"")
        conn = self._connect()
        answer = Answer(self, conn, upgrade=True)
        try:
            conn.send(data, self.timing.patience_s + self.timing.health_s)
            answer.start()
        except TimeoutError as error:
            answer.close()
            raise self.unreachable("it does not read what is sent") from error
        except BaseException:  # also cancelled
            conn.close()
            raise
        self._accepted(answer)
        if answer.head.status != http1.SWITCHING:
            conn.close()
            raise Unsupported.lacks(path, "WebSocket", f"answered with status {answer.head.status} instead")
        if answer.head.headers.get(b"sec-websocket-accept") != websocket.accept_key(key):
            conn.close()
            raise Garbage("an answer to another WebSocket's handshake")
        return answer.switched()

    def received(self, conn: Conn, end: float | None = None) -> bytes:
        """The next bytes from the server. Broken or NodeUnreachable: there will be none; Late: the time `end` came."""
        since = time.monotonic()
        while True:
            patience_s = self.timing.patience_s
            if end is not None:
                patience_s = min(patience_s, max(end - time.monotonic(), _LATE_S))
            try:
                data = conn.recv(patience_s)
                break
            except TimeoutError:
                if end is not None and time.monotonic() >= end:
                    raise Late from None
                self.check_alive()
                if time.monotonic() - since > self.timing.reask_s:
                    raise Broken("silence, though the server is well") from None
        if data:  # else it hung up, which is no word of a server of ours
            self.heard()
        return data

    def upload(self, method: str, path: str, to: type[T], body: Body, *, key: str | None = None) -> T:
        """As `call`, with a body that is sent as it is made, and made again when it must be sent again."""
        return self.call(method, path, to, made=body, key=key)

    def _accepted(self, answer: Answer) -> Answer:
        try:
            if answer.head.status >= 300:
                self._raise_error(answer)
        except BaseException:  # also cancelled: a connection with half an answer on it is not used again
            answer.close()
            raise
        return answer

    def heard(self) -> None:
        """The server has said something."""
        self._heard_at = time.monotonic()
        self.met = True

    def check_alive(self) -> None:
        """Returns when the server is well; NodeUnreachable when it is silent to everybody.

        Calls share it: what another call has heard or found out counts.
        """
        asked = time.monotonic()
        while self._checking == os.getpid():
            sleep(_CHECK_POLL_S)
        if self._failed_at >= asked:
            raise self.unreachable("it does not answer")
        if time.monotonic() - self._heard_at < self.timing.patience_s:
            return
        self._checking = os.getpid()
        try:
            self._ask_health()
        except (Broken, TimeoutError, Garbage) as error:
            self._failed_at = time.monotonic()
            raise self.unreachable("it does not answer") from error
        finally:
            self._checking = 0

    def unreachable(self, why: str, cause: BaseException | None = None) -> NodeUnreachable:
        """The error for this server."""
        hint = advice(self.target, why, cause)
        return NodeUnreachable(f"no answer from {self.target.url}: {why}; {hint}", detail={"url": self.target.url})

    def close(self) -> None:
        """Let go of idle connections and the tunnel."""
        self.pool.close()
        if self._tunnel is not None:
            self._tunnel.close()

    def _send(self, data: bytes) -> Answer:
        while True:
            conn = self.pool.take() or self._connect()
            answer = Answer(self, conn)
            try:
                conn.send(data, self.timing.patience_s + self.timing.health_s)
                answer.start()
                return answer
            except Broken:
                answer.close()
                # A kept connection that the server closed at the moment we used it says nothing about the server.
                if not conn.used:
                    raise
            except TimeoutError as error:
                answer.close()
                raise self.unreachable("it does not read what is sent") from error
            except BaseException:  # also cancelled: a connection with half an answer on it is not used again
                answer.close()
                raise

    def _send_body(self, method: str, path: str, body: Body, key: str | None) -> Answer:
        head = http1.head(method, self.target.prefix + path, self._common, _headers(key, codec.MSGPACK), body.size)
        patience_s = self.timing.patience_s + self.timing.health_s
        # On a connection of its own: a kept one that the server has closed would be found out after much was sent.
        conn = self._connect()
        answer = Answer(self, conn)
        try:
            conn.send(head, patience_s)
            for piece in body.pieces():
                conn.send(piece if body.size is not None else http1.chunk(piece), patience_s)
                if not conn.idle():
                    # It has answered: no more of this is wanted, and the connection is in the middle of it.
                    answer.start()
                    answer.last()
                    return answer
            if body.size is None:
                conn.send(http1.LAST_CHUNK, patience_s)
            answer.start()
            return answer
        except TimeoutError as error:
            answer.close()
            raise self.unreachable("it does not read what is sent") from error
        except BaseException:  # also cancelled: a connection with half an answer on it is not used again
            answer.close()
            raise

    def _connect(self) -> Conn:
        try:
            return connect(self.target, self._tunnel, self.timing.connect_s)
        except TimeoutError as error:
            raise self.unreachable("connecting timed out") from error

    def _raise_error(self, answer: Answer) -> None:
        status = answer.head.status
        request_id = answer.head.headers.get(b"x-request-id", b"").decode("latin-1") or None
        data = answer.read()
        try:
            error = codec.decode_error(data, answer.head.media_type)
        except Garbage:
            if status in _PROXY_STATUS:
                raise Broken(f"a proxy answered {status}") from None
            raise
        error.request_id = error.request_id or request_id
        raise error

    def _ask_health(self) -> None:
        """Any answer at all will do; on a connection of its own, in bounded time."""
        end = time.monotonic() + self.timing.health_s
        conn = connect(self.target, self._tunnel, self.timing.health_s)
        try:
            data = request("GET", f"{self.target.prefix}/v1/health", self._common, {}, b"")
            conn.send(data, self.timing.health_s)
            response = Response()
            while response.head is None:
                response.feed(conn.recv(max(end - time.monotonic(), 0.001)))
        finally:
            conn.close()
        self.heard()

    def garbage(self, error: Garbage) -> NodeUnreachable | InvalidSpec:
        """The error for a server that does not speak our API, or for what is too much to be asked for at once."""
        if isinstance(error, TooMuch):
            way = "ask for parts of it (offset=), or take it as it comes: files.download(), or by iterating"
            return InvalidSpec(f"{error}, the most that is taken at once; {way}")
        url = self.target.url
        return NodeUnreachable(
            f"what answers at {url} is not a dsec server: {error}; check the URL", detail={"url": url}
        )


def _headers(key: str | None, accept: str) -> dict[str, str]:
    headers = {"Accept": codec.MSGPACK if accept == codec.MSGPACK else f"{accept}, {codec.MSGPACK}"}
    if key is not None:
        headers["Idempotency-Key"] = key
    return headers


def _tunnel(target: Target) -> Tunnel | None:
    if target.scheme != "ssh":
        return None
    # Imported here: what it needs costs a local command's start some 15 ms.
    from dsec.sdk.tunnel import Tunnel

    return Tunnel(target)


def _common_headers(target: Target, api_key: str | None) -> bytes:
    host = f"{target.host}:{target.port}" if target.scheme in ("http", "https") else "localhost"
    if ":" in target.host:
        host = f"[{target.host}]:{target.port}"
    lines = f"Host: {host}\r\nUser-Agent: dsec-sdk\r\n"
    if api_key:
        lines += f"Authorization: Bearer {api_key}\r\n"
    return lines.encode("latin-1")
