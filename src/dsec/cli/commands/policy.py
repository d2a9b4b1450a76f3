"""`dsec policy`: what a sandbox may reach."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec.cli.commands.common import client, switches
from dsec.cli.terminal import safe, show_json, table
from dsec.model.errors import InvalidSpec

if TYPE_CHECKING:
    import argparse

    from dsec.model.network import NetworkReport, NetworkRow


def policy_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec policy`."""
    about = "explain: each rule that holds; set: replace all; patch: change what is named, keep the rest"
    parser.add_argument("action", choices=["explain", "set", "patch"], help=about)
    parser.add_argument("sandbox", help="id or name")
    about = "for set and patch: a mirror and whether it may be reached; none: nothing"
    parser.add_argument("names", nargs="*", metavar="NAME=on|off", help=about)
    parser.add_argument("--file", metavar="FILE", help="for set and patch: a policy in JSON; -: from standard input")
    parser.add_argument("--json", action="store_true", help="explain: as JSON")


def policy_command(args: argparse.Namespace) -> int:
    """Explain or change what a sandbox may reach; a change holds when this returns."""
    given = bool(args.names) + (args.file is not None)
    if args.action == "explain" and given:
        raise InvalidSpec("dsec policy explain: it changes nothing; `dsec policy set` does")
    if args.action != "explain" and given != 1:
        raise InvalidSpec(f"dsec policy {args.action}: NAME=on|off, or --file FILE with a policy")
    network = _network(args) if given else {}
    sandbox = client(args).get(args.sandbox)
    if args.action == "explain":
        report = sandbox.explain_network()
        if args.json:
            show_json(report)
        else:
            print(text(report))
    elif args.action == "set":
        sandbox.set_network(network)
    else:
        sandbox.patch_network(network)
    return 0


def _network(args: argparse.Namespace) -> dict[str, Any]:
    if args.file is None:
        return dict(switches("network", args.names))
    import msgspec

    data = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidSpec(f"{args.file}: no JSON object: {error}", detail={"field": "network"}) from error


def text(report: NetworkReport) -> str:
    """A report for a person: the rules as they decide, the first that matches first, and what came of them."""
    lines = [table(("SOURCE", "RULE", "HITS", "ENFORCED BY"), (_row(row) for row in report.rules))]
    if not report.steered:
        lines.append("nothing was ever allowed: loopback only")
    elif report.reason is not None:
        lines.append(f"no numbers: {safe(report.reason)}")
    else:
        lines.append(
            f"{report.connections} connections; of ended ones {report.sent_bytes} bytes sent, "
            f"{report.received_bytes} received"
        )
    if report.phase is not None:
        lines.append(f"phase {safe(report.phase)}")
    return "\n".join(lines)


def _row(row: NetworkRow) -> tuple[str, str, str, str]:
    by = ", ".join(dict.fromkeys(row.mechanisms)) or f"nothing: {row.reason}"
    if row.shadowed_by is not None:
        by = f"nothing is left of it: {row.shadowed_by}"
    return row.source, row.text, str(row.hits), by
