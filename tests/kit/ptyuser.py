"""A user at a real terminal, who starts a command, types, and reads the screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

# Only so that a test that fails ends.
_PATIENCE_S = 60.0


class PtyUser:
    """One command in a terminal of its own."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, rows: int = 30, cols: int = 100) -> None:
        self.master, self.slave = os.openpty()
        self.resize(rows, cols)
        self.before = termios.tcgetattr(self.slave)
        self.screen = b""
        self.process = subprocess.Popen(
            # Its own session, whose terminal this is.
            ["setsid", "-c", *command],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=dict(env),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for fd in (self.master, self.slave):
            with contextlib.suppress(OSError):
                os.close(fd)

    def resize(self, rows: int, cols: int) -> None:
        """Drag the window."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, keys: bytes) -> None:
        """Press these keys."""
        os.write(self.master, keys)

    def expect(self, pattern: bytes) -> re.Match[bytes]:
        """Wait until it is on the screen, behind what was waited for before."""
        end = time.monotonic() + _PATIENCE_S
        while True:
            found = re.search(pattern, self.screen, re.DOTALL)
            if found:
                self.screen = self.screen[found.end() :]
                return found
            if time.monotonic() > end:
                raise AssertionError(f"{pattern!r} is not in {self.screen!r}")
            # Asked before it is read: what it said last may be the pattern.
            ended = self.process.poll() is not None
            if not self._read(0.1) and ended:
                raise AssertionError(f"it ended ({self.process.returncode}); {pattern!r} is not in {self.screen!r}")

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], timeout_s)
        if ready:
            self.screen += os.read(self.master, 65536)
        return bool(ready)

    def ends(self) -> int:
        """Its exit code, once it has one."""
        end = time.monotonic() + _PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it does not end: {self.screen!r}"
            self._read(0.05)  # or it could not write
        while self._read(0):
            pass
        return self.process.returncode

    def raw(self) -> bool:
        """Whether keys are handed on as they are."""
        return not termios.tcgetattr(self.slave)[3] & (termios.ICANON | termios.ECHO | termios.ISIG)

    def as_before(self) -> bool:
        """Whether the terminal is as it was before the command."""
        return termios.tcgetattr(self.slave) == self.before

    def until_raw(self) -> None:
        """Wait until it has the terminal."""
        end = time.monotonic() + _PATIENCE_S
        while not self.raw():
            assert time.monotonic() < end
            self._read(0.02)

    def signal(self, number: signal.Signals) -> None:
        """As `kill`."""
        self.process.send_signal(number)
