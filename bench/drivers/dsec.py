"""Drives a node through the SDK: `python -m bench.drivers.dsec URL BASE WORKSPACE TOOLKIT`."""

from __future__ import annotations

import sys
from typing import Any

import dsec
from bench.drivers.base import Driver

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
    Driver(target, target.many).serve()
