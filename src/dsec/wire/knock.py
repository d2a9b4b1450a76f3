"""A connection of one's own to the runtime, for a call that takes it over."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Final

from dsec.model.errors import Unavailable

_KNOCK_S: Final = 0.005


async def connect(path: Path) -> socket.socket:
    """A connected, non-blocking socket. Unavailable: nobody listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    try:
        while True:
            try:
                sock.connect(str(path))
                return sock
            except BlockingIOError:  # its backlog is full
                await asyncio.sleep(_KNOCK_S)
            except OSError as error:
                raise Unavailable(f"the runtime at {path} cannot be reached: {error}") from error
    except BaseException:  # also cancelled
        sock.close()
        raise
