"""`python -m tests.kit.vm`: a Debian guest for a developer. See `--help`."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator

from tests.kit.vm import cache, frameworks, image, machine, payload, qemu
from tests.kit.vm.channel import GuestError
from tests.kit.vm.emulator import EmulatorError
from tests.kit.vm.machine import Guest


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/guest", description=__doc__)
    parser.add_argument("-k", "--kernel", choices=image.KERNELS, default=image.KERNELS[0])
    parser.add_argument(
        "--frameworks", action="store_true",
        help=f"for shell and run: with those of the lane adapters; their interpreter is {frameworks.MOUNT}/bin/python",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the image and both snapshots; prints where they are")
    commands.add_parser("boot", help="boot afresh and replace the snapshot of this kernel")
    commands.add_parser("shell", help="a line at a time; the tree is in /srv/dsec")
    run = commands.add_parser("run", help="run one command with the tree in /srv/dsec; its exit code is ours")
    run.add_argument("--timeout", type=float, default=600.0, metavar="S")
    run.add_argument("argv", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if reason := qemu.missing():
        sys.exit(f"no guests here: {reason}")
    try:
        return {"build": build, "boot": boot, "shell": shell, "run": execute}[args.command](args)
    except (GuestError, qemu.QemuError, image.BuildError, EmulatorError) as error:
        sys.exit(str(error))


def build(_args: argparse.Namespace) -> int:
    for series in image.KERNELS:
        began = time.monotonic()
        saved = machine.snapshot(series)
        print(f"{series}: {saved.path} ({saved.accel}, {time.monotonic() - began:.1f} s)")
    return 0


def boot(args: argparse.Namespace) -> int:
    cache.discard(machine.snapshot(args.kernel).path)
    began = time.monotonic()
    print(f"{machine.snapshot(args.kernel).path}: {time.monotonic() - began:.1f} s")
    return 0


@contextlib.contextmanager
def working(args: argparse.Namespace) -> Iterator[tuple[Guest, dict[str, str]]]:
    """A guest with the tree, and what programs in it have as their environment."""
    brought = frameworks.disk() if args.frameworks else None
    with payload.disk() as tree, machine.restored(args.kernel, tree, brought) as guest:
        if brought is not None:
            frameworks.mount(guest)
        yield guest, payload.ENVIRONMENT if brought is None else frameworks.ENVIRONMENT


def shell(args: argparse.Namespace) -> int:
    """Not a terminal: each line is a command of its own, with the directory kept."""
    cwd = "/srv/dsec"
    with working(args) as (guest, environment):
        while True:
            try:
                line = input(f"{args.kernel}:{cwd}# ")
            except EOFError:
                return 0
            done = guest.run(
                f"{line}\nstatus=$?; pwd >/run/cwd; exit $status",
                cwd=cwd,
                on_output=_print,
                timeout_s=3600,
                env=environment,
            )
            if done.exit_code:
                print(f"[exit {done.exit_code}]")
            cwd = guest.run("cat /run/cwd").text.strip() or cwd


def execute(args: argparse.Namespace) -> int:
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    line = argv[0] if len(argv) == 1 else shlex.join(argv)
    with working(args) as (guest, environment):
        return guest.run(line, cwd="/srv/dsec", on_output=_print, timeout_s=args.timeout, env=environment).exit_code


def _print(data: bytes) -> None:
    os.write(sys.stdout.fileno(), data)


if __name__ == "__main__":
    sys.exit(main())
