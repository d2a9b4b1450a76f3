"""What stands for the world outside: a network namespace where every address can be bound, with servers in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self

import dsec
from tests.kit.lanes import runtime_binary

CLONE_NEWNET: Final = 0x40000000
_IPV6_FREEBIND: Final = 78
RESOLVER: Final = "20.0.0.53"
# One request, on a connection of its own; what the server said, or nothing.
GET = (
    "import socket, sys\n"
    "try:\n"
    " s = socket.create_connection((sys.argv[1], int(sys.argv[3])), 20)\n"
    " s.settimeout(20)\n"
    " s.sendall(b'GET / HTTP/1.1\\r\\nHost: %s\\r\\n\\r\\n' % sys.argv[2].encode())\n"
    " print(s.recv(4096).decode().rpartition('\\r\\n')[2].strip())\n"
    "except OSError as e:\n"
    " print(type(e).__name__)\n"
)
_libc = ctypes.CDLL(None, use_errno=True)

Handler = Callable[[socket.socket], None]


def cannot_steer() -> str:
    """Why connections of sandboxes cannot be steered here; empty: they can."""
    binary = runtime_binary()
    if os.geteuid() != 0 or binary is None:
        return "needs root and a built dsec-runtime"
    done = subprocess.run([binary, "net", "probe"], stderr=subprocess.PIPE, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


class World:
    """A namespace of its own, and what was asked in it."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self.path = Path(f"/proc/{self._holder.pid}/ns/net")
        here = Path("/proc/self/ns/net").stat().st_ino
        while self.path.stat().st_ino == here:
            assert self._holder.poll() is None
        self.before = ("nsenter", f"--net={self.path}")
        for line in (
            "ip link set lo up",
            "ip route add local default dev lo",
            "ip -6 route add local default dev lo",
        ):
            subprocess.run([*self.before, *line.split()], check=True)
        self.names: dict[str, list[str]] = {}
        self.asked: list[str] = []  # names, as they came to the resolver
        self.heard: list[bytes] = []  # all that came to it
        self.taken: list[tuple[str, int]] = []  # addresses of connections that came, with the port they came to
        self._sockets: list[socket.socket] = []

    def socket(self, family: int, kind: int, address: tuple[str, int]) -> socket.socket:
        """One that is bound in there."""
        found: queue.Queue[socket.socket | OSError] = queue.Queue()

        def inside() -> None:
            fd = os.open(self.path, os.O_RDONLY)
            try:
                if _libc.setns(fd, CLONE_NEWNET):  # of this thread only
                    raise OSError(ctypes.get_errno(), "setns")
                made = socket.socket(family, kind)
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:  # which asks for more than a route before it lets one bind
                    made.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
                made.bind(address)
                found.put(made)
            except OSError as error:
                found.put(error)
            finally:
                os.close(fd)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        got = found.get()
        if isinstance(got, OSError):
            raise got
        self._sockets.append(got)
        return got

    def serve(self, address: str, port: int, handler: Handler) -> None:
        """A server of TCP; each connection in a thread of its own."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = self.socket(family, socket.SOCK_STREAM, (address, port))
        listening.listen(256)

        def one(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                handler(connection)

        def loop() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    self.taken.append((address, port))
                    threading.Thread(target=one, args=(connection,), daemon=True).start()

        threading.Thread(target=loop, daemon=True).start()

    def resolve(self, **addresses: list[str]) -> None:
        """Names (with `_` for `.`) and their addresses."""
        self.names.update({name.replace("_", "."): found for name, found in addresses.items()})

    def serve_names(self) -> None:
        """The resolver that the node asks."""
        server = self.socket(socket.AF_INET, socket.SOCK_DGRAM, (RESOLVER, 53))

        def loop() -> None:
            with contextlib.suppress(OSError):
                while True:
                    question, peer = server.recvfrom(4096)
                    if not question:  # it was shut
                        return
                    self.heard.append(question)
                    server.sendto(self._answer(question), peer)

        threading.Thread(target=loop, daemon=True).start()

    def _answer(self, question: bytes) -> bytes:
        at, labels = 12, []
        while question[at]:
            labels.append(question[at + 1 : at + 1 + question[at]].decode())
            at += 1 + question[at]
        kind = struct.unpack(">H", question[at + 1 : at + 3])[0]
        name = ".".join(labels).lower()
        self.asked.append(name)
        family, number = (socket.AF_INET6, 28) if kind == 28 else (socket.AF_INET, 1)
        found = [a for a in self.names.get(name, []) if (":" in a) == (kind == 28)]
        records = b"".join(
            b"\xc0\x0c" + struct.pack(">HHIH", number, 1, 60, 16 if kind == 28 else 4) + socket.inet_pton(family, a)
            for a in found
        )
        flags = 0x8180 if name in self.names else 0x8183
        head = question[:2] + struct.pack(">HHHHH", flags, 1, len(found), 0, 0)
        return head + question[12 : at + 5] + records

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._holder.kill()
        self._holder.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def web(text: str) -> Handler:
    """A server of HTTP that says one thing, as often as it is asked on a connection."""

    def serve(connection: socket.socket) -> None:
        waiting = b""
        while True:
            while b"\r\n\r\n" not in waiting:
                data = connection.recv(65536)
                if not data:
                    return
                waiting += data
            _, _, waiting = waiting.partition(b"\r\n\r\n")
            body = text.encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)

    return serve


def echo(connection: socket.socket) -> None:
    """Says what it hears."""
    while data := connection.recv(65536):
        connection.sendall(data)


@contextlib.contextmanager
def world() -> Iterator[World]:
    """One with a resolver and these servers: allowed.example and other.example at 20.0.1.1 and 20.0.1.2 (HTTP and, at
    port 22, an echo), private.example at 10.1.1.1, below.wild.example."""
    with World() as made:
        made.serve_names()
        made.names = {
            "allowed.example": ["20.0.1.1", "2600::1"],
            "other.example": ["20.0.1.2"],
            "private.example": ["10.1.1.1"],
            "below.wild.example": ["20.0.1.3"],
            "mirror.example": ["20.0.1.4"],
        }
        for address in ("20.0.1.1", "20.0.1.2", "10.1.1.1", "20.0.1.3", "20.0.1.4", "2600::1"):
            made.serve(address, 80, web(f"this is {address}\n"))
            made.serve(address, 22, echo)
        yield made


def rule(**fields: Any) -> dict[str, Any]:
    """What is allowed."""
    return {"action": "allow", **fields}


def policy(*rules: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Of these rules."""
    return {"version": 1, "rules": list(rules), **fields}


def get(sbx: dsec.Sandbox, name: str, host: str | None = None, port: int = 80) -> str:
    """What a request from inside brings, to a name or an address: what the server says, or the name of an error."""
    return sbx.run(["python3", "-c", GET, name, host or name, str(port)]).stdout.strip()
