"""Options that several commands have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec.model.errors import InvalidSpec

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from dsec.sdk._sync.client import Client


def add_url(parser: argparse.ArgumentParser, *, below: bool = False) -> None:
    """`--url`; `below` another parser that has it, too: not given there, it is left as it was given above."""
    import argparse

    parser.add_argument(
        "--url",
        default=argparse.SUPPRESS if below else None,
        help="the node or gateway (default: DSEC_URL, else this machine's node)",
    )


def client(args: argparse.Namespace) -> Client:
    """The client for `--url`."""
    from dsec.sdk._sync.client import Client

    return Client(args.url)


def is_program(ref: str) -> bool:
    """Whether it has the form of a program's id."""
    return ref.startswith("p-")


def pairs(option: str, items: Sequence[str] | None) -> dict[str, str]:
    """`KEY=VALUE` options as a dict."""
    found = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise InvalidSpec.field(option, item, "KEY=VALUE")
        found[key] = value
    return found


def switches(option: str, items: Sequence[str] | None) -> dict[str, bool]:
    """`NAME=on` or `NAME=off` options as a dict; `none`, which is docker's word for it, is none of them."""
    words = {"on": True, "true": True, "off": False, "false": False}
    found: dict[str, bool] = {}
    if list(items or ()) == ["none"]:
        return found
    if lone := [item for item in items or () if "=" not in item]:
        raise InvalidSpec.field(option, lone[0], "NAME=on or NAME=off, or none alone")
    for name, value in pairs(option, items).items():
        if value not in words:
            raise InvalidSpec.field(option, f"{name}={value}", "NAME=on or NAME=off")
        found[name] = words[value]
    return found
