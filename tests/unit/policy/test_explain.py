"""What is said of each rule: whose it is, what enforces it, or why nothing does."""

from __future__ import annotations

import pytest

from dsec.model.errors import Unsupported
from dsec.model.network import NetworkRow, Part, Policy, Rule, policy_of
from dsec.model.states import Capability
from dsec.policy import compile_policy, explain, operator, refuse_unenforced
from dsec.policy.explain import CLOSED, EXPOSE, NAMES, PROXY, ROUTED

HAS = {
    name: Capability(available=True, mechanism=f"the {name.removeprefix('network_')}")
    for name in (CLOSED, NAMES, PROXY, ROUTED, EXPOSE)
}
TEXT = """
version = 1
floor = [{action = "deny", domain = "*.evil.org"}, {action = "deny", mirror = "huggingface"}]
default = [{action = "allow", cidr = "10.0.0.0/8", ports = [53], protocol = "udp"}]
[profiles]
python = [{action = "allow", mirror = "pypi"}]
"""
POLICY = Policy(
    profile="python",
    rules=(
        Rule(action="allow", domain="a.org"),
        Rule(action="deny", domain="b.org", ports=(80,)),
        Rule(action="allow", domain="ntp.org", protocol="udp", ports=(123,), by="address"),
    ),
    expose=(8000,),
)
WHOLE = [
    ("floor/deny/domain:*.evil.org", "floor", "deny domain *.evil.org", ("the loopback",)),
    ("floor/deny/mirror:huggingface", "floor", "deny mirror huggingface", ("the loopback",)),
    ("own/deny/domain:b.org", "own", "deny domain b.org 80", ("the loopback",)),
    ("own/allow/domain:a.org", "own", "allow domain a.org", ("the names", "the proxy")),
    ("own/allow/domain:ntp.org", "own", "allow domain ntp.org udp 123 by address", ("the names", "the routed")),
    ("profile/allow/mirror:pypi", "profile python", "allow mirror pypi", ("the names", "the proxy")),
    ("default/allow/cidr:10.0.0.0/8", "default", "allow cidr 10.0.0.0/8 udp 53", ("the routed",)),
    ("own/expose/8000", "own", "expose 8000", ("the expose",)),
    ("default/deny", "default", "deny everything else", ("the loopback",)),
]


def test_every_rule_has_its_row_in_the_order_in_which_they_decide() -> None:
    rows = explain(POLICY, operator(TEXT), HAS)
    assert [(row.id, row.source, row.text, row.mechanisms) for row in rows] == WHOLE
    assert all(row.reason is None for row in rows)
    refuse_unenforced(rows)


def test_every_line_of_the_table_has_its_row() -> None:
    ids = {row.id for row in explain(POLICY, operator(TEXT), HAS)}
    assert {line.id for line in compile_policy(POLICY, operator(TEXT)).table.rules} <= ids


@pytest.mark.parametrize(
    ("missing", "rule"),
    [
        (NAMES, "own/allow/domain:a.org"),
        (PROXY, "own/allow/domain:a.org"),
        (ROUTED, "own/allow/domain:ntp.org"),
        (EXPOSE, "own/expose/8000"),
        (CLOSED, "floor/deny/domain:*.evil.org"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_one_rule_that_nothing_enforces_refuses_the_policy(missing: str, rule: str, known: bool) -> None:
    features = {name: has for name, has in HAS.items() if name != missing}
    if known:
        features[missing] = Capability(available=False, reason="the kernel says no")
    rows = explain(POLICY, operator(TEXT), features)
    with pytest.raises(Unsupported) as caught:
        refuse_unenforced(rows)
    assert caught.value.detail["mechanism"] == missing
    assert rule in caught.value.message
    assert ("the kernel says no" if known else "this backend does not have it") in caught.value.message
    assert {row.missing for row in rows if row.reason} == {missing}


def test_a_backend_with_loopback_alone_enforces_what_only_denies() -> None:
    loopback = {CLOSED: HAS[CLOSED], "network": Capability(available=False, reason="none")}
    refuse_unenforced(explain(policy_of({"npm": False}), operator(), loopback))
    with pytest.raises(Unsupported):
        refuse_unenforced(explain(policy_of({"npm": True}), operator(), loopback))


def test_a_phase_is_explained_as_it_holds() -> None:
    policy = Policy(phases={"setup": Part(rules=(Rule(action="allow", mirror="pypi"),)), "agent": Part()})
    assert [row.id for row in explain(policy.in_phase("setup"), operator(), HAS)] == [
        "own/allow/mirror:pypi",
        "default/deny",
    ]
    assert [row.id for row in explain(policy.in_phase("agent"), operator(), HAS)] == ["default/deny"]


def shadow(*rules: Rule) -> str | None:
    [row] = [row for row in explain(Policy(rules=rules), operator(TEXT), HAS) if row.id.startswith("own/allow")]
    assert isinstance(row, NetworkRow)
    return row.shadowed_by


@pytest.mark.parametrize(
    ("rule", "by"),
    [
        (Rule(action="allow", domain="x.evil.org"), "floor/deny/domain:*.evil.org"),
        (Rule(action="allow", domain="*.x.evil.org"), "floor/deny/domain:*.evil.org"),
        (Rule(action="allow", domain="*.evil.org"), "floor/deny/domain:*.evil.org"),
        (Rule(action="allow", domain="evil.org"), None),
        (Rule(action="allow", domain="*.org.example"), None),
        (Rule(action="allow", mirror="huggingface"), "floor/deny/mirror:huggingface"),
        (Rule(action="allow", mirror="pypi"), None),
    ],
)
def test_a_rule_that_the_floor_leaves_nothing_of_says_so(rule: Rule, by: str | None) -> None:
    assert shadow(rule) == by


def test_only_what_denies_all_of_a_rule_shadows_it() -> None:
    wide = Rule(action="allow", cidr="8.8.8.0/24", ports=(53, 443))
    assert shadow(wide, Rule(action="deny", cidr="8.8.0.0/16", ports=(443,))) is None
    assert shadow(wide, Rule(action="deny", cidr="8.8.8.8/32")) is None
    assert shadow(wide, Rule(action="deny", cidr="8.8.0.0/16", protocol="udp")) is None
    assert shadow(wide, Rule(action="deny", cidr="8.8.0.0/16", ports=("50-500",))) == "own/deny/cidr:8.8.0.0/16"
    # One of its hosts is left.
    github = Rule(action="allow", mirror="github")
    assert shadow(github, Rule(action="deny", domain="github.com")) is None
