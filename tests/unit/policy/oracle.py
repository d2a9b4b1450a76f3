"""What a policy means, said once more and without a table: for the tests of the compiler.

It goes through the rules as they were written and looks at each by itself; of the code that is tested it takes the list
of closed ranges, and nothing else.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

from dsec.model.network import Part, Rule
from dsec.policy import Operator, Query
from dsec.policy.addresses import _CLOSED

NAT64 = IPv6Network("64:ff9b::/96")


def allowed(part: Part, operator: Operator, node: tuple[str, ...], query: Query) -> bool:
    """Whether a query may pass."""
    profile = operator.profiles[part.profile] if part.profile else ()
    for own, rules in ((False, operator.floor), (True, part.rules), (False, profile), (False, operator.default)):
        hit = [rule for rule in rules if about(rule, operator, query) and opens(rule, own, node, query)]
        if hit:
            return all(rule.action == "allow" for rule in hit)
    return False


def about(rule: Rule, operator: Operator, query: Query) -> bool:
    """Whether a rule is about a query, closed or not."""
    targets = (rule.domain,) if rule.domain else ()
    usual: tuple[int | str, ...] = (80, 443)
    if rule.mirror:
        targets, usual = operator.mirrors[rule.mirror].hosts, operator.mirrors[rule.mirror].ports
    if rule.action == "deny":
        usual = ("1-65535",)
    if query.protocol not in (
        [rule.protocol] if rule.protocol else ["tcp", "udp"] if rule.action == "deny" else ["tcp"]
    ):
        return False
    if not any(query.port in span(port) for port in rule.ports or usual):
        return False
    if rule.cidr:
        return query.address is not None and in_range(rule, query.address)
    return query.name is not None and any(is_name(target or "", query.name) for target in targets)


def opens(rule: Rule, own: bool, node: tuple[str, ...], query: Query) -> bool:
    """Whether a rule that allows may be about an address that is closed, if it is."""
    if rule.action == "deny" or query.address is None or (most := smallest_closed(query.address, node)) is None:
        return True
    return rule.cidr is not None and not own and bits(rule.cidr) >= most


def span(port: int | str) -> range:
    low, _, high = str(port).partition("-")
    return range(int(low), int(high or low) + 1)


def is_name(target: str, name: str) -> bool:
    name, target = name.lower().rstrip("."), target.lower().rstrip(".")
    labels, wanted = name.split("."), target.split(".")
    if wanted[0] == "*":
        return len(labels) >= len(wanted) and labels[len(labels) - len(wanted) + 1 :] == wanted[1:]
    return labels == wanted


def forms(address: str) -> list[IPv4Address | IPv6Address]:
    """An address, and the IPv4 that stands in it: instead of it, or beside."""
    at = ip_address(address)
    if isinstance(at, IPv4Address):
        return [at]
    if at.ipv4_mapped:
        return [at.ipv4_mapped]
    inner = IPv4Address(int(at) & 0xFFFF_FFFF) if at in NAT64 else at.sixtofour
    return [at, inner] if inner else [at]


def in_range(rule: Rule, address: str) -> bool:
    at = forms(address)
    return any(form in ip_network(rule.cidr or "") for form in (at if rule.action == "deny" else at[:1]))


def bits(cidr: str) -> int:
    return ip_network(cidr).prefixlen


def smallest_closed(address: str, node: tuple[str, ...]) -> int | None:
    """The length of the smallest closed range that an address is in; IPv4 within IPv6 counts from where it begins."""
    at = forms(address)
    found = []
    for text in (*_CLOSED, *node):
        net = ip_network(text)
        if at[0] in net:
            found.append(net.prefixlen)
        elif len(at) > 1 and at[1] in net:
            found.append(net.prefixlen + (96 if at[0] in NAT64 else 16))
    return max(found, default=None)
