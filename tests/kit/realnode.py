"""A real node in a process of its own: agent, runtime and containers, apart from every other on the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from dsec.backends.base import LayerMount
from dsec.backends.container import Place
from dsec.images import LayerStore
from dsec.model.errors import DsecError
from dsec.model.ids import new_key
from dsec.node.steps import WireError
from tests.kit.lanes import runtime_binary
from tests.kit.runtime import ContainerSubject

SOURCE = Path(__file__).resolve().parents[2] / "src"
BASE = "busybox:1"
START_S = 60.0
# As the SDK: a broken connection is made again, with the same key, for as long as an agent may take to start.
RETRY_S = 60.0


class RealNode:
    """Agent and runtime of one place."""

    def __init__(self, place: Place, layer: LayerMount) -> None:
        self.place = place
        self.subject = ContainerSubject(place, (layer,))
        self.log = place.run_dir / "agent.log"
        self._layer = layer
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, failpoints: str = "") -> None:
        """Start the agent and wait until it answers."""
        self.place.run_dir.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "DSEC_FAILPOINTS": failpoints}
        if (binary := runtime_binary()) is not None:
            environment["DSEC_RUNTIME_BIN"] = str(binary)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "dsec.node", "--node", "t"),
                *("--run-dir", str(self.place.run_dir), "--state-dir", str(self.place.state_dir)),
                *("--cgroup", self.place.cgroup),
                env=environment,
                stdout=log,
                stderr=log,
            )
        async with asyncio.timeout(START_S):
            while True:
                assert self._process.returncode is None, self.log.read_text()[-3000:]
                with contextlib.suppress(aiohttp.ClientError):
                    async with self.session() as http, http.get("/v1/health") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)

    def import_base(self) -> None:
        """The base layer, under its name."""
        LayerStore(self.place.state_dir).import_source(f"erofs:{self._layer.path}", BASE)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the agent a signal and wait for its end."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        return await process.wait()

    async def died(self) -> int:
        """Wait until the agent has ended by itself."""
        process, self._process = self._process, None
        assert process is not None
        return await process.wait()

    def session(self) -> aiohttp.ClientSession:
        """A client."""
        connector = aiohttp.UnixConnector(str(self.place.run_dir / "api.sock"), limit=0)
        return aiohttp.ClientSession("http://node", connector=connector)

    async def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> Any:
        """The answer of a call, which is repeated under its key while the agent is away. Raises DsecError."""
        headers = {"Idempotency-Key": key or new_key()}
        async with asyncio.timeout(RETRY_S):
            while True:
                try:
                    async with (
                        self.session() as http,
                        http.request(method, path, json=body, headers=headers) as answer,
                    ):
                        value = await answer.json()
                except (aiohttp.ClientError, OSError):
                    await asyncio.sleep(0.05)
                    continue
                if answer.status < 400:
                    return value
                error = error_of(value)
                if error.code == "unavailable" or error.detail.get("launched") is False:
                    await asyncio.sleep(0.05)
                    continue
                raise error


def error_of(value: dict[str, Any]) -> DsecError:
    """The error in an answer."""
    return msgspec.convert(value, WireError).error()


@contextlib.asynccontextmanager
async def running(place: Place, layer: LayerMount) -> AsyncIterator[RealNode]:
    """A node that serves; its agent is ended afterwards (`own_place` ends the rest)."""
    node = RealNode(place, layer)
    node.import_base()
    await node.start()
    try:
        yield node
    finally:
        await node.end(signal.SIGKILL)
