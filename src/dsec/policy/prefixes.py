"""The rules for addresses as a map by longest prefix, for what is decided by address and port alone (BPF)."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from dsec.model.network import ALL_PORTS, Ports, Protocol, joined
from dsec.policy import addresses
from dsec.policy.table import PROTOCOLS, Artifact, TableRule, minus


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """What may be reached at the addresses of a range that are in no smaller range of the map."""

    range: str
    tcp: Ports = ()
    udp: Ports = ()


def prefixes(artifact: Artifact) -> tuple[Prefix, ...]:
    """The map: the smallest range with an address decides, without one nothing may be reached.

    In order, IPv4 first, larger ranges before those within them. IPv4 mapped into IPv6 is to be looked up as IPv4.
    """
    rules: dict[addresses.Range, list[int]] = defaultdict(list)
    for index, rule in enumerate(artifact.table.rules):
        if rule.range is not None:
            rules[addresses.network(rule.range)].append(index)
    made: dict[addresses.Range, Prefix] = {}
    for at in sorted(rules, key=lambda net: (net.version, net.prefixlen, int(net.network_address))):
        above = _above(at)
        order = sorted(index for net in (at, *above) for index in rules.get(net, ()))
        about = [artifact.table.rules[index] for index in order]
        row = Prefix(range=str(at), tcp=_open(about, "tcp"), udp=_open(about, "udp"))
        larger = next((made[net] for net in above if net in made), Prefix(range=""))
        if any(getattr(row, protocol) != getattr(larger, protocol) for protocol in PROTOCOLS):
            made[at] = row
    return tuple(made.values())


def _above(at: addresses.Range) -> list[addresses.Range]:
    """The ranges around a range, the smallest first."""
    return [at.supernet(new_prefix=length) for length in range(at.prefixlen - 1, -1, -1)]


def _open(rules: list[TableRule], protocol: Protocol) -> Ports:
    """The ports that the first of these rules about each of them allows."""
    left = ALL_PORTS
    allowed: list[tuple[int, int]] = []
    for rule in rules:
        if rule.protocol in (None, protocol):
            rest = minus(left, rule.ports or ALL_PORTS)
            if rule.action == "allow":
                allowed += minus(left, rest)
            left = rest
    return joined(allowed)
