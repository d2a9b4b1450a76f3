"""What a caller may write for `network`: the short form and policies as plain data."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dsec.model import limits
from dsec.model.errors import InvalidSpec
from dsec.model.network import Part, Policy, Rule, policy_of, port_ranges
from dsec.model.specs import Spec

RULE = {"action": "allow", "domain": "a.org"}


def test_the_short_form_is_a_policy() -> None:
    assert policy_of({"pypi": True, "npm": False}) == Policy(
        rules=(Rule(action="allow", mirror="pypi"), Rule(action="deny", mirror="npm"))
    )
    assert policy_of({}) == Policy()
    assert policy_of({"version": True}).rules == (Rule(action="allow", mirror="version"),)


def test_a_policy_as_plain_data_stands_in_a_spec() -> None:
    policy = Policy(rules=(Rule(action="deny", domain="a.org", ports=(443, "80-90")),), phases={"agent": Part()})
    data = policy.document()
    assert data == {
        "version": 1,
        "rules": [{"action": "deny", "domain": "a.org", "ports": [443, "80-90"]}],
        "phases": {"agent": {}},
    }
    spec = Spec(network=data).check()
    assert policy_of(spec.network) == policy
    assert msgspec.json.decode(msgspec.json.encode(spec), type=Spec) == spec


@pytest.mark.parametrize(
    ("network", "field"),
    [
        ({"pypi": "yes"}, "network.pypi"),
        ({"pypi": 1}, "network.pypi"),
        ({"pypi": None}, "network.pypi"),
        ({"a b": True}, "network"),
        ({f"n{i}": False for i in range(limits.NETWORK_RULES_MAX + 1)}, "network"),
        ({"version": 2}, "network.version"),
        ({"version": 1, "pypi": True}, "network"),
        ({"version": 1, "rules": [RULE] * (limits.NETWORK_RULES_MAX + 1)}, "network.rules"),
        ({"version": 1, "rules": [RULE, {"action": "alow", "domain": "a.org"}]}, "network.rules[1].action"),
        ({"version": 1, "rules": [{"action": "allow"}]}, "network.rules[0]"),
        ({"version": 1, "rules": [{**RULE, "mirror": "pypi"}]}, "network.rules[0]"),
        ({"version": 1, "rules": [{**RULE, "domain": ""}]}, "network.rules[0].domain"),
        ({"version": 1, "rules": [{**RULE, "domain": "a" * 256}]}, "network.rules[0].domain"),
        ({"version": 1, "rules": [{"action": "deny", "mirror": "a b"}]}, "network.rules[0].mirror"),
        ({"version": 1, "rules": [{"action": "allow", "cidr": "8.8.8.8"}]}, "network.rules[0].ports"),
        ({"version": 1, "rules": [{**RULE, "ports": [0]}]}, "network.rules[0].ports"),
        ({"version": 1, "rules": [{**RULE, "ports": [65536]}]}, "network.rules[0].ports"),
        ({"version": 1, "rules": [{**RULE, "ports": ["90-80"]}]}, "network.rules[0].ports"),
        ({"version": 1, "rules": [{**RULE, "ports": ["80"]}]}, "network.rules[0].ports"),
        ({"version": 1, "rules": [{**RULE, "ports": ["80-90\n"]}]}, "network.rules[0].ports"),
        ({"version": 1, "rules": [{**RULE, "ports": ["٣-٤"]}]}, "network.rules[0].ports"),
        ({"version": 1, "rules": [{**RULE, "ports": [*range(1, 18)]}]}, "network.rules[0].ports"),
        ({"version": 1, "rules": [{**RULE, "ports": [True]}]}, "network.rules[0].ports[0]"),
        ({"version": 1, "rules": [{**RULE, "protocol": "icmp"}]}, "network.rules[0].protocol"),
        ({"version": 1, "rules": [{**RULE, "protocol": "udp"}]}, "network.rules[0].by"),
        ({"version": 1, "rules": [{"action": "deny", "domain": "a.org", "by": "address"}]}, "network.rules[0].by"),
        ({"version": 1, "rules": [{"action": "deny", "cidr": "::/0", "by": "address"}]}, "network.rules[0].by"),
        ({"version": 1, "expose": [0]}, "network.expose"),
        ({"version": 1, "expose": [*range(1, 18)]}, "network.expose"),
        ({"version": 1, "profile": "a b"}, "network.profile"),
        ({"version": 1, "phase": "agent"}, "network.phase"),
        ({"version": 1, "phases": {f"p{i}": {} for i in range(17)}}, "network.phases"),
        ({"version": 1, "phases": {"a b": {}}}, "network.phases"),
        ({"version": 1, "phases": {"a": {"rules": [{"action": "deny"}]}}}, "network.phases.a.rules[0]"),
        ({"version": 1, "phases": {"a": {"version": 1}}}, "network.phases[...]"),
    ],
)
def test_what_is_wrong_is_named(network: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        Spec(network=network).check()
    assert caught.value.detail["field"] == field, caught.value
    assert len(caught.value.message) < 500


def test_rules_are_looked_at_when_they_are_made() -> None:
    with pytest.raises(InvalidSpec) as caught:
        Rule(action="alow", mirror="pypi")  # type: ignore[arg-type]  # what is refused
    assert caught.value.detail["field"] == "action"
    with pytest.raises(InvalidSpec):
        Policy(rules=[{"action": "deny"}, 3])  # type: ignore[arg-type]  # what is refused


def test_ports_that_overlap_or_touch_are_one_range() -> None:
    assert port_ranges((90, "80-89", 85, 443, 1), "f") == ((1, 1), (80, 90), (443, 443))
    assert port_ranges((), "f") == ()
    assert port_ranges(("1-65535", 3), "f") == ((1, 65535),)
