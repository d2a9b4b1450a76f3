"""A proxy before a node's socket that cuts connections after so many bytes, wherever that is."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Self


class Cutting:
    """Each connection is cut after the next number of `budgets`, both ways together; when they are used up, none is."""

    def __init__(self, path: Path, target: str, budgets: Iterable[int]) -> None:
        self.url = f"unix://{path}"
        self.cuts = 0
        self._path = str(path)
        self._target = target
        self._budgets = iter(budgets)
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(self._target)
            with self._lock:
                left = next(self._budgets, None)
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    cut = left is not None and len(data) >= left
                    (server if ready is client else client).sendall(data[:left] if cut else data)
                    if cut:
                        self.cuts += 1
                        return
                    left = None if left is None else left - len(data)
