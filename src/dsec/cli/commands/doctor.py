"""`dsec doctor`: what this machine can do, what is missing and what to do about it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from dsec.cli.commands.common import client
from dsec.cli.terminal import safe, show_json
from dsec.model.errors import DsecError, NodeUnreachable
from dsec.model.states import Capabilities

if TYPE_CHECKING:
    import argparse

MARKS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    name: str
    level: Literal["ok", "warning", "problem"]
    found: str
    advice: str = ""


class Report(msgspec.Struct, frozen=True):
    """What was found."""

    machine: tuple[Finding, ...]
    node: Finding
    backends: dict[str, Capabilities]


def doctor_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec doctor`."""
    parser.add_argument("--state-dir", type=Path, default=Path(os.environ.get("DSEC_STATE_DIR") or "/var/lib/dsec"))
    parser.add_argument("--json", action="store_true", help="the report as JSON")


def doctor_command(args: argparse.Namespace) -> int:
    """Examine this machine and ask its node; 1 when something keeps sandboxes from running."""
    report = examine(args)
    if args.json:
        show_json(report)
    else:
        print(render(report))
    lines = [*report.machine, report.node]
    return 1 if any(line.level == "problem" for line in lines) else 0


def examine(args: argparse.Namespace) -> Report:
    """The report on this machine and the node it reaches."""
    from dsec.linux.doctor import examine as examine_machine

    # The nearest directory that is there: before the first start the state has none of its own.
    where = next(path for path in (args.state_dir.absolute(), *args.state_dir.absolute().parents) if path.exists())
    machine = [Finding(one.name, one.level, one.found, one.advice) for one in examine_machine(where)]
    backends: dict[str, Capabilities] = {}
    try:
        made = client(args)
        info = made.node()
        backends = made.capabilities()
        node = Finding("node", "ok", f"{info.node} at {made.url}, version {info.version}, {info.sandboxes} sandboxes")
    except NodeUnreachable as error:
        node = Finding("node", "warning", str(error), "`dsec up` starts it; then this report has its backends, too")
    except DsecError as error:
        node = Finding("node", "problem", str(error), "check DSEC_URL and DSEC_API_KEY")
    return Report(machine=(_extra(), *machine), node=node, backends=backends)


def _extra() -> Finding:
    from dsec.cli.commands.service import NODE_MODULES

    missing = [name for name in NODE_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        return Finding("package", "warning", f"no {', '.join(missing)}", "pip install 'dsec[node]' to run a node here")
    return Finding("package", "ok", "dsec[node] is installed")


def render(report: Report) -> str:
    """The report for a person."""
    lines = []
    width = max(len(line.name) for line in (*report.machine, report.node))
    for line in (*report.machine, report.node):
        lines.append(f"{MARKS[line.level]}  {line.name.ljust(width)}  {safe(line.found)}")
        if line.advice:
            lines.append(f"{'':9}{'':{width}}  -> {safe(line.advice)}")
    for name, backend in sorted(report.backends.items()):
        lines += ["", _headline(name, backend)]
        features = max((len(feature) for feature in backend.features), default=0)
        for feature, one in sorted(backend.features.items()):
            mark = "ok     " if one.available else "missing"
            why = one.mechanism if one.available else one.reason
            lines.append(f"{mark}  {safe(feature).ljust(features)}  {safe(why or '')}".rstrip())
    return "\n".join(lines)


def _headline(name: str, backend: Capabilities) -> str:
    if backend.available:
        return f"backend {safe(name)}:"
    return f"backend {safe(name)}: not available: {safe(backend.reason or 'no reason given')}"
