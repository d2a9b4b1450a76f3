"""runc and bubblewrap: launchers without a daemon, driven as command lines. All of it is server."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from bench.peers.base import Env, Failed, Peer

KEPT = "bench-kept"


class Runc(Peer):
    """A bundle on the shared tree, read-only: it has no overlay, limits as everybody's."""

    name = "runc"
    ops = ("cycle", "run")

    @classmethod
    def missing(cls, env: Env) -> str | None:
        return None if shutil.which("runc") else "not installed: runc"

    def _bundle(self, name: str, argv: list[str]) -> str:
        bundle = self.work / name
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.mkdir(parents=True)
        subprocess.run(["runc", "spec", "--bundle", str(bundle)], check=True)
        path = bundle / "config.json"
        config = json.loads(path.read_text())
        config["process"].update(terminal=False, args=argv)
        config["root"] = {"path": str(self.env.root.tree), "readonly": True}
        config["linux"]["resources"].update(
            memory={"limit": 512 * 1024 * 1024}, cpu={"quota": 100_000, "period": 100_000}, pids={"limit": 4096}
        )
        path.write_text(json.dumps(config))
        return str(bundle)

    def _runc(self, *words: str) -> None:
        command = [*self.server.prefix(limits=True), "runc", "--root", str(self.work / "state"), *words]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise Failed(f"runc {' '.join(words)} returned {done.returncode}")

    def start(self) -> None:
        self._runc("run", "--detach", "--bundle", self._bundle(KEPT, ["sleep", "1000000"]), KEPT)

    def perform(self, op: str, *args: float | int) -> dict[str, Any]:
        seconds, jobs = float(args[0]), int(args[1])
        command = ["runc", "--root", str(self.work / "state")]
        if op == "run":
            return self.loop(self.server, seconds, jobs, [*command, "exec", KEPT, "true"])
        # runc only reads a bundle, so all jobs share one; the cgroup is named after the container, below the caller's.
        bundle = self._bundle("cycle", ["true"])
        return self.loop(self.server, seconds, jobs, [*command, "run", "--bundle", bundle, "{}"])

    def close(self) -> None:
        if (self.work / "state" / KEPT).exists():
            self._runc("delete", "--force", KEPT)
        super().close()


class Bwrap(Peer):
    """All namespaces, the shared tree read-only, no cgroup, no overlay, nothing that stays: the least there is."""

    name = "bwrap"
    ops = ("cycle",)

    @classmethod
    def missing(cls, env: Env) -> str | None:
        return None if shutil.which("bwrap") else "not installed: bwrap"

    def perform(self, op: str, *args: float | int) -> dict[str, Any]:
        command: list[str | Path] = ["bwrap", "--unshare-all", "--ro-bind", self.env.root.tree, "/"]
        command += ["--proc", "/proc", "--dev", "/dev"]
        return self.loop(self.server, float(args[0]), int(args[1]), [*command, "/bin/true"])
