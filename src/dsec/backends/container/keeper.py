"""Finding and starting the native runtime of a node."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import sysconfig
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from dsec.linux import proc
from dsec.model.errors import LaunchFailed, Unsupported

BINARY: Final = "dsec-runtime"
BINARY_ENV: Final = "DSEC_RUNTIME_BIN"
START_DEADLINE_S: Final = 20.0
# How much of what a keeper that did not start said is put into the error.
SAID_MAX_BYTES: Final = 2000
_POLL_S: Final = 0.02


class Place(msgspec.Struct, frozen=True):
    """Where a node's runtime lives: several on one machine differ in all three."""

    run_dir: Path
    state_dir: Path
    cgroup: str

    @property
    def socket(self) -> Path:
        """The runtime's socket."""
        return self.run_dir / "runtime.sock"


class Keeper(msgspec.Struct, frozen=True):
    """A living keeper."""

    pid: int
    start_time: int
    instance: str


def find_binary() -> Path:
    """The runtime's binary: what `DSEC_RUNTIME_BIN` names, else beside this Python, on PATH, or built in a checkout."""
    if named := os.environ.get(BINARY_ENV):
        return Path(named)
    checkout = Path(__file__).resolve().parents[4]
    target = Path(os.environ.get("CARGO_TARGET_DIR", str(checkout / "target")))
    triple = f"{os.uname().machine}-unknown-linux-gnu"
    candidates: list[Path] = [
        Path(sysconfig.get_path("scripts")) / BINARY,
        Path(sys.executable).parent / BINARY,
        *((Path(found),) if (found := shutil.which(BINARY)) else ()),
        *(target / kind / profile / BINARY for kind in (triple, "") for profile in ("release", "debug")),
    ]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    tried = ", ".join(str(path) for path in candidates)
    raise Unsupported.lacks(
        "starting the runtime", BINARY, f"not found (tried {tried}); install dsec[node], build it, or set {BINARY_ENV}"
    )


def living_keeper(run_dir: Path) -> Keeper | None:
    """The keeper of this directory, when it lives. A pid alone proves nothing: numbers are used again."""
    try:
        pid, start_time, instance = (run_dir / "keeper.pid").read_text().split()[:3]
        keeper = Keeper(int(pid), int(start_time), instance)
    except (OSError, ValueError):
        return None
    return keeper if proc.start_time(keeper.pid) == keeper.start_time else None


def options_of(pid: int) -> dict[str, str]:
    """The options a keeper or an agent was started with: where its node's state lies and what its cgroup is called."""
    words = [os.fsdecode(word) for word in proc.command_line(pid)]
    found: dict[str, str] = {}
    for word, after in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            found[name] = value if equals else after
    return found


async def ensure_runtime(place: Place, binary: Path | None = None) -> Keeper:
    """The keeper of this place; started when there is none. Safe to call from several processes at once."""
    if (keeper := living_keeper(place.run_dir)) is not None:
        return keeper
    binary = binary or find_binary()
    code, said = await asyncio.to_thread(_start, binary, place)
    if (keeper := await _appears(place.run_dir)) is not None:
        return keeper
    log = _tail(place.run_dir / "runtime.log")
    raise LaunchFailed(
        f"{binary} keeper did not start in {place.run_dir} (exit code {code}): {said or log or 'it said nothing'}",
        detail={"step": "keeper", "exit_code": code, "log": log},
    )


def _start(binary: Path, place: Place) -> tuple[int, str]:
    """Run it until it has forked itself away; its exit code and what it said until then.

    Into a file, not a pipe: the keeper keeps its standard error for as long as it lives, so the end of a pipe would
    never come. One in memory: the disk may be full. By `subprocess` in a thread, which closes every other descriptor of
    the agent in the child.
    """
    options = ("--run-dir", place.run_dir, "--state-dir", place.state_dir, "--cgroup", place.cgroup)
    with os.fdopen(os.memfd_create("said"), "w+b") as said:
        try:
            done = subprocess.run(
                [binary, "keeper", *options],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                timeout=START_DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LaunchFailed(
                f"the keeper in {place.run_dir} did not get ready within {START_DEADLINE_S:g} s",
                detail={"step": "keeper"},
            ) from None
        except OSError as error:
            raise LaunchFailed(f"{binary} cannot be executed: {error}", detail={"step": "keeper"}) from error
        said.seek(0)
        return done.returncode, said.read(SAID_MAX_BYTES).decode(errors="replace").strip()


async def _appears(run_dir: Path) -> Keeper | None:
    """Its pid file may come a moment after its first process has ended; or another one won the race to start."""
    for _ in range(100):
        if (keeper := living_keeper(run_dir)) is not None:
            return keeper
        await asyncio.sleep(_POLL_S)
    return None


def _tail(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    return data[-SAID_MAX_BYTES:].decode(errors="replace").strip()
