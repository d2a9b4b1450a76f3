"""What is decided by a compiled policy is what the policy says."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.model.errors import InvalidSpec
from dsec.model.network import Part, Policy, Rule, policy_of
from dsec.policy import (
    Artifact,
    Operator,
    Prefix,
    Query,
    Table,
    compile_policy,
    decide,
    effective,
    exposes,
    operator,
    prefixes,
    resolves,
)
from dsec.policy import addresses as ranges
from dsec.policy.compiler import rule_id
from dsec.policy.table import ID_MAX_CHARS
from tests.unit.policy import CALM, oracle

NODE = ("1.1.1.1/32", "10.0.5.1/32", "2a00::1/128")
NAMES = ["a.org", "x.a.org", "y.x.a.org", "b.org", "xa.org", "pypi.org", "files.pythonhosted.org", "X.A.ORG."]
ADDRESSES = [
    *(
        "8.8.8.8",
        "8.8.9.9",
        "1.1.1.1",
        "1.1.1.2",
        "10.0.5.1",
        "10.9.9.9",
        "127.0.0.1",
        "169.254.169.254",
        "169.254.1.1",
    ),
    *(
        "::ffff:8.8.8.8",
        "::ffff:10.9.9.9",
        "64:ff9b::808:808",
        "64:ff9b::a09:909",
        "2002:808:808::1",
        "2002:a09:909::1",
    ),
    *("2a00::1", "2a00::2", "2001:db8::1", "fd00:ec2::254", "fd00::7", "::1", "ff02::fb"),
]
DOMAINS = ["a.org", "*.a.org", "x.a.org", "*.x.a.org", "b.org"]
PUBLIC = ["0.0.0.0/0", "8.0.0.0/7", "8.8.8.0/24", "8.8.8.8/32", "1.1.1.0/24", "::/0", "2a00::/16", "2000::/3"]
CLOSED = [
    "10.0.0.0/8",
    "10.0.5.1/32",
    "10.0.0.0/16",
    "169.254.0.0/16",
    "169.254.169.254/32",
    "127.0.0.1/32",
    "1.1.1.1/32",
]
CLOSED += ["64:ff9b::/96", "64:ff9b::a00:0/104", "2002::/16", "fd00::/8", "8000::/1", "2a00::1/128"]
PORTS: list[tuple[int | str, ...]] = [(443,), (53, "400-500"), ("1-65535",), (80, 443)]

ports, maybe = st.sampled_from(PORTS), st.sampled_from([(), *PORTS])


def rules(cidrs: list[str]) -> st.SearchStrategy[Rule]:
    """Rules of an author who may allow these ranges."""
    named: dict[str, Any] = {"ports": maybe}
    target = st.one_of(
        st.fixed_dictionaries({"domain": st.sampled_from(DOMAINS)}), st.fixed_dictionaries({"mirror": st.just("pypi")})
    )
    ways: dict[str, Any] = {"protocol": st.none() | st.just("tcp")}
    udp: dict[str, Any] = {"protocol": st.just("udp"), "by": st.just("address")}
    allow = st.one_of(st.fixed_dictionaries(named | ways), st.fixed_dictionaries(named | udp))
    deny = st.fixed_dictionaries(named | {"protocol": st.sampled_from([None, "tcp", "udp"])})
    return st.one_of(
        st.builds(lambda a, b: Rule(action="allow", **a, **b), target, allow),
        st.builds(lambda a, b: Rule(action="deny", **a, **b), target, deny),
        st.builds(
            Rule,
            action=st.just("allow"),
            cidr=st.sampled_from(cidrs),
            ports=ports,
            protocol=st.sampled_from([None, "tcp", "udp"]),
        ),
        DENIALS,
    )


DENIALS = st.one_of(
    st.builds(Rule, action=st.just("deny"), cidr=st.sampled_from(PUBLIC + CLOSED), ports=maybe),
    st.builds(Rule, action=st.just("deny"), domain=st.sampled_from(DOMAINS), ports=maybe),
    st.builds(Rule, action=st.just("deny"), mirror=st.just("pypi"), protocol=st.sampled_from([None, "tcp", "udp"])),
)
MINE = st.lists(rules(PUBLIC), max_size=5).map(tuple)
THEIRS = st.lists(rules(PUBLIC + CLOSED), max_size=4).map(tuple)
OPERATORS = st.builds(
    lambda floor, default, profile: Operator(
        version=1, mirrors=operator().mirrors, floor=floor, default=default, profiles={"p": profile}
    ),
    st.lists(DENIALS, max_size=2).map(tuple),
    THEIRS,
    THEIRS,
)
POLICIES = st.builds(Policy, rules=MINE, profile=st.sampled_from([None, "p"]))
QUERIES = st.builds(
    Query,
    port=st.sampled_from([1, 53, 80, 443, 444, 65535]),
    protocol=st.sampled_from(["tcp", "udp"]),
    name=st.none() | st.sampled_from(NAMES),
    address=st.none() | st.sampled_from(ADDRESSES),
).filter(lambda query: query.name is not None or query.address is not None)


@settings(CALM, max_examples=300)
@given(POLICIES, OPERATORS, st.lists(QUERIES, min_size=1, max_size=12))
def test_the_table_decides_as_the_rules_do(policy: Policy, op: Operator, queries: list[Query]) -> None:
    artifact = compile_policy(policy, op, NODE)
    for query in queries:
        expected = oracle.allowed(effective(policy), op, NODE, query)
        assert decide(artifact, query).allow is expected, query


@settings(CALM, max_examples=100)
@given(POLICIES, OPERATORS, DENIALS, st.integers(0, 4), st.lists(QUERIES, min_size=1, max_size=12))
def test_another_denial_allows_nothing_more(
    policy: Policy, op: Operator, denial: Rule, where: int, queries: list[Query]
) -> None:
    before = compile_policy(policy, op, NODE)
    more = (denial,)
    if where == 0:
        policy = Policy(rules=policy.rules + more, profile=policy.profile)
    elif where == 1:
        op = msgspec.structs.replace(op, floor=op.floor + more)
    elif where == 2:
        op = msgspec.structs.replace(op, profiles={"p": op.profiles["p"] + more})
    else:
        op = msgspec.structs.replace(op, default=op.default + more)
    after = compile_policy(policy, op, NODE)
    for query in queries:
        assert decide(before, query).allow or not decide(after, query).allow
        if query.name:
            assert (
                resolves(before, query.name, query.address).allow
                or not resolves(after, query.name, query.address).allow
            )


@CALM
@given(POLICIES, OPERATORS, st.randoms(use_true_random=False))
def test_the_same_is_compiled_to_the_same(policy: Policy, op: Operator, chance: random.Random) -> None:
    artifact = compile_policy(policy, op, NODE)
    assert compile_policy(policy, op, NODE) == artifact
    shuffled = list(policy.rules)
    chance.shuffle(shuffled)
    other = compile_policy(Policy(rules=tuple(shuffled), profile=policy.profile), op, reversed(NODE))
    assert other == artifact
    assert other.numbered(7).digest == artifact.digest
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(artifact), type=Artifact) == artifact


@CALM
@given(POLICIES, OPERATORS, QUERIES)
def test_a_name_is_answered_if_and_only_if_something_there_may_be_reached(
    policy: Policy, op: Operator, query: Query
) -> None:
    artifact = compile_policy(policy, op, NODE)
    name = query.name or "a.org"
    # With the name alone first: a range that is allowed does not make a name be asked for.
    for at in (None, query.address):
        assert resolves(artifact, name, at).allow is (reachable(artifact, name, None) and reachable(artifact, name, at))


def reachable(artifact: Artifact, name: str, at: str | None) -> bool:
    """Whether a connection by this name, to this address, may pass at any port."""
    # Ports at which no rule changes its mind are as their neighbours.
    edges = {port for rule in artifact.table.rules for low, high in rule.ports for port in (low, high + 1)} | {1}
    return any(
        decide(artifact, Query(port=port, protocol=protocol, name=name, address=at)).allow
        for port in edges
        if port <= 65535
        for protocol in ("tcp", "udp")
    )


def range_rules(cidrs: list[str]) -> st.SearchStrategy[tuple[Rule, ...]]:
    """Rules for ranges alone, and of few ports, so that they meet."""
    some = {"ports": st.sampled_from([(443,), ("400-500",), ("1-65535",)]), "protocol": st.sampled_from([None, "tcp"])}
    allow = st.builds(Rule, action=st.just("allow"), cidr=st.sampled_from(cidrs), **some)
    deny = st.builds(Rule, action=st.just("deny"), cidr=st.sampled_from(PUBLIC + CLOSED), **some)
    return st.lists(allow | deny, max_size=5).map(tuple)


@settings(CALM, max_examples=200)
@given(range_rules(PUBLIC), range_rules(PUBLIC + CLOSED), range_rules(PUBLIC + CLOSED))
def test_the_map_of_prefixes_decides_addresses_as_the_table_does(
    mine: tuple[Rule, ...], theirs: tuple[Rule, ...], default: tuple[Rule, ...]
) -> None:
    op = Operator(version=1, profiles={"p": theirs}, default=default)
    policy = Policy(rules=mine, profile="p")
    artifact = compile_policy(policy, op, NODE)
    rows = [(ranges.network(row.range), row) for row in prefixes(artifact)]
    assert len(dict(rows)) == len(rows)
    for text in ADDRESSES:
        found = [pair for pair in rows if ranges.address(text) in pair[0]]
        _, longest = max(found, key=lambda pair: pair[0].prefixlen, default=(None, Prefix(range="")))
        for port in (1, 443, 444):
            asked = Query(port=port, address=text)
            assert any(low <= port <= high for low, high in longest.tcp) is decide(artifact, asked).allow
            assert decide(artifact, asked).allow is oracle.allowed(effective(policy), op, NODE, asked)
            asked = Query(port=port, address=text, protocol="udp")
            assert any(low <= port <= high for low, high in longest.udp) is decide(artifact, asked).allow


def test_a_prefix_that_changes_nothing_is_no_row() -> None:
    artifact = compiled(
        Rule(action="allow", cidr="8.8.0.0/16", ports=(53,)),
        Rule(action="allow", cidr="8.8.8.8", ports=(53,)),
        Rule(action="allow", cidr="8.8.9.0/24", ports=(80,)),
    )
    assert prefixes(artifact) == (
        Prefix(range="8.8.0.0/16", tcp=((53, 53),)),
        Prefix(range="8.8.9.0/24", tcp=((53, 53), (80, 80))),
    )


def compiled(*mine: Rule, text: str = "version = 1", profile: str | None = None) -> Artifact:
    return compile_policy(Policy(rules=mine, profile=profile), operator(text), NODE)


A = Rule(action="allow", domain="a.org")
NOT_A = Rule(action="deny", domain="a.org")
TO_A = Query(name="a.org", address="8.8.8.8", port=443)


def test_nothing_is_allowed_by_itself() -> None:
    assert compiled() == Artifact(table=Table(), node=compiled().node)
    assert decide(compiled(), TO_A) == msgspec.convert(
        {"allow": False, "reason": "no rule"}, type(decide(compiled(), TO_A))
    )


@pytest.mark.parametrize(
    ("mine", "text", "profile", "rule"),
    [
        ((A,), "", None, "own/allow/domain:a.org"),
        ((A, NOT_A), "", None, "own/deny/domain:a.org"),
        ((A, Rule(action="deny", domain="*.org.example")), "", None, "own/allow/domain:a.org"),
        ((A,), "floor = [{action='deny', domain='a.org'}]", None, "floor/deny/domain:a.org"),
        ((A,), "profiles.p = [{action='deny', domain='a.org'}]", "p", "own/allow/domain:a.org"),
        ((NOT_A,), "profiles.p = [{action='allow', domain='a.org'}]", "p", "own/deny/domain:a.org"),
        ((), "profiles.p = [{action='allow', domain='a.org'}]", "p", "profile/allow/domain:a.org"),
        ((), "profiles.p = [{action='allow', domain='a.org'}]", None, None),
        ((), "default = [{action='allow', domain='a.org'}]", None, "default/allow/domain:a.org"),
        ((NOT_A,), "default = [{action='allow', domain='a.org'}]", None, "own/deny/domain:a.org"),
        (
            (),
            "profiles.p = [{action='deny', domain='a.org'}]\ndefault = [{action='allow', domain='a.org'}]",
            "p",
            "profile/deny/domain:a.org",
        ),
    ],
)
def test_whose_rule_decides(mine: tuple[Rule, ...], text: str, profile: str | None, rule: str | None) -> None:
    verdict = decide(compiled(*mine, text=f"version = 1\n{text}", profile=profile), TO_A)
    assert verdict.rule == rule
    assert verdict.allow is (rule is not None and "/allow/" in rule)


def test_an_allowed_name_opens_no_address_that_is_closed() -> None:
    artifact = compiled(A)
    assert decide(artifact, TO_A).allow
    for at in ("10.9.9.9", "169.254.169.254", "::ffff:127.0.0.1", "64:ff9b::a09:909", "fd00:ec2::254", *NODE):
        closed = Query(name="a.org", address=at.partition("/")[0], port=443)
        assert decide(artifact, closed) == type(decide(artifact, closed))(allow=False, reason="closed"), at


def test_an_operators_range_opens_what_it_names_and_nothing_closed_inside() -> None:
    text = "version = 1\nprofiles.p = [{action='allow', cidr='%s', ports=[443]}]"
    for cidr, opened, shut in (
        ("10.0.0.0/8", "10.9.9.9", "10.0.5.1"),
        ("169.254.0.0/16", "169.254.1.1", "169.254.169.254"),
        ("64:ff9b::/96", "64:ff9b::808:808", "64:ff9b::a09:909"),
        ("0.0.0.0/0", "8.8.8.8", "10.9.9.9"),
        ("::/0", "2a00::2", "fd00::7"),
        ("10.0.5.1/32", "10.0.5.1", "10.0.5.2"),
    ):
        artifact = compiled(text=text % cidr, profile="p")
        assert decide(artifact, Query(address=opened, port=443)).allow, cidr
        assert not decide(artifact, Query(address=shut, port=443)).allow, cidr
        assert not decide(artifact, Query(address=opened, port=444)).allow, cidr


def test_a_denied_range_is_denied_wherever_it_stands_in_ipv6() -> None:
    text = "version = 1\ndefault = [{action='allow', cidr='64:ff9b::/96', ports=[443]}]"
    query = Query(address="64:ff9b::808:808", port=443)
    assert decide(compiled(text=text), query).allow
    assert not decide(compiled(Rule(action="deny", cidr="8.8.8.0/24"), text=text), query).allow


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (Query(port=0, name="a.org", address="8.8.8.8"), "no port"),
        (Query(port=65536, name="a.org", address="8.8.8.8"), "no port"),
        (Query(port=-1, name="a.org"), "no port"),
        (Query(port=443, protocol="icmp", name="a.org"), "no port"),  # type: ignore[arg-type]  # what is refused
        (Query(port=443), "no name"),
        (Query(port=443, name="a.org\0", address="8.8.8.8"), "no name"),
        (Query(port=443, name="a\u200b.org", address="8.8.8.8"), "no name"),
        (Query(port=443, name="a.org", address="8.8.8.8%x"), "no address"),
        (Query(port=443, name="a.org", address=""), "no address"),
        (Query(port=443, name="a.org..", address="8.8.8.8"), "no name"),
    ],
)
def test_what_is_no_question_is_denied(query: Query, reason: str) -> None:
    everything = compiled(A, Rule(action="allow", cidr="0.0.0.0/0", ports=("1-65535",)))
    assert decide(everything, query).reason == reason
    assert not decide(everything, query).allow


@CALM
@given(st.text(max_size=20) | st.none(), st.text(max_size=20) | st.none(), st.integers())
def test_nothing_that_is_asked_raises(name: str | None, address: str | None, port: int) -> None:
    assert decide(compiled(A), Query(port=port, name=name, address=address)).allow is False
    assert resolves(compiled(A), name or "", address).allow is False


def test_ports_and_ways_that_nobody_names_are_the_usual_ones() -> None:
    [line] = compiled(A).table.rules
    assert (line.ports, line.protocol, line.check) == (((80, 80), (443, 443)), "tcp", "spoken")
    [line] = compiled(NOT_A).table.rules
    assert (line.ports, line.protocol) == ((), None)
    lines = compile_policy(policy_of({"pypi": True}), operator()).table.rules
    assert {line.ports for line in lines} == {((443, 443),)}
    [line] = compiled(Rule(action="allow", domain="a.org", ports=(22,), by="address")).table.rules
    assert (line.ports, line.check) == (((22, 22),), "address")


def test_two_rules_that_differ_in_ports_are_one_line() -> None:
    artifact = compiled(A, Rule(action="allow", domain="A.org", ports=(444, "8000-8001")))
    [line] = artifact.table.rules
    assert line.ports == ((80, 80), (443, 444), (8000, 8001))


def test_what_may_be_exposed_is_said() -> None:
    policy = Policy(expose=(8000,), phases={"agent": Part(expose=()), "more": Part(expose=(80,)), "same": Part()})
    assert [exposes(policy, port) for port in (8000, 8001)] == [True, False]
    assert not exposes(policy.in_phase("agent"), 8000)
    assert exposes(policy.in_phase("same"), 8000)
    assert [exposes(policy.in_phase("more"), port) for port in (8000, 80)] == [False, True]
    assert exposes(Policy(), 8000)
    assert not exposes(Policy(expose=()), 8000)


def test_ids_are_short_enough_and_no_two_are_the_same() -> None:
    long = [f"{'a' * 60}.{'b' * 60}.{'c' * 60}.{end}.org" for end in ("x", "y")]
    ids = [rule_id("own", Rule(action="allow", domain=domain)) for domain in long]
    assert all(len(made) == ID_MAX_CHARS for made in ids)
    assert ids[0] != ids[1]


def test_a_table_has_an_end() -> None:
    hosts = [f"a{i}.org" for i in range(64)]
    mirrors = "\n".join(f"m{i} = {{ hosts = {hosts} }}" for i in range(200))
    with pytest.raises(InvalidSpec) as caught:
        compile_policy(policy_of({f"m{i}": True for i in range(200)}), operator(f"version = 1\n[mirrors]\n{mirrors}"))
    assert caught.value.detail == {"field": "network", "allowed": "at most 10000"}
