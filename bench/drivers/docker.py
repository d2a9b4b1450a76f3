"""Drives dockerd through its HTTP API: `python -m bench.drivers.docker SOCKET IMAGE CGROUP_PARENT`.

Without the command line, whose start alone costs more than many of the calls: docker at its best.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
from typing import Any

from bench.drivers.base import Driver

API = "/v1.41"
MEMORY_BYTES = 512 * 1024 * 1024
NANO_CPUS = 1_000_000_000
PIDS = 4096
FOREVER = ["sleep", "1000000"]


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket, kept alive."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self.path = path

    def connect(self) -> None:
        """To the daemon."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self.path)


class DockerTarget:
    """One daemon, one image."""

    def __init__(self, path: str, image: str, parent: str) -> None:
        self.path = path
        self.config = {
            "Image": image,
            "HostConfig": {
                "NetworkMode": "none",
                "CgroupParent": parent,
                "Memory": MEMORY_BYTES,
                "NanoCpus": NANO_CPUS,
                "PidsLimit": PIDS,
                "LogConfig": {"Type": "none"},
            },
        }

    def session(self) -> UnixConnection:
        """A connection."""
        return UnixConnection(self.path)

    def _call(self, session: UnixConnection, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        session.request(method, API + path, data, headers)
        answer = session.getresponse()
        text = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status} {text!r}")
        return json.loads(text) if "json" in (answer.getheader("Content-Type") or "") and text else None

    def _start(self, session: UnixConnection, command: list[str]) -> str:
        made: str = self._call(session, "POST", "/containers/create", {**self.config, "Cmd": command})["Id"]
        self._call(session, "POST", f"/containers/{made}/start")
        return made

    def create(self, session: UnixConnection) -> str:
        """A container that sleeps."""
        return self._start(session, FOREVER)

    def run(self, session: UnixConnection, sandbox: str) -> None:
        """An exec: made, started, its output read to the end, its code asked for."""
        spec = {"Cmd": ["true"], "AttachStdout": True, "AttachStderr": True}
        made = self._call(session, "POST", f"/containers/{sandbox}/exec", spec)["Id"]
        self._call(session, "POST", f"/exec/{made}/start", {"Detach": False, "Tty": False})
        code = self._call(session, "GET", f"/exec/{made}/json")["ExitCode"]
        if code != 0:
            raise RuntimeError(f"true returned {code}")

    def stop(self, session: UnixConnection, sandbox: str) -> None:
        """Kill and remove."""
        self._call(session, "DELETE", f"/containers/{sandbox}?force=1")

    def cycle(self, session: UnixConnection) -> None:
        """`docker run --rm IMAGE true`: the program is the container's first, which spares docker an exec."""
        made = self._start(session, ["true"])
        code = self._call(session, "POST", f"/containers/{made}/wait")["StatusCode"]
        if code != 0:
            raise RuntimeError(f"true returned {code}")
        self._call(session, "DELETE", f"/containers/{made}")


if __name__ == "__main__":
    Driver(DockerTarget(*sys.argv[1:])).serve()
