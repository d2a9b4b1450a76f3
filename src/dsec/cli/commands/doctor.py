"""`dsec doctor`: what this machine can do, what is missing and what to do about it."""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from dsec.cli.commands.common import client
from dsec.cli.terminal import safe, show_json
from dsec.model.errors import DsecError, NodeUnreachable
from dsec.model.states import Capabilities, NodeInfo

if TYPE_CHECKING:
    import argparse

MARKS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


# What to do about a feature that a backend is missing.
ADVICE = {
    "network_names": "a kernel with BPF programs of type sk_lookup (5.9 or newer), and IPv6 not switched off",
    "network_proxy": "as for network_names",
    "network_routed": "nothing to mend: what is reached is reached by tcp for now",
    "layers": "a kernel with EROFS (modprobe erofs)",
    "overlay": "a kernel with overlayfs (modprobe overlay)",
    "idmap": "a kernel with idmapped mounts of EROFS (6.1 or newer)",
    "disk_limit": "apt-get install btrfs-progs e2fsprogs, and a kernel with btrfs, ext4 or loop devices",
    "memory_limit": "enable the memory controller of cgroups",
    "cpu_limit": "enable the cpu controller of cgroups",
    "pids_limit": "enable the pids controller of cgroups",
}


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
    broken = any(not backend.available for backend in report.backends.values())
    return 1 if broken or any(line.level == "problem" for line in lines) else 0


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
        text = f"{info.node} at {made.url}, version {info.version}, {info.sandboxes} sandboxes"
        node = Finding("node", "ok", f"{text}; {_room(info)}")
    except NodeUnreachable as error:
        node = _unreachable(args, error)
    except DsecError as error:
        node = Finding("node", "problem", str(error), "check DSEC_URL and DSEC_API_KEY")
    return Report(machine=(_extra(), *machine, *_state(args)), node=node, backends=backends)


def _state(args: argparse.Namespace) -> list[Finding]:
    """Where the node of this machine has its state, when one lives; its next agent needs to be told the same."""
    from dsec.cli.commands.service import node_state

    if args.url or os.environ.get("DSEC_URL"):
        return []
    run_dir = Path(os.environ.get("DSEC_RUN_DIR") or "/run/dsec")
    has = node_state(run_dir.absolute())
    if has is None:
        return []
    if has == os.path.realpath(args.state_dir):
        return [Finding("state", "ok", f"in {has}")]
    text = f"the node in {run_dir} has its state in {has}, and {args.state_dir.absolute()} is asked about"
    return [Finding("state", "warning", text, f"export DSEC_STATE_DIR={shlex.quote(has)}")]


def _unreachable(args: argparse.Namespace, error: NodeUnreachable) -> Finding:
    """No node is what a machine has before `dsec up`; one that was asked for, or has died, is missing."""
    if args.url or os.environ.get("DSEC_URL"):
        return Finding("node", "problem", str(error), "start it there (`dsec up`), or correct --url or DSEC_URL")
    from dsec.backends.container.keeper import living_keeper

    run_dir = Path(os.environ.get("DSEC_RUN_DIR") or "/run/dsec")
    if living_keeper(run_dir) is not None:
        advice = "`dsec up` starts its agent again and finds its sandboxes; STATE_DIR/agent.log says how it ended"
        return Finding("node", "problem", f"its agent does not run ({run_dir}): {error}", advice)
    return Finding("node", "warning", str(error), "`dsec up` starts it; then this report has its backends, too")


def _room(info: NodeInfo) -> str:
    """What is promised of what may be promised: the machine's memory and disk times the factor of overcommitment."""
    parts = []
    for name in ("memory_mib", "disk_mib"):
        one = info.capacity.get(name)
        if isinstance(one, dict):
            parts.append(f"{name} {one.get('promised', 0):,.0f} of {one.get('total', 0):,.0f} promised")
    return ", ".join(parts) or "no room reported"


def _extra() -> Finding:
    from dsec.cli.commands.service import NODE_MODULES

    missing = [name for name in NODE_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            "package", "warning", f"no {', '.join(missing)}", "to run a node here, in a clone: pip install '.[node]'"
        )
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
            if not one.available:
                lines.append(f"{'':9}{'':{features}}  -> {ADVICE.get(feature, 'see the reason')}")
    return "\n".join(lines)


def _headline(name: str, backend: Capabilities) -> str:
    if backend.available:
        return f"backend {safe(name)}:"
    return f"backend {safe(name)}: not available: {safe(backend.reason or 'no reason given')}"
