"""`dsec bench`: the benchmarks live in a checkout; this finds and runs them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec.cli.terminal import note

if TYPE_CHECKING:
    import argparse


_NOT_HERE: Final = "the benchmarks are not part of the installed package: run `dsec bench` in a checkout of the project"


def bench_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dsec bench`."""
    import argparse

    class Help(argparse.Action):
        """Our help and then that of the benchmarks, which have their own options."""

        def __call__(self, *_: object) -> None:
            parser.print_help()
            parser.exit(bench_help())

    parser.add_argument("-h", "--help", action=Help, nargs=0, help="show this and what the benchmarks take")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for the benchmarks")


def bench_command(args: argparse.Namespace) -> int:
    """Run the checkout's benchmarks in place of this process."""
    root = find_checkout()
    if root is None:
        note(f"dsec: {_NOT_HERE}")
        return 1
    words = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    if args.url:
        os.environ["DSEC_URL"] = args.url
    os.chdir(root)
    os.execv(sys.executable, [sys.executable, "-m", "bench", *words])


def bench_help() -> int:
    """Print the benchmarks' own help, or where it is to be had."""
    root = find_checkout()
    if root is None:
        print(f"\n{_NOT_HERE}")
        return 0
    print("\nThe benchmarks:\n", flush=True)
    return subprocess.run([sys.executable, "-m", "bench", "--help"], cwd=root, check=False).returncode


def find_checkout() -> Path | None:
    """The checkout this package runs from or we stand in, with a `bench` package."""
    spec = importlib.util.find_spec("dsec")
    homes = [Path(spec.origin).parents[2]] if spec is not None and spec.origin else []
    for root in [*homes, Path.cwd(), *Path.cwd().parents]:
        if (root / "bench" / "__main__.py").is_file() and (root / "src" / "dsec").is_dir():
            return root
    return None
