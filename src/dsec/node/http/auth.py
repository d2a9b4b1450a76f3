"""Who may ask: peers of the Unix socket by their uid, everybody else by a bearer token."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from dsec.model.errors import Unauthenticated

KEY_BYTES: Final = 32
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_ucred = struct.Struct("3i")


class Guard(Protocol):
    """Decides about one request by its headers."""

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises Unauthenticated."""
        ...


class PeerGuard:
    """A listener whose connections were checked when they were made (`peer_allowed`)."""

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        pass


def peer_allowed(sock: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is root's or our own user's."""
    _, uid, _ = _ucred.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _ucred.size))
    return uid in (0, os.geteuid())


class TokenGuard:
    """Bearer tokens. Only their hashes are on the disk: a key of 32 random bytes needs no slow hash."""

    def __init__(self, hashes: list[str]) -> None:
        self._hashes = [value.encode() for value in hashes]

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = hashlib.sha256(token.strip()).hexdigest().encode()
        # Every hash is compared, in constant time, whichever matches.
        matches = [hmac.compare_digest(given, known) for known in self._hashes]
        if scheme.lower() != b"bearer" or not any(matches):
            raise Unauthenticated("no valid key: send `Authorization: Bearer KEY` (the SDK takes DSEC_API_KEY)")


def load_tokens(path: Path) -> tuple[TokenGuard, str | None]:
    """The tokens of a file of sha256 hashes, one a line. A missing file is made with one new key, which is returned."""
    made: str | None = None
    if not path.exists():
        made = secrets.token_urlsafe(KEY_BYTES)
        line = f"{hashlib.sha256(made.encode()).hexdigest()}\n"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as opened:
            opened.write(line)
            opened.flush()
            os.fsync(opened.fileno())
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    hashes = [line for line in lines if line]
    for value in hashes:
        if not _HASH.match(value):
            raise ValueError(f"{path}: a line is not a sha256 hash (64 hex digits)")
    return TokenGuard(hashes), made
