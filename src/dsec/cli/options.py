"""The parser of a command's options."""

from __future__ import annotations

import argparse
from typing import NoReturn

from dsec.cli.terminal import safe_lines


class Parser(argparse.ArgumentParser):
    """Its errors repeat words of the command line, which may be a sandbox's: a file's name that a shell completed."""

    def error(self, message: str) -> NoReturn:
        """Say it and the usage, and end with the code for that."""
        super().error(safe_lines(message))
