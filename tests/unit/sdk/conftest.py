"""Scripted servers, and one test body for both clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import dsec
from dsec.sdk.timing import Timing
from tests.kit.scripted import Script, Server

# Patient, so that a busy machine changes nothing; only pauses between tries are short.
PATIENT = Timing(
    connect_s=60.0,
    patience_s=60.0,
    health_s=60.0,
    reconnect_s=60.0,
    lived_s=60.0,
    backoff_first_s=0.01,
    backoff_max_s=0.05,
    kill_s=60.0,
)
# For tests of silence: it is noticed soon, and what then answers may take its time.
HASTY = replace(PATIENT, patience_s=0.15, reask_s=0.6)

SANDBOX_ID = "sbx-n1-aaaaaaaaaaaaa"
INFO = {"id": SANDBOX_ID, "node": "n1", "state": "running", "backend": "container", "spec": {}}


def result(code: int = 0, out: bytes = b"", **more: object) -> dict[str, object]:
    """A RunResult as it crosses the wire."""
    value: dict[str, object] = {"process_id": "p-1", "exit_code": code, "cause": "exited", "step": 1}
    if out:
        value["out"] = {"head": out, "total": len(out)}
    return value | more


async def get(value: Any) -> Any:
    """What a call of either client gives."""
    return await value if hasattr(value, "__await__") else value


async def collect(items: Any) -> list[Any]:
    """All items of either kind of iterator."""
    return [item async for item in items] if hasattr(items, "__aiter__") else list(items)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(script: Script, *, tcp: bool = False) -> Server:
        servers.append(Server(None if tcp else tmp_path / f"{len(servers)}.sock", script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Kit:
    """Makes clients of one kind with short times and runs async test bodies. The blocking kind runs inside a
    running loop too, as it does in a notebook."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def client(self, url: str, api_key: str | None = None, timing: Timing = PATIENT) -> Any:
        client = (dsec.Client if self.kind == "sync" else dsec.AsyncClient)(url, api_key)
        client.transport.timing = timing
        return client

    def sandbox(self, url: str, timing: Timing = PATIENT) -> Any:
        client = self.client(url, timing=timing)
        return (dsec.Sandbox if self.kind == "sync" else dsec.AsyncSandbox)(client, SANDBOX_ID)

    def run(self, body: Any) -> Any:
        return asyncio.run(body)


@pytest.fixture(params=["sync", "async"])
def kit(request: pytest.FixtureRequest) -> Kit:
    return Kit(request.param)
