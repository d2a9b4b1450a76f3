"""`dsec run` and `dsec exec`."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
import sys
import termios
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, NoReturn

from msgspec.structs import replace

from dsec.cli.commands.common import client, pairs, switches
from dsec.cli.terminal import Sink, note
from dsec.model import limits
from dsec.model.errors import DsecError, InvalidSpec, NodeUnreachable, ProgramNotStarted

if TYPE_CHECKING:
    import argparse

    from dsec.model.states import RunResult
    from dsec.sdk._sync.client import Client
    from dsec.sdk._sync.programs import Process
    from dsec.sdk._sync.sandbox import Sandbox
    from dsec.sdk.values import Command, SpecFields

_PIPED: Final = (stat.S_ISFIFO, stat.S_ISREG, stat.S_ISSOCK)


def add_program(parser: argparse.ArgumentParser, *, required: bool, terminal: bool = False) -> None:
    """The options of a program that is started in a sandbox that is there."""
    parser.add_argument("--key", help="name this call: the same again starts nothing and has the same answer")
    parser.add_argument("sandbox", help="id or name")
    _program_options(parser, required, streams=not terminal)


def _program_options(parser: argparse.ArgumentParser, required: bool, *, streams: bool = True) -> None:
    import argparse

    parser.add_argument("--cwd", "-w", metavar="DIR", help="where the program starts")
    parser.add_argument("--env", "-e", action="append", metavar="KEY=VALUE", help="(repeatable)")
    parser.add_argument("--user", "-u", help="name, uid, name:group or uid:gid")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="kill it after that many seconds (exit code 137)")
    if streams:
        no_stdin = "give the program nothing to read, even from a pipe"
        parser.add_argument("--no-stdin", action="store_true", help=no_stdin)
        parser.add_argument("--raw", action="store_true", help="control characters go to the terminal as they are")
    command = parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND" if required else "[COMMAND]",
        help="a program and its arguments; a single word with spaces is a shell command line",
    )
    command.required = required  # as it is told when something is missing


def run_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec run`."""
    parser.add_argument("--backend", default="container", help="container; not yet: microvm, vm, fncall")
    parser.add_argument("--image", help="not yet: an image to import (docker://...)")
    parser.add_argument("--base", help="a base layer (default: debian:12)")
    parser.add_argument("--workspace", metavar="LAYER", help="a workspace layer")
    parser.add_argument("--toolkit", action="append", default=[], metavar="LAYER", help="a toolkit layer (repeatable)")
    for name, kind, default, about in (
        ("--cpu", float, limits.CPU_DEFAULT, "cores at most"),
        ("--memory-mib", int, limits.MEMORY_DEFAULT_MIB, "memory at most"),
        ("--disk-mib", int, limits.DISK_DEFAULT_MIB, "disk at most, for what it writes"),
        ("--pids", int, limits.PIDS_DEFAULT, "processes and threads at most"),
        ("--idle-timeout-s", float, limits.IDLE_TIMEOUT_DEFAULT_S, "it ends when nothing went on in it for so long"),
        ("--lifetime-s", float, limits.LIFETIME_DEFAULT_S, "it ends then in any case"),
    ):
        parser.add_argument(name, type=kind, default=default, metavar="N", help=f"{about} (default: %(default)s)")
    parser.add_argument("--wait-s", type=float, default=0.0, metavar="S", help="how long to wait for room")
    about = "a mirror that may be reached (repeatable); none: loopback only, the default"
    parser.add_argument("--network", action="append", metavar="NAME=on|off", help=about)
    parser.add_argument("--name", help="a name for the sandbox")
    parser.add_argument("--job", help="the job it belongs to")
    parser.add_argument("--label", action="append", metavar="KEY=VALUE", help="(repeatable)")
    parser.add_argument("--keep", action="store_true", help="leave the sandbox running and print its id on stderr")
    parser.add_argument("-d", "--detach", action="store_true", help="only create it and print its id")
    _talk_options(parser)
    _program_options(parser, required=False)


