"""`dsec diff`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from dsec.cli.commands.common import client
from dsec.cli.terminal import note, safe, show_json_line

if TYPE_CHECKING:
    import argparse

    from dsec.model.files import FileChange, FileState

_LETTERS = {"added": "A", "changed": "C", "deleted": "D"}


def diff_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec diff`."""
    parser.add_argument("sandbox", help="id or name")
    parser.add_argument("path", nargs="?", default="/", help="only this and what is below (default: /)")
    parser.add_argument("--limit", type=int, metavar="N", help="no more changes than this (default: all, to a million)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def diff_command(args: argparse.Namespace) -> int:
    """Print changes, one a line, as they are found: A, C or D, type, bytes, path, and in what it differs."""
    changes = client(args).get(args.sandbox).diff(args.path, limit=args.limit)
    for change in changes:
        if args.json:
            show_json_line(_plain_change(change))
        else:
            print(line(change))
    report = changes.report
    if report is None:
        return 0
    sys.stdout.flush()
    unread = [one for one in report.skipped.named if one.why != "mount"]
    if unread:
        note(f"dsec: not looked at: {', '.join(f'{safe(one.path)} ({one.why})' for one in unread[:3])}")
    if report.more:
        note(f"dsec: there are more than {args.limit} changes")
    if sys.stderr.isatty():
        note(f"{report.added} added, {report.changed} changed, {report.deleted} deleted")
    return 0


def line(change: FileChange) -> str:
    """A change for a person."""
    before, now = change.before, change.now
    size = str(change.size)
    if before is not None and now is not None and before.size != now.size and now.type != "directory":
        size = f"{before.size}>{now.size}"
    kind = change.type if before is None or now is None or before.type == now.type else f"{before.type}>{now.type}"
    words = [_LETTERS[change.kind], f"{kind:<9}", f"{size:>12}", os.fsencode(change.path).decode("utf-8", "replace")]
    target = _target(now if now is not None else before)
    if target:
        words.append(target)
    if change.what:
        words.append(f"({', '.join(change.what)})")
    if change.unsure:
        words.append(f"(content not compared: {change.unsure})")
    return safe(" ".join(words))


def _target(state: FileState | None) -> str:
    return f"-> {os.fsencode(state.target).decode('utf-8', 'replace')}" if state and state.target is not None else ""


def _plain_change(change: FileChange) -> FileChange:
    import msgspec

    from dsec.model.files import shown

    text, raw = shown(os.fsencode(change.path))
    return msgspec.structs.replace(
        change, path=text, raw_path=raw, before=_plain(change.before), now=_plain(change.now)
    )


def _plain(state: FileState | None) -> FileState | None:
    """Without surrogate escapes, which JSON does not have; the exact bytes stand beside."""
    import msgspec

    from dsec.model.files import shown

    if state is None or state.target is None:
        return state
    text, raw = shown(os.fsencode(state.target))
    return msgspec.structs.replace(state, target=text, raw_target=raw)
