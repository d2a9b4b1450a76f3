"""The server side of `runtime.sock`, scripted: for what the real runtime does only when it dies at the right moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from dsec.wire.frames import Splitter

Handler = Callable[["Session", int, dict[str, Any]], Awaitable[None]]


class Session:
    """One connection of a client."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    def send(self, **fields: Any) -> None:
        body = msgspec.msgpack.encode(fields)
        self.writer.write(len(body).to_bytes(4, "big") + body)

    def raw(self, data: bytes) -> None:
        self.writer.write(data)

    def drop(self) -> None:
        self.writer.close()


class ScriptedRuntime:
    """Answers operations with handlers; what has none is left unanswered."""

    def __init__(self, path: Path, instance: str = "one") -> None:
        self.path = path
        self.instance = instance
        self.handlers: dict[str, Handler] = {}
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.sessions: list[Session] = []
        self._server: asyncio.Server | None = None

    def on(self, op: str) -> Callable[[Handler], Handler]:
        def register(handler: Handler) -> Handler:
            self.handlers[op] = handler
            return handler

        return register

    def count(self, op: str) -> int:
        return sum(1 for name, _ in self.seen if name == op)

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        """As when the keeper is gone: nobody listens."""
        assert self._server is not None
        self._server.close()
        self.drop()
        self.path.unlink(missing_ok=True)

    def drop(self) -> None:
        """As when the runtime is killed: all connections break."""
        for session in self.sessions:
            session.drop()
        self.sessions.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = Session(writer)
        self.sessions.append(session)
        splitter = Splitter()
        while data := await reader.read(1 << 16):
            splitter.feed(data)
            while (body := splitter.next()) is not None:
                await self._handle(session, msgspec.msgpack.decode(body))

    async def _handle(self, session: Session, request: dict[str, Any]) -> None:
        op, args = request["op"], request["args"]
        self.seen.append((op, args))
        if op == "hello":
            ok = {"protocol": 1, "version": "test", "pid": 1, "instance": self.instance, "binary": ""}
            session.send(id=request["id"], ok=ok)
        elif (handler := self.handlers.get(op)) is not None:
            await handler(session, request["id"], args)


def run_result(run: str, out: bytes = b"", **fields: Any) -> dict[str, Any]:
    """A RunResult as the runtime sends it."""
    stream = {"total": len(out), "head": out, "tail": b"", "dropped": 0}
    empty = {"total": 0, "head": b"", "tail": b"", "dropped": 0}
    base = {
        "run": run,
        "exit_code": 0,
        "signal": None,
        "cause": "exited",
        "limits_hit": [],
        "started_ns": 1,
        "duration_ns": 1,
        "streams": [stream, empty],
        "usage": {"user_us": 1, "system_us": 1, "max_rss_bytes": 1, "memory_peak_bytes": 1},
        "leftover": 0,
    }
    return base | fields
