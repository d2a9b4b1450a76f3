"""`dsec cp`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec.cli.commands.common import client
from dsec.cli.terminal import note, safe, size
from dsec.model.errors import FileError, FileExists, FileNotFound, InvalidSpec

if TYPE_CHECKING:
    import argparse

    from dsec.model.files import TreeReport
    from dsec.sdk._sync.files import Files

# Shown at most so often, and only for a copy that lasts.
_PROGRESS_EVERY_S: Final = 0.2
_PROGRESS_AFTER_S: Final = 1.0


def cp_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec cp`."""
    about = "a local path, SANDBOX:PATH, or - for standard input; several go into a directory"
    parser.add_argument("source", nargs="+", help=about)
    parser.add_argument("target", help="SANDBOX:PATH, a local path, or - for standard output")
    about = "copy only to a path at which nothing is"
    parser.add_argument("-n", "--no-clobber", action="store_true", help=about)
    parser.add_argument("--user", "-u", help="with the rights of this user of the sandbox (default: its own)")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress and no summary")


def cp_hint(words: list[str]) -> str:
    """What to say of options that `dsec cp` does not have."""
    if words[0] in ("-r", "-R", "-a", "-p", "--recursive", "--archive", "-rf", "-av", "-rp"):
        return "; a directory is copied with all below it, with its modes, without an option"
    return ""


def cp_command(args: argparse.Namespace) -> int:
    """Copy files or directories with all below them, into a sandbox or out of one."""
    sources, target = [(text, _split(text)) for text in args.source], _split(args.target)
    if any((source is None) == (target is None) for _, source in sources):
        raise InvalidSpec(
            "either the last or all before it must be SANDBOX:PATH (./a:b for a local file with a colon), and of those "
            "of one copy the others are local paths"
        )
    names = {target[0]} if target is not None else {source[0] for _, source in sources if source is not None}
    made = client(args)
    copies = {name: _Copies(made.get(name).files, args) for name in names}
    if len(sources) > 1:
        _check_several(args.target, target, copies)
    failed = 0
    for text, source in sources:
        name, inside = target or source or ("", "")
        try:
            copies[name].copy(text if target is not None else inside, inside if target is not None else args.target)
        except FileError as error:
            told = type(error)(f"{name}: {error.message}", detail=error.detail)
            if len(sources) == 1:
                raise told from error
            note(f"dsec: {told.message}")
            failed += 1
    return 1 if failed else 0


def _check_several(text: str, target: tuple[str, str] | None, copies: Mapping[str, _Copies]) -> None:
    """Several sources go into a directory that is there, as with cp."""
    there = Path(text).is_dir() if target is None else copies[target[0]].is_directory(target[1])
    if not there:
        raise InvalidSpec(f"{text} is no directory that is there, and several sources are to go into it")


class _Copies:
    """Copies into a sandbox or out of it."""

    def __init__(self, files: Files, args: argparse.Namespace) -> None:
        self._files = files
        self._into = _split(args.target) is not None
        self._user: str | None = args.user
        self._replace: bool = not args.no_clobber
        self._quiet: bool = args.quiet

    def is_directory(self, path: str) -> bool:
        """Whether one is there, inside."""
        try:
            return self._files.stat(path or ".", user=self._user).type == "directory"
        except FileNotFound:
            return False

    def copy(self, source: str, target: str) -> None:
        """One of them."""
        progress = _Progress(quiet=self._quiet)
        report = self._in(source, target, progress) if self._into else self._out(source, target, progress)
        progress.end()
        if report is not None:
            _tell(report, quiet=self._quiet)

    def _in(self, source: str, target: str, progress: _Progress) -> TreeReport | None:
        if source == "-":
            self._files.write(target, sys.stdin.buffer.read(), exclusive=not self._replace, user=self._user)
            return None
        local = Path(source)
        if not local.exists():
            raise InvalidSpec(f"no file or directory {source!r} on this machine", detail={"field": "source"})
        if self.is_directory(target) or (target.endswith("/") and not local.is_dir()):
            target = f"{target or '.'}{'' if target.endswith('/') else '/'}{local.resolve().name}"
        return self._files.upload(local, target, replace=self._replace, user=self._user, on_progress=progress.show)

    def _out(self, source: str, target: str, progress: _Progress) -> TreeReport | None:
        if target == "-":
            sys.stdout.buffer.write(self._files.read(source, user=self._user))
            sys.stdout.buffer.flush()
            return None
        local = Path(target)
        if local.is_dir() or (target.endswith("/") and not self.is_directory(source)):
            local.mkdir(parents=True, exist_ok=True)
            local = local / (source.rstrip("/").rpartition("/")[2] or "root")
        if not self._replace and os.path.lexists(local):
            raise FileExists(f"{local} is there, and --no-clobber leaves it")
        return self._files.download(source, local, user=self._user, on_progress=progress.show)


def _tell(report: TreeReport, *, quiet: bool) -> None:
    if report.skipped.count:
        named = ", ".join(f"{safe(one.path)} ({one.why})" for one in report.skipped.named[:3])
        note(f"dsec: left out: {report.skipped.count}: {named}")
    if not quiet and sys.stderr.isatty():
        note(f"{report.entries} files, {size(report.bytes)}")


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
