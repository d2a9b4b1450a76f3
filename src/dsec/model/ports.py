"""Ports of a sandbox that can be reached from outside."""

from __future__ import annotations

from typing import Final, Self

import msgspec

from dsec.model.errors import InvalidSpec
from dsec.model.network import PORT_MAX

# The header that says the token where Authorization is the program's own.
TOKEN_HEADER: Final = "X-Dsec-Token"
# Of the credentials within a URL; any will do.
USER: Final = "dsec"


class Exposed(msgspec.Struct, frozen=True, kw_only=True):
    """A port of a sandbox that whoever has its token can reach.

    `origin`: scheme, host and port, no other sandbox's. `token`: who sends it may reach the port, and only that.
    `url`: the origin with the token in it as a password; it ends without a slash.
    """

    port: int
    origin: str
    token: str
    url: str

    @classmethod
    def at(cls, port: int, origin: str, token: str) -> Self:
        """With the URL that follows from these."""
        scheme, _, host = origin.partition("://")
        return cls(port=port, origin=origin, token=token, url=f"{scheme}://{USER}:{token}@{host}")

    @property
    def headers(self) -> dict[str, str]:
        """What a client sends that has an Authorization of its own, or takes no password from a URL."""
        return {TOKEN_HEADER: self.token}


class ExposeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which port: 1 to 65535."""

    port: int


def check_port(port: object) -> int:
    """Raises InvalidSpec for what is none."""
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= PORT_MAX:
        raise InvalidSpec.field("port", port, f"1 to {PORT_MAX}")
    return port
