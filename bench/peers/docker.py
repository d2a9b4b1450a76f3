"""Docker: a daemon of our own, with its own data root, socket and pidfile, touching no firewall and no bridge."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

from bench.peers.base import Env, Failed, Peer

IMAGE = "bench-root:latest"
LIMITS = ("--network", "none", "--memory", "512m", "--cpus", "1", "--pids-limit", "4096", "--log-driver", "none")
KEPT = "bench-kept"
PROBE_TIMEOUT_S = 5.0


def find(program: str) -> str | None:
    """Debian puts daemons where a plain user's PATH does not look."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")


class Docker(Peer):
    """Through the API."""

    name = "docker"
    ops: ClassVar[tuple[str, ...]] = ("cycle", "create", "run", "stop")

    @classmethod
    def missing(cls, env: Env) -> str | None:
        absent = [name for name in ("dockerd", "docker", "containerd", "runc") if find(name) is None]
        return f"not installed: {', '.join(absent)}" if absent else None

    @property
    def socket(self) -> Path:
        """Of the daemon."""
        return self.work / "docker.sock"

    def docker(self, *words: str) -> str:
        """The command line, run once."""
        done = subprocess.run(
            ["docker", "-H", f"unix://{self.socket}", *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Failed(f"docker {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def start(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        parent = f"/{self.server.name}/containers"
        command: list[str | Path] = [
            find("dockerd") or "dockerd",
            "--host",
            f"unix://{self.socket}",
            "--data-root",
            self.work / "data",
        ]
        command += ["--exec-root", self.work / "exec", "--pidfile", self.work / "docker.pid", "--cgroup-parent", parent]
        command += [
            "--iptables=false",
            "--ip6tables=false",
            "--bridge=none",
            "--exec-opt",
            "native.cgroupdriver=cgroupfs",
        ]
        command += ["--log-level", "error", "--config-file", self.work / "daemon.json"]
        (self.work / "daemon.json").write_text("{}")
        self.spawn(self.server, command, stdout=subprocess.DEVNULL)
        self.wait_until(self._answers, "dockerd")
        self.docker("import", str(self.env.root.tar), IMAGE)
        self.begin(parent)

    def begin(self, parent: str) -> None:
        """What drives it."""
        self.start_driver(self.client, [sys.executable, "-m", "bench.drivers.docker", str(self.socket), IMAGE, parent])

    def _answers(self) -> bool:
        if not self.socket.exists():
            return False
        done = subprocess.run(
            ["docker", "-H", f"unix://{self.socket}", "version"],
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
        return done.returncode == 0

    def close(self) -> None:
        if self.socket.exists() and (left := self.docker("ps", "-aq").split()):
            self.docker("rm", "-f", *left)
        super().close()


class DockerCli(Docker):
    """Through the command line, as the marks' figures for docker were taken."""

    name = "docker-cli"
    ops = ("cycle", "run")

    def begin(self, parent: str) -> None:
        self.docker("run", "-d", "--name", KEPT, *LIMITS, IMAGE, "sleep", "1000000")

    def perform(self, op: str, *args: float | int) -> dict[str, Any]:
        command = ["docker", "-H", f"unix://{self.socket}"]
        if op == "cycle":
            command += ["run", "--rm", *LIMITS, IMAGE, "true"]
        else:
            command += ["exec", KEPT, "true"]
        return self.loop(self.client, float(args[0]), int(args[1]), command)
