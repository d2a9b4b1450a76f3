"""The control connection to a node's process for sandboxes' connections (docs/reference/net-control.md)."""

from __future__ import annotations

import array
import asyncio
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

PROTOCOL: Final = 1
# Longer bodies travel in a memfd.
INLINE_MAX: Final = 48 * 1024
PACKET_MAX: Final = 64 * 1024
BODY_MAX: Final = 16 * 1024 * 1024
_FDS_MAX: Final = 4
# For one answer: whoever does not give it has hung or died.
ANSWER_S: Final = 20.0
_TURNS: Final = 64  # packets of one wake-up

_encode = msgspec.msgpack.Encoder().encode


class Verdict(msgspec.Struct, frozen=True):
    """One decision about a connection or a question for a name."""

    at_ns: int
    sandbox: str
    kind: Literal["connect", "dns", "cut", "dial"]
    allow: bool
    rule: str | None = None
    why: str | None = None
    name: str | None = None
    address: str | None = None
    port: int | None = None


class Counters(msgspec.Struct, frozen=True):
    """Of one sandbox; `hits` by rule since its table came."""

    connections: int = 0
    sent: int = 0
    received: int = 0
    hits: list[tuple[str, int]] = []
    unmatched: int = 0


class Said(msgspec.Struct, frozen=True):
    """What comes over the connection: an answer, or (without `id`) verdicts."""

    id: int | None = None
    error: str | None = None
    status: Counters | None = None
    sandboxes: list[str] = []
    events: list[Verdict] = []
    dropped: dict[str, int] = {}


_decode = msgspec.msgpack.Decoder(Said).decode


class Refused(Exception):
    """The process did not do what it was asked; its words."""


class Gone(ConnectionError):
    """The connection has ended, with the process or without it. What was under way may have been done."""


def _body(sock: socket.socket) -> bytes:
    """The body of one message. Raises OSError for what is none, and at the end."""
    packet, fds, _, _ = socket.recv_fds(sock, PACKET_MAX, _FDS_MAX)
    try:
        if packet[:1] == b"\1" and fds:
            return os.pread(fds[-1], BODY_MAX, 0)
        if packet[:1] != b"\0":
            raise ConnectionError("no message")
        return packet[1:]
    finally:
        for fd in fds:
            os.close(fd)


class Control:
    """One connection. `told` gets verdicts, and what was dropped by sandbox; `over` is called once it has ended."""

    def __init__(
        self, path: Path, told: Callable[[list[Verdict], dict[str, int]], None], over: Callable[[], None]
    ) -> None:
        self._told = told
        self._over = over
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Said]] = {}
        self._sending = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(os.fspath(path))
        except OSError:
            self._socket.close()
            raise
        self.closed = False
        self._loop.add_reader(self._socket, self._readable)

    async def ask(self, op: str, **args: Any) -> Said:
        """The answer to a request. Raises Refused, and Gone when none will come."""
        number = next(self._ids)
        future: asyncio.Future[Said] = self._loop.create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._send(_encode({"id": number, "op": op, **args}))
                answer = await future
        except TimeoutError:
            self.close()
            raise Gone("the process for connections does not answer") from None
        finally:
            self._waiting.pop(number, None)
        if answer.error is not None:
            raise Refused(answer.error)
        return answer

    async def _send(self, body: bytes) -> None:
        async with self._sending:
            while True:
                if self.closed:
                    raise Gone("the process for connections is gone")
                try:
                    self._packet(body)
                except BlockingIOError:
                    await self._writable()
                except OSError as error:
                    self.close()
                    raise Gone(f"the process for connections is gone: {error}") from error
                else:
                    return

    def _packet(self, body: bytes) -> None:
        if len(body) <= INLINE_MAX:
            self._socket.send(b"\0" + body)
            return
        with os.fdopen(os.memfd_create("dsec-table"), "w+b") as file:
            file.write(body)
            file.flush()
            file.seek(0)
            right = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()]))
            self._socket.sendmsg([b"\1"], [right])

    async def _writable(self) -> None:
        ready = self._loop.create_future()
        self._loop.add_writer(self._socket, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            if not self.closed:
                self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        for _ in range(_TURNS):
            try:
                said = _decode(_body(self._socket))
            except BlockingIOError:
                return
            except (OSError, msgspec.MsgspecError):
                self.close()
                return
            if said.id is None:
                self._told(said.events, said.dropped)
            elif (future := self._waiting.get(said.id)) is not None and not future.done():
                future.set_result(said)

    def close(self) -> None:
        """Nothing more comes; what waits for an answer fails."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Gone("the process for connections is gone"))
        self._over()
