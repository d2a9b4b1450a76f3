"""A small synchronous client of a file helper, over the runtime's operation `files`."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.kit.rtclient import Client, Frame, RuntimeFault

DATA: Final = 1 << 31
PIECE: Final = 256 << 10


class Files(Client):
    """A connection that is a helper's."""

    def __init__(
        self,
        path: Path,
        sandbox: str,
        *,
        user: str = "root",
        cwd: bytes = b"/",
        diff: bool = False,
        timeout_s: float = 60,
    ):
        super().__init__(path, timeout_s=timeout_s)
        try:
            self.call("files", sandbox=sandbox, user=user, cwd=cwd, diff=diff)
        except BaseException:  # also interrupted: nobody would close it
            self.close()
            raise

    def data(self, piece: bytes) -> None:
        self.sock.sendall(struct.pack(">I", len(piece) | DATA) + piece)

    def upload(self, op: str, pieces: Iterable[bytes], **args: Any) -> Frame:
        """A request with data frames; its answer."""
        number = self.send(op, args)
        for piece in pieces:
            self.data(piece)
        self.data(b"")
        return self.wait(number)

    def write(self, path: bytes, data: bytes, **args: Any) -> Frame:
        pieces = (data[at : at + PIECE] for at in range(0, len(data), PIECE))
        return self.upload("write", pieces, path=path, **args)

    def download(self, op: str, **args: Any) -> tuple[bytes, Frame]:
        """All data of a request, and its answer."""
        number = self.send(op, args)
        out = bytearray()
        while True:
            (head,) = struct.unpack(">I", self._exactly(4))
            body = self._exactly(head & ~DATA)
            if head & DATA:
                out += body
                continue
            frame = msgspec.msgpack.decode(body)
            assert frame["id"] == number
            if "err" in frame:
                raise RuntimeFault(frame["err"])
            if "ok" in frame:
                return bytes(out), frame["ok"]

    def read(self, path: bytes) -> bytes:
        return self.download("read", path=path)[0]

    def _exactly(self, count: int) -> bytes:
        got = self._file.read(count)
        if len(got) < count:
            raise ConnectionError("the helper closed the connection")
        return got
