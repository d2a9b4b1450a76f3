"""The C reference: what the kernel itself costs for the same work."""

from __future__ import annotations

import shutil

from bench.peers.base import Env, Peer


class Reference(Peer):
    """One process that does everything: all of it is server."""

    name = "reference"
    ops = ("cycle", "create", "run", "stop")
    upper = "dir"

    @classmethod
    def missing(cls, env: Env) -> str | None:
        return None if (env.tools / "reference").exists() else "gcc is not installed"

    def start(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        command = [str(self.env.tools / "reference"), "--work", str(self.work)]
        sandboxes = self.server.v2 / "sandboxes"
        sandboxes.mkdir(exist_ok=True)
        command += ["--v2", str(sandboxes)]
        if self.env.layout.v1:
            for path in self.server.v1:
                command += ["--v1", str(path)]
        else:
            (sandboxes / "cgroup.subtree_control").write_text("+memory +cpu +pids")
            command.append("--v2-limits")
        for layer in self.env.root.images or self.env.root.layers:
            command += ["--layer", str(layer)]
        if self.upper == "tmpfs":
            command.append("--tmpfs")
        self.start_driver(self.server, command)


class ReferenceTmpfs(Reference):
    """The same with its writable part in memory."""

    name = "reference-tmpfs"
    upper = "tmpfs"
