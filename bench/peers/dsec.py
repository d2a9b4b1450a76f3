"""This project: a node of its own started by the bench, used through the SDK."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.drivers.docker import UnixConnection
from bench.peers.base import Env, Failed, Peer, python_env

LAYERS = (("bench-base", "base"), ("bench-workspace", "workspace"), ("bench-toolkit", "toolkit"))

# Thousands of idle sandboxes of 512 MiB each promise more than this machine has: what is measured is what they use.
OVERCOMMITTED = ("memory_mib", "disk_mib", "pids")
OVERCOMMIT = 1000
CGROUP = "dsec"


class Dsec(Peer):
    """The node, its keeper, runtime, launchers and sandboxes are server; the SDK is client."""

    name = "dsec"
    ops = ("cycle", "create", "many", "run", "stop", "stream", "echo")
    runtime = 0

    @classmethod
    def missing(cls, env: Env) -> str | None:
        probe = [sys.executable, "-c", "import dsec, dsec.node.__main__; dsec.Client"]
        done = subprocess.run(probe, capture_output=True, text=True, env=python_env(), check=False)
        return f"not installed: {done.stderr.strip().splitlines()[-1]}" if done.returncode else None

    @property
    def socket(self) -> Path:
        """The node's."""
        return self.work / "run" / "api.sock"

    def start(self) -> None:
        env = {
            **python_env(),
            "DSEC_RUN_DIR": str(self.work / "run"),
            "DSEC_STATE_DIR": str(self.work / "state"),
            # Below the accounting group: on v2 a sandbox's CPU is counted where its cgroup is.
            "DSEC_CGROUP": f"{self.server.name}/{CGROUP}",
            "DSEC_NODE": "bench",
        }
        command = [sys.executable, "-m", "dsec.node"]
        for resource in OVERCOMMITTED:
            command += ["--overcommit", f"{resource}={OVERCOMMIT}"]
        self.spawn(self.server, command, stdout=subprocess.DEVNULL, env=env)
        self.wait_until(self._healthy, "the node")
        for (name, role), tree in zip(LAYERS, self.env.root.layers, strict=True):
            self._import(f"{name}@1", role, tree)
        names = [f"{name}@1" for name, _ in LAYERS]
        url = f"unix://{self.socket}"
        self.start_driver(self.client, [sys.executable, "-m", "bench.drivers.dsec", url, *names])

        self._check_real()
        # It has begun with the first sandbox.
        self.runtime = _find(b"serve", str(self.work / "run").encode())

    def parts(self) -> dict[str, int]:
        return {"agent": self.processes[0].pid, "runtime": self.runtime}

    def _check_real(self) -> None:
        """See in the kernel that a sandbox is one: a simulated backend answers all calls, and would meet every mark."""
        self.perform("create", 1, 1)
        cgroups = [path for path in (self.server.v2 / CGROUP).rglob("*") if path.is_dir()]
        if not any((path / "cgroup.procs").read_text().split() for path in cgroups):
            raise Failed(
                f"{self.name}: a sandbox was created, but no process is in a cgroup below {CGROUP}: not a real one"
            )
        self.perform("stop", 1)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        connection = UnixConnection(str(self.socket))
        headers = {"Content-Type": "application/json", "Idempotency-Key": f"bench-{path}-{body}".replace(" ", "")[:128]}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def _healthy(self) -> bool:
        try:
            return self._call("GET", "/v1/health")[0] == 200
        except OSError:
            return False

    def _import(self, name: str, role: str, tree: Path) -> None:
        status, text = self._call("POST", "/v1/layers:import", {"source": f"dir:{tree}", "name": name, "role": role})
        if status >= 400 or b'"error"' in text:
            raise Failed(f"importing {name}: {status} {text.decode(errors='replace')}")


def _find(*words: bytes) -> int:
    """The process whose command line has all of these words. Failed when there is none."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        if set(words) <= set(line):
            return int(path.parent.name)
    raise Failed(f"no process with {words}")
