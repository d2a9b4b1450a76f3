"""A Debian root as a tar, by mmdebstrap: the base layers users start from."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from dsec.images import tools
from dsec.images.build import failure
from dsec.model.errors import InvalidSpec, Unavailable

# Raised when the recipe changes in a way its fields do not show.
RECIPE_VERSION: Final = 1
# Times inside are cut to this moment, so the same package versions give the same bytes.
SOURCE_DATE_EPOCH: Final = 1_700_000_000
TIMEOUT_S: Final = 1_800.0
POLL_S: Final = 0.2
LOG_TAIL_BYTES: Final = 2_000
SUITES: Final = ("bookworm", "trixie")
ENV: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}

# What agents and test runs reach for first. pytest comes along because a sandbox has no network by default.
PACKAGES: Final = (
    "bzip2", "ca-certificates", "curl", "file", "gcc", "git", "iproute2", "less", "libc6-dev", "make", "nano",
    "netbase", "patch", "procps", "psmisc", "python3", "python3-pip", "python3-pytest", "python3-venv", "sudo",
    "unzip", "xz-utils", "zip",
)  # fmt: skip

# Differs from run to run, or is of no use in a layer.
_CLEAN: Final = (
    "var/cache/apt", "var/lib/apt/lists", "var/cache/ldconfig/aux-cache", "var/log", "var/cache/debconf",
    "etc/machine-id", "var/lib/dbus/machine-id", "tmp", "run", "etc/hostname", "etc/resolv.conf",
)  # fmt: skip


class Recipe(msgspec.Struct, frozen=True):
    """Which Debian, with what. `source` changes when any of it does."""

    suite: str
    packages: tuple[str, ...] = PACKAGES
    variant: str = "minbase"

    @property
    def source(self) -> str:
        """The import source with a digest of the recipe, so that a cache knows what it has."""
        text = repr((RECIPE_VERSION, SOURCE_DATE_EPOCH, self.suite, self.packages, self.variant, _CLEAN))
        return f"debootstrap:{self.suite}?recipe={hashlib.sha256(text.encode()).hexdigest()[:16]}"


def make(
    recipe: Recipe,
    staging: Path,
    progress: Callable[[str], None] | None,
    cancel: threading.Event | None,
) -> Path:
    """The root's archive, in `staging`."""
    if recipe.suite not in SUITES:
        raise InvalidSpec.field("source", f"debootstrap:{recipe.suite}", ", ".join(SUITES))
    archive, log = staging / "root.tar", staging / "mmdebstrap.log"
    staging.chmod(0o711)  # apt downloads as a user of its own
    with log.open("wb") as opened:
        process = subprocess.Popen(
            _command(recipe, archive),
            stdin=subprocess.DEVNULL,
            stdout=opened,
            stderr=opened,
            start_new_session=True,
            # The tree is unpacked beside the store, not in a /tmp that may be small.
            env={**os.environ, "SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH), "TMPDIR": str(staging)},
        )
    try:
        _watch(process, log, progress, cancel)
    finally:
        if process.poll() is None:
            _end(process)
    if cancel is not None and cancel.is_set():
        raise Unavailable(f"making {recipe.source} was cancelled")
    if process.returncode != 0:
        tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        lines = [line for line in tail.splitlines() if line.startswith(("E:", "W:"))] or tail.splitlines()[-3:]
        raise failure("mmdebstrap", f"exit status {process.returncode}: {' '.join(lines)}", staging)
    return archive


def _command(recipe: Recipe, archive: Path) -> list[str]:
    emptied = " ".join(f'"$1"/{path}/*' if _is_directory(path) else f'"$1"/{path}' for path in _CLEAN)
    return [
        tools.mmdebstrap(),
        f"--variant={recipe.variant}",
        f"--include={','.join(recipe.packages)}",
        "--aptopt=Acquire::Languages none",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        f"--customize-hook=rm -rf {emptied}",
        "--format=tar",
        recipe.suite,
        str(archive),
    ]


def _is_directory(path: str) -> bool:
    return not re.search(r"(aux-cache|machine-id|hostname|resolv\.conf)$", path)


def _watch(
    process: subprocess.Popen[bytes],
    log: Path,
    progress: Callable[[str], None] | None,
    cancel: threading.Event | None,
) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    said = ""
    while process.poll() is None:
        if cancel is not None and cancel.is_set():
            return
        if time.monotonic() > deadline:
            raise Unavailable(f"mmdebstrap did not end within {TIMEOUT_S:.0f} s")
        if progress is not None:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("I: ")]
            if lines and lines[-1] != said:
                said = lines[-1]
                progress(f"mmdebstrap: {said[3:]}")
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM first: mmdebstrap unmounts what it mounted in its root."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
