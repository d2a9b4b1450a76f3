"""Policies as they are written: forms, merging, phases, the operator's part, and what is said of what is wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.model import limits
from dsec.model.errors import InvalidSpec
from dsec.model.network import Part, Policy, Rule, policy_of
from dsec.policy import Query, compile_policy, decide, effective, hosts, merge, normal, operator
from dsec.policy.operator import HOSTS_MAX
from tests.unit.policy import CALM

PLAIN = operator()


def allow(domain: str, *ports: int | str) -> Rule:
    return Rule(action="allow", domain=domain, ports=ports)


def deny(domain: str) -> Rule:
    return Rule(action="deny", domain=domain)


def test_everything_in_one_form() -> None:
    policy = Policy(
        rules=(
            Rule(action="allow", domain="Bücher.Example.", ports=(443, "80-90", 91)),
            Rule(action="deny", cidr="::ffff:10.0.0.0/104"),
            Rule(action="allow", mirror="pypi"),
        ),
        expose=(8000, 80, 8000),
    )
    assert normal(policy) == Policy(
        rules=(
            Rule(action="allow", domain="xn--bcher-kva.example", ports=("80-91", 443)),
            Rule(action="deny", cidr="10.0.0.0/8"),
            Rule(action="allow", mirror="pypi"),
        ),
        expose=(80, 8000),
    )


def test_a_patch_replaces_what_it_names_and_keeps_the_rest() -> None:
    before = policy_of({"pypi": True, "npm": False, "crates": True})
    after = merge(before, policy_of({"npm": True, "crates": False, "go": True}))
    assert after == policy_of({"pypi": True, "npm": True, "crates": False, "go": True})


def test_a_patch_knows_a_name_by_any_of_its_spellings() -> None:
    before = Policy(rules=(allow("bücher.example", 8080), allow("a.org")))
    assert merge(before, Policy(rules=(deny("XN--bcher-kva.EXAMPLE."),))).rules == (
        allow("a.org"),
        deny("xn--bcher-kva.example"),
    )
    wide = Policy(rules=(Rule(action="deny", cidr="::ffff:8.8.8.8"),))
    assert merge(wide, Policy(rules=(Rule(action="deny", cidr="8.8.8.8/32", ports=(53,)),))).rules[0].ports == (53,)


def test_a_patch_that_says_nothing_changes_nothing() -> None:
    policy = Policy(profile="p", rules=(allow("a.org"),), expose=(80,), phases={"x": Part()}, phase="x")
    assert merge(policy, Policy()) == merge(Policy(), policy) == policy
    assert merge(policy, Policy(profile="q", expose=())).profile == "q"
    assert merge(policy, Policy(expose=())).expose == ()


def test_a_patch_may_choose_a_phase_of_the_policy() -> None:
    policy = Policy(phases={"setup": Part(), "agent": Part()}, phase="setup")
    assert merge(policy, policy_of({"version": 1, "phase": "agent"}, patch=True)).phase == "agent"
    with pytest.raises(InvalidSpec, match=r"network\.phase"):
        policy_of({"version": 1, "phase": "agent"})
    with pytest.raises(InvalidSpec, match=r"network\.phase"):
        merge(policy, policy_of({"version": 1, "phase": "verify"}, patch=True))


def test_a_patch_does_not_make_more_than_there_may_be() -> None:
    many = Policy(rules=tuple(allow(f"a{i}.org") for i in range(limits.NETWORK_RULES_MAX)))
    with pytest.raises(InvalidSpec, match="at most 256"):
        merge(many, Policy(rules=(allow("b.org"),)))


def test_a_phase_is_laid_over_the_rest() -> None:
    policy = Policy(
        rules=(allow("a.org"), deny("b.org")),
        expose=(80,),
        phases={"setup": Part(profile="build", rules=(allow("b.org"),)), "agent": Part(expose=())},
    )
    assert effective(policy) == Part(rules=policy.rules, expose=(80,))
    setup = effective(policy.in_phase("setup"))
    assert setup == Part(profile="build", rules=(allow("a.org"), allow("b.org")), expose=(80,))
    assert effective(policy.in_phase("agent")) == Part(rules=policy.rules, expose=())
    assert policy.in_phase("setup").in_phase(None) == policy
    with pytest.raises(InvalidSpec) as caught:
        policy.in_phase("verify")
    assert caught.value.detail == {"field": "phase", "allowed": "agent, setup"}


DOMAINS = st.sampled_from(["a.org", "*.a.org", "A.org.", "b.org"])
RULES = st.one_of(
    st.builds(Rule, action=st.sampled_from(["allow", "deny"]), domain=DOMAINS, ports=st.sampled_from([(), (443,)])),
    st.builds(Rule, action=st.sampled_from(["allow", "deny"]), mirror=st.sampled_from(["pypi", "npm"])),
    st.builds(Rule, action=st.just("deny"), cidr=st.sampled_from(["8.8.8.8", "::ffff:8.8.8.8", "10.0.0.0/8"])),
)
PARTS: dict[str, st.SearchStrategy[Any]] = {
    "profile": st.none() | st.sampled_from(["p", "q"]),
    "rules": st.lists(RULES, max_size=4).map(tuple),
    "expose": st.none() | st.lists(st.sampled_from([80, 81]), max_size=2).map(tuple),
}
POLICIES = st.builds(
    Policy,
    **PARTS,
    phases=st.dictionaries(st.sampled_from(["setup", "agent"]), st.builds(Part, **PARTS), max_size=2),
)


@CALM
@given(POLICIES, POLICIES, POLICIES)
def test_merging_is_associative(a: Policy, b: Policy, c: Policy) -> None:
    assert merge(merge(a, b), c) == merge(a, merge(b, c))


@CALM
@given(POLICIES, POLICIES)
def test_normal_forms_are_their_own_and_merging_twice_is_merging_once(a: Policy, b: Policy) -> None:
    assert normal(normal(a)) == normal(a)
    assert merge(a, a) == merge(a, Policy()) == normal(a)
    assert merge(merge(a, b), b) == merge(a, b) == merge(normal(a), normal(b))


@CALM
@given(POLICIES)
def test_a_policy_is_plain_data_and_back(policy: Policy) -> None:
    assert policy_of(policy.document()) == policy
    assert msgspec.json.decode(msgspec.json.encode(policy), type=Policy) == policy


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (allow("127.1"), "network.rules[1].domain"),
        (Rule(action="allow", cidr="8.8.8.9/24", ports=(53,)), "network.rules[1].cidr"),
        (Rule(action="allow", mirror="pypy"), "network.rules[1].mirror"),
        (Rule(action="deny", mirror="pypy"), "network.rules[1].mirror"),
        (Rule(action="allow", cidr="10.1.2.3", ports=(80,)), "network.rules[1].cidr"),
        (Rule(action="allow", cidr="::ffff:127.0.0.1", ports=(80,)), "network.rules[1].cidr"),
        (Rule(action="allow", cidr="169.254.169.254", ports=(80,)), "network.rules[1].cidr"),
        (Rule(action="allow", cidr="64:ff9b::/96", ports=(80,)), "network.rules[1].cidr"),
        (Rule(action="allow", cidr="fd00::/8", ports=(80,)), "network.rules[1].cidr"),
        (Rule(action="allow", cidr="1.1.1.1", ports=(80,)), "network.rules[1].cidr"),  # the node's own
    ],
)
def test_a_sandboxs_rule_that_cannot_be_is_named(rule: Rule, field: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        compile_policy(Policy(rules=(allow("a.org"), rule)), PLAIN, ["1.1.1.1"])
    assert caught.value.detail["field"] == field
    assert caught.value.detail["allowed"]


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (Part(rules=(allow("b.org"), allow("[::1]"))), "rules[1].domain"),
        (Part(rules=(Rule(action="allow", mirror="pypy"),)), "rules[0].mirror"),
        (Part(rules=(Rule(action="allow", cidr="10.0.0.0/8", ports=(1,)),)), "rules[0].cidr"),
        (Part(profile="x"), "profile"),
    ],
)
def test_what_a_phase_says_is_looked_at_before_it_holds(part: Part, field: str) -> None:
    for phase in (None, "setup"):
        policy = Policy(rules=(allow("a.org"),), phases={"setup": part}, phase=phase)
        with pytest.raises(InvalidSpec) as caught:
            compile_policy(policy, PLAIN)
        assert caught.value.detail["field"] == f"network.phases.setup.{field}"


def test_a_profile_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(InvalidSpec) as caught:
        compile_policy(Policy(profile="x"), operator("version = 1\nprofiles = { python = [], c = [] }"))
    assert caught.value.detail == {"field": "network.profile", "allowed": "c, python"}


def test_a_node_does_not_have_any_number_of_addresses() -> None:
    with pytest.raises(InvalidSpec) as caught:
        compile_policy(Policy(), PLAIN, (f"1.1.{n >> 8}.{n & 255}" for n in range(1025)))
    assert caught.value.detail["field"] == "node"
    with pytest.raises(InvalidSpec):
        compile_policy(Policy(), PLAIN, ["localhost"])


# The operator's part.


def test_the_built_in_mirrors_have_no_host_in_common() -> None:
    found = [(name, host) for name, mirror in PLAIN.mirrors.items() for host in mirror.hosts]
    assert {"pypi", "npm", "crates", "go", "debian", "github", "huggingface"} <= PLAIN.mirrors.keys()
    for name, host in found:
        probe = host.replace("*", "any")
        assert [other for other, there in found if other != name and hosts.fits(there, probe)] == []


def test_mirrors_of_a_text_are_added_replaced_and_taken_away() -> None:
    made = operator(
        """
        version = 1
        [mirrors]
        pypi = { hosts = ["PyPI.Corp.example"], ports = [8443] }
        npm = { hosts = [] }
        corp = { hosts = ["*.corp.example"] }
        """
    )
    assert made.mirrors["pypi"].hosts == ("pypi.corp.example",)
    assert made.mirrors["corp"].ranges == ((443, 443),)
    assert "npm" not in made.mirrors
    assert "crates" in made.mirrors
    artifact = compile_policy(policy_of({"pypi": True}), made)
    assert decide(artifact, Query(name="pypi.corp.example", address="1.1.1.1", port=8443)).allow
    assert not decide(artifact, Query(name="pypi.org", address="1.1.1.1", port=443)).allow


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "text"),
        ("version = 2", "version"),
        ("version = 1\nversion = 1", "text"),
        ("version = 1\nmirror = {}", "text"),
        ("version = 1\n[mirrors.x]\nhosts = 'a.org'", "mirrors[...].hosts"),
        ("version = 1\n[mirrors.x]\nhosts = ['127.1']", "mirrors.x.hosts[0]"),
        ("version = 1\n[mirrors.x]\nhosts = ['a.org']\nports = []", "mirrors.x.ports"),
        ("version = 1\n[mirrors.x]\nhosts = ['a.org']\nports = [0]", "mirrors.x.ports"),
        ("version = 1\n[mirrors.'a b']\nhosts = ['a.org']", "mirrors"),
        (f"version = 1\n[mirrors.x]\nhosts = {[f'a{i}.org' for i in range(HOSTS_MAX + 1)]}", "mirrors.x.hosts"),
        ("version = 1\nfloor = [{action = 'allow', mirror = 'pypi'}]", "floor[0].action"),
        ("version = 1\nfloor = [{action = 'deny', mirror = 'pypy'}]", "floor[0].mirror"),
        ("version = 1\ndefault = [{action = 'deny', domain = '*.org'}]", "default[0].domain"),
        ("version = 1\ndefault = [{action = 'deny'}]", "default[0]"),
        ("version = 1\nprofiles.p = [{action = 'allow', cidr = '10.0.0.0/8'}]", "profiles.p[0].ports"),
        ("version = 1\nprofiles.p = [{action = 'allow', cidr = '10.0.0.1/8', ports = [1]}]", "profiles.p[0].cidr"),
        ("#" * (1024 * 1024 + 1), "text"),
    ],
)
def test_a_text_that_is_wrong_says_where(text: str, field: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        operator(text)
    assert caught.value.detail["field"] == field, caught.value


@pytest.mark.parametrize("kind", ["mirrors", "profiles"])
def test_there_are_not_any_number_of(kind: str) -> None:
    value = "{ hosts = ['a.org'] }" if kind == "mirrors" else "[]"
    lines = "\n".join(f"n{i} = {value}" for i in range(257))
    with pytest.raises(InvalidSpec) as caught:
        operator(f"version = 1\n[{kind}]\n{lines}")
    assert caught.value.detail["field"] == kind
