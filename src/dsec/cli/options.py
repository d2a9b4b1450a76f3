"""The parser of a command's options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from dsec.cli.terminal import safe_lines


class Parser(argparse.ArgumentParser):
    """Its errors repeat words of the command line, which may be a sandbox's: a file's name that a shell completed."""

    def parse(self, args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """What is given, and what is not known. Options may stand between and behind other words, but for a command's
        that takes all words behind its first as they are."""
        if any(action.nargs in (argparse.REMAINDER, argparse.PARSER) for action in self._actions):
            return self.parse_known_args(args)
        return self.parse_known_intermixed_args(args)

    def error(self, message: str) -> NoReturn:
        """Say it and the usage, and end with the code for that."""
        super().error(safe_lines(message))
