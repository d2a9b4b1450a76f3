"""Who may ask: peers of the Unix socket by their uid, everybody else by a bearer token; and no web page."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Protocol

from dsec.model.errors import Denied, Unauthenticated
from dsec.node.store import write_whole

KEY_BYTES: Final = 32
NAME_MAX: Final = 64
SHOWN_MAX: Final = 100  # of a header that is refused
SHOWN_DIGITS: Final = 8  # of the hash of a key without a name
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_ucred = struct.Struct("3i")


class Guard(Protocol):
    """Decides about one request by its headers."""

    def check(self, headers: Mapping[bytes, bytes], peer: str) -> str:
        """Who asks, in a word or two; `peer` is the other end of the connection. Raises Unauthenticated."""
        ...


class PeerGuard:
    """A listener whose connections were checked when they were made (`peer_allowed`)."""

    def check(self, headers: Mapping[bytes, bytes], peer: str) -> str:
        return peer


class Pages:
    """Web pages, whose browser reaches all that its machine does: their requests are refused, unless they are ours.

    A browser says with each request that changes something, and with each WebSocket, from which page it is (`Origin`).
    What it only reads from another site it shows to no page; but a page may have its own name point here, and is of the
    same site then: the name it has asked for is in `Host`. A key that a page has guessed would change nothing of it,
    and a Unix socket that somebody has made a port of (`socat`) asks for none.
    """

    def __init__(self, origins: Collection[str] = (), *, names: bool = False) -> None:
        """`origins`: those that are ours; `names`: the listener can be reached by a name that is anybody's."""
        self._origins = frozenset(origin.encode() for origin in origins)
        self._hosts = frozenset(origin.partition(b"://")[2] for origin in self._origins)
        self._names = names

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises Denied."""
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() not in self._origins:
            raise _foreign("Origin", origin, "requests of web pages are refused")
        if self._names:
            host = headers.get(b"host")
            if host is not None and not self._ours(host.lower()):
                raise _foreign("Host", host, "a name that is not known may be any web page's")

    def _ours(self, host: bytes) -> bool:
        # What stands in most requests is an address: no name that somebody could point here.
        name = host.rpartition(b":")[0] if not host.endswith(b"]") and b":" in host else host
        if name == b"localhost" or host in self._hosts:
            return True
        try:
            ip_address(name.strip(b"[]").decode("latin-1"))
        except ValueError:
            return False
        return True


def _foreign(header: str, value: bytes, why: str) -> Denied:
    shown = value.decode("latin-1")[:SHOWN_MAX]
    return Denied(
        f"{header}: {shown}: {why}; the agent's option --origin names where pages and proxies that may ask are served",
        detail={"header": header},
    )


def peer_uid(sock: socket.socket) -> int:
    """Whose process is at the other end of a Unix socket."""
    _, uid, _ = _ucred.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _ucred.size))
    return int(uid)


def peer_allowed(uid: int) -> bool:
    """Whether that is root or our own user."""
    return uid in (0, os.geteuid())


class TokenGuard:
    """Bearer tokens. Only their hashes are on the disk: a key of 32 random bytes needs no slow hash."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """`names`: of each hash, to say who it was; it may be empty."""
        self._hashes = [value.encode() for value in names]
        self._names = list(names.values())

    def check(self, headers: Mapping[bytes, bytes], peer: str) -> str:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = hashlib.sha256(token.strip()).hexdigest().encode()
        # Every hash is compared, in constant time, whichever matches.
        matches = [hmac.compare_digest(given, known) for known in self._hashes]
        if scheme.lower() != b"bearer" or not any(matches):
            raise Unauthenticated("no valid key: send `Authorization: Bearer KEY` (the SDK takes DSEC_API_KEY)")
        at = matches.index(True)
        return f"key {self._names[at] or self._hashes[at].decode()[:SHOWN_DIGITS]}"


def load_tokens(path: Path, keep: Callable[[str], None] = lambda key: None) -> tuple[TokenGuard, str | None]:
    """The tokens of a file of sha256 hashes, one a line, each with a name behind a `#` if one likes.

    A missing file is made with one new key, which is returned, and given to `keep` before: only its hash is here.
    """
    made: str | None = None
    if not path.exists():
        made = secrets.token_urlsafe(KEY_BYTES)
        keep(made)
        write_whole(path, f"{hashlib.sha256(made.encode()).hexdigest()}\n".encode())
    lines = [line.partition("#") for line in path.read_text().splitlines()]
    names = {value.strip(): name.strip()[:NAME_MAX] for value, _, name in lines if value.strip()}
    for value in names:
        if not _HASH.match(value):
            raise ValueError(f"{path}: a line is not a sha256 hash (64 hex digits)")
    return TokenGuard(names), made
