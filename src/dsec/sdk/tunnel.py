"""An SSH tunnel to the Unix socket of a node on another host."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec.model.errors import NodeUnreachable, Unsupported
from dsec.sdk.http1 import Broken
from dsec.sdk.options import Unix
from dsec.sdk.target import Target

if TYPE_CHECKING:
    import subprocess

_POLL_S: Final = 0.02
# Two missed answers at 10 s: ssh ends, and with it every connection through it, before the 30 s are over.
_ALIVE_INTERVAL_S: Final = 10
_ALIVE_COUNT: Final = 2


class Tunnel:
    """Runs `ssh -N -L local.sock:remote.sock`; started at the first use, again when it has ended."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._dir: str | None = None
        self._finalizer: weakref.finalize[..., Tunnel] | None = None

    def ensure(self, timeout_s: float) -> Unix:
        """The local end. Unsupported: no ssh here; Broken or NodeUnreachable: it does not come up."""
        if self._pid != os.getpid():
            # A forked child makes its own: the parent's ends with the parent. Its lock may have been held at the fork.
            self.__init__(self._target)  # type: ignore[misc] # starting over is exactly what is meant
        with self._lock:
            if self._process is None or self._process.poll() is not None or self._dir is None:
                self._start(timeout_s)
            assert self._dir is not None  # _start has set it or raised
            return Unix(f"{self._dir}/api.sock")

    def close(self) -> None:
        """End it."""
        if self._finalizer is not None and self._pid == os.getpid():
            self._finalizer()

    def _start(self, timeout_s: float) -> None:
        import subprocess

        self.close()
        if shutil.which("ssh") is None:
            raise Unsupported.lacks(self._target.url, "ssh", "no ssh program in PATH; install an OpenSSH client")
        where = tempfile.mkdtemp(prefix="dsec-ssh-")
        log = Path(where, "ssh.log")
        with log.open("wb") as errors:
            process = subprocess.Popen(
                command(self._target, f"{where}/api.sock"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # ^C is for the caller, who then kills the program through this tunnel
            )
        self._process, self._dir = process, where
        self._finalizer = weakref.finalize(self, _end, process, where, os.getpid())
        self._await(process, log, timeout_s)

    def _await(self, process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not Path(f"{self._dir}/api.sock").exists():
            if process.poll() is not None:
                said = log.read_text("utf-8", "replace").strip().splitlines()[-1:] or ["no reason given"]
                self.close()
                raise Broken(f"ssh to {self._target.host} ended with code {process.returncode}: {said[0]}")
            if time.monotonic() > end:
                self.close()
                raise NodeUnreachable(f"{self._target.url}: ssh made no tunnel within {timeout_s:g} s")
            time.sleep(_POLL_S)


def command(target: Target, local: str) -> list[str]:
    """The ssh command line. No prompts: a library cannot answer them."""
    options = {
        "BatchMode": "yes",
        "ExitOnForwardFailure": "yes",
        "StreamLocalBindMask": "0177",
        "ServerAliveInterval": str(_ALIVE_INTERVAL_S),
        "ServerAliveCountMax": str(_ALIVE_COUNT),
        "ControlPath": "none",
    }
    line = ["ssh", "-N", "-T", "-L", f"{local}:{target.path}", "-p", str(target.port)]
    for name, value in options.items():
        line += ["-o", f"{name}={value}"]
    if target.user:
        line += ["-l", target.user]
    return [*line, "--", target.host]


def _end(process: subprocess.Popen[bytes], where: str, pid: int) -> None:
    if pid != os.getpid():
        return
    process.terminate()
    process.wait()
    shutil.rmtree(where, ignore_errors=True)
