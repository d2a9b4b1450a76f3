"""`dsec cp`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec.cli.commands.common import client
from dsec.cli.terminal import note, safe, size
from dsec.model.errors import FileError, FileNotFound, InvalidSpec

if TYPE_CHECKING:
    import argparse

    from dsec.model.files import TreeReport
    from dsec.sdk._sync.files import Files

# Shown at most so often, and only for a copy that lasts.
_PROGRESS_EVERY_S: Final = 0.2
_PROGRESS_AFTER_S: Final = 1.0


def cp_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec cp`."""
    parser.add_argument("source", help="a local path, SANDBOX:PATH, or - for standard input")
    parser.add_argument("target", help="SANDBOX:PATH, a local path, or - for standard output")
    parser.add_argument("--user", "-u", help="with the rights of this user of the sandbox (default: its own)")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress and no summary")


def cp_command(args: argparse.Namespace) -> int:
    """Copy a file or a directory with all below it, into a sandbox or out of one."""
    source, target = _split(args.source), _split(args.target)
    try:
        return _copy(args, source, target)
    except FileError as error:
        inside = (source or target or ("",))[0]
        raise type(error)(f"{inside}: {error.message}", detail=error.detail) from error


def _copy(args: argparse.Namespace, source: tuple[str, str] | None, target: tuple[str, str] | None) -> int:
    if (source is None) == (target is None):
        raise InvalidSpec("exactly one of the two must be SANDBOX:PATH (./a:b for a local file with a colon)")
    progress = _Progress(quiet=args.quiet)
    if target is not None:
        files = client(args).get(target[0]).files
        report = _into(files, args.source, target[1], args.user, progress)
    else:
        assert source is not None
        files = client(args).get(source[0]).files
        report = _out(files, source[1], args.target, args.user, progress)
    progress.end()
    if report is not None and report.skipped.count:
        named = ", ".join(f"{safe(one.path)} ({one.why})" for one in report.skipped.named[:3])
        note(f"dsec: left out: {report.skipped.count}: {named}")
    if report is not None and not args.quiet and sys.stderr.isatty():
        note(f"{report.entries} files, {size(report.bytes)}")
    return 0


def _into(files: Files, source: str, target: str, user: str | None, progress: _Progress) -> TreeReport | None:
    if source == "-":
        files.write(target, sys.stdin.buffer.read(), user=user)
        return None
    local = Path(source)
    if not local.exists():
        raise InvalidSpec(f"no file or directory {source!r} on this machine", detail={"field": "source"})
    return files.upload(local, _remote(files, target, local.resolve().name, user), user=user, on_progress=progress.show)


def _remote(files: Files, target: str, name: str, user: str | None) -> str:
    """As cp: into a directory that is there, or is said to be one, else that very path."""
    if target.endswith("/"):
        return target + name
    try:
        there = files.stat(target or ".", user=user)
    except FileNotFound:
        return target
    return f"{target or '.'}/{name}" if there.type == "directory" else target


def _out(files: Files, source: str, target: str, user: str | None, progress: _Progress) -> TreeReport | None:
    if target == "-":
        sys.stdout.buffer.write(files.read(source, user=user))
        sys.stdout.buffer.flush()
        return None
    local = Path(target)
    if target.endswith("/") or local.is_dir():
        local.mkdir(parents=True, exist_ok=True)
        local = local / (source.rstrip("/").rpartition("/")[2] or "root")
    return files.download(source, local, user=user, on_progress=progress.show)


def _split(text: str) -> tuple[str, str] | None:
    """SANDBOX:PATH; None for a local path."""
    sandbox, colon, path = text.partition(":")
    if not colon or not sandbox or "/" in sandbox or text == "-":
        return None
    return sandbox, path


class _Progress:
    """One line that is written over, on a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._on = not quiet and sys.stderr.isatty()
        self._began = self._last = time.monotonic()
        self._shown = False

    def show(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if not self._on or now - self._last < _PROGRESS_EVERY_S or now - self._began < _PROGRESS_AFTER_S:
            return
        self._last, self._shown = now, True
        rate = size(done / (now - self._began))
        of = f" of {size(total)}" if total is not None else ""
        print(f"\r{size(done)}{of}, {rate}/s\x1b[K", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
