"""Names of hosts in one form: lower case, ASCII, no final dot.

Two grammars. What a program says (a question, SNI, Host) is only brought into that form, or is no name. What stands in
a policy is more: it may be international, and whatever could be read as an address or fits everything is refused.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

import idna

from dsec.model import limits
from dsec.model.errors import InvalidSpec

HOST_MAX_CHARS: Final = 253
WILDCARD: Final = "*."

_SAID = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\Z")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z")
# As the URL standard has it: a name that ends so is an address, however it is written (0x7f.1, 2130706433, 127.1).
_NUMBER = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)\Z")
_JOINERS: Final = "\u200c\u200d"  # parts of words in some scripts; idna says where
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Zs", "Zl", "Zp"})
_ALLOWED: Final = "a host's name (two labels at least, each 1 to 63 of a-z 0-9 - _ or international), no address"


def said(text: str) -> str | None:
    """A name that a program said, in its one form; None: it is not a host's name, and no rule is about it."""
    if not text.isascii():
        return None
    name = text.removesuffix(".").lower()
    return name if len(name) <= HOST_MAX_CHARS and _SAID.match(name) else None


def pattern(text: str, field: str) -> str:
    """A domain of a rule in its one form, `example.org` or `*.example.org`. Raises InvalidSpec naming `field`.

    A wildcard is for every name below its own, however deep, and not for that name itself.
    """
    if text.startswith(WILDCARD):
        return WILDCARD + _host(text.removeprefix(WILDCARD), text, field)
    return _host(text, text, field)


def fits(pattern: str, name: str) -> bool:
    """Whether a domain in its one form is about a name in its one form."""
    if pattern.startswith(WILDCARD):
        return name.endswith(pattern[1:]) and len(name) >= len(pattern)
    return name == pattern


def _host(text: str, whole: str, field: str) -> str:
    if len(whole) > limits.NETWORK_TARGET_MAX_CHARS or any(_hidden(char) for char in text):
        raise InvalidSpec.field(field, whole, _ALLOWED)
    try:
        labels = _ascii(text)
    except idna.IDNAError as error:
        raise InvalidSpec.field(field, whole, f"{_ALLOWED} ({error})") from error
    name = ".".join(labels)
    if len(name) > HOST_MAX_CHARS or not all(_LABEL.match(label) for label in labels):
        raise InvalidSpec.field(field, whole, _ALLOWED)
    if _NUMBER.match(labels[-1]):
        raise InvalidSpec.field(field, whole, f"{_ALLOWED}; addresses are given by cidr=")
    if len(labels) < 2 or labels[-1] == "localhost":
        raise InvalidSpec.field(field, whole, f"{_ALLOWED}, and not localhost")
    return name


def _ascii(text: str) -> list[str]:
    """The labels as they are asked for in the DNS. What is plain ASCII already is not looked at by idna's rules, which
    refuse names that there are (`r3---sn.example.org`, `_x.example.org`)."""
    plain = text.lower() if text.isascii() else idna.uts46_remap(text, std3_rules=False, transitional=False)
    labels = plain.removesuffix(".").split(".")
    return [
        label if label.isascii() and not label.startswith("xn--") else idna.alabel(label).decode("ascii")
        for label in labels
    ]


def _hidden(char: str) -> bool:
    return char not in _JOINERS and unicodedata.category(char) in _HIDDEN