def _talk_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--interactive", action="store_true", help="its input is ours as it comes, to any length")
    parser.add_argument("-t", "--tty", action="store_true", help="in this terminal, as `dsec shell` (also: -it)")


# Interpreters that wait for a person when they are called alone.
INTERACTIVE: Final = frozenset({"sh", "bash", "dash", "zsh", "fish", "python", "python3", "ipython", "node", "irb"})
# What a shell does itself: there are no programs of these names.
BUILTINS: Final = frozenset({"cd", "export", "source", ".", "alias", "eval", "exec", "set", "ulimit", "umask", "unset"})
# A layer's name with its tag, as it stands before the program for other tools.
_LAYER: Final = re.compile(r"[a-z0-9][a-z0-9._-]*:[A-Za-z0-9][A-Za-z0-9._-]*")
# Options of ours that are unlikely to be the program's.
OURS: Final = frozenset(
    {
        "--memory-mib",
        "--disk-mib",
        "--idle-timeout-s",
        "--lifetime-s",
        "--timeout-s",
        "--wait-s",
        "--no-stdin",
        "--keep",
    }
    | {"--toolkit", "--workspace", "--base", "--pids", "--detach"}
)


def advise(words: list[str], *, terminal: bool) -> None:
    """Notes on what a newcomer may have meant otherwise; the program runs in any case."""
    first = words[0] if words else ""
    late = [word for word in words[1:] if word.partition("=")[0] in OURS]
    if first.startswith("-") and first != "--":
        note(f"dsec: {first} stands after the sandbox and is taken for the program; options of dsec stand before both")
    elif late and first != "--":
        note(f"dsec: {late[0]} stands after the command and is given to the program; options of dsec stand before it")
    words = words[1:] if words[:1] == ["--"] else words
    if len(words) > 1 and words[0] in BUILTINS:
        note(f"dsec: {words[0]} is no program but a shell's; a shell runs what is one word: '{' '.join(words)}; ls'")
    if words and _LAYER.fullmatch(words[0]):
        note(f"dsec: {words[0]} is taken for the program; a layer is an option of `dsec run`: --base {words[0]}")
    if terminal and len(words) == 1 and words[0].rpartition("/")[2] in INTERACTIVE:
        note(
            f"dsec: {words[0]} gets an empty input; `dsec run -it {words[0]}`, or in a sandbox that is there "
            f"`dsec shell NAME {words[0]}`, gives it this terminal"
        )


def _terminal() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def run_command(args: argparse.Namespace) -> int:
    """Create a sandbox, run a program, stop it. The exit code is the program's."""
    command = command_of(args.command)
    _check_together(command, args)
    sigterm_ends()
    # Nobody else would stop the sandbox of a window that was closed.
    signal_ends(signal.SIGHUP)
    talks = args.interactive or args.tty
    advise(args.command, terminal=_terminal() and not talks)
    stdin = None if args.detach or talks else _stdin(args)
    try:
        sandbox = _create(client(args), args)
    except InvalidSpec as error:
        raise _not_started(error) from error
    if args.detach:
        print(sandbox.id)
        return 0
    with ExitStack() as stack:
        if args.keep:
            note(sandbox.id)
        else:
            stack.enter_context(sandbox)
            # A closed window is told twice, by the kernel and by its shell: the second must not end us before the stop.
            stack.callback(signal.signal, signal.SIGHUP, signal.SIG_IGN)
        if talks:
            return _talk_in_its_own(sandbox, command, args, stack)
        return exit_code(_stream(sandbox, command, stdin, args, env=None))


def _check_together(command: Command | None, args: argparse.Namespace) -> None:
    if args.detach and (args.interactive or args.tty):
        way = "`dsec shell SANDBOX` opens a shell in it"
        raise InvalidSpec(f"--detach only creates the sandbox, so there is nothing for -i or -t to talk to: {way}")
    if args.detach and command is not None:
        way = "`dsec exec -d SANDBOX COMMAND` starts one in it that goes on by itself; `dsec exec` waits for it"
        raise InvalidSpec(f"--detach only creates the sandbox, without a program: {way}")
    if command is None and not (args.detach or args.tty):
        raise InvalidSpec("no program: give one to run (or -it for a shell, or --detach, to only create the sandbox)")
    if args.tty:
        from dsec.cli.commands.terminals import need_terminal

        need_terminal("", instead="without -t `dsec run -i` is for pipes")


