"""Socket options and addresses both clients use."""

from __future__ import annotations

import socket
from functools import cache
from typing import TYPE_CHECKING, Final

import msgspec

from dsec.sdk.target import Target

if TYPE_CHECKING:
    import ssl

# The kernel finds a dead peer on its own: first probe after 10 s, then every 5 s, three times; the same for data that
# is not acknowledged. Without it a run that prints nothing for an hour would never learn that its peer is gone.
_KEEPALIVE_IDLE_S: Final = 10
_KEEPALIVE_INTERVAL_S: Final = 5
_KEEPALIVE_COUNT: Final = 3
_USER_TIMEOUT_MS: Final = 25_000


class Unix(msgspec.Struct, frozen=True):
    """A Unix socket's path."""

    path: str


class Tcp(msgspec.Struct, frozen=True):
    """A host and port, with or without TLS."""

    host: str
    port: int
    tls: bool


def address(target: Target) -> Unix | Tcp:
    """What to connect to."""
    if target.scheme == "unix":
        return Unix(target.path)
    return Tcp(target.host, target.port, target.scheme == "https")


def tune(sock: socket.socket) -> None:
    """Small messages at once; a dead peer is found."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", _KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", _USER_TIMEOUT_MS),
    ):
        # Some systems a client runs on (macOS) lack some of them.
        if option := getattr(socket, name, None):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


@cache
def tls_context() -> ssl.SSLContext:
    """Verifies the server by the system's authorities, or those in SSL_CERT_FILE."""
    import ssl

    return ssl.create_default_context()
