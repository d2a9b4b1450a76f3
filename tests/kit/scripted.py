"""A server that does what a test says, byte by byte: for what a well-behaved one never does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

MSGPACK = "application/msgpack"
SEQUENCE = "application/vnd.dsec.msgpack-seq"


@dataclass
class Request:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str | None:
        """Its idempotency key."""
        return self.headers.get("idempotency-key")

    def value(self) -> Any:
        """The body decoded."""
        return msgspec.msgpack.decode(self.body)


class Wire:
    """The server's side of one connection."""

    def __init__(self, sock: socket.socket, closed: threading.Event) -> None:
        self.sock = sock
        self.closed = closed

    def raw(self, data: bytes) -> None:
        """These bytes."""
        self.sock.sendall(data)

    def answer(self, value: object, status: int = 200, media: str = MSGPACK, extra: str = "") -> None:
        """A whole answer."""
        body = value if isinstance(value, bytes) else msgspec.msgpack.encode(value)
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {media}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        self.raw(head.encode() + body)

    def error(self, code: str, message: str, status: int, **detail: object) -> None:
        """An error as the API sends it."""
        self.answer({"code": code, "message": message, "detail": detail}, status)

    def stream(self) -> None:
        """The head of a stream."""
        self.raw(f"HTTP/1.1 200 OK\r\nContent-Type: {SEQUENCE}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())

    def item(self, value: object) -> None:
        """One item of it, in a chunk of its own."""
        data = msgspec.msgpack.encode(value)
        data = len(data).to_bytes(4, "big") + data
        self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def end(self) -> None:
        """The end of it."""
        self.raw(b"0\r\n\r\n")

    def hang(self) -> None:
        """Nothing, until the test is over or the client leaves."""
        self.sock.settimeout(0.02)
        while not self.closed.is_set():
            try:
                if not self.sock.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return

    def drop(self) -> None:
        """End the connection."""
        raise ConnectionAbortedError


Script = Callable[[Request, Wire], None]


class Server:
    """Listens on a Unix socket (or a TCP port) and hands every request to the script."""

    def __init__(self, path: Path | None, script: Script) -> None:
        self.path = path
        self.script = script
        self.requests: list[Request] = []
        self.connections = 0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listen()

    def _listen(self) -> None:
        if self.path is not None:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(str(self.path))
        else:
            self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.listen(64)
        self.listener.settimeout(0.02)
        thread = threading.Thread(target=self._accept, args=(self.listener,))
        thread.start()
        self._threads.append(thread)

    @property
    def url(self) -> str:
        """Where it listens."""
        if self.path is not None:
            return f"unix://{self.path}"
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._open.add(sock)
            sock.settimeout(None)
            thread = threading.Thread(target=self._serve, args=(sock,))
            thread.start()
            self._threads.append(thread)

    def _serve(self, sock: socket.socket) -> None:
        wire = Wire(sock, self._closed)
        try:
            buffer = b""
            while True:
                while b"\r\n\r\n" not in buffer:
                    data = sock.recv(65536)
                    if not data:
                        return
                    buffer += data
                head, _, buffer = buffer.partition(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines[1:])}
                size = int(headers.get("content-length", 0))
                while len(buffer) < size:
                    buffer += sock.recv(1 << 20)
                request = Request(method, path, headers, buffer[:size])
                buffer = buffer[size:]
                with self._lock:
                    self.requests.append(request)
                self.script(request, wire)
        except OSError:
            pass
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def away(self) -> None:
        """Stop listening and break every connection, as a killed process does."""
        self.listener.close()
        if self.path is not None:
            self.path.unlink()
        with self._lock:
            for sock in self._open:
                sock.shutdown(socket.SHUT_RDWR)

    def back(self) -> None:
        """Listen again."""
        self._listen()

    def close(self) -> None:
        """End it and its threads."""
        self._closed.set()
        self.listener.close()
        with self._lock:
            for sock in self._open:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
        for thread in self._threads:
            thread.join()
