"""Socket options and addresses both clients use."""

from __future__ import annotations

import os
import socket
from functools import cache
from typing import TYPE_CHECKING, Final

import msgspec

from dsec.model.errors import InvalidSpec
from dsec.sdk.target import Target

if TYPE_CHECKING:
    import ssl

# The kernel finds a dead peer on its own: first probe after 10 s, then every 5 s, three times; the same for data that
# is not acknowledged. Without it a run that prints nothing for an hour would never learn that its peer is gone.
_KEEPALIVE_IDLE_S: Final = 10
_KEEPALIVE_INTERVAL_S: Final = 5
_KEEPALIVE_COUNT: Final = 3
_USER_TIMEOUT_MS: Final = 25_000

_CERT_FILE_ENV: Final = "SSL_CERT_FILE"


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

    context = ssl.create_default_context()
    # OpenSSL passes over one that is not there, and then no certificate is good.
    if named := os.environ.get(_CERT_FILE_ENV):
        try:
            context.load_verify_locations(named)
        except OSError as error:
            allowed = f"a file of certificates (PEM); this one could not be read: {error}"
            raise InvalidSpec.field(_CERT_FILE_ENV, named, allowed) from error
    return context


def advice(target: Target, why: str, cause: BaseException | None) -> str:
    """What to do about a server that could not be reached."""
    if target.scheme == "unix":
        if isinstance(cause, PermissionError):
            return "its socket is for its user, usually root, only: sudo, or DSEC_URL and DSEC_API_KEY of a node on TCP"
        return "is it running? `dsec up` starts it; DSEC_RUN_DIR or DSEC_URL names another node"
    # By name: importing ssl costs a local command's start some 15 ms.
    if type(cause).__name__ == "SSLCertVerificationError":
        return f"{_CERT_FILE_ENV} names the file of certificates to trust (the node's, or its authority's)"
    if target.scheme == "https" and "WRONG_VERSION_NUMBER" in why:
        return "a server without TLS does so: is it http://?"
    if target.scheme == "http" and "unanswered" in why:
        return "a server that wants TLS does so: is it https://?"
    return "check the URL and the node"
