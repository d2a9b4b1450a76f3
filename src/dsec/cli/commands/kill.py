"""`dsec kill`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec.cli.commands.common import client, is_program
from dsec.cli.terminal import note
from dsec.cli.words import said
from dsec.model.errors import DsecError, InvalidSpec
from dsec.sdk.programs import SIGNALS, signal_number

if TYPE_CHECKING:
    import argparse


def kill_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec kill`."""
    import argparse

    for number, name in enumerate(SIGNALS, 1):  # as `kill` takes them
        words = (f"-{number}", f"-{name}", f"-SIG{name}")
        parser.add_argument(*words, dest="signal", action="store_const", const=name, help=argparse.SUPPRESS)
    about = "only send the program itself this signal, a name or a number (default: end it with all it has started)"
    parser.add_argument("-s", "--signal", metavar="SIGNAL", help=about)
    parser.add_argument("sandbox", help="id or name")
    parser.add_argument("program", nargs="*", help="its id, p-..., as `dsec ps -a SANDBOX` shows it")


def kill_command(args: argparse.Namespace) -> int:
    """End programs of a sandbox, or send them a signal. One that fails does not keep the others alive."""
    _check_programs(args.sandbox, args.program)
    number = None if args.signal is None else signal_number(int(args.signal) if args.signal.isdigit() else args.signal)
    sandbox = client(args).get(args.sandbox)
    failed = 0
    for ref in args.program:
        try:
            process = sandbox.process(ref)
            ended = process.info().state == "ended"
            if number is None:
                process.kill()  # after its end that of what it has left behind
            else:
                process.signal(number)
        except DsecError as error:
            note(f"dsec: {ref}: {said(error)}")
            failed += 1
            continue
        if ended:
            note(f"dsec: {ref} had ended" + ("; what it had left behind is ended now" if number is None else ""))
        print(ref)
    return 1 if failed else 0


def _check_programs(sandbox: str, programs: list[str]) -> None:
    if not programs:
        ways = f"`dsec stop {sandbox}` ends the sandbox; `dsec ps -a {sandbox}` lists its programs"
        if is_program(sandbox):
            ways = f"`dsec kill SANDBOX {sandbox}`"
        raise InvalidSpec(f"no program of {sandbox} is named: {ways}")
    for ref in programs:
        if ref.isdigit():
            way = f"`dsec exec {sandbox} 'kill {ref}'` reaches any process, `dsec ps {sandbox}` says to which program"
            raise InvalidSpec(f"{ref} is a process's number, and a program has an id (p-...): {way} it belongs")
