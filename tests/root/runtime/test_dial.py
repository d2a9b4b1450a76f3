"""Ports of a sandbox: the operation `dial` hands a connection to one over."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dsec.model.errors import InvalidSpec, InvalidState, NodeFull, NotFound, SandboxLost, Unavailable
from dsec.wire.dial import dial
from tests.kit.rtclient import Client, Node, RuntimeFault
from tests.kit.rtnode import create, needs

pytestmark = [*needs, pytest.mark.one_guest]

LIBC = ctypes.CDLL(None, use_errno=True)


def inside(c: Client, box: str, make: Callable[[], socket.socket]) -> socket.socket:
    """A socket made in a sandbox's network, as a program of it would make it."""
    pid = c.call("sandbox.get", id=box)["init_pid"]

    def made() -> socket.socket:
        fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            assert LIBC.setns(fd, 0) == 0, os.strerror(ctypes.get_errno())
            return make()
        finally:
            os.close(fd)

    with ThreadPoolExecutor(1) as thread:  # it does not come back
        return thread.submit(made).result()


@contextlib.contextmanager
def echo(c: Client, box: str, address: str = "127.0.0.1") -> Iterator[None]:
    """What listens inside, and says who has come and what was said."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, peer = server.accept()
                with connection:
                    connection.sendall(peer[0].encode() + b" " + connection.recv(99))

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = inside(c, box, lambda: socket.create_server((address, 8000), family=family))
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        server.close()


def called(node: Node, box: str, port: int = 8000) -> socket.socket:
    return asyncio.run(dial(node.socket, box, port))


def talk(node: Node, box: str) -> bytes:
    with called(node, box) as sock:
        assert os.get_blocking(sock.fileno()) is False and os.get_inheritable(sock.fileno()) is False
        sock.settimeout(60)
        sock.sendall(b"hello")
        got = b""
        while data := sock.recv(99):
            got += data
        return got


@pytest.mark.parametrize(("address", "peer"), [("127.0.0.1", b"127.0.0.1"), ("::1", b"::1"), ("0.0.0.0", b"127.0.0.1")])
def test_a_connection_to_what_listens_inside(shared: Node, box: tuple[Client, str], address: str, peer: bytes) -> None:
    c, name = box
    with echo(c, name, address):
        assert talk(shared, name) == peer + b" hello"
        assert talk(shared, name) == peer + b" hello"


def test_each_has_its_own_loopback_and_the_node_has_another(node: Node) -> None:
    c = node.client()
    create(c, "a")
    create(c, "b")
    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]
        for name in ("a", "b"):
            with pytest.raises(InvalidState, match=f"port {port} of the sandbox: nothing listens on it"):
                called(node, name, port)
    with echo(c, "a"):
        assert talk(node, "a") == b"127.0.0.1 hello"
        with pytest.raises(InvalidState):
            called(node, "b")
    assert outside.fileno() == -1


def test_who_is_not_there_and_what_is_no_port(shared: Node, box: tuple[Client, str]) -> None:
    with pytest.raises(NotFound):
        called(shared, "none")
    for port in (0, 65536, -1):
        with pytest.raises(InvalidSpec):
            called(shared, box[1], port)
    with shared.client() as c:
        # With something else on the connection it stays what it is.
        c.send("sandbox.wait", {"id": box[1]})
        with pytest.raises(RuntimeFault) as busy:
            c.call("dial", sandbox=box[1], port=1)
        assert busy.value.code == "bad_request" and busy.value.detail["field"] == "op"
        assert c.call("sandbox.get", id=box[1])["state"] == "running"


def test_a_full_queue_is_told_and_holds_up_nobody_else(shared: Node, box: tuple[Client, str]) -> None:
    """A listener that accepts nothing, and has all the connections that it may have."""
    c, name = box
    server = inside(c, name, lambda: socket.create_server(("127.0.0.1", 8000), backlog=1))

    async def dialled() -> list[Any]:
        all_of_them = asyncio.gather(*(dial(shared.socket, name, 8000) for _ in range(5)), return_exceptions=True)
        await asyncio.sleep(0.1)
        with shared.client() as other:  # the event loop does not wait
            other.call("sandbox.get", id=name)
        return await all_of_them

    found = asyncio.run(dialled())
    made = [one for one in found if isinstance(one, socket.socket)]
    errors = [one for one in found if isinstance(one, Exception)]
    for sock in (server, *made):
        sock.close()
    assert made and errors and all("accepts nothing" in str(error) for error in errors), found
    assert {type(error) for error in errors} == {Unavailable}


def test_only_so_many_are_under_way(shared: Node, box: tuple[Client, str]) -> None:
    """Each is a thread; what there is no room for is told at once, and there is room again."""
    c, name = box
    server = inside(c, name, lambda: socket.create_server(("127.0.0.1", 8000), backlog=1))

    async def dialled() -> list[Any]:
        waves = []
        for _ in range(6):  # of connections to the runtime there are not so many at once either
            waves += [asyncio.ensure_future(dial(shared.socket, name, 8000)) for _ in range(50)]
            await asyncio.sleep(0.2)
        return await asyncio.gather(*waves, return_exceptions=True)

    found = asyncio.run(dialled())
    for sock in (server, *(one for one in found if isinstance(one, socket.socket))):
        sock.close()
    full = [one for one in found if isinstance(one, NodeFull)]
    assert 0 < len(full) <= 300 - 256, found
    with echo(c, name):
        assert talk(shared, name) == b"127.0.0.1 hello"


def test_the_runtime_may_die_while_it_lasts(node: Node) -> None:
    c = node.client()
    create(c, "a")
    with echo(c, "a"):
        with called(node, "a") as sock:
            node.kill_runtime()
            sock.settimeout(60)
            sock.sendall(b"still")
            assert sock.recv(99) == b"127.0.0.1 still"
        assert talk(node, "a") == b"127.0.0.1 hello"
    with node.client() as again:
        again.call("sandbox.stop", id="a", grace_ms=0)
    with pytest.raises((SandboxLost, NotFound)):
        called(node, "a")
