"""Errors in the words of the command line: what the SDK calls a field is an option here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dsec.model.errors import DsecError

# Fields of `dsec.Spec` and `run` that are options, under another name than `--a-b` for `a_b`; and those under that.
_OPTIONS: Final = {"toolkits": "--toolkit", "labels": "--label"}
_AS_THEY_ARE: Final = frozenset(
    {"backend", "image", "base", "workspace", "cpu", "memory_mib", "disk_mib", "pids", "idle_timeout_s", "lifetime_s"}
    | {"wait_s", "network", "env", "cwd", "user", "name", "job", "timeout_s", "role"}
)
# The node's and the SDK's advice, and what it is here.
PHRASES: Final = (
    ("use if_exists='get' or another name", "`dsec exec` runs in it; or take another name"),
    ("wait longer (wait_s)", "wait longer (--wait-s)"),
    ("alive or ended not long ago", "alive or ended not long ago (`dsec ps -a` lists them)"),
)


def option(field: str) -> str | None:
    """The option that sets a field; None: there is none."""
    if field in _AS_THEY_ARE:
        return "--" + field.replace("_", "-")
    return _OPTIONS.get(field)


def said(error: DsecError) -> str:
    """The message of an error."""
    return in_our_words(error.message, error.detail.get("field"))


def in_our_words(message: str, field: object) -> str:
    """A message with options for fields."""
    for theirs, ours in PHRASES:
        message = message.replace(theirs, ours)
    name = option(field) if isinstance(field, str) else None
    if name is not None and message.startswith((f"{field}=", f"{field}:")):
        return name + message[len(str(field)) :]
    return message
