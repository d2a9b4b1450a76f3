"""What containers may reach: tables for the node's process for connections, through its deaths and the runtime's.

The runtime steers a sandbox's namespace to that process, closed; here it is told what to let through. All that it
knows is kept here and told again to the next one, which denies everything until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from pathlib import Path
from typing import Final

import msgspec

from dsec.backends.base import NetworkCounters, Verdict, Verdicts
from dsec.model.errors import DsecError, LaunchFailed, NotFound, SandboxLost, Unavailable
from dsec.wire import network as wire
from dsec.wire.network import Control, Gone, Refused
from dsec.wire.runtime import RuntimeClient

log = logging.getLogger(__name__)

# How long a call waits for a process that is not there.
PATIENCE_S: Final = 20.0
_AGAIN_S: Final = 0.05
_AGAIN_MAX_S: Final = 2.0
_AT_ONCE: Final = 32
_NS: Final = 1e9


class _Life:
    """One connection, and of what it leads to: which sandboxes are steered to it, and which were told their table."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.steered: set[str] = set()
        self.told: set[str] = set()


class ContainerNetworks:
    """The `Networks` of containers."""

    def __init__(self, client: RuntimeClient, path: Path) -> None:
        self._client = client
        self._path = path
        self._tables: dict[str, bytes] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._resolvers: tuple[str, ...] = ()
        self._own: tuple[str, ...] = ()
        self._told: Verdicts = lambda verdicts, dropped: None
        self._life: _Life | None = None
        self._up = asyncio.Event()
        self._lost = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._settled = False

    def configure(self, *, resolvers: tuple[str, ...], own: tuple[str, ...], told: Verdicts) -> None:
        changed = (resolvers, own) != (self._resolvers, self._own)
        self._resolvers, self._own, self._told = resolvers, own, told
        if changed and self._life is not None:
            self._life.control.close()  # all of it is told again

    async def put(self, sandbox_id: str, table: bytes) -> None:
        async with self._locks[sandbox_id]:
            before = self._tables.get(sandbox_id)
            self._tables[sandbox_id] = table
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._put(sandbox_id)
            except Refused as error:  # nothing was changed
                self._put_back(sandbox_id, before)
                raise Unavailable(f"the process for sandboxes' connections refused a table: {error}") from error
            except BaseException as error:  # also cancelled: what nobody heard of does not hold
                self._put_back(sandbox_id, before)
                if self._life is not None and (before is not None or sandbox_id in self._life.steered):
                    # It may have got the new one, or none. On the next connection it gets the one before.
                    self._life.control.close()
                if isinstance(error, TimeoutError):
                    raise Unavailable(
                        "the process for sandboxes' connections cannot be reached; nothing is let through meanwhile",
                        sandbox_id=sandbox_id,
                    ) from error
                raise

    def _put_back(self, sandbox_id: str, before: bytes | None) -> None:
        if before is None:
            del self._tables[sandbox_id]
        else:
            self._tables[sandbox_id] = before

    async def _put(self, sandbox_id: str) -> None:
        while True:
            life = await self._alive()
            with contextlib.suppress(Gone):
                return await self._tell(life, sandbox_id)

    async def _tell(self, life: _Life, sandbox_id: str) -> None:
        if sandbox_id not in life.steered:
            await self._steer(life, sandbox_id)
        table = self._tables.get(sandbox_id)
        if table is not None:
            await life.control.ask("set", sandbox=sandbox_id, table=msgspec.Raw(table))
            life.told.add(sandbox_id)

    async def _steer(self, life: _Life, sandbox_id: str) -> None:
        try:
            await self._client.network_steer(sandbox_id)
        except (LaunchFailed, Unavailable):
            # A runtime that died may have done it before it was asked again, which fails then.
            if sandbox_id not in (await life.control.ask("list")).sandboxes:
                raise
        life.steered.add(sandbox_id)

    async def remove(self, sandbox_id: str) -> None:
        if sandbox_id not in self._tables and (self._life is None or sandbox_id not in self._life.steered):
            return
        async with self._locks[sandbox_id]:
            self._tables.pop(sandbox_id, None)
            await self._let_go(sandbox_id)
        self._locks.pop(sandbox_id, None)

    async def _let_go(self, sandbox_id: str) -> None:
        life = self._life
        if life is None or sandbox_id not in life.steered:
            return
        try:
            await life.control.ask("remove", sandbox=sandbox_id)
        except (Gone, Refused) as error:
            # Gone with the process; or, with the connection alone, let go when it is made again.
            log.debug("%s: %s", sandbox_id, error)
        life.steered.discard(sandbox_id)
        life.told.discard(sandbox_id)

    async def settled(self) -> None:
        self._settled = True
        if self._life is not None:
            await self._strangers(self._life)
        elif self._path.exists():
            self._keep()

    async def counters(self, sandbox_id: str) -> NetworkCounters | None:
        if sandbox_id not in self._tables:
            return None
        try:
            async with asyncio.timeout(PATIENCE_S):
                life = await self._alive()
                found = (await life.control.ask("status", sandbox=sandbox_id)).status or wire.Counters()
        except (Gone, Refused, TimeoutError) as error:
            raise Unavailable(f"the process for sandboxes' connections does not tell: {error}") from error
        return NetworkCounters(
            connections=found.connections,
            sent_bytes=found.sent,
            received_bytes=found.received,
            hits=_summed(found.hits),
            unmatched=found.unmatched,
        )

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._life is not None:
            self._life.control.close()

    # The connection.

    def _keep(self) -> None:
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.get_running_loop().create_task(self._keep_up())

    async def _alive(self) -> _Life:
        """The connection once everybody is told again. Waits without an end."""
        self._keep()
        await self._up.wait()
        assert self._life is not None
        return self._life

    async def _keep_up(self) -> None:
        """Connected for as long as there is anything to be told: to connect may start the node's runtime again."""
        pause = _AGAIN_S
        while True:
            try:
                life = await self._connect()
                pause = _AGAIN_S
                await self._again(life)
                await self._lost.wait()
            except (DsecError, OSError, Refused) as error:
                log.warning("the process for sandboxes' connections: %s", error)
            if self._life is not None:
                self._life.control.close()
                self._life = None
            if not self._tables:
                return  # the next that is put begins again
            await asyncio.sleep(pause)
            pause = min(2 * pause, _AGAIN_MAX_S)

    def _over(self) -> None:
        self._up.clear()
        self._lost.set()

    async def _connect(self) -> _Life:
        await self._client.network_start()
        self._lost.clear()
        control = Control(self._path, self._verdicts, self._over)
        try:
            await control.ask("hello", protocol=wire.PROTOCOL)
            await control.ask("node", resolvers=self._resolvers, own=self._own)
            await control.ask("events")
            life = _Life(control)
            life.steered.update((await control.ask("list")).sandboxes)
        except BaseException:  # also cancelled: it is nobody's
            control.close()
            raise
        self._life = life
        if not control.closed:
            self._up.set()
        return life

    async def _again(self, life: _Life) -> None:
        """Tell all that is known; those that fail, again later. Only a lost connection ends it."""
        left = list(self._tables)
        while left:
            gate = asyncio.Semaphore(_AT_ONCE)
            failed: list[str] = []

            async def one(sandbox_id: str, gate: asyncio.Semaphore = gate, failed: list[str] = failed) -> None:
                async with gate:
                    if not await self._once_more(life, sandbox_id):
                        failed.append(sandbox_id)

            await asyncio.gather(*(one(sandbox_id) for sandbox_id in left))
            left = [sandbox_id for sandbox_id in failed if sandbox_id in self._tables]
            if left:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._lost.wait(), _AGAIN_MAX_S)
                    return
        if self._settled:
            await self._strangers(life)

    async def _once_more(self, life: _Life, sandbox_id: str) -> bool:
        async with self._locks[sandbox_id]:
            if sandbox_id not in self._tables or sandbox_id in life.told:
                return True
            try:
                await self._tell(life, sandbox_id)
            except (NotFound, SandboxLost):
                return True  # its end is told elsewhere
            except (DsecError, Refused) as error:
                log.warning("%s reaches nothing: %s", sandbox_id, error)
                return False
        return True

    async def _strangers(self, life: _Life) -> None:
        for sandbox_id in life.steered - set(self._tables):
            await self._let_go(sandbox_id)

    def _verdicts(self, verdicts: list[wire.Verdict], dropped: dict[str, int]) -> None:
        self._told([_verdict(one) for one in verdicts], dropped)


def _verdict(one: wire.Verdict) -> Verdict:
    return Verdict(
        at=one.at_ns / _NS,
        sandbox=one.sandbox,
        kind=one.kind,
        allow=one.allow,
        rule=one.rule,
        why=one.why,
        name=one.name,
        address=one.address,
        port=one.port,
    )


def _summed(hits: list[tuple[str, int]]) -> dict[str, int]:
    """Several lines of a table belong to one rule."""
    found: dict[str, int] = {}
    for rule, count in hits:
        found[rule] = found.get(rule, 0) + count
    return found