def _talk_in_its_own(sandbox: Sandbox, command: Command | None, args: argparse.Namespace, stack: ExitStack) -> int:
    """`stack` stops the sandbox, but not when its program was left, or is out of reach, with the way back to it."""
    try:
        if not args.tty:
            assert command is not None, "was checked"
            return _talk(sandbox, sandbox.id, command, args)
        from dsec.cli.commands.terminals import in_terminal

        code = in_terminal(sandbox, sandbox.id, command, args)
    except NodeUnreachable:
        stack.pop_all()
        raise
    if code is None:
        stack.pop_all()
        note(f"dsec: the sandbox lives on: `dsec stop {sandbox.id}` stops it")
    return code or 0


def _not_started(error: InvalidSpec) -> DsecError:
    """The sandbox was made, and has no such directory or user: for who runs one program in it, that did not start."""
    # One that is never allowed comes with what is.
    if error.detail.get("field") in ("cwd", "user") and "allowed" not in error.detail:
        return ProgramNotStarted(error.message, detail=error.detail)
    return error


def _create(made: Client, args: argparse.Namespace) -> Sandbox:
    fields: SpecFields = {
        "backend": args.backend,
        "image": args.image,
        "base": args.base,
        "workspace": args.workspace,
        "toolkits": args.toolkit,
        "cpu": args.cpu,
        "memory_mib": args.memory_mib,
        "disk_mib": args.disk_mib,
        "pids": args.pids,
        "idle_timeout_s": args.idle_timeout_s,
        "lifetime_s": args.lifetime_s,
        "wait_s": args.wait_s,
        "network": switches("network", args.network),
        "env": pairs("env", args.env),
        "cwd": args.cwd,
        "user": args.user,
        "name": args.name,
        "job": args.job,
        "labels": pairs("label", args.label),
    }
    return made.create(**fields)


