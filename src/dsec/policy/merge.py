"""Policies in one form, one laid over another, and what holds of one in its phase.

A patch replaces what it names: all rules about the same mirror, domain or range give way to those of the patch.
So it is written as the short form is changed, entry by entry, and the order of three does not depend on which two are
merged first.
"""

from __future__ import annotations

import msgspec

from dsec.model.network import Part, Policy, Rule, port_ranges
from dsec.policy import addresses, hosts


def normal_rules(rules: tuple[Rule, ...], field: str) -> tuple[Rule, ...]:
    """Rules with their domains, ranges and ports in one form, in the order given. Raises InvalidSpec naming one."""
    return tuple(_normal(rule, f"{field}[{index}]") for index, rule in enumerate(rules))


def normal(policy: Policy, *, patch: bool = False) -> Policy:
    """A policy, or a patch, with everything in one form. Raises InvalidSpec naming the field, below `network`."""
    policy.check(patch=patch)
    phases = {name: _normal_part(part, f"network.phases.{name}") for name, part in sorted(policy.phases.items())}
    part = _normal_part(policy, "network")
    return msgspec.structs.replace(policy, rules=part.rules, expose=part.expose, phases=phases)


def merge(policy: Policy, patch: Policy) -> Policy:
    """The policy with a patch laid over it, in one form.

    Rules: those about a target that the patch names are replaced by its own. Profile, exposed ports and phase: the
    patch's where it says one; the phase may be one of the policy's. Phases: the patch's replace those of the same name.
    Raises InvalidSpec, also when the whole is more than a policy may have.
    """
    below, above = normal(policy), normal(patch, patch=True)
    part = laid_over(below, above)
    merged = Policy(
        profile=part.profile,
        rules=part.rules,
        expose=part.expose,
        phases=dict(sorted({**below.phases, **above.phases}.items())),
        phase=below.phase if above.phase is None else above.phase,
    )
    return merged.check()


def effective(policy: Policy) -> Part:
    """What holds of a policy in its phase, in one form: the phase's part laid over the rest."""
    whole = normal(policy)
    common = Part(profile=whole.profile, rules=whole.rules, expose=whole.expose)
    return common if whole.phase is None else laid_over(common, whole.phases[whole.phase])


def exposes(policy: Policy, port: int) -> bool:
    """Whether a port of the sandbox may be exposed: one of those that the policy names in its phase, or any."""
    named = effective(policy).expose
    return named is None or port in named


def laid_over(below: Part, above: Part) -> Part:
    """One part laid over another; both in normal form."""
    named = {rule.target for rule in above.rules}
    kept = tuple(rule for rule in below.rules if rule.target not in named)
    return Part(
        profile=below.profile if above.profile is None else above.profile,
        rules=kept + above.rules,
        expose=below.expose if above.expose is None else above.expose,
    )


def _normal_part(part: Part, field: str) -> Part:
    expose = None if part.expose is None else tuple(sorted(set(part.expose)))
    return Part(profile=part.profile, rules=normal_rules(part.rules, f"{field}.rules"), expose=expose)


def _normal(rule: Rule, field: str) -> Rule:
    ranges = port_ranges(rule.ports, f"{field}.ports")
    ports = tuple(low if low == high else f"{low}-{high}" for low, high in ranges)
    domain = None if rule.domain is None else hosts.pattern(rule.domain, f"{field}.domain")
    made = None if rule.cidr is None else str(addresses.cidr(rule.cidr, f"{field}.cidr"))
    return msgspec.structs.replace(rule, domain=domain, cidr=made, ports=ports)
