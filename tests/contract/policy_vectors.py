"""Compiled policies and what is decided by them: `vectors/policy.json`, for every reader of a table.

Each case has a policy as it is written, the table as JSON and as the bytes that are sent (`msgpack`), the node's own
addresses, and verdicts. After a change of the contract `python -m tests.contract.policy_vectors` writes it again; the
difference shows what a reader has to learn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.model.network import policy_of
from dsec.policy import Artifact, Query, compile_policy, decide, hosts, operator, prefixes, resolves
from dsec.policy import addresses as ranges

FILE: Final = Path(__file__).parent / "vectors/policy.json"
NODE: Final = ("1.1.1.1", "10.0.5.1", "2a00::1")

OPERATOR: Final = """
version = 1
floor = [
  { action = "deny", domain = "*.evil.org" },
  { action = "deny", mirror = "huggingface" },
  { action = "deny", cidr = "9.9.9.0/24" },
]
default = [{ action = "allow", domain = "status.example.org" }, { action = "deny", domain = "old.example.org" }]
[profiles]
corp = [
  { action = "allow", cidr = "10.0.0.0/16", ports = [443, "8000-8100"] },
  { action = "allow", cidr = "64:ff9b::/96", ports = [443] },
  { action = "allow", domain = "*.corp.example" },
]
wide = [{ action = "allow", cidr = "0.0.0.0/0", ports = ["1-65535"] }, { action = "deny", mirror = "npm" }]
"""
POLICIES: Final[dict[str, dict[str, Any]]] = {
    "nothing": {},
    "short": {"pypi": True, "npm": False, "huggingface": True},
    "names": {
        "version": 1,
        "rules": [
            {"action": "allow", "domain": "*.example.org"},
            {"action": "allow", "domain": "bücher.example", "ports": [443]},
            {"action": "allow", "domain": "x.evil.org"},
            {"action": "deny", "domain": "secret.example.org"},
            {"action": "deny", "domain": "half.example.org", "ports": [443]},
            {"action": "deny", "domain": "none.example.org", "protocol": "tcp"},
            {"action": "deny", "domain": "none.example.org", "protocol": "udp"},
            {"action": "allow", "domain": "git.example.net", "ports": [22], "by": "address"},
            {"action": "allow", "domain": "time.example.net", "ports": [123], "protocol": "udp", "by": "address"},
        ],
    },
    "ranges": {
        "version": 1,
        "rules": [
            {"action": "allow", "cidr": "8.8.0.0/16", "ports": [53, 443]},
            {"action": "allow", "cidr": "8.8.8.8", "ports": [53], "protocol": "udp"},
            {"action": "deny", "cidr": "8.8.4.0/24", "ports": [53]},
            {"action": "allow", "cidr": "::/0", "ports": [853]},
        ],
    },
    "corp": {"version": 1, "profile": "corp", "rules": [{"action": "deny", "cidr": "10.0.7.0/24"}]},
    "wide": {"version": 1, "profile": "wide", "rules": [{"action": "allow", "mirror": "npm", "ports": [443]}]},
}
NAMES: Final = (
    *("pypi.org", "PyPI.org.", "files.pythonhosted.org", "registry.npmjs.org", "huggingface.co", "a.huggingface.co"),
    *("example.org", "a.example.org", "b.a.example.org", "xexample.org", "secret.example.org", "a.secret.example.org"),
    *("half.example.org", "none.example.org", "old.example.org", "status.example.org", "x.evil.org", "evil.org"),
    *("xn--bcher-kva.example", "bücher.example", "git.example.net", "time.example.net", "a.corp.example"),
    *("example.org..", "", ".", "*.example.org", "127.0.0.1", "a\0.example.org", "-a.example.org", "_a.example.org"),
)
ADDRESSES: Final = (
    *("8.8.8.8", "8.8.4.4", "8.9.0.0", "9.9.9.9", "1.1.1.1", "1.1.1.2", "10.0.5.1", "10.0.6.1", "10.0.7.1", "10.1.0.1"),
    *("127.0.0.1", "169.254.169.254", "::ffff:8.8.8.8", "::ffff:10.0.6.1", "::ffff:169.254.169.254"),
    *("64:ff9b::808:808", "64:ff9b::a00:601", "64:ff9b::909:909", "2002:808:808::1", "2002:a00:601::1"),
    *("2a00::1", "2a00::2", "2001:db8::1", "fd00:ec2::254", "::1", "fe80::1", "ff02::fb"),
)
# With each name a public address and a closed one; with each address no name, and one that is allowed in most cases.
QUERIES: Final = (
    *(Query(name=name, address=at, port=443) for name in NAMES for at in ("1.1.1.2", "10.0.6.1")),
    *(Query(name="half.example.org", address="1.1.1.2", port=port) for port in (80, 443)),
    *(Query(name="git.example.net", address="1.1.1.2", port=port) for port in (22, 23)),
    *(Query(name="time.example.net", address="1.1.1.2", port=123, protocol=way) for way in ("tcp", "udp")),
    *(Query(address=at, port=port) for at in ADDRESSES for port in (53, 443, 853)),
    *(Query(address=at, port=53, protocol="udp") for at in ADDRESSES),
    *(Query(name="a.example.org", address=at, port=443) for at in ADDRESSES),
    *(Query(address="8.8.8.8", port=port) for port in (1, 52, 54, 442, 444, 65535)),
    *(Query(address="10.0.6.1", port=port) for port in (7999, 8000, 8100, 8101)),
)


def artifacts() -> dict[str, Artifact]:
    """Every case, compiled."""
    made = operator(OPERATOR)
    return {name: compile_policy(policy_of(policy), made, NODE) for name, policy in POLICIES.items()}


def document() -> dict[str, Any]:
    """What the file should have."""
    return {
        "about": "Written by tests/contract/policy_vectors.py; docs/reference/network-table.md says what it means.",
        "operator": OPERATOR,
        "names": [{"said": name, "name": hosts.said(name)} for name in NAMES],
        "closed": [{"address": at, "closed": _is_closed(at)} for at in ADDRESSES + EDGES],
        "cases": [_case(name, made) for name, made in artifacts().items()],
    }


def text() -> str:
    """The same as it is written: a line for each verdict, each line of a table, and the like."""
    return _written(document(), depth=3) + "\n"


def _written(value: Any, depth: int, indent: str = "") -> str:
    if depth == 0 or not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {_written(part, depth - 1, inner)}" for key, part in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    # What stands in a list of cases is as deep as it was; a list of anything else has a line for each.
    lines = [inner + _written(part, depth if "case" in part else 0, inner) for part in value]
    return "[\n" + ",\n".join(lines) + f"\n{indent}]"


def _case(name: str, artifact: Artifact) -> dict[str, Any]:
    table = msgspec.msgpack.encode(artifact.table)
    return {
        "case": name,
        "policy": POLICIES[name],
        "digest": artifact.digest,
        "node": list(artifact.node),
        "table": msgspec.to_builtins(artifact.table),
        "msgpack": table.hex(),
        "decide": [_decided(artifact, query) for query in QUERIES],
        "resolves": [_resolved(artifact, name, None) for name in NAMES]
        + [_resolved(artifact, "a.example.org", at) for at in ADDRESSES],
        "prefixes": [msgspec.to_builtins(row) for row in prefixes(artifact)],
    }


def _decided(artifact: Artifact, query: Query) -> dict[str, Any]:
    verdict: dict[str, Any] = msgspec.to_builtins(decide(artifact, query))
    return {**_some(msgspec.structs.asdict(query)), **_some(verdict)}


def _resolved(artifact: Artifact, name: str, address: str | None) -> dict[str, Any]:
    verdict: dict[str, Any] = msgspec.to_builtins(resolves(artifact, name, address))
    return {**_some({"name": name, "address": address}), **_some(verdict)}


def _some(fields: dict[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in fields.items() if value is not None}


def _is_closed(at: str) -> bool:
    address = ranges.address(at)
    assert address is not None
    own = tuple(ranges.cidr(text, "node") for text in NODE)
    return ranges.why_closed(address, ranges.closed(own)) is not None


def _edges() -> tuple[str, ...]:
    """The addresses at both ends of each closed range, and those beside them."""
    found: dict[str, None] = {}
    for net, _ in ranges.closed():
        kind = type(net.network_address)
        for number in (int(net.network_address) - 1, int(net.network_address), int(net.broadcast_address)):
            if number >= 0:
                found[str(kind(number))] = None
        if int(net.broadcast_address) + 1 < 2**net.max_prefixlen:
            found[str(kind(int(net.broadcast_address) + 1))] = None
    return tuple(found)


EDGES: Final = _edges()

if __name__ == "__main__":
    FILE.write_text(text())
