"""The live server against its own document: schemathesis asks whatever the document allows, and what it forbids."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from dsec.model.specs import Spec
from dsec.node.http import openapi
from dsec.node.http.auth import TokenGuard
from tests.kit.simserver import SimServer

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (pip install dsec[dev])")

pytestmark = [pytest.mark.contract]

KEY = "key-of-this-test"


class Served:
    """A simulated node in a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self._server = SimServer(directory, TokenGuard({hashlib.sha256(KEY.encode()).hexdigest(): ""}))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._main()), daemon=True)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with self._server as server:
            await server.node.create(Spec(name="a", job="j"))
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> str:
        self._thread.start()
        assert self._ready.wait(30)
        return f"http://127.0.0.1:{self._server.port}"

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Served(tmp_path_factory.mktemp("node")) as base:
        yield base


@schemathesis.serializer("application/x-tar")
def as_it_is(ctx: object, value: object) -> bytes:
    """What is made up for an archive is none: it has to be refused."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


schema = schemathesis.openapi.from_dict(openapi.document())
schema.config.generation.update(max_examples=12)


@schema.parametrize()
def test_every_call_keeps_to_the_document(case, url):
    case.headers["Authorization"] = f"Bearer {KEY}"
    if case.method == "DELETE" and case.path_parameters.get("ref") == "a":
        case.path_parameters["ref"] = "b"
    case.call_and_validate(
        base_url=url,
        timeout=30,
        excluded_checks=[
            # Unknown layers, names in use and the like are refused though the document allows them.
            schemathesis.checks.CHECKS.get_one("positive_data_acceptance"),
        ],
    )
