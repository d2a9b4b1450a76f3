"""`dsec shell`, `dsec attach`, `dsec logs`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Final

from dsec.cli.commands.common import client, pairs
from dsec.cli.commands.programs import (
    add_program,
    command_of,
    exit_code,
    piped,
    piped_in,
    sigterm_ends,
    without_what_was_delivered,
)
from dsec.cli.started import newest, newest_running
from dsec.cli.terminal import Sink, Unbuffered, note
from dsec.model.errors import DsecError, InvalidSpec, InvalidState, NodeUnreachable, NotFound

if TYPE_CHECKING:
    import argparse

    from dsec.model.states import RunResult
    from dsec.sdk._sync.output import Follow
    from dsec.sdk._sync.programs import Process
    from dsec.sdk._sync.sandbox import Sandbox
    from dsec.sdk.values import Command

# A login shell, as ssh gives one.
_SHELL: Final = "if command -v bash >/dev/null 2>&1; then exec bash -l; else exec sh -l; fi"
# A program is held back once its reader is so far behind: who stops a flood by ^C wants to see no more of it.
SHELL_SPOOL_BYTES: Final = 128 << 10
# What is shown of a terminal's output from before.
_BEFORE_BYTES: Final = 8192
_HANG_UP_S: Final = 3.0
_NO_TERMINAL: Final = "standard input and output are no terminal; {}"


def shell_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec shell`."""
    add_program(parser, required=False, terminal=True)


def shell_command(args: argparse.Namespace) -> int:
    """A program of a sandbox in this terminal. The exit code is the program's."""
    need_terminal(args.sandbox)
    return in_terminal(client(args).get(args.sandbox), args.sandbox, command_of(args.command), args) or 0


def need_terminal(sandbox: str, *, instead: str = "`dsec exec -i {} ...` is for pipes") -> None:
    """Raises InvalidSpec where there is none, with what to do instead."""
    if not (_is_terminal(0) and _is_terminal(1)):
        raise InvalidSpec(_NO_TERMINAL.format(instead.format(sandbox)))


def in_terminal(sandbox: Sandbox, name: str, command: Command | None, args: argparse.Namespace) -> int | None:
    """Start a program (None: a login shell) in a terminal of its own and bring the two together.

    Its exit code; None: it was left by the keys for that. `name`: what its user calls the sandbox.
    """
    from dsec.cli.rawtty import size

    env = {"TERM": os.environ.get("TERM", "xterm"), **pairs("env", args.env)}
    process = sandbox.spawn(
        _SHELL if command is None else command,
        cwd=args.cwd,
        env=env,
        user=args.user,
        tty=size(0),
        timeout_s=args.timeout_s,
        spool_bytes=SHELL_SPOOL_BYTES,
        key=getattr(args, "key", None),
    )
    try:
        return _join(process, name, (0, 0), b"")
    except SystemExit:
        # Our terminal went, or we were told to end: so does the program's, as a window's shell does.
        _hang_up(process)
        raise


def _hang_up(process: Process) -> None:
    def send() -> None:
        try:
            process.signal(signal.SIGHUP)
        except DsecError:
            return  # it has ended, or the node is away

    worker = threading.Thread(target=send, daemon=True)
    worker.start()
    worker.join(_HANG_UP_S)


