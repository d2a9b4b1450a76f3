"""`dsec events`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from dsec.cli.commands.common import client
from dsec.cli.terminal import safe, show_json_line

if TYPE_CHECKING:
    import argparse

    from dsec.model.events import Event


def events_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec events`."""
    parser.add_argument("sandbox", help="id or name; also of one that has ended")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the sandbox has ended")
    parser.add_argument("--since", type=int, default=0, metavar="SEQ", help="only what came after this event")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def events_command(args: argparse.Namespace) -> int:
    """Print events, one a line, as they come."""
    for event in client(args).get(args.sandbox).events(args.since, follow=args.follow):
        if args.json:
            show_json_line(event, flush=True)
        else:
            print(line(event), flush=True)
    return 0


def line(event: Event) -> str:
    """An event for a person."""
    at = datetime.fromtimestamp(event.at).astimezone().isoformat(" ", "milliseconds")
    words = [f"{event.seq:>5}", at, event.kind]
    if event.step is not None:
        words.append(f"step {event.step}")
    if event.process_id is not None:
        words.append(event.process_id)
    words += [f"{name}={_shown(value)}" for name, value in event.detail.items()]
    if event.command is not None:
        words.append(f"[{event.command}]")
    return safe(" ".join(words))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
