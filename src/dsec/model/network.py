"""What a sandbox may reach, as a caller says it: names of mirrors, or a whole policy. What it means: `dsec.policy`.

Here only its form is checked: the mirrors are the node's, and so are the rules for names of hosts and addresses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

import msgspec

from dsec.model import ids, limits
from dsec.model.convert import Checked
from dsec.model.errors import InvalidSpec

Action = Literal["allow", "deny"]
Protocol = Literal["tcp", "udp"]
By = Literal["name", "address"]
Target = tuple[Literal["mirror", "domain", "cidr"], str]
Network = dict[str, Any]  # the short form or a policy as plain data; which of the two: `policy_of`
Ports = tuple[tuple[int, int], ...]  # from, to, both included; in order, none touching the next

PORT_MAX: Final = 65_535
ALL_PORTS: Final[Ports] = ((1, PORT_MAX),)

_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})\Z")


class Rule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, metaclass=Checked
):
    """One thing that is allowed or denied: exactly one of `mirror`, `domain`, `cidr`.

    `ports` are numbers and ranges (`"8000-8100"`). Without them a rule that denies is about all, one that allows about
    those of the mirror, of a domain 80 and 443; for a `cidr` it has to name them. Without `protocol` a rule that denies
    is about both, one that allows about tcp. `by="address"` lets a connection that names nobody (SSH, a database) pass
    because its address was resolved for the name; whoever else is at that address can be reached with it. Over udp
    nothing else is possible, so that it has to be said there.
    """

    action: Action
    mirror: str | None = None
    domain: str | None = None
    cidr: str | None = None
    ports: tuple[int | str, ...] = ()
    protocol: Protocol | None = None
    by: By = "name"

    @property
    def target(self) -> Target:
        """What it is about, as it was written. Raises InvalidSpec unless it is one thing."""
        return self._target("rule")

    def _target(self, field: str) -> Target:
        found: list[Target] = []
        if self.mirror is not None:
            found.append(("mirror", self.mirror))
        if self.domain is not None:
            found.append(("domain", self.domain))
        if self.cidr is not None:
            found.append(("cidr", self.cidr))
        if len(found) != 1:
            raise InvalidSpec.field(field, dict(found), "exactly one of mirror, domain, cidr")
        return found[0]

    def check(self, field: str = "rule") -> Self:
        """The rule itself when its form is right. Raises InvalidSpec naming what is wrong, below `field`."""
        kind, text = self._target(field)
        if kind == "mirror":
            ids.check_name(text, f"{field}.mirror")
        elif not 0 < len(text) <= limits.NETWORK_TARGET_MAX_CHARS:
            allowed = f"1 to {limits.NETWORK_TARGET_MAX_CHARS} letters"
            raise InvalidSpec.field(f"{field}.{kind}", text, allowed)
        ports = port_ranges(self.ports, f"{field}.ports")
        if kind == "cidr" and self.action == "allow" and not ports:
            raise InvalidSpec.field(f"{field}.ports", self.ports, 'ports for what a cidr allows ("1-65535": all)')
        named = kind != "cidr" and self.action == "allow"
        if self.by == "address" and not named:
            raise InvalidSpec.field(f"{field}.by", self.by, "name, but where a mirror or a domain is allowed")
        if self.by == "name" and named and self.protocol == "udp":
            raise InvalidSpec.field(f"{field}.by", self.by, "address: what is sent over udp names nobody")
        return self


class Part(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, metaclass=Checked
):
    """What holds together: a profile of the operator's by name, rules above it, ports that may be exposed.

    None for `profile` and `expose` says nothing of them: in a patch, and in a phase, they stay as they were.
    """

    profile: str | None = None
    rules: tuple[Rule, ...] = ()
    expose: tuple[int, ...] | None = None


class Policy(Part, frozen=True, kw_only=True, tag_field="version", tag=1):
    """A whole policy, version 1. What no rule allows is denied.

    `phases` are parts by name, of which the one that `phase` names holds; it is laid over the rest like a patch.
    """

    phases: dict[str, Part] = {}
    phase: str | None = None

    def check(self, *, patch: bool = False) -> Self:
        """The policy itself when its form is right. Raises InvalidSpec naming the field, below `network`.

        The phase of a patch may be one of the policy that it is laid over.
        """
        _check_part("network", self)
        if len(self.phases) > limits.NETWORK_PHASES_MAX:
            allowed = f"at most {limits.NETWORK_PHASES_MAX}"
            raise InvalidSpec.field("network.phases", f"{len(self.phases)} phases", allowed)
        for name, part in self.phases.items():
            _check_part(f"network.phases.{ids.check_name(name, 'network.phases')}", part)
        if self.phase is not None and self.phase not in self.phases and not patch:
            raise _no_such_phase("network.phase", self.phase, self.phases)
        return self

    def in_phase(self, phase: str | None) -> Self:
        """The same policy with another of its phases, or none, in force. Raises InvalidSpec: it has no such phase."""
        if phase is not None and phase not in self.phases:
            raise _no_such_phase("phase", phase, self.phases)
        return msgspec.structs.replace(self, phase=phase)

    def document(self) -> Network:
        """It as plain data, as `Spec.network` takes it."""
        data: Network = msgspec.json.decode(msgspec.json.encode(self))
        return data


class NetworkRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rule that holds for a sandbox. `source` is whose it is: floor, own, profile (with its name), default.

    `mechanisms` enforce it here, unless there is a `reason`: a policy with it is refused, `missing` is the feature.
    `shadowed_by`: the rule before it that denies all that it allows. `hits`: how often it decided about a connection or
    a name since the policy last changed.
    """

    id: str
    source: str
    text: str
    mechanisms: tuple[str, ...] = ()
    missing: str | None = None
    reason: str | None = None
    shadowed_by: str | None = None
    hits: int = 0


class NetworkReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sandbox may reach, rule by rule in the order in which they decide, and what came of it.

    `steered`: its connections are decided about; before its first rule that allows something it has loopback only.
    `reason`: why there are no numbers. `generation` grows with each change. Bytes are those of connections that ended.
    """

    network: Network
    phase: str | None = None
    steered: bool = False
    reason: str | None = None
    generation: int = 0
    connections: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    rules: tuple[NetworkRow, ...] = ()


def plain(network: Mapping[str, Any] | Policy) -> Network:
    """As it is sent."""
    if isinstance(network, Policy):
        return network.document()
    if not isinstance(network, Mapping):
        text = (
            f"network is of the type {type(network).__name__}; allowed: a dict, as {{'pypi': True}}, or a dsec.Policy"
        )
        raise InvalidSpec(text, detail={"field": "network"})
    return dict(network)


def policy_of(network: Mapping[str, Any] | Policy, *, patch: bool = False) -> Policy:
    """The policy that a caller means, its form checked. Raises InvalidSpec naming the field, `network` or below it.

    A mapping whose `version` is a number is a policy as plain data; any other one is the short form, which maps names
    of mirrors to whether they may be reached (a mirror may be called `version`: then there is True or False). A patch
    may name a phase of what it is laid over.
    """
    if isinstance(network, Policy):
        return network.check(patch=patch)
    version = network.get("version")
    if isinstance(version, int) and not isinstance(version, bool):
        try:
            return msgspec.convert(dict(network), Policy).check(patch=patch)
        except msgspec.ValidationError as error:
            raise _invalid(error, "network") from error
    if len(network) > limits.NETWORK_RULES_MAX:
        raise InvalidSpec.field("network", f"{len(network)} rules", f"at most {limits.NETWORK_RULES_MAX}")
    for name, reachable in network.items():
        if not isinstance(reachable, bool):
            raise InvalidSpec.field(f"network.{name}", reachable, "True or False; or a policy, with version 1")
        ids.check_name(name, "network")
    rules = (Rule(action="allow" if yes else "deny", mirror=name) for name, yes in network.items())
    return Policy(rules=tuple(rules)).check()


def port_ranges(ports: tuple[int | str, ...], field: str) -> Ports:
    """Ports in order, those that overlap or touch as one. Raises InvalidSpec naming the one that is not allowed."""
    if len(ports) > limits.NETWORK_PORTS_MAX:
        raise InvalidSpec.field(field, f"{len(ports)} ports", f"at most {limits.NETWORK_PORTS_MAX} numbers and ranges")
    found: list[tuple[int, int]] = []
    for port in ports:
        if isinstance(port, str):
            match = _RANGE.match(port)
            low, high = map(int, match.groups()) if match else (0, 0)
        else:
            low = high = port
        if not 1 <= low <= high <= PORT_MAX:
            raise InvalidSpec.field(field, port, f'1 to {PORT_MAX}, or a range as "8000-8100"')
        found.append((low, high))
    return joined(found)


def joined(ports: list[tuple[int, int]]) -> Ports:
    """Ranges of ports in order, those that overlap or touch as one."""
    made: list[tuple[int, int]] = []
    for low, high in sorted(ports):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return tuple(made)


def check_rules(field: str, rules: tuple[Rule, ...]) -> None:
    """Raises InvalidSpec unless number and form of the rules are right; it names the rule by its index."""
    if len(rules) > limits.NETWORK_RULES_MAX:
        raise InvalidSpec.field(field, f"{len(rules)} rules", f"at most {limits.NETWORK_RULES_MAX}")
    for index, rule in enumerate(rules):
        rule.check(f"{field}[{index}]")


def _check_part(field: str, part: Part) -> None:
    if part.profile is not None:
        ids.check_name(part.profile, f"{field}.profile")
    check_rules(f"{field}.rules", part.rules)
    if part.expose is not None:
        port_ranges(part.expose, f"{field}.expose")


def _no_such_phase(field: str, phase: str, phases: Mapping[str, Part]) -> InvalidSpec:
    return InvalidSpec.field(field, phase, ", ".join(sorted(phases)) or "none: the policy has no phases")


def _invalid(error: msgspec.ValidationError, top: str) -> InvalidSpec:
    """An InvalidSpec for what msgspec found wrong in a document, with the whole path as its field."""
    text = str(error)
    said, marked, path = text.rpartition(" - at `$")
    field = top + path.rstrip("`") if marked else top
    return InvalidSpec(f"{field}: {said if marked else text}", detail={"field": field})
