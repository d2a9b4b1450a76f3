"""What the operator of a node says: mirrors by name, profiles, what nobody may reach, what everybody may.

A TOML text. Its mirrors are added to the built-in ones; one of the same name replaces them, without hosts it is gone.
"""

from __future__ import annotations

import tomllib
from typing import Final, Literal

import msgspec

from dsec.model import ids
from dsec.model.errors import InvalidSpec
from dsec.model.network import Ports, Rule, check_rules, port_ranges
from dsec.policy import hosts
from dsec.policy.merge import normal_rules

TEXT_MAX_BYTES: Final = 1024 * 1024
MIRRORS_MAX: Final = 256
HOSTS_MAX: Final = 64  # of one mirror
PROFILES_MAX: Final = 256

# No host is in two of them: a mirror that is denied closes no part of one that is allowed.
BUILT_IN: Final = """
version = 1

[mirrors]
pypi = { hosts = ["pypi.org", "files.pythonhosted.org"] }
npm = { hosts = ["registry.npmjs.org", "registry.yarnpkg.com"] }
crates = { hosts = ["crates.io", "index.crates.io", "static.crates.io"] }
go = { hosts = ["proxy.golang.org", "sum.golang.org"] }
maven = { hosts = ["repo.maven.apache.org", "repo1.maven.org"] }
rubygems = { hosts = ["rubygems.org", "index.rubygems.org"] }
conda = { hosts = ["conda.anaconda.org", "repo.anaconda.com"] }
debian = { hosts = ["deb.debian.org", "security.debian.org", "ftp.debian.org"], ports = [80, 443] }
ubuntu = { hosts = ["archive.ubuntu.com", "security.ubuntu.com", "ports.ubuntu.com"], ports = [80, 443] }
alpine = { hosts = ["dl-cdn.alpinelinux.org"], ports = [80, 443] }
github = { hosts = ["github.com", "api.github.com", "codeload.github.com", "*.githubusercontent.com"] }
gitlab = { hosts = ["gitlab.com"] }
huggingface = { hosts = ["huggingface.co", "*.huggingface.co", "*.hf.co"] }
"""


class Mirror(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts that belong together, exact or `*.below`, and the tcp ports on which they serve."""

    hosts: tuple[str, ...] = ()
    ports: tuple[int | str, ...] = (443,)

    @property
    def ranges(self) -> Ports:
        """Its ports, in order."""
        return port_ranges(self.ports, "ports")


class Operator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The operator's part, in its normal form.

    `floor`: what is denied to everybody, whatever a sandbox says. `default`: what holds where a sandbox and its profile
    say nothing. `profiles`: rules that a sandbox chooses by name.
    """

    version: Literal[1]
    mirrors: dict[str, Mirror] = {}
    profiles: dict[str, tuple[Rule, ...]] = {}
    floor: tuple[Rule, ...] = ()
    default: tuple[Rule, ...] = ()


def operator(text: str = "version = 1\n") -> Operator:
    """What a text says, on top of the built-in mirrors. Raises InvalidSpec naming the field that is wrong."""
    built_in, own = _read(BUILT_IN), _read(text)
    mirrors = {name: mirror for name, mirror in {**built_in.mirrors, **own.mirrors}.items() if mirror.hosts}
    for field, count, most in (
        ("mirrors", len(mirrors), MIRRORS_MAX),
        ("profiles", len(own.profiles), PROFILES_MAX),
    ):
        if count > most:
            raise InvalidSpec.field(field, f"{count} {field}", f"at most {most}")
    checked = {ids.check_name(name, "mirrors"): _mirror(mirrors[name], f"mirrors.{name}") for name in sorted(mirrors)}
    for index, rule in enumerate(own.floor):
        if rule.action != "deny":
            allowed = "deny; what everybody may reach stands in default"
            raise InvalidSpec.field(f"floor[{index}].action", rule.action, allowed)
    return Operator(
        version=1,
        mirrors=checked,
        profiles={
            ids.check_name(name, "profiles"): _rules(rules, f"profiles.{name}", checked)
            for name, rules in sorted(own.profiles.items())
        },
        floor=_rules(own.floor, "floor", checked),
        default=_rules(own.default, "default", checked),
    )


def known_mirror(rule: Rule, mirrors: dict[str, Mirror], field: str) -> Mirror:
    """The mirror that a rule names. Raises InvalidSpec with those that there are, naming `field`."""
    found = mirrors.get(rule.mirror or "")
    if found is None:
        raise InvalidSpec.field(f"{field}.mirror", rule.mirror, ", ".join(sorted(mirrors)) or "none on this node")
    return found


def _read(text: str) -> Operator:
    if len(text) > TEXT_MAX_BYTES:
        raise InvalidSpec.field("text", f"{len(text)} letters", f"at most {TEXT_MAX_BYTES}")
    try:
        return msgspec.convert(tomllib.loads(text), Operator)
    except tomllib.TOMLDecodeError as error:
        raise InvalidSpec(f"text: it is not TOML: {error}", detail={"field": "text"}) from error
    except msgspec.ValidationError as error:
        said, marked, path = str(error).rpartition(" - at `$")
        field = path.strip("`.") if marked else "text"
        raise InvalidSpec(f"{field or 'text'}: {said or error}", detail={"field": field or "text"}) from error


def _mirror(mirror: Mirror, field: str) -> Mirror:
    if len(mirror.hosts) > HOSTS_MAX:
        raise InvalidSpec.field(f"{field}.hosts", f"{len(mirror.hosts)} hosts", f"at most {HOSTS_MAX}")
    if not port_ranges(mirror.ports, f"{field}.ports"):
        raise InvalidSpec.field(f"{field}.ports", mirror.ports, "one port at least")
    found = {hosts.pattern(host, f"{field}.hosts[{index}]") for index, host in enumerate(mirror.hosts)}
    return Mirror(hosts=tuple(sorted(found)), ports=mirror.ports)


def _rules(rules: tuple[Rule, ...], field: str, mirrors: dict[str, Mirror]) -> tuple[Rule, ...]:
    check_rules(field, rules)
    for index, rule in enumerate(rules):
        if rule.mirror is not None:
            known_mirror(rule, mirrors, f"{field}[{index}]")
    return normal_rules(rules, field)
