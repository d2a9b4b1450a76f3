"""`dsec ps`, `inspect`, `stop`, `job stop`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from dsec.cli.commands.common import client, is_program, pairs
from dsec.cli.started import ENDED
from dsec.cli.terminal import age, note, show_json, size, table
from dsec.cli.words import said
from dsec.model import limits
from dsec.model.errors import DsecError, InvalidSpec, NotFound

if TYPE_CHECKING:
    import argparse

    from dsec.cli.started import Started
    from dsec.model.states import SandboxInfo
    from dsec.sdk._sync.client import Client
    from dsec.sdk._sync.sandbox import Sandbox
    from dsec.sdk.programs import ProcessInfo
    from dsec.sdk.values import States


COMMAND_CHARS: Final = 120
EVENTS_SHOWN: Final = 20
LIMITS: Final = ("cpu", "memory_mib", "disk_mib", "pids", "idle_timeout_s", "lifetime_s")
TIMES: Final = ("created_at", "started_at", "expires_at", "idle_since", "ended_at")


def ps_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec ps`."""
    parser.add_argument("sandbox", nargs="?", help="the processes of this one (id or name)")
    about = "those that ended not long ago, too; of one sandbox the programs that calls have started, also ended ones"
    parser.add_argument("-a", "--all", action="store_true", help=about)
    parser.add_argument("-q", "--quiet", action="store_true", help="ids only")
    parser.add_argument("--state", action="append", help="only in this state (repeatable)")
    parser.add_argument("--job", help="only of this job")
    parser.add_argument("--label", action="append", metavar="KEY=VALUE", help="only with this label (repeatable)")
    parser.add_argument("--json", action="store_true", help="a JSON list")


def ps_command(args: argparse.Namespace) -> int:
    """List sandboxes, or the processes of one."""
    if args.sandbox is not None:
        return _processes(args)
    state: States | None = args.state or ("any" if args.all else None)
    found = client(args).list(labels=pairs("label", args.label), job=args.job, state=state)
    infos = [sandbox._info for sandbox in found]
    # Newest first: ids are random.
    shown = sorted((info for info in infos if info is not None), key=lambda info: info.created_at, reverse=True)
    if args.json:
        show_json(shown)
    elif args.quiet:
        for info in shown:
            print(info.id)
    else:
        head = ("ID", "NAME", "STATE", "BACKEND", "FROM", "JOB", "AGE", "IDLE", "ENDED")
        wide = any(info.ended_at is not None for info in shown)
        rows = [_row(info, time.time()) for info in shown]
        print(table(head if wide else head[:-1], rows if wide else [row[:-1] for row in rows]))
    return 0


def _processes(args: argparse.Namespace) -> int:
    if args.state or args.job or args.label:
        raise InvalidSpec("of one sandbox all processes are listed: only -a, -q and --json go with it")
    sandbox = client(args).get(args.sandbox)
    if args.all:
        return _programs(sandbox, args)
    found = sandbox.processes()
    if args.json:
        show_json({"programs": found.programs, "processes": found.processes, "more": found.more})
    elif args.quiet:
        for process in found:
            print(process.pid)
    else:
        head = ("PID", "PPID", "PROGRAM", "UID", "STATE", "CPU", "MEMORY", "AGE", "COMMAND")
        print(table(head, [_process_row(process) for process in found]))
    if found.more:
        note("dsec: there are more; these are the first")
    return 0


def _programs(sandbox: Sandbox, args: argparse.Namespace) -> int:
    from dsec.cli.started import started

    found = started(sandbox)
    if args.json:
        show_json(found)
    elif args.quiet:
        for one in found:
            print(one.id)
    else:
        print(table(("PROGRAM", "KIND", "STATE", "STARTED", "COMMAND"), [_program_row(one) for one in found]))
    return 0


def _program_row(one: Started) -> tuple[str, ...]:
    ago = "" if one.started_at is None else f"{age(time.time() - one.started_at)} ago"
    return (one.id, one.kind, one.how or "runs", ago, _cut(one.command))


def _cut(command: str) -> str:
    return command if len(command) <= COMMAND_CHARS else command[:COMMAND_CHARS] + "..."


def _process_row(process: ProcessInfo) -> tuple[str, ...]:
    import shlex

    # As `ps` marks what has no command line: a kernel's thread, a zombie, the init.
    line = shlex.join(process.argv) if process.argv else f"[{process.name}]"
    program = (process.id or "") if process.main else f"({process.id})" if process.id else ""
    uid = "" if process.uid is None else str(process.uid)
    cpu = f"{process.cpu_s:.1f}s"
    memory = size(process.memory_bytes)
    lived = age(process.age_s)
    return (str(process.pid), str(process.ppid), program, uid, process.status, cpu, memory, lived, _cut(line))


