"""Addresses and ranges in one form, and the ranges that are closed: no name opens them, and no rule of a sandbox's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network, NetmaskValueError
from typing import Final, TypeVar

from dsec.model.errors import InvalidSpec

Address = IPv4Address | IPv6Address
Range = IPv4Network | IPv6Network
Closed = Sequence[tuple[Range, str]]
R = TypeVar("R", IPv4Network, IPv6Network)

_LENGTH = re.compile(r"[0-9]{1,3}\Z")
_MAPPED: Final = IPv6Network("::ffff:0:0/96")
# Where else IPv4 stands in IPv6: the network, and after how many bits.
_IMAGES: Final = ((IPv6Network("64:ff9b::/96"), 96, "NAT64"), (IPv6Network("2002::/16"), 16, "6to4"))

_METADATA: Final = (
    "169.254.169.254/32",
    "168.63.129.16/32",
    "100.100.100.200/32",
    "192.0.0.192/32",
    "fd00:ec2::254/128",
)
# What is not public (RFC 6890 and its registry), is a group, or tells a cloud's machine who it is.
_CLOSED: Final = {
    **dict.fromkeys(_METADATA, "metadata of a cloud"),
    "0.0.0.0/8": "this network",
    "10.0.0.0/8": "private",
    "100.64.0.0/10": "shared by a provider (CGNAT)",
    "127.0.0.0/8": "loopback",
    "169.254.0.0/16": "link-local",
    "172.16.0.0/12": "private",
    "192.0.0.0/24": "protocols",
    "192.0.2.0/24": "documentation",
    "192.88.99.0/24": "6to4",
    "192.168.0.0/16": "private",
    "198.18.0.0/15": "benchmarks",
    "198.51.100.0/24": "documentation",
    "203.0.113.0/24": "documentation",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved",
    "::1/128": "loopback",
    "64:ff9b::/96": "NAT64",
    "fc00::/7": "private",
    "fe80::/10": "link-local",
    "ff00::/8": "multicast",
    # Of IPv6 only 2000::/3 is public at all, except for these.
    "::/3": "not public",
    "4000::/2": "not public",
    "8000::/1": "not public",
    "2001::/23": "protocols",
    "2001:db8::/32": "documentation",
    "2002::/16": "6to4",
    "3fff::/20": "documentation",
}


def address(text: str) -> Address | None:
    """An address in its one form, which of IPv4 mapped into IPv6 is that of IPv4; None: it is not one."""
    if "%" in text:
        return None
    try:
        return plain(IPv6Address(text) if ":" in text else IPv4Address(text))
    except AddressValueError:
        return None


def plain(address: Address) -> Address:
    """IPv4 mapped into IPv6 as IPv4: the kernel sends it there."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def cidr(text: str, field: str) -> Range:
    """A range in its one form; an address alone is itself. Raises InvalidSpec naming `field`."""
    base, slash, length = text.partition("/")
    if "%" in base or (slash and not _LENGTH.match(length)):
        raise InvalidSpec.field(field, text, "ADDRESS/LENGTH")
    try:
        made: Range = IPv6Network(text) if ":" in base else IPv4Network(text)
    except (AddressValueError, NetmaskValueError, ValueError) as error:
        raise InvalidSpec.field(field, text, f"ADDRESS/LENGTH without bits behind the length ({error})") from error
    if isinstance(made, IPv6Network) and made.subnet_of(_MAPPED):
        return IPv4Network((int(made.network_address) & 0xFFFF_FFFF, made.prefixlen - 96))
    return made


@lru_cache(maxsize=65_536)
def network(text: str) -> Range:
    """A range that is in its one form, as it stands in a table."""
    return IPv6Network(text) if ":" in text else IPv4Network(text)


def within(inner: Range, outer: Range) -> bool:
    """Whether all of one range is in the other."""
    if isinstance(inner, IPv4Network):
        return isinstance(outer, IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, IPv6Network) and inner.subnet_of(outer)


def images(made: Range) -> list[Range]:
    """Where a range of IPv4 stands in IPv6 (NAT64, 6to4)."""
    if isinstance(made, IPv6Network):
        return []
    return [
        IPv6Network((int(net.network_address) | int(made.network_address) << (96 - at), at + made.prefixlen))
        for net, at, _ in _IMAGES
    ]


@lru_cache(maxsize=64)
def closed(node: tuple[Range, ...] = ()) -> Closed:
    """What is closed on a node, whose own addresses are `node`: ranges and why, the smallest first."""
    found = {network(text): why for text, why in _CLOSED.items()} | dict.fromkeys(node, "the node's own")
    for made, why in list(found.items()):
        for image in images(made):
            found.setdefault(image, why)
    return tuple(
        sorted(found.items(), key=lambda pair: (-pair[0].prefixlen, pair[0].version, int(pair[0].network_address)))
    )


def why_closed(at: Address | Range, closed: Closed) -> str | None:
    """Why an address, or all of a range, is closed; None: it is not."""
    asked = at if isinstance(at, IPv4Network | IPv6Network) else network(f"{at}/{at.max_prefixlen}")
    return next((why for shut, why in closed if within(asked, shut)), None)


def without(made: Range, closed: Closed) -> list[Range]:
    """A range without those that are closed and smaller than it: in order, as few as there can be.

    A range within a closed one opens it; so a wide one opens what its writer named and not what lies closed inside.
    """
    if isinstance(made, IPv4Network):
        return list(_cut(made, [shut for shut, _ in closed if isinstance(shut, IPv4Network)]))
    return list(_cut(made, [shut for shut, _ in closed if isinstance(shut, IPv6Network)]))


def _cut(made: R, shut: list[R]) -> list[R]:
    pieces = [made]
    # The largest first: those within it are gone with it.
    for hole in sorted((hole for hole in shut if hole != made and hole.subnet_of(made)), key=lambda net: net.prefixlen):
        left: list[R] = []
        for piece in pieces:
            if hole.subnet_of(piece):
                left += piece.address_exclude(hole)
            elif not piece.subnet_of(hole):
                left.append(piece)
        pieces = left
    return sorted(pieces)
