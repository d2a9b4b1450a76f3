"""What the page about policies shows is so."""

from __future__ import annotations

import json
import re

from dsec.model.network import policy_of
from dsec.policy import compile_policy, exposes, operator
from dsec.policy.explain import CLOSED, EXPOSE, NAMES, PROXY, ROUTED
from tests.kit.lanes import TESTS

PAGE = (TESTS.parent / "docs/reference/network-policy.md").read_text()


def block(language: str) -> str:
    [text] = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert isinstance(text, str)
    return text


def test_its_policy_is_compiled_with_its_operators_text() -> None:
    made = operator(block("toml"))
    policy = policy_of(json.loads(block("json")))
    assert compile_policy(policy, made).table.rules
    assert exposes(policy, 8000) and not exposes(policy, 8001)
    assert not exposes(policy.in_phase("agent"), 8000)
    assert made.mirrors["pypi"].hosts == ("pypi.corp.example",)


def test_its_python_runs() -> None:
    found: dict[str, dict[str, object]] = {}
    exec(block("python"), {}, found)
    assert found["fields"]["network"] == {
        "version": 1,
        "rules": [{"action": "allow", "domain": "example.org"}, {"action": "deny", "mirror": "npm"}],
    }


def test_its_mirrors_are_those_that_are_built_in() -> None:
    rows = {
        name: re.findall(r"`([^`]+)`", hosts) for name, hosts in re.findall(r"^\| `(\w+)` \| (`.*) \|$", PAGE, re.M)
    }
    built_in = operator().mirrors
    for name, mirror in built_in.items():
        assert sorted(rows[name]) == list(mirror.hosts), name
        assert mirror.ranges == (((80, 80), (443, 443)) if name in ("debian", "ubuntu", "alpine") else ((443, 443),))


def test_it_names_the_features() -> None:
    for feature in (CLOSED, NAMES, PROXY, ROUTED, EXPOSE):
        assert f"`{feature}`" in PAGE