def attach_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec attach`."""
    parser.add_argument("--no-stdin", action="store_true", help="only look: nothing is sent to it, and ^C leaves it")
    parser.add_argument("--raw", action="store_true", help="control characters go to the terminal as they are")
    parser.add_argument("sandbox", help="id or name")
    parser.add_argument("program", nargs="?", help="its id (`dsec ps SANDBOX`; default: the newest spawned that runs)")


def attach_command(args: argparse.Namespace) -> int:
    """The terminal, or the streams, of a program that runs. Leaving it does not end it."""
    sandbox = client(args).get(args.sandbox)
    process = sandbox.process(args.program or newest_running(sandbox))
    info = process.info()
    if info.state == "ended":
        note(f"dsec: {process.id} has ended; what it has shown last:")
    offsets = (0, 0)
    if info.tty:
        if not args.no_stdin:
            need_terminal(args.sandbox, instead=f"`dsec logs -f {{}} {process.id}` shows what it writes")
        at, before = process.stdout.located()
        offsets = (at + len(before), 0)
        if not args.no_stdin:
            return _join(process, args.sandbox, offsets, _end_of(before)) or 0
        offsets = (offsets[0] - len(_end_of(before)), 0)
    elif info.state != "ended":
        offsets = (_reached(process, 1), _reached(process, 2))
    sigterm_ends()
    if piped_in() and not info.stdin and not args.no_stdin:
        note(f"dsec: {process.id} has no input (`dsec exec -di` starts one with it): what is piped in is not read")
    stdin = 0 if info.stdin and not args.no_stdin and (piped() or _is_terminal(0)) else None
    try:
        return streams(process, stdin, raw=args.raw, offsets=offsets)
    except KeyboardInterrupt as error:
        error.add_note(f"the program goes on: {_way_back(args.sandbox, process)}")
        raise


def _reached(process: Process, stream: int) -> int:
    at, data = (process.stdout if stream == 1 else process.stderr).located()
    return at + len(data)


def _end_of(before: bytes) -> bytes:
    """The last of it, from a line's start on."""
    if len(before) <= _BEFORE_BYTES:
        return before
    return before[-_BEFORE_BYTES:].partition(b"\n")[2]


def _join(process: Process, sandbox: str, offsets: tuple[int, int], before: bytes) -> int | None:
    from dsec.cli.rawtty import RawTerminal, size, write_all
    from dsec.cli.talk import Talk

    def say(text: str) -> None:
        write_all(2, f"\r\ndsec: {text}\r\n".encode())

    talk = Talk(process, lambda stream, data: write_all(1, data), stdin=0, terminal=True, offsets=offsets, say=say)
    terminal = RawTerminal(0, talk.resized)
    try:
        with terminal:
            if before:
                write_all(1, before)
                _repaint(process, *size(0))
            result = talk.run()
            if result is None or result.cause != "exited":
                terminal.clean()
    except NodeUnreachable as error:
        terminal.clean()
        error.add_note(f"the program goes on: {_way_back(sandbox, process)}")
        raise
    if result is None:
        note(f"\ndsec: detached; {_way_back(sandbox, process)}")
        return None
    if result.cause != "exited":
        note("")  # behind a prompt
    return exit_code(result)


def _repaint(process: Process, rows: int, cols: int) -> None:
    """A program that draws a screen draws it anew when its size changes; where nothing changes there is no signal."""
    try:
        process.resize(rows, max(cols - 1, 1))
        process.resize(rows, cols)
    except (NotFound, InvalidState):
        return  # it has ended


def _way_back(sandbox: str, process: Process) -> str:
    return f"`dsec attach {sandbox} {process.id}` returns to it"


def streams(process: Process, stdin: int | None, *, raw: bool, offsets: tuple[int, int] = (0, 0)) -> int:
    """A program's streams are ours until it ends."""
    from dsec.cli.talk import Talk

    # Written to by a thread that may be stuck in it when we are told to end.
    sinks = {fd: Sink(Unbuffered(fd), raw=raw) for fd in (1, 2)}
    talk = Talk(
        process,
        lambda stream, data: sinks[stream].write(data),
        stdin=stdin,
        terminal=False,
        offsets=offsets,
        say=lambda text: note(f"dsec: {text}"),
    )
    try:
        result = talk.run()
        assert result is not None, "there are no keys that detach"
        _tell_missing(talk.follow)
        return exit_code(_streamed(result, talk.follow))
    finally:
        for sink in sinks.values():
            sink.close()


def _streamed(result: RunResult, follow: Follow) -> RunResult:
    return without_what_was_delivered(result, {s: follow.offsets[s] - follow.dropped[s] for s in (1, 2)})


def _tell_missing(follow: Follow) -> None:
    for stream, name in ((1, "stdout"), (2, "stderr")):
        if follow.dropped[stream]:
            note(f"dsec: {follow.dropped[stream]} bytes of {name} are not kept any more")


def logs_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec logs`."""
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the program ends")
    parser.add_argument("--raw", action="store_true", help="control characters go to the terminal as they are")
    parser.add_argument("sandbox", help="id or name")
    parser.add_argument("program", nargs="?", help="its id (default: the newest spawned, whether or not it runs)")


def logs_hint(words: list[str]) -> str:
    """What to say of options that `dsec logs` does not have."""
    word = words[0].partition("=")[0]
    if word in ("-n", "--tail", "--lines"):
        return "; all that is kept is written: `dsec logs SANDBOX | tail -n 5` shows the end of it"
    if word in ("-t", "--timestamps", "--since", "--until"):
        return "; output is kept without times: what is to have them is written with them by its program"
    return ""


def logs_command(args: argparse.Namespace) -> int:
    """What a program has written and is kept."""
    sigterm_ends()
    sandbox = client(args).get(args.sandbox)
    process = sandbox.process(args.program or _newest(sandbox))
    sinks = {1: Sink(sys.stdout.buffer, raw=args.raw), 2: Sink(sys.stderr.buffer, raw=args.raw)}
    try:
        with process.follow(wait=args.follow) as follow:
            for stream, data in follow:
                sinks[stream].write(data)
        _tell_missing(follow)
    finally:
        for sink in sinks.values():
            sink.close()
    return 0


def _newest(sandbox: Sandbox) -> str:
    one, others = newest(sandbox)
    if others:
        note(f"dsec: of {one.id} ({one.command}), which {'runs' if one.running else f'has ended: {one.how}'}")
    return one.id


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
