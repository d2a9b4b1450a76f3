"""asyncio connections and what else differs from the blocking client. The twin of `dsec.sdk._sync.net`."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

from dsec.sdk.http1 import Broken
from dsec.sdk.keywords import Awaited, E, called
from dsec.sdk.options import Tcp, Unix, address, tls_context, tune
from dsec.sdk.target import Target

if TYPE_CHECKING:
    from dsec.sdk.tunnel import Tunnel

# Above this we stop reading from the socket until the caller has taken what is there: back-pressure.
BUFFER_MAX_BYTES: Final = 256 * 1024
SEND_BYTES: Final = 256 * 1024
_KNOCK_S: Final = 0.005
_EACH_TASKS: Final = 64

T = TypeVar("T")
P = ParamSpec("P")

# For what one handle does for several tasks, one after the other.
AsyncLock = asyncio.Lock
AsyncCondition = asyncio.Condition


class AsyncConn(asyncio.Protocol):
    """One connection. `TimeoutError` means silence, `Broken` everything else that ends it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._transport: asyncio.Transport | None = None
        self._received: deque[bytes] = deque()
        self._waiting = 0  # bytes of it
        self._ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._full = False
        self.used = False

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._waiting += len(data)
        if self._waiting > BUFFER_MAX_BYTES and self._transport is not None:
            self._transport.pause_reading()
        _wake(self._reader)

    def eof_received(self) -> bool:
        self._ended = True
        _wake(self._reader)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._ended, self._error = True, error
        _wake(self._reader)
        _wake(self._writer)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        _wake(self._writer)

    # What the client calls.

    async def send(self, data: bytes, timeout_s: float) -> None:
        """All of it, or an error; each bit of progress starts the time anew."""
        for start in range(0, len(data), SEND_BYTES):
            if self._ended or self._transport is None:
                raise Broken(f"sending failed: {self._error or 'closed'}")
            # Not a slice of what is short: the common request goes out without a copy.
            self._transport.write(data if len(data) <= SEND_BYTES else data[start : start + SEND_BYTES])
            if self._full:
                self._writer = self._loop.create_future()
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._writer
                finally:
                    self._writer = None

    async def recv(self, timeout_s: float) -> bytes:
        """What has come; empty: the other side has closed."""
        if not self._received and not self._ended:
            self._reader = self._loop.create_future()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._reader
            finally:
                self._reader = None
        if not self._received and self._error is not None:
            raise Broken(f"receiving failed: {self._error}") from self._error
        data = self._received.popleft() if self._received else b""
        full = self._waiting > BUFFER_MAX_BYTES
        self._waiting -= len(data)
        if full and self._transport is not None and not self._ended and self._waiting <= BUFFER_MAX_BYTES:
            self._transport.resume_reading()
        return data

    def idle(self) -> bool:
        """Whether it belongs to this process and nothing, not even its end, has come on it."""
        return self._pid == os.getpid() and not self._ended and not self._received

    def close(self) -> None:
        """Let go of it."""
        # A loop that has ended cannot close its transports any more: collecting them does.
        if self._transport is not None and not self._loop.is_closed() and self._pid == os.getpid():
            self._transport.abort()


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


async def connect(target: Target, tunnel: Tunnel | None, timeout_s: float) -> AsyncConn:
    """A new connection. TimeoutError: no answer; Broken: refused."""
    where = await asyncio.to_thread(tunnel.ensure, timeout_s) if tunnel is not None else address(target)
    try:
        async with asyncio.timeout(timeout_s):
            return await (_connect_unix(where.path) if isinstance(where, Unix) else _connect_tcp(where))
    except TimeoutError:
        raise
    except OSError as error:
        raise Broken(str(error)) from error


async def _connect_unix(path: str) -> AsyncConn:
    # Connected here and not by the loop: asyncio takes the EAGAIN of a full backlog for "in progress" and goes on
    # with a socket that is not connected.
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError:
                await asyncio.sleep(_KNOCK_S)
        _, conn = await asyncio.get_running_loop().create_unix_connection(AsyncConn, sock=sock)
    except BaseException:  # also cancelled: it goes on, the socket does not
        sock.close()
        raise
    return conn


async def _connect_tcp(where: Tcp) -> AsyncConn:
    loop = asyncio.get_running_loop()
    context = tls_context() if where.tls else None
    transport, conn = await loop.create_connection(AsyncConn, where.host, where.port, ssl=context)
    sock = transport.get_extra_info("socket")
    if sock is not None:
        tune(sock)
    return conn


class AsyncPool:
    """Idle connections of each event loop, last in first out. A connection is only ever touched in its own loop."""

    MAX_IDLE: Final = 64

    def __init__(self) -> None:
        self._idle: dict[asyncio.AbstractEventLoop, deque[AsyncConn]] = {}

    def take(self) -> AsyncConn | None:
        """A connection that looks usable, or None."""
        idle = self._idle.get(asyncio.get_running_loop())
        while idle:
            conn = idle.pop()
            if conn.idle():
                return conn
            conn.close()
        return None

    def give(self, conn: AsyncConn) -> None:
        """A connection that can carry another request."""
        loop = asyncio.get_running_loop()
        idle = self._idle.get(loop)
        if idle is None:
            # A loop we have not seen: the time to forget those that have ended.
            for old in [known for known in tuple(self._idle) if known.is_closed()]:
                self._idle.pop(old, None)
            idle = self._idle.setdefault(loop, deque())
        if len(idle) < self.MAX_IDLE:
            idle.append(conn)
        else:
            conn.close()

    def close(self) -> None:
        """Close the idle ones of this loop; those of another are closed when it ends."""
        idle = self._idle.pop(asyncio.get_running_loop(), None)
        while idle:
            idle.pop().close()


def entered(function: Callable[P, Coroutine[Any, Any, E]]) -> Callable[P, Awaited[E]]:
    """A method whose result is entered, which `async with` may do without `await`: `explained` makes it so."""
    function.entered = True  # type: ignore[attr-defined]  # functions have attributes
    return cast(Callable[P, Awaited[E]], function)


async def notified(condition: asyncio.Condition, end: float | None) -> None:
    """Wait until somebody says that something has changed, or the time `end` has come."""
    try:
        async with asyncio.timeout(None if end is None else max(end - time.monotonic(), 0.0)):
            await condition.wait()
    except TimeoutError:
        return


async def sleep(seconds: float) -> None:
    """Wait."""
    await asyncio.sleep(seconds)


# asyncio holds tasks weakly; one that outlives its caller's cancellation is held here.
_finishing: set[asyncio.Future[object]] = set()


async def finish(work: Awaitable[object], timeout_s: float) -> None:
    """Carry out the work though the caller is being cancelled, and wait for it as long as that is allowed."""
    task: asyncio.Future[object] = asyncio.ensure_future(work)
    _finishing.add(task)
    task.add_done_callback(_finishing.discard)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(task)
    except (asyncio.CancelledError, TimeoutError):
        return


async def output(on_output: Callable[[int, bytes], Any], stream: int, data: bytes) -> None:
    """Hand output to the caller, who may be a coroutine function."""
    answer = called(on_output, stream, data)
    if hasattr(answer, "__await__"):
        await answer


async def each(work: Callable[[T], Awaitable[object]], items: Iterable[T]) -> list[BaseException]:
    """Do the work for every item, several at a time; the errors, when all are done."""
    limit = asyncio.Semaphore(_EACH_TASKS)

    async def one(item: T) -> None:
        async with limit:
            await work(item)

    results = await asyncio.gather(*(one(item) for item in items), return_exceptions=True)
    return [result for result in results if isinstance(result, BaseException)]
