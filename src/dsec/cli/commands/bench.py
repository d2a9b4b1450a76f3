"""`dsec bench`: the benchmarks live in a checkout; this finds and runs them."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dsec.cli.terminal import note

if TYPE_CHECKING:
    import argparse


def bench_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec bench`."""
    import argparse

    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for `python -m bench` (--help shows them)")


def bench_command(args: argparse.Namespace) -> int:
    """Run the checkout's benchmarks in place of this process."""
    root = find_checkout()
    if root is None:
        note(
            "dsec: the benchmarks are not part of the installed package: run `dsec bench` in a checkout of the project"
        )
        return 1
    words = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    if args.url:
        os.environ["DSEC_URL"] = args.url
    os.chdir(root)
    os.execv(sys.executable, [sys.executable, "-m", "bench", *words])


def find_checkout() -> Path | None:
    """The checkout this package runs from or we stand in, with a `bench` package."""
    spec = importlib.util.find_spec("dsec")
    homes = [Path(spec.origin).parents[2]] if spec is not None and spec.origin else []
    for root in [*homes, Path.cwd(), *Path.cwd().parents]:
        if (root / "bench" / "__main__.py").is_file() and (root / "src" / "dsec").is_dir():
            return root
    return None