def _row(info: SandboxInfo, now: float) -> tuple[str, ...]:
    spec = info.spec
    source = spec.image or spec.environment or spec.snapshot or spec.base or next((x.ref for x in info.layers), "")
    idle = age(now - info.idle_since) if info.idle_since is not None and info.ended_at is None else ""
    ended = f"{age(now - info.ended_at)} ago" if info.ended_at is not None else ""
    since = info.started_at or info.created_at
    lived = age((info.ended_at or now) - since)
    return (info.id, info.name or "", info.state + _why(info), info.backend, source, info.job or "", lived, idle, ended)


def _why(info: SandboxInfo | None) -> str:
    reason = info.end_reason if info is not None else None
    return f" ({reason})" if info is not None and reason not in (None, info.state) else ""


def inspect_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec inspect`."""
    parser.add_argument("sandbox", help="id or name")
    parser.add_argument("--json", action="store_true", help="as always: the answer is JSON")


def inspect_hint(words: list[str]) -> str:
    """What to say of words that `dsec inspect` does not take."""
    return "; `dsec ps -a SANDBOX` and `dsec events SANDBOX` tell of its programs" if is_program(words[0]) else ""


def inspect_command(args: argparse.Namespace) -> int:
    """Everything about one sandbox, as JSON."""
    from collections import deque

    from dsec.cli import findings

    sandbox = client(args).get(args.sandbox)
    info = sandbox._info
    about: dict[str, object] = {"sandbox": info}
    if info is not None:
        # Of the spec only what differs from the defaults is sent; times are seconds since the epoch, for programs.
        about["limits"] = {name: getattr(info.spec, name) for name in LIMITS}
        moments = {name: getattr(info, name) for name in TIMES}
        about["times"] = {name: _iso(at) for name, at in moments.items() if at is not None}
    events = list(deque(sandbox.events(), EVENTS_SHOWN))
    if info is not None and sandbox.state == "running":
        usage, processes = sandbox.usage(), sandbox.processes()
        found = findings.of_running(info, usage, list(processes)) + findings.of_devices(sandbox.files)
        about["findings"] = found + findings.of_programs(info, events)
        about |= {"usage": usage, "processes": processes}
    elif info is not None and sandbox.state in ENDED:
        about["findings"] = findings.of_ended(info, events)
    about["events"] = events
    show_json(about)
    return 0


def _iso(at: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def stop_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec stop`."""
    parser.add_argument("sandbox", nargs="+", help="ids or names")
    parser.add_argument(
        "--grace-s",
        type=float,
        default=limits.GRACE_DEFAULT_S,
        metavar="S",
        help="seconds between SIGTERM and the end (default: %(default)s)",
    )


def stop_command(args: argparse.Namespace) -> int:
    """Stop sandboxes for good. One that fails does not keep the others running."""
    made = client(args)
    # Before any is stopped: `dsec stop SANDBOX PROGRAM` is meant to stop less.
    found = [(ref, _looked_up(made, ref)) for ref in args.sandbox]
    for ref, sandbox in found:
        if isinstance(sandbox, NotFound) and is_program(ref):
            way = "`dsec kill SANDBOX PROGRAM` ends one"
            raise InvalidSpec(f"{ref} is no sandbox but a program's id: {way}; nothing was stopped")
    failed = 0
    for ref, sandbox in found:
        try:
            if isinstance(sandbox, DsecError):
                raise sandbox
            if sandbox.state in ENDED:
                note(f"dsec: {ref} has ended already{_why(sandbox._info)}")
                continue
            sandbox.stop(grace_s=args.grace_s)
            print(ref)
        except DsecError as error:
            note(f"dsec: {ref}: {said(error)}")
            failed += 1
    return 1 if failed else 0


def _looked_up(made: Client, ref: str) -> Sandbox | DsecError:
    try:
        return made.get(ref)
    except DsecError as error:
        return error


def job_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec job`."""
    parser.add_argument("action", choices=["stop"])
    parser.add_argument("job", help="the job's name")


def job_command(args: argparse.Namespace) -> int:
    """Stop all sandboxes of a job; 1 when it has none."""
    stopped = client(args).job(args.job).stop()
    if not stopped:
        note(f"dsec: no sandbox of a job {args.job!r} is alive (`dsec ps` lists what is, with its JOB)")
        return 1
    print(f"stopped {stopped}")
    return 0
