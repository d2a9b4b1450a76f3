"""The compiled policy: rules in order, of which the first that matches decides; none is a denial.

What the node's proxy is given is `Artifact.table`, as msgpack (docs/reference/network-table.md). The decisions here are
those that its own are checked against.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from dsec.model.network import ALL_PORTS, Action, Ports, Protocol, joined
from dsec.policy import addresses, hosts

RULES_MAX: Final = 10_000
ID_MAX_CHARS: Final = 200
PROTOCOLS: Final[tuple[Protocol, ...]] = ("tcp", "udp")

Reason = Literal["rule", "closed", "no rule", "no name", "no address", "no port"]


class TableRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line: exactly one of `name` (that one), `suffix` (every name below it), `range` (addresses).

    `ports`: first and last of each, none are all. `protocol`: None is both. `check` is `address` where a connection
    need not say the name. Several lines of one rule of a policy have one `id`.
    """

    id: str
    action: Action
    name: str | None = None
    suffix: str | None = None
    range: str | None = None
    ports: Ports = ()
    protocol: Protocol | None = None
    check: Literal["spoken", "address"] = "spoken"

    def carries(self, protocol: Protocol, port: int) -> bool:
        """Whether it is about this protocol and port."""
        if self.protocol not in (None, protocol):
            return False
        return not self.ports or any(low <= port <= high for low, high in self.ports)

    def names(self, name: str) -> bool:
        """Whether it is about a name in its normal form."""
        if self.suffix is not None:
            return hosts.fits(hosts.WILDCARD + self.suffix, name)
        return self.name == name

    def covers(self, address: addresses.Address) -> bool:
        """Whether it is about an address in its normal form."""
        return self.range is not None and address in addresses.network(self.range)


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """What the proxy of a node decides by. `generation` counts the policies that one sandbox has had."""

    format: Literal[1] = 1
    generation: int = 0
    rules: tuple[TableRule, ...] = ()


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A policy, compiled for one node: the table, and the node's own addresses that are closed with the rest."""

    table: Table
    node: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """`sha256:...` of everything but the generation: equal if and only if the same is decided by the same rules."""
        table = msgspec.structs.replace(self.table, generation=0)
        return "sha256:" + hashlib.sha256(msgspec.msgpack.encode([table, self.node])).hexdigest()

    def numbered(self, generation: int) -> Artifact:
        """The same as another generation."""
        return msgspec.structs.replace(self, table=msgspec.structs.replace(self.table, generation=generation))


class Query(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A connection or a packet to a port at an address, by the name that it says, if it says one."""

    port: int
    protocol: Protocol = "tcp"
    name: str | None = None
    address: str | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether it may pass, which rule said so, and, if none did, why not."""

    allow: bool
    rule: str | None = None
    reason: Reason


class _Asked(msgspec.Struct, frozen=True):
    name: str | None
    address: addresses.Address | None
    closed: bool


def decide(artifact: Artifact, query: Query) -> Verdict:
    """The verdict on a query, whatever stands in it; nothing is raised.

    A rule for a name or a suffix opens no address that is closed; one for a range does (the compiler has seen to it
    which ranges these are). With an address alone only rules for ranges count, with a name alone only those for names.
    """
    if not 1 <= query.port <= ALL_PORTS[0][1] or query.protocol not in PROTOCOLS:
        return Verdict(allow=False, reason="no port")
    asked = _asked(artifact, query.name, query.address)
    if isinstance(asked, Verdict):
        return asked
    for rule in _about(artifact, asked):
        if rule.carries(query.protocol, query.port):
            return Verdict(allow=rule.action == "allow", rule=rule.id, reason="rule")
    return Verdict(allow=False, reason="closed" if asked.closed else "no rule")


def resolves(artifact: Artifact, name: str, address: str | None = None) -> Verdict:
    """Whether a question for a name is asked at all, and answered with this address: if anything may be reached there.

    The name has to be allowed as such: that a range is does not make any name be asked for that may lie in it. The rule
    is the first that allows some port which no rule before it denies; of a denial the first that is about it.
    """
    if address is not None and not (verdict := resolves(artifact, name)).allow:
        return verdict
    asked = _asked(artifact, name, address)
    if isinstance(asked, Verdict):
        return asked
    left: dict[Protocol, Ports] = dict.fromkeys(PROTOCOLS, ALL_PORTS)
    first: str | None = None
    for rule in _about(artifact, asked):
        first = first or rule.id
        for protocol in PROTOCOLS if rule.protocol is None else (rule.protocol,):
            rest = minus(left[protocol], rule.ports or ALL_PORTS)
            if rule.action == "allow" and rest != left[protocol]:
                return Verdict(allow=True, rule=rule.id, reason="rule")
            left[protocol] = rest
    if first is not None:
        return Verdict(allow=False, rule=first, reason="rule")
    return Verdict(allow=False, reason="closed" if asked.closed else "no rule")


def minus(ports: Ports, taken: Ports) -> Ports:
    """Ports without others."""
    left = list(ports)
    for low, high in taken:
        cut = [(a, min(b, low - 1)) for a, b in left] + [(max(a, high + 1), b) for a, b in left]
        left = [(a, b) for a, b in cut if a <= b]
    return joined(left)


def _asked(artifact: Artifact, name: str | None, address: str | None) -> _Asked | Verdict:
    said = None if name is None else hosts.said(name)
    if said is None and (name is not None or address is None):
        return Verdict(allow=False, reason="no name")
    at = None if address is None else addresses.address(address)
    if at is None:
        return Verdict(allow=False, reason="no address") if address is not None else _Asked(said, None, False)
    closed = addresses.closed(tuple(map(addresses.network, artifact.node)))
    return _Asked(said, at, addresses.why_closed(at, closed) is not None)


def _about(artifact: Artifact, asked: _Asked) -> Iterator[TableRule]:
    """The rules that are about what was asked, in order."""
    for rule in artifact.table.rules:
        at_address = asked.address is not None and rule.covers(asked.address)
        by_name = asked.name is not None and rule.names(asked.name)
        if at_address or (by_name and (rule.action == "deny" or not asked.closed)):
            yield rule
