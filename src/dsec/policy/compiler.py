"""A sandbox's policy and its operator's as one table: whoever comes first decides.

The order is the precedence (docs/adr/0011): the operator's floor, the sandbox's own rules, those of its profile, the
operator's default; of each what it denies, then what it allows. Behind the last nothing is allowed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final, Literal

import msgspec

from dsec.model.errors import InvalidSpec
from dsec.model.network import ALL_PORTS, By, Part, Policy, Ports, Protocol, Rule, joined, port_ranges
from dsec.policy import addresses, hosts
from dsec.policy.merge import effective
from dsec.policy.operator import Operator, known_mirror
from dsec.policy.table import ID_MAX_CHARS, RULES_MAX, Artifact, Table, TableRule

NODE_ADDRESSES_MAX: Final = 1024

_DOMAIN_PORTS: Final[Ports] = ((80, 80), (443, 443))
_KINDS: Final = ("name", "suffix", "range")

Where = Literal["floor", "own", "profile", "default"]
Kind = Literal["name", "suffix", "range"]


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of one author, all of one precedence, in normal form."""

    where: Where
    rules: tuple[Rule, ...]


class _Line(msgspec.Struct, frozen=True):
    """What lines of a table are grouped by: they differ in ports only, and become one."""

    id: str
    action: Literal["allow", "deny"]
    kind: Kind
    value: str
    protocol: Protocol | None
    by: By


def compile_policy(policy: Policy, operator: Operator, node: Iterable[str] = ()) -> Artifact:
    """The artifact of a policy in its phase, on a node with these addresses of its own. Always the same for the same.

    Raises InvalidSpec naming the field of the sandbox's policy, `network` or below it, or `node`.
    """
    own = node_ranges(node)
    closed = addresses.closed(own)
    rules: list[TableRule] = []
    for level in levels(policy, operator, closed):
        rules += table_rules(level, operator, closed)
    if len(rules) > RULES_MAX:
        raise InvalidSpec.field("network", f"{len(rules)} rules of the table", f"at most {RULES_MAX}")
    return Artifact(table=Table(rules=tuple(rules)), node=tuple(map(str, own)))


def levels(policy: Policy, operator: Operator, closed: addresses.Closed) -> list[Level]:
    """Whose rules hold, in the order in which they decide.

    Raises InvalidSpec for what a sandbox may not say, in any of its phases: a switch to another one cannot fail later.
    """
    _check_part(policy, "network", operator, closed)
    for name, phase in policy.phases.items():
        _check_part(phase, f"network.phases.{name}", operator, closed)
    part = effective(policy)
    profile = () if part.profile is None else operator.profiles[part.profile]
    return [
        Level(where="floor", rules=operator.floor),
        Level(where="own", rules=part.rules),
        Level(where="profile", rules=profile),
        Level(where="default", rules=operator.default),
    ]


def table_rules(level: Level, operator: Operator, closed: addresses.Closed) -> list[TableRule]:
    """The lines of one level, what denies first; in an order of their own, not that in which they were written."""
    found: dict[_Line, list[Ports]] = {}
    for rule in level.rules:
        for line, ports in _lines(rule, level.where, operator, closed):
            found.setdefault(line, []).append(ports)
    return sorted((_table_rule(line, ports) for line, ports in found.items()), key=_place)


def rule_id(where: Where, rule: Rule) -> str:
    """What a rule is called in verdicts: by whose it is and what it is about, so that a patch renames no other."""
    kind, target = rule.target
    made = f"{where}/{rule.action}/{kind}:{target}"
    if len(made) <= ID_MAX_CHARS:
        return made
    return f"{made[: ID_MAX_CHARS - 17]}~{hashlib.sha256(made.encode()).hexdigest()[:16]}"


def node_ranges(node: Iterable[str]) -> tuple[addresses.Range, ...]:
    """A node's own addresses in their normal form, each once, in order."""
    found = {addresses.cidr(text, "node") for text in node}
    if len(found) > NODE_ADDRESSES_MAX:
        raise InvalidSpec.field("node", f"{len(found)} addresses", f"at most {NODE_ADDRESSES_MAX}")
    return tuple(sorted(found, key=lambda made: (made.version, int(made.network_address), made.prefixlen)))


def _check_part(part: Part, field: str, operator: Operator, closed: addresses.Closed) -> None:
    """Raises InvalidSpec for names that the operator does not have, and for ranges that only he opens."""
    if part.profile is not None and part.profile not in operator.profiles:
        allowed = ", ".join(operator.profiles) or "none on this node"
        raise InvalidSpec.field(f"{field}.profile", part.profile, allowed)
    for index, rule in enumerate(part.rules):
        at = f"{field}.rules[{index}]"
        if rule.mirror is not None:
            known_mirror(rule, operator.mirrors, at)
        if rule.cidr is not None and rule.action == "allow":
            why = addresses.why_closed(addresses.cidr(rule.cidr, f"{at}.cidr"), closed)
            if why is not None:
                allowed = f"addresses of the Internet; these are not ({why}), and only the operator's rules open them"
                raise InvalidSpec.field(f"{at}.cidr", rule.cidr, allowed)


def _lines(rule: Rule, where: Where, operator: Operator, closed: addresses.Closed) -> Iterator[tuple[_Line, Ports]]:
    """What one rule says, target by target."""
    allows = rule.action == "allow"
    ports = port_ranges(rule.ports, "ports")
    protocol = rule.protocol or ("tcp" if allows else None)
    name = rule_id(where, rule)
    if rule.cidr is not None:
        whole = addresses.network(rule.cidr)
        # To deny, wherever else in IPv6 it is; to allow, what is open of it.
        for made in addresses.without(whole, closed) if allows else (whole, *addresses.images(whole)):
            yield _Line(name, rule.action, "range", str(made), protocol, "name"), ports
        return
    targets, usual = [rule.domain or ""], _DOMAIN_PORTS
    if rule.mirror is not None:
        mirror = known_mirror(rule, operator.mirrors, where)
        targets, usual = list(mirror.hosts), mirror.ranges
    for target in targets:
        kind: Kind = "suffix" if target.startswith(hosts.WILDCARD) else "name"
        value = target.removeprefix(hosts.WILDCARD)
        yield _Line(name, rule.action, kind, value, protocol, rule.by), ports or (usual if allows else ALL_PORTS)


def _table_rule(line: _Line, ports: list[Ports]) -> TableRule:
    # No ports are all of them: a rule about a range to deny has none, one that allows always has some.
    given = joined([pair for some in ports for pair in some or ALL_PORTS])
    return TableRule(
        id=line.id,
        action=line.action,
        name=line.value if line.kind == "name" else None,
        suffix=line.value if line.kind == "suffix" else None,
        range=line.value if line.kind == "range" else None,
        ports=() if given == ALL_PORTS else given,
        protocol=line.protocol,
        check="address" if line.by == "address" else "spoken",
    )


def _place(rule: TableRule) -> tuple[bool, int, str, str, str, str]:
    kind = next(index for index, kind in enumerate(_KINDS) if getattr(rule, kind) is not None)
    value = rule.name or rule.suffix or rule.range or ""
    return rule.action == "allow", kind, value, rule.protocol or "", rule.check, rule.id
