"""The raw limit of what passes bytes on: the same programs on the bench's own machine, a pipe or a terminal between."""

from __future__ import annotations

import os
import pty
import subprocess
import time
from typing import Any

from bench.peers.base import Env, Failed, Peer

KEY = b"x"


class Raw(Peer):
    """`head | cat > /dev/null`, and `cat` on a terminal: all of it is server, but what types."""

    name = "raw"
    ops = ("stream", "echo")

    @classmethod
    def missing(cls, env: Env) -> str | None:
        return None

    def perform(self, op: str, *args: float | int) -> dict[str, Any]:
        return self._stream(int(args[0])) if op == "stream" else self._echo(int(args[0]))

    def _stream(self, mib: int) -> dict[str, Any]:
        head = [str(self.env.root.tree / "usr/bin/head"), "-c", str(mib << 20), "/dev/zero"]
        begin = time.perf_counter()
        writer = subprocess.Popen([*self.server.prefix(), *head], stdout=subprocess.PIPE)
        reader = subprocess.Popen([*self.server.prefix(), "cat"], stdin=writer.stdout, stdout=subprocess.DEVNULL)
        assert writer.stdout is not None
        writer.stdout.close()
        if ended := [process.args for process in (writer, reader) if process.wait()]:
            raise Failed(f"{self.name}: ended with an error: {ended}")
        seconds = time.perf_counter() - begin
        return {"count": mib, "seconds": seconds, "latencies_us": [seconds * 1e6]}

    def _echo(self, count: int) -> dict[str, Any]:
        master, slave = pty.openpty()
        words = [*self.server.prefix(), "/bin/sh", "-c", "stty raw -echo && printf . && exec cat"]
        cat = subprocess.Popen(words, stdin=slave, stdout=slave)
        try:
            os.close(slave)
            os.read(master, 1)  # it is raw from now on
            return timed(count, lambda: os.write(master, KEY), lambda: os.read(master, 1))
        finally:
            cat.kill()
            cat.wait()
            os.close(master)


def timed(count: int, give: Any, take: Any) -> dict[str, Any]:
    """So many bytes typed, each once the one before has come back. Failed when something else comes."""
    latencies = []
    begin = time.perf_counter()
    for _ in range(count):
        typed = time.perf_counter()
        give()
        if (came := take()) != KEY:
            raise Failed(f"{KEY!r} was typed, {came!r} came back")
        latencies.append((time.perf_counter() - typed) * 1e6)
    return {"count": count, "seconds": time.perf_counter() - begin, "latencies_us": latencies}
