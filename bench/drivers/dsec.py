"""Drives a node through the SDK: `python -m bench.drivers.dsec URL BASE WORKSPACE TOOLKIT`."""

from __future__ import annotations

import sys
import time
from typing import Any

import dsec
from bench.drivers.base import Driver
from bench.peers.raw import KEY, timed

MEMORY_MIB = 512
CPU = 1.0


class SdkTarget:
    """The public client, as a trainer uses it: one, shared by all threads."""

    def __init__(self, url: str, base: str, workspace: str, toolkit: str) -> None:
        self.client = dsec.Client(url)
        self.spec: dict[str, Any] = {
            "base": base,
            "workspace": workspace,
            "toolkits": [toolkit],
            "memory_mib": MEMORY_MIB,
            "cpu": CPU,
        }

    def session(self) -> None:
        """Nothing: the client takes calls from any thread."""

    def create(self, session: None) -> Any:
        """One sandbox."""
        return self.client.create(**self.spec)

    def many(self, count: int) -> list[Any]:
        """All in one call; leaving its `with` block would stop them, so it is entered and kept open."""
        self.batch = self.client.create_many(count, **self.spec)
        made = list(self.batch.__enter__())
        failed = [item for item in made if isinstance(item, dsec.CreateFailed)]
        if failed:
            raise failed[0]
        return made

    def run(self, session: None, sandbox: Any) -> None:
        """`true`."""
        result = sandbox.run(["true"])
        if result.exit_code != 0:
            raise RuntimeError(f"true returned {result}")

    def stream(self, sandbox: Any, mib: int) -> dict[str, Any]:
        """Output of one program, read to its end."""
        begin = time.perf_counter()
        program = sandbox.spawn(["head", "-c", str(mib << 20), "/dev/zero"])
        size = sum(len(data) for data in program.stdout)
        result = program.wait()
        seconds = time.perf_counter() - begin
        if size != mib << 20 or not result.ok:
            raise RuntimeError(f"{size} bytes of {mib} MiB came, and {result}")
        return {"count": mib, "seconds": seconds, "latencies_us": [seconds * 1e6]}

    def echo(self, sandbox: Any, count: int) -> dict[str, Any]:
        """Keys typed to `cat` on a terminal, as a person's program does: over one connection."""
        program = sandbox.spawn(["sh", "-c", "stty raw -echo && printf . && exec cat"], tty=True)
        try:
            with program.attach() as attached:
                output = iter(attached)
                next(output)
                return timed(count, lambda: attached.write(KEY), lambda: next(output)[1])
        finally:
            program.kill()

    def stop(self, session: None, sandbox: Any) -> None:
        """For good."""
        sandbox.stop()

    def cycle(self, session: None) -> None:
        """The mark's sequence: three calls."""
        sandbox = self.create(session)
        self.run(session, sandbox)
        self.stop(session, sandbox)


if __name__ == "__main__":
    target = SdkTarget(*sys.argv[1:])
    Driver(target, target.many, {"stream": target.stream, "echo": target.echo}).serve()
