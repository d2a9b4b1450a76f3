"""Each rule of a policy with whose it is, what enforces it on this node, or why nothing does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from dsec.model.errors import Unsupported
from dsec.model.network import ALL_PORTS, NetworkRow, Policy, Rule
from dsec.model.states import Capability
from dsec.policy import addresses, hosts
from dsec.policy.compiler import levels, node_ranges, rule_id, table_rules
from dsec.policy.merge import effective
from dsec.policy.operator import Operator
from dsec.policy.table import TableRule, minus

# Features of a backend (`Capabilities.features`) by which it enforces rules.
CLOSED: Final = "loopback"  # a network of its own, from which nothing leads out by itself
NAMES: Final = "network_names"  # questions for names are answered by the node, for those that are allowed
PROXY: Final = "network_proxy"  # tcp ends at the node, which decides and dials
ROUTED: Final = "network_routed"  # packets leave through a filter for addresses
EXPOSE: Final = "network_expose"  # the node leads connections in

DENIED: Final = "default/deny"  # what no rule allows


def explain(
    policy: Policy, operator: Operator, features: Mapping[str, Capability], node: Iterable[str] = ()
) -> tuple[NetworkRow, ...]:
    """The rows of a policy in its phase, in the order in which they decide, the denial of everything else last.

    `features` are those of the backend that is to run the sandbox. Raises InvalidSpec as `compile_policy` does.
    """
    closed = addresses.closed(node_ranges(node))
    before: list[TableRule] = []
    rows: dict[str, NetworkRow] = {}
    part = effective(policy)
    for level in levels(policy, operator, closed):
        source = f"profile {part.profile}" if level.where == "profile" else level.where
        lines = table_rules(level, operator, closed)
        before += [line for line in lines if line.action == "deny"]
        for rule in sorted(level.rules, key=lambda rule: rule.action == "allow"):
            name = rule_id(level.where, rule)
            shadow = _shadow([line for line in lines if line.id == name], before)
            row = NetworkRow(id=name, source=source, text=_text(rule), shadowed_by=shadow)
            rows.setdefault(f"{name} {row.text}", _judged(row, _needs(rule), features))
    for port in part.expose or ():
        row = NetworkRow(id=f"own/expose/{port}", source="own", text=f"expose {port}")
        rows[row.id] = _judged(row, (EXPOSE,), features)
    rest = NetworkRow(id=DENIED, source="default", text="deny everything else")
    return (*rows.values(), _judged(rest, (CLOSED,), features))


def refuse_unenforced(rows: Iterable[NetworkRow]) -> None:
    """Raises Unsupported, naming rule and mechanism, unless every row is enforced."""
    for row in rows:
        if row.reason is not None:
            raise Unsupported.lacks(f"network rule {row.id}", row.missing or "network policy", row.reason)


def _needs(rule: Rule) -> tuple[str, ...]:
    """The features without which a rule cannot be kept. What is denied needs only that nothing leads out by itself."""
    if rule.action == "deny":
        return (CLOSED,)
    carried = ROUTED if rule.protocol == "udp" else PROXY
    return (carried,) if rule.cidr is not None else (NAMES, carried)


def _judged(row: NetworkRow, needs: tuple[str, ...], features: Mapping[str, Capability]) -> NetworkRow:
    """The row with what enforces it, or with what is missing."""
    for feature in needs:
        found = features.get(feature, Capability(available=False, reason="this backend does not have it"))
        if not found.available:
            return msgspec.structs.replace(row, missing=feature, reason=found.reason or "not available")
    mechanisms = tuple(features[feature].mechanism or feature for feature in needs)
    return msgspec.structs.replace(row, mechanisms=mechanisms)


def _text(rule: Rule) -> str:
    kind, target = rule.target
    said = [rule.action, kind, target]
    if rule.protocol is not None:
        said.append(rule.protocol)
    if rule.ports:
        said.append(",".join(map(str, rule.ports)))
    return " ".join(said + ["by address"] * (rule.by == "address"))


def _shadow(lines: list[TableRule], denials: list[TableRule]) -> str | None:
    """The first denial that leaves nothing of what these lines allow; each of them has to be wholly in one."""
    by: list[str] = []
    for line in lines:
        found = next((denial.id for denial in denials if line.action == "allow" and _contains(denial, line)), None)
        if found is None:
            return None
        by.append(found)
    return by[0] if by else None


def _contains(outer: TableRule, inner: TableRule) -> bool:
    """Whether whatever the inner line is about, the outer one is, too."""
    if outer.protocol not in (None, inner.protocol) or minus(inner.ports or ALL_PORTS, outer.ports or ALL_PORTS):
        return False
    if outer.range is not None:
        return inner.range is not None and addresses.within(
            addresses.network(inner.range), addresses.network(outer.range)
        )
    if inner.name is not None:
        return outer.names(inner.name)
    # Every name below the inner one is below the outer one.
    within = inner.suffix is not None and outer.suffix is not None
    return within and (inner.suffix == outer.suffix or hosts.fits(f"*.{outer.suffix}", inner.suffix or ""))
