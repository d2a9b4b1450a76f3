"""Which QEMU runs the guests.

Debian 12's own 7.2 miscompiles what kernel 6.12 does with cmpxchg16b: 11 of 12 boots under software
emulation ended in a double fault or a corrupted list, within seconds, with every -cpu tried; 10.0 from
bookworm-backports boots it every time. Where the installed QEMU is older, that one is unpacked into the
cache and run from there; nothing is installed.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kit.vm import cache

NAME = "qemu-system-x86_64"
GOOD_VERSION = (10, 0)
PACKAGES = ("qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
SOURCE = f"deb [signed-by={KEYRING}] http://deb.debian.org/debian bookworm-backports main\n"
FETCH_TIMEOUT_S = 300
FETCH_FORMAT = "1"


class EmulatorError(RuntimeError):
    """No QEMU that can run the guests; the message says what was tried."""


@dataclass(frozen=True)
class Emulator:
    program: str
    version: str
    data: tuple[Path, ...] = ()

    @property
    def command(self) -> list[str]:
        return [self.program, *(word for path in self.data for word in ("-L", str(path)))]


def find(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


@functools.cache
def emulator() -> Emulator:
    installed = find(NAME)
    if installed is None:
        raise EmulatorError(f"{NAME} is not installed")
    version = _version(installed)
    if _numbers(version) >= GOOD_VERSION:
        return Emulator(installed, version)
    root = cache.entry("qemu", cache.key_of(SOURCE, *PACKAGES, FETCH_FORMAT), _fetch)
    program = str(root / "usr/bin" / NAME)
    return Emulator(program, _version(program), (root / "usr/share/qemu", root / "usr/share/seabios"))


def _version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EmulatorError(f"{program} does not run here: {done.stderr.strip()}")
    return done.stdout.splitlines()[0]


def _numbers(version: str) -> tuple[int, ...]:
    match = re.search(r"version (\d+)\.(\d+)", version)
    return tuple(int(part) for part in match.groups()) if match else ()


def _fetch(target: Path) -> None:
    """The packages by apt with a configuration of its own: the system's lists and sources stay as they are."""
    apt = target / "apt"
    (apt / "lists/partial").mkdir(parents=True)
    (apt / "cache/archives/partial").mkdir(parents=True)
    (apt / "sources.list").write_text(SOURCE)
    options = (
        f"-oDir::Etc::SourceList={apt}/sources.list", "-oDir::Etc::SourceParts=/dev/null",
        f"-oDir::State::Lists={apt}/lists", f"-oDir::Cache={apt}/cache",
        "-oAPT::Sandbox::User=root", "-oAcquire::Languages=none", "-oAcquire::Retries=3",
    )  # fmt: skip
    _run(["apt-get", "-qq", *options, "update"], apt)
    _run(["apt-get", "-qq", *options, "download", *PACKAGES], apt)
    for package in apt.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(target)], apt)
    shutil.rmtree(apt)


def _run(argv: Sequence[str], cwd: Path) -> None:
    done = subprocess.run(
        argv, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=FETCH_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise EmulatorError(f"{argv[0]}: {done.stderr.strip()[-1000:]}")
