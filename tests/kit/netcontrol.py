"""A synchronous client of the process for sandboxes' connections, for tests."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any, Self

import msgspec

_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(dict[str, Any]).decode
PATIENCE_S = 30.0


class Control:
    """One connection; waits for the process if it is not there yet."""

    def __init__(self, run_dir: Path) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.sock.settimeout(PATIENCE_S)
            try:
                self.sock.connect(os.fspath(run_dir / "net.sock"))
            except OSError:
                self.sock.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
                continue
            return

    def ask(self, op: str, **args: Any) -> dict[str, Any]:
        self.sock.send(b"\0" + _ENCODE({"id": 1, "op": op, **args}))
        packet = self.sock.recv(1 << 16)
        if not packet:
            raise ConnectionError("the process is gone")
        return _DECODE(packet[1:])

    def pid(self) -> int:
        """Of the process."""
        found = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(found[:4], "little")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()


def table(*rules: dict[str, Any], generation: int = 1, connections: int = 64) -> dict[str, Any]:
    """A table of these rules."""
    return {"format": 1, "generation": generation, "connections": connections, "rules": list(rules)}
