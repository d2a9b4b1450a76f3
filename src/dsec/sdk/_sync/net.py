"""Blocking connections and what else differs from asyncio. Written by hand; the twin of `dsec.sdk._async.net`."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from dsec.sdk.http1 import Broken
from dsec.sdk.keywords import called
from dsec.sdk.options import Unix, address, tls_context, tune
from dsec.sdk.target import Target

if TYPE_CHECKING:
    from dsec.sdk.tunnel import Tunnel

RECV_BYTES: Final = 256 * 1024
# A full backlog of a Unix socket answers at once; this is how often we knock.
_KNOCK_S: Final = 0.005
_EACH_THREADS: Final = 16

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

# For what one handle does for several threads, one after the other.
Lock = threading.Lock
Condition = threading.Condition


class _Socket(Protocol):
    def send(self, data: memoryview, /) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def settimeout(self, value: float | None, /) -> None: ...
    def fileno(self) -> int: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class Conn:
    """One connection. `TimeoutError` means silence, `Broken` everything else that ends it."""

    __slots__ = ("_pid", "_sock", "used")

    def __init__(self, sock: _Socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self.used = False

    def send(self, data: bytes, timeout_s: float) -> None:
        """All of it, or an error; each bit of progress starts the time anew."""
        view = memoryview(data)
        try:
            self._sock.settimeout(timeout_s)
            while view:
                view = view[self._sock.send(view) :]
        except TimeoutError:
            raise
        except OSError as error:
            raise Broken(f"sending failed: {error}") from error

    def recv(self, timeout_s: float) -> bytes:
        """What has come; empty: the other side has closed."""
        try:
            self._sock.settimeout(timeout_s)
            return self._sock.recv(RECV_BYTES)
        except TimeoutError:
            raise
        except OSError as error:
            raise Broken(f"receiving failed: {error}") from error

    def idle(self) -> bool:
        """Whether it is ours (not a parent process's) and nothing, not even its end, has come on it."""
        if self._pid != os.getpid():
            return False
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Let go of it; a thread that waits for it is told of its end. A parent process keeps its own."""
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):  # it is closed already, or by the other side
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def connect(target: Target, tunnel: Tunnel | None, timeout_s: float) -> Conn:
    """A new connection. TimeoutError: no answer; Broken: refused."""
    where = tunnel.ensure(timeout_s) if tunnel is not None else address(target)
    try:
        if isinstance(where, Unix):
            return Conn(_connect_unix(where.path, timeout_s))
        sock = socket.create_connection((where.host, where.port), timeout_s)
        tune(sock)
        if not where.tls:
            return Conn(sock)
        try:
            return Conn(tls_context().wrap_socket(sock, server_hostname=where.host))
        except BaseException:  # KeyboardInterrupt, too: it goes on, the socket does not
            sock.close()
            raise
    except TimeoutError:
        raise
    except OSError as error:
        raise Broken(str(error)) from error


def _connect_unix(path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        end = time.monotonic() + timeout_s
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    raise TimeoutError(f"{path}: nobody accepts") from error
                time.sleep(_KNOCK_S)
    except BaseException:  # KeyboardInterrupt, too: it goes on, the socket does not
        sock.close()
        raise


class Pool:
    """Idle connections, last in first out. Without a lock, so that a fork at any moment leaves it usable."""

    MAX_IDLE: Final = 64

    def __init__(self) -> None:
        self._idle: deque[Conn] = deque()

    def take(self) -> Conn | None:
        """A connection that looks usable, or None."""
        while True:
            try:
                conn = self._idle.pop()
            except IndexError:
                return None
            if conn.idle():
                return conn
            conn.close()

    def give(self, conn: Conn) -> None:
        """A connection that can carry another request."""
        if len(self._idle) < self.MAX_IDLE:
            self._idle.append(conn)
        else:
            conn.close()

    def close(self) -> None:
        """Close the idle ones."""
        while self._idle:
            self._idle.pop().close()


def entered(function: F) -> F:
    """A method whose result is entered (here there is nothing to await)."""
    return function


def notified(condition: threading.Condition, end: float | None) -> None:
    """Wait until somebody says that something has changed, or the time `end` has come."""
    condition.wait(None if end is None else max(end - time.monotonic(), 0.0))


def sleep(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def finish(done: object, timeout_s: float) -> None:
    """Something that is to be carried out though the caller is being cancelled (here: it has been)."""


def output(on_output: Callable[[int, bytes], Any], stream: int, data: bytes) -> None:
    """Hand output to the caller."""
    answer = called(on_output, stream, data)
    if hasattr(answer, "__await__"):
        if hasattr(answer, "close"):
            answer.close()
        raise TypeError("on_output of the blocking client is a plain function; coroutines go with AsyncClient")


def each(work: Callable[[T], object], items: Iterable[T]) -> list[BaseException]:
    """Do the work for every item, several at a time; the errors, when all are done. Its threads end with the call."""
    todo = deque(items)
    errors: list[BaseException] = []

    def worker() -> None:
        while True:
            try:
                item = todo.popleft()
            except IndexError:
                return
            try:
                work(item)
            except Exception as error:  # noqa: BLE001 - a thread's edge: handed to the caller
                errors.append(error)

    threads = [threading.Thread(target=worker) for _ in range(min(_EACH_THREADS, len(todo)) - 1)]
    for thread in threads:
        thread.start()
    worker()
    for thread in threads:
        thread.join()
    return errors
