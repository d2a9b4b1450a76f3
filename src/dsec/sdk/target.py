"""Where a client connects: the URL, checked and taken apart."""

from __future__ import annotations

import os
from typing import Final, Literal

import msgspec

from dsec.model.errors import InvalidSpec

DEFAULT_SOCKET: Final = "/run/dsec/api.sock"
DEFAULT_URL: Final = f"unix://{DEFAULT_SOCKET}"
ENV_URL: Final = "DSEC_URL"
ENV_KEY: Final = "DSEC_API_KEY"
ENV_RUN_DIR: Final = "DSEC_RUN_DIR"

_ALLOWED = "unix:///path/api.sock, http://host:port, https://host[:port] or ssh://[user@]host[:port][/path/api.sock]"
_PORTS: Final = {"http": 80, "https": 443, "ssh": 22}
# sizeof(sun_path) - 1: what a Unix socket's name may have.
_UNIX_PATH_MAX_BYTES: Final = 107


class Target(msgspec.Struct, frozen=True):
    """A checked URL. `path` is the Unix socket (unix; on the other host for ssh) or the path's prefix (http, https)."""

    url: str
    scheme: Literal["unix", "http", "https", "ssh"]
    host: str = ""
    port: int = 0
    path: str = ""
    user: str | None = None

    @property
    def prefix(self) -> str:
        """What stands before `/v1` in a request's path."""
        return self.path if self.scheme in ("http", "https") else ""


def default_url() -> str:
    """DSEC_URL; without it the local node's socket (in DSEC_RUN_DIR when that is set)."""
    url = os.environ.get(ENV_URL)
    if url:
        return url
    run_dir = os.environ.get(ENV_RUN_DIR)
    return f"unix://{run_dir.rstrip('/')}/api.sock" if run_dir else DEFAULT_URL


def parse(url: str) -> Target:
    """The target a URL names. Raises InvalidSpec when it is none, or has a key in it (URLs get logged and pickled)."""
    scheme, marked, rest = url.partition("://")
    if not marked:
        raise InvalidSpec.field("url", url, _ALLOWED)
    if scheme == "unix":
        if not rest.startswith("/") or "\0" in rest or len(os.fsencode(rest)) > _UNIX_PATH_MAX_BYTES:
            allowed = f"unix:// and an absolute path of at most {_UNIX_PATH_MAX_BYTES} bytes"
            raise InvalidSpec.field("url", url, allowed)
        return Target(url=url, scheme="unix", path=rest)
    if scheme not in _PORTS:
        raise InvalidSpec.field("url", url, _ALLOWED)
    return _parse_host(url, scheme)


def _parse_host(url: str, scheme: str) -> Target:
    # Imported here: the default target is a Unix socket, which needs none of it.
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[scheme]
    except ValueError as error:
        raise InvalidSpec.field("url", url, _ALLOWED) from error
    secret = parts.password is not None or (scheme != "ssh" and parts.username is not None)
    if secret:
        allowed = f"no password or key in it; keys go into {ENV_KEY} or api_key="
        raise InvalidSpec.field("url", f"{scheme}://...@{parts.hostname}", allowed)
    user, host = parts.username, parts.hostname or ""
    # A host or user that starts with "-" would be an option to ssh.
    if not host or host.startswith("-") or (user or "").startswith("-") or parts.query or parts.fragment:
        raise InvalidSpec.field("url", url, _ALLOWED)
    path = parts.path.rstrip("/")
    if scheme == "ssh":
        return Target(url=url, scheme="ssh", host=host, port=port, path=path or DEFAULT_SOCKET, user=user)
    return Target(url=url, scheme="https" if scheme == "https" else "http", host=host, port=port, path=path)
