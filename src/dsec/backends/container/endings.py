"""Who waits for the end of which sandbox: one subscription for all of them."""

from __future__ import annotations

import asyncio
import logging

from dsec.backends.base import Exit
from dsec.backends.container import plans
from dsec.model.errors import DsecError, NotFound, Unavailable
from dsec.wire import values as v
from dsec.wire.runtime import RuntimeClient

log = logging.getLogger(__name__)


def known(future: asyncio.Future[Exit]) -> Exit | None:
    """The end of a sandbox, when it is known."""
    return future.result() if future.done() and future.exception() is None else None


class Endings:
    """A future for every sandbox somebody holds. `watch` before asking whether it lives, and no end can be missed."""

    def __init__(self, client: RuntimeClient) -> None:
        self._client = client
        self._futures: dict[str, asyncio.Future[Exit]] = {}
        self._subscribed = False
        self._checking: asyncio.Task[None] | None = None

    async def watch(self, sandbox_id: str) -> asyncio.Future[Exit]:
        """The end of this sandbox; the same future for all who ask."""
        if not self._subscribed:
            # Set only after it worked; subscribing twice in a race does no harm, the client keeps the last.
            await self._client.subscribe(self._ended, self._gap)
            self._subscribed = True
        future = self._futures.get(sandbox_id)
        if future is None:
            future = self._futures[sandbox_id] = asyncio.get_running_loop().create_future()
        return future

    def ended(self, sandbox_id: str, exit_: Exit) -> None:
        """It is known that this sandbox has ended."""
        future = self._futures.pop(sandbox_id, None)
        if future is not None and not future.done():
            future.set_result(exit_)

    def unwatch(self, sandbox_id: str) -> None:
        """It was never made."""
        self._futures.pop(sandbox_id, None)

    def close(self) -> None:
        """Nobody will be told any more."""
        if self._checking is not None:
            self._checking.cancel()
        for future in self._futures.values():
            future.set_exception(Unavailable("the backend was closed; the sandbox lives on"))
            future.exception()  # marks it as seen: not everyone waits
        self._futures.clear()

    def _ended(self, status: v.SandboxStatus) -> None:
        self.ended(status.id, plans.ending(status))

    def _gap(self) -> None:
        if self._checking is None or self._checking.done():
            self._checking = asyncio.get_running_loop().create_task(self._check())

    async def _check(self) -> None:
        """The connection was broken: ask for what ended meanwhile."""
        watched = list(self._futures)
        try:
            alive = {status.id for status in await self._client.sandboxes() if status.state == "running"}
            for sandbox_id in watched:
                if sandbox_id not in alive:
                    await self._check_one(sandbox_id)
        except DsecError as error:
            log.warning("could not ask which sandboxes ended: %s", error)

    async def _check_one(self, sandbox_id: str) -> None:
        try:
            status = await self._client.get(sandbox_id)
        except NotFound:
            self.ended(sandbox_id, Exit(reason="lost", detail="the runtime does not know it any more"))
            return
        if status.state == "ended":
            self._ended(status)
