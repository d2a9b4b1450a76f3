"""A machine of a test's own with the base layer, on which the dsec command has started a node."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from dsec.backends.container import Place
from tests.kit.lanes import runtime_binary
from tests.kit.runtime import own_place

COMMAND = [sys.executable, "-c", "import sys; from dsec.cli.main import main; sys.exit(main())"]
BASE = "debian:12"


class Home:
    """A machine of the test's own, in which the dsec command is used."""

    def __init__(self, place: Place, before: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> None:
        self.place = place
        self.options = options  # of the agent
        self.before = before  # words of a command that starts each of its own
        self.env = {
            **os.environ,
            "DSEC_URL": "",
            "DSEC_RUN_DIR": str(place.run_dir),
            "DSEC_STATE_DIR": str(place.state_dir),
            "DSEC_CGROUP": place.cgroup,
            "DSEC_NODE": "t",
            "DSEC_RUNTIME_BIN": str(runtime_binary()),
        }

    def dsec(self, *args: str, stdin: bytes = b"", code: int | None = 0) -> bytes:
        """What the command prints; its exit code must be the given one."""
        line = [*self.before, *COMMAND, *args]
        done = subprocess.run(line, env=self.env, input=stdin, capture_output=True, check=False)
        assert code is None or done.returncode == code, (args, done)
        return done.stdout

    def dsec_says(self, *args: str, code: int) -> str:
        """What the command says on its standard error."""
        done = subprocess.run([*COMMAND, *args], env=self.env, capture_output=True, check=False)
        assert done.returncode == code, (args, done)
        return done.stderr.decode()

    def dsec_code(self, *args: str) -> int:
        """The command's exit code, whatever it is."""
        return subprocess.run([*COMMAND, *args], env=self.env, capture_output=True, check=False).returncode

    def up(self) -> None:
        """Have the node started."""
        self.dsec("up", *(("--", *self.options) if self.options else ()))

    def agent(self) -> int:
        """The agent's pid."""
        return int((self.place.run_dir / "agent.pid").read_text())

    def client(self) -> dsec.Client:
        """A client of it."""
        return dsec.Client(f"unix://{self.place.run_dir}/api.sock")


@contextlib.contextmanager
def standing(
    state_dir: Path | None = None, *, before: tuple[str, ...] = (), up: tuple[str, ...] = ()
) -> Iterator[Home]:
    """A node that is up, with its state in a given place; afterwards everything of it is gone.

    `before`: words that start each command; `up`: options of the agent.
    """
    cache = Path(os.environ.get("DSEC_CACHE") or "/var/cache/dsec")
    if not (cache / "layers" / "catalog.sqlite").exists():
        pytest.skip(f"no layer {BASE} in {cache} (scripts/setup makes it)")
    with own_place() as own:
        place = own if state_dir is None else Place(own.run_dir, state_dir, own.cgroup)
        made = Home(place, before, up)
        line = ["-m", "dsec.images", "--store", str(place.state_dir), "import", f"store:{cache}#{BASE}", BASE]
        subprocess.run([sys.executable, *line], check=True, stdout=subprocess.DEVNULL)
        made.up()
        yield made
        made.dsec("down", "--stop-all", code=None)


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """A node for the tests of a file; a directory's conftest.py takes it from here."""
    with standing() as made:
        yield made
