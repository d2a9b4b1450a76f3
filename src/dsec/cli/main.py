"""Finds the command, imports only its module, and turns errors into one line and an exit code.

argparse and modules imported when called: typer with rich takes longer to import than all of `dsec ps` may take.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from dsec.cli.terminal import note, show_all_text
from dsec.linux.descriptors import open_standard

if TYPE_CHECKING:
    import argparse

    from dsec.model.errors import DsecError

# Name: (module below dsec.cli.commands, function prefix, what it does).
COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "up": ("service", "up", "start the node agent of this machine"),
    "down": ("service", "down", "stop the node agent; sandboxes live on (--stop-all: stop them first)"),
    "run": ("programs", "run", "create a sandbox, run a program in it, stop it"),
    "exec": ("programs", "exec", "run a program in a sandbox"),
    "shell": ("terminals", "shell", "a shell (or another program) of a sandbox in this terminal"),
    "attach": ("terminals", "attach", "return to a program that runs in a sandbox"),
    "logs": ("terminals", "logs", "what a program of a sandbox has written"),
    "cp": ("files", "cp", "copy files and directories into a sandbox or out of one"),
    "expose": ("ports", "expose", "make a port of a sandbox reachable, and print its URL"),
    "diff": ("diff", "diff", "what of a sandbox's files is not as in its layers"),
    "ps": ("sandboxes", "ps", "list sandboxes, or the processes of one"),
    "inspect": ("sandboxes", "inspect", "everything about one sandbox"),
    "events": ("events", "events", "what happened to a sandbox, and with -f what happens"),
    "kill": ("kill", "kill", "end programs of a sandbox with all they have started, or send them a signal"),
    "policy": ("policy", "policy", "what a sandbox may reach: explain, set, patch"),
    "stop": ("sandboxes", "stop", "stop sandboxes for good (also: rm)"),
    "rm": ("sandboxes", "stop", ""),
    "job": ("sandboxes", "job", "job stop NAME: stop all sandboxes of a job (`dsec ps --job NAME` lists them)"),
    "layer": ("layers", "layer", "import, list and remove layers"),
    "doctor": ("doctor", "doctor", "what this machine can do and what to mend"),
    "bench": ("bench", "bench", "measure this machine (from a checkout)"),
}
# How much two words have in common, of 1, for one to be a slip of the other: --imgae is --image, --listen no --timeout.
SIMILAR: Final = 0.7
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
# The platform failed and not the program: nothing a program usually returns.
EXIT_PLATFORM: Final = 125
EXIT_PIPE: Final = 141
EXIT_INTERRUPTED: Final = 130
_RUNS_PROGRAMS: Final = ("run", "exec", "shell", "attach")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `dsec ARGS`."""
    open_standard()
    show_all_text()
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if args else EXIT_USAGE
    if args[0] in ("-V", "--version"):
        import dsec

        print(f"dsec {dsec.__version__}")
        return 0
    if args[0] not in COMMANDS:
        from dsec.cli.words import meant_command

        hint = _late(args) or meant_command(args[0]) or _meant(args[0], COMMANDS)
        # The last thing on the screen is what is wrong.
        note(f"{_usage()}\n\ndsec: no command {args[0]!r}{hint}")
        return EXIT_USAGE
    return _guarded(args[0], args[1:])


def _guarded(name: str, args: list[str]) -> int:
    from dsec.model.errors import DsecError, ProgramNotStarted

    try:
        code = _call(name, args)
        sys.stdout.flush()
        return code
    except ProgramNotStarted as error:
        note(_explain(error))
        return error.exit_code
    except DsecError as error:
        note(_explain(error))
        return EXIT_PLATFORM if name in _RUNS_PROGRAMS else EXIT_FAILED
    except KeyboardInterrupt as error:
        for line in getattr(error, "__notes__", ()):
            note(f"dsec: {line}")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone.
        _drop_output()
        return EXIT_PIPE
    except OSError as error:
        note(f"dsec: {error}")
        _drop_output()
        return EXIT_PLATFORM if name in _RUNS_PROGRAMS else EXIT_FAILED


def _drop_output() -> None:
    # The interpreter must not complain again when it flushes.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(error: DsecError) -> str:
    from dsec.cli.words import said

    lines = [f"dsec: {said(error)}", *(f"dsec: {line}" for line in getattr(error, "__notes__", ()))]
    request = getattr(error, "request_id", None)
    if request and getattr(error, "code", "") in ("internal", "unavailable", "launch_failed"):
        lines.append(f"dsec: request {request}: the node's log has more")
    return "\n".join(lines)


def _call(name: str, args: list[str]) -> int:
    from importlib import import_module

    from dsec.cli.commands.common import add_url
    from dsec.cli.options import Parser

    module_name, prefix, about = COMMANDS[name]
    module = import_module(f"dsec.cli.commands.{module_name}")
    # A module with a help of its own adds the option for it.
    add_help = not hasattr(module, f"{prefix}_help")
    parser = Parser(f"dsec {name}", description=about, allow_abbrev=False, add_help=add_help)
    if not getattr(module, "OF_THIS_MACHINE", False):
        add_url(parser)
    getattr(module, f"{prefix}_options")(parser)
    given, unknown = parser.parse(args)
    if unknown:
        words = args[args.index(unknown[0]) :] if unknown[0] in args else unknown
        from dsec.cli.words import meant_option

        word, known_here = unknown[0].partition("=")[0], _options(parser)
        hint = meant_option(word, known_here) or _meant(word, known_here)
        hint = hint or getattr(module, f"{prefix}_hint", lambda words: "")(words)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    code: int = getattr(module, f"{prefix}_command")(given)
    return code


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """The long options of a command, and those of the actions below it."""
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    below = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    return known + [option for parsers in below for inner in parsers.values() for option in _options(inner)]


def _meant(word: str, known: Iterable[str]) -> str:
    """What is much like a word that is not known."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), n=1, cutoff=SIMILAR)
    return f"; did you mean {close[0]}?" if close else ""


def _late(args: list[str]) -> str:
    """What to say of an option in place of a command."""
    if not args[0].startswith("-"):
        return ""
    at = next((at for at, word in enumerate(args) if word in COMMANDS), None)
    order = "dsec COMMAND [OPTIONS]" if at is None else f"dsec {' '.join([args[at], *args[:at], *args[at + 1 :]])}"
    return f"; options stand after the command: {order}"


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {about}" for name, (_, _, about) in COMMANDS.items() if about]
    return "\n".join(["usage: dsec COMMAND [OPTIONS]", "", *lines, "", "`dsec COMMAND --help` says more."])


if __name__ == "__main__":
    sys.exit(main())
