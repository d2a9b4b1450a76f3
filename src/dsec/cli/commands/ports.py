"""`dsec expose`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec.cli.commands.common import client
from dsec.cli.terminal import note, show_json, table
from dsec.model.errors import InvalidSpec

if TYPE_CHECKING:
    import argparse


def expose_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec expose`."""
    parser.add_argument("sandbox", help="id or name")
    parser.add_argument("port", nargs="?", type=int, help="what listens inside (default: list those that are exposed)")
    parser.add_argument("--close", action="store_true", help="close it for good, with the connections to it")
    parser.add_argument("--json", action="store_true", help="with origin and token apart, as JSON")


def expose_command(args: argparse.Namespace) -> int:
    """Print the URL of a port, which has its token in it."""
    sandbox = client(args).get(args.sandbox)
    if args.close:
        if args.port is None:
            raise InvalidSpec("--close wants the port that is to be closed")
        sandbox.unexpose(args.port)
        note(f"dsec: port {args.port} is closed")
        return 0
    if args.port is not None:
        exposed = sandbox.expose(args.port)
        if args.json:
            show_json(exposed)
        else:
            print(exposed.url)
        return 0
    found = sandbox.exposed()
    if args.json:
        show_json(found)
    else:
        print(table(("PORT", "URL"), [(str(one.port), one.url) for one in found]))
    return 0
