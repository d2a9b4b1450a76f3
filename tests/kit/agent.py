"""A real node agent in a process of its own, over the fake backend: the API as it is, without containers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import dsec

_START_S = 60.0


class Agent:
    """Start, kill and start it again; its state stays in its directory."""

    def __init__(self, home: Path, *options: str) -> None:
        self.run_dir = home / "run"
        self.state_dir = home / "state"
        self.log = home / "agent.log"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"unix://{self.run_dir}/api.sock"

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    @property
    def env(self) -> dict[str, str]:
        """An environment in which the dsec command finds it."""
        return {**os.environ, "DSEC_RUN_DIR": str(self.run_dir), "DSEC_STATE_DIR": str(self.state_dir), "DSEC_URL": ""}

    def start(self) -> None:
        """Start it and wait until it answers."""
        line = [sys.executable, "-m", "dsec.node", "--run-dir", str(self.run_dir), "--state-dir", str(self.state_dir)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*line, "--node", "t", "--backend", "fake", *self._options], stdout=log, stderr=log
            )
        end = time.monotonic() + _START_S
        while True:
            try:
                dsec.Client(self.url).node()
                return
            except dsec.NodeUnreachable:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise AssertionError(self.log.read_text()) from None
                time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Signal it and wait for its end."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None
