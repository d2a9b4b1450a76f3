"""Addresses of this machine, word of their changes, and where it asks for names."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Final

_V4: Final = Path("/proc/net/fib_trie")
_V6: Final = Path("/proc/net/if_inet6")
RESOLV_CONF: Final = Path("/etc/resolv.conf")
RESOLVERS_MAX: Final = 3  # as the C library

_LOCAL = re.compile(r"\|-- ([0-9.]+)\n\s+/32 host LOCAL")
_NAMESERVER = re.compile(r"^nameserver[ \t]+(\S+)", re.MULTILINE)
# linux/rtnetlink.h: changes of IPv4 and IPv6 addresses.
_GROUPS: Final = 0x10 | 0x100
_NOTE_MAX: Final = 64 * 1024


def own() -> tuple[str, ...]:
    """Every address of this network namespace, as ranges of one, in order. Raises OSError."""
    found = {f"{address}/32" for address in _LOCAL.findall(_V4.read_text())}
    if _V6.exists():  # not where IPv6 is off
        found.update(f"{IPv6Address(int(line.split()[0], 16))}/128" for line in _V6.read_text().splitlines())
    return tuple(sorted(found))


def resolvers(path: Path = RESOLV_CONF) -> tuple[str, ...]:
    """Where the machine asks for names, as `ADDRESS:PORT`; none if it does not say, or names none by its address."""
    try:
        words = _NAMESERVER.findall(path.read_text())
    except OSError:
        return ()
    found: list[str] = []
    for word in words:
        try:
            found.append(with_port(word, 53))
        except ValueError:  # with a zone: it is of an interface
            continue
    return tuple(found[:RESOLVERS_MAX])


def with_port(address: str, port: int) -> str:
    """`192.0.2.1:53` or `[2001:db8::1]:53`. Raises ValueError for what is no address."""
    made = ip_address(address)
    if getattr(made, "scope_id", None) is not None:
        raise ValueError(f"{address}: an address of one interface")
    return f"[{made}]:{port}" if made.version == 6 else f"{made}:{port}"


class Watch:
    """Calls back, from the event loop, after addresses have come or gone."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE)
        self._socket.bind((0, _GROUPS))
        self._loop.add_reader(self._socket, self._readable)

    def _readable(self) -> None:
        try:
            while self._socket.recv(_NOTE_MAX):
                pass
        except BlockingIOError:
            pass
        except OSError:
            pass  # more came than there was room for: it changed
        self._changed()

    def close(self) -> None:
        """No more calls."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
