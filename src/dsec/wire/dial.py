"""A connection to a port of a sandbox, which the runtime makes and hands over as a descriptor."""

from __future__ import annotations

import array
import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Final

import msgspec

from dsec.model.errors import DsecError, InvalidState, Unavailable
from dsec.wire import faults, frames
from dsec.wire import values as v
from dsec.wire.knock import connect

# The runtime waits 5 s for each of the two addresses of a listener that takes nothing.
DEADLINE_S: Final = 15.0
_ANSWER_MAX_BYTES: Final = 64 * 1024
_decode: Final = msgspec.msgpack.Decoder(v.Answer).decode


async def dial(path: Path, sandbox_id: str, port: int) -> socket.socket:
    """A connected TCP socket, non-blocking, to what listens on that port of the sandbox's loopback.

    Raises InvalidState: nothing listens there; Unavailable: what listens accepts nothing; SandboxLost; NotFound.
    """
    sock = await connect(path)
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await _Question(sock, sandbox_id, port).ask()
    except TimeoutError:
        raise Unavailable(f"the runtime made no connection within {DEADLINE_S:g} s", sandbox_id=sandbox_id) from None
    except OSError as error:
        raise Unavailable(f"the runtime's connection broke: {error}", sandbox_id=sandbox_id) from error
    finally:
        sock.close()


class _Question:
    def __init__(self, sock: socket.socket, sandbox_id: str, port: int) -> None:
        self._sock = sock
        self._sandbox_id = sandbox_id
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()
        self._fds: list[int] = []

    async def ask(self) -> socket.socket:
        try:
            await self._one(1, "hello", v.HelloArgs())
            await self._one(2, "dial", {"sandbox": self._sandbox_id, "port": self._port})
            if len(self._fds) != 1:
                raise Unavailable(f"the runtime gave {len(self._fds)} descriptors for a connection")
            found = socket.socket(fileno=self._fds.pop())
        finally:
            for fd in self._fds:
                with contextlib.suppress(OSError):
                    socket.close(fd)
        found.setblocking(False)
        return found

    async def _one(self, number: int, op: str, args: object) -> None:
        await self._loop.sock_sendall(self._sock, frames.encode(v.Request(number, op, args)))
        size = int.from_bytes(await self._exactly(frames.HEADER_BYTES), "big")
        if size > _ANSWER_MAX_BYTES:
            raise Unavailable(f"the runtime answered with a frame of {size} bytes")
        answer = _decode(await self._exactly(size))
        if answer.err is not None:
            raise self._error(answer.err, op)

    def _error(self, error: v.WireError, op: str) -> DsecError:
        kind = {"conflict": InvalidState, "deadline": Unavailable}.get(error.code) if "port" in error.detail else None
        if kind is None:
            return faults.translate(error, op=op, sandbox_id=self._sandbox_id)
        # It may listen, or accept, in a moment.
        return kind(error.message, detail={"port": self._port}, retry="later", sandbox_id=self._sandbox_id)

    async def _exactly(self, count: int) -> bytes:
        while len(self._data) < count:
            await self._receive()
        data = bytes(self._data[:count])
        del self._data[:count]
        return data

    async def _receive(self) -> None:
        while True:
            try:
                data, aside, *_ = self._sock.recvmsg(_ANSWER_MAX_BYTES, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                await self._readable()
        for level, kind, content in aside:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds += fds
        if not data:
            raise Unavailable("the runtime closed the connection", sandbox_id=self._sandbox_id)
        self._data += data

    async def _readable(self) -> None:
        ready = asyncio.Event()
        self._loop.add_reader(self._sock, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_reader(self._sock)