def exec_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec exec`."""
    about = "only start it and print its id, for `dsec attach` and `dsec logs`; with -i its input stays open for those"
    parser.add_argument("-d", "--detach", action="store_true", help=about)
    _talk_options(parser)
    add_program(parser, required=True)


def exec_command(args: argparse.Namespace) -> int:
    """Run a program in a sandbox. The exit code is the program's; of one that is only started 0."""
    command = command_of(args.command)
    if command is None:
        raise InvalidSpec("no program: give one to run")
    if args.detach:
        sigterm_ends()
        advise(args.command, terminal=False)
        if args.interactive and not args.no_stdin and piped_in():  # without -i it may well be the rest of a loop's list
            note(
                "dsec: with -d what is piped in is not read: the program's input stays open, and `dsec attach` fills it"
            )
        print(_start(client(args).get(args.sandbox), command, args, stdin=args.interactive, tty=args.tty).id)
        return 0
    if args.tty:
        from dsec.cli.commands.terminals import in_terminal, need_terminal

        need_terminal(args.sandbox)
        return in_terminal(client(args).get(args.sandbox), args.sandbox, command, args) or 0
    sigterm_ends()
    advise(args.command, terminal=_terminal() and not args.interactive)
    if args.interactive:
        return _talk(client(args).get(args.sandbox), args.sandbox, command, args)
    stdin = _stdin(args)
    sandbox = client(args).get(args.sandbox)
    return exit_code(_stream(sandbox, command, stdin, args, env=pairs("env", args.env)))


def _talk(sandbox: Sandbox, name: str, command: Command, args: argparse.Namespace) -> int:
    from dsec.cli.commands.terminals import streams

    process = _start(sandbox, command, args, stdin=True, tty=False)
    try:
        return streams(process, None if args.no_stdin else 0, raw=args.raw)
    except NodeUnreachable as error:
        error.add_note(f"the program goes on: `dsec attach {name} {process.id}` returns to it")
        raise
    except BaseException:  # ^C, SIGTERM, whoever read our output has gone: as without -i
        with suppress(DsecError):
            process.kill()
        raise


def _start(sandbox: Sandbox, command: Command, args: argparse.Namespace, *, stdin: bool, tty: bool) -> Process:
    return sandbox.spawn(
        command,
        cwd=args.cwd,
        env=pairs("env", args.env),
        user=args.user,
        stdin=tty or (stdin and not args.no_stdin),  # a terminal has one
        tty=tty,
        timeout_s=args.timeout_s,
        key=getattr(args, "key", None),
    )


def _stream(
    sandbox: Sandbox,
    command: Command | None,
    stdin: bytes | None,
    args: argparse.Namespace,
    env: dict[str, str] | None,
) -> RunResult:
    sinks = {1: Sink(sys.stdout.buffer, raw=args.raw), 2: Sink(sys.stderr.buffer, raw=args.raw)}
    got = {1: 0, 2: 0}

    def take(stream: int, data: bytes) -> None:
        got[stream] += len(data)
        sinks[stream].write(data)

    try:
        result = sandbox.run(
            command or "",
            cwd=args.cwd,
            env=env,
            user=args.user,
            stdin=stdin,
            timeout_s=args.timeout_s,
            on_output=take,
            key=getattr(args, "key", None),
        )
        return without_what_was_delivered(result, got)
    finally:
        for sink in sinks.values():
            sink.close()


def without_what_was_delivered(result: RunResult, got: dict[int, int]) -> RunResult:
    """`output` says that the result does not keep all of it: nothing to tell when every byte came as a stream."""
    if got[1] < result.out.total or got[2] < result.err.total:
        return result
    return replace(result, limits_hit=tuple(limit for limit in result.limits_hit if limit != "output"))


def exit_code(result: RunResult) -> int:
    """That of the program; how it was ended and which limits it met are notes."""
    if result.cause != "exited":
        why = {"timeout": ": its time was over", "oom": ": it ran out of memory", "killed": ": it was killed"}
        note(f"dsec: the program was ended by signal {_signal_name(result.signal)}{why.get(result.cause, '')}")
    if result.limits_hit:
        note(f"dsec: limits hit: {', '.join(result.limits_hit)}")
    return result.exit_code


def _signal_name(number: int | None) -> str:
    try:
        return f"{number} ({signal.Signals(number or 0).name})"
    except ValueError:
        return str(number)


def command_of(words: list[str]) -> Command | None:
    """One word is for the shell, several are a program and its arguments; None: there are none."""
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        return None
    return words[0] if len(words) == 1 else words


def _stdin(args: argparse.Namespace) -> bytes | None:
    """What is piped in; nothing from a terminal or /dev/null."""
    if args.no_stdin or not piped():
        return None
    data = sys.stdin.buffer.read(limits.STDIN_MAX_BYTES + 1)
    if len(data) > limits.STDIN_MAX_BYTES:
        raise InvalidSpec(f"stdin has more than {limits.STDIN_MAX_BYTES} bytes, the most a program can be given")
    return data


def piped() -> bool:
    """Whether standard input is a pipe, a file or a socket."""
    if sys.stdin is None:
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed
        return False
    return any(is_a(mode) for is_a in _PIPED)


def piped_in() -> bool:
    """Whether something is there to be read: who calls us may leave us any pipe or file of his own."""
    if not piped():
        return False
    try:
        fd = sys.stdin.fileno()
        about = os.fstat(fd)
        if stat.S_ISREG(about.st_mode):
            return os.lseek(fd, 0, os.SEEK_CUR) < about.st_size
        return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder) > 0
    except OSError:
        return False


def sigterm_ends() -> None:
    """SIGTERM ends us as ^C does: the program is killed and the sandbox stopped."""
    signal_ends(signal.SIGTERM)


def signal_ends(number: signal.Signals) -> None:
    """So does this one, unless it is ignored (`nohup`)."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, end)
