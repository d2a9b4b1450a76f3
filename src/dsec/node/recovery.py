"""Putting together again, when the agent starts, what the disk says and what is there.

Afterwards every sandbox that lives has a row and every row that says alive has a sandbox. Nothing that lives and has
a complete row is dropped; nothing half-made stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final, cast, get_args

from dsec.backends.base import Exit, Handle
from dsec.model import failpoint
from dsec.model.errors import DsecError, SandboxLost, Unavailable
from dsec.model.limits import PROGRAMS_KEPT
from dsec.model.states import EndReason, SandboxInfo
from dsec.node import box as boxes
from dsec.node.admission import Need
from dsec.node.box import SELECT, Box, Row, read_row
from dsec.node.core import NODE_SCOPE, Core
from dsec.node.lifecycle import Lifecycle
from dsec.node.network import NetworkPolicies
from dsec.node.plan import spool_mib
from dsec.node.runs import how_of
from dsec.node.steps import Step
from dsec.node.store import Statement

log = logging.getLogger("dsec.node.recovery")

_AT_ONCE: Final = 32


class Recovery:
    """One start of a node."""

    def __init__(
        self,
        core: Core,
        lifecycle: Lifecycle,
        networks: NetworkPolicies,
        resume_command: Callable[[Box, Step], object],
    ) -> None:
        self._core = core
        self._networks = networks
        self._resume_command = resume_command
        self._lifecycle = lifecycle

    async def run(self) -> None:
        """Raises Unavailable when a backend that has sandboxes here cannot be asked."""
        core = self._core
        rows = [read_row(columns) for columns in core.store.read(f"{SELECT} WHERE ended_at IS NULL")]
        rebooted = await self._note_boot()
        self._check_backends(rows)
        there = {handle.id: handle for backend in core.backends.values() for handle in await backend.survey()}
        await _bounded(self._row(row, there.pop(row.info.id, None), rebooted) for row in rows)
        await _bounded(self._end_orphan(handle) for handle in there.values())
        await self._steps()
        self._sweep_spool()
        self._lifecycle.collect()
        log.info("recovered: %d sandboxes live, %d orphans ended", len(core.boxes), len(there))

    async def _note_boot(self) -> bool:
        """Whether the machine has booted since; from now on this boot counts."""
        core = self._core
        known = core.store.read("SELECT value FROM meta WHERE key = 'boot_id'")
        now = core.clock.boot_id()
        if known and known[0][0] == now:
            return False
        rows = core.store.read("SELECT id FROM sandboxes WHERE ended_at IS NULL")
        if known and rows:
            log.warning("the machine has booted since: %d sandboxes are lost", len(rows))
        await core.store.commit(
            ("INSERT OR REPLACE INTO meta VALUES ('boot_id', ?)", (now,)),
            # Times of another boot say nothing in this one.
            ("UPDATE sandboxes SET idle_boot = NULL WHERE ended_at IS NOT NULL", ()),
        )
        return bool(known)

    def _check_backends(self, rows: Iterable[Row]) -> None:
        missing = {row.info.backend for row in rows} - set(self._core.backends)
        if missing:
            raise Unavailable(
                f"sandboxes of backend {', '.join(sorted(missing))} may live here, and this node was started without "
                "it: start it with that backend"
            )

    async def _row(self, row: Row, handle: Handle | None, rebooted: bool) -> None:
        info = row.info
        if info.state == "creating":
            await self._undo(row, handle)
        elif rebooted:
            if handle is not None:
                await self._end_orphan(handle)
            await self._gone(row, "reboot")
        elif (known := handle or row.handle) is None:
            await self._gone(row, "lost")
        else:
            # Also one that is not listed: it ended while the agent was away, and the backend still knows how.
            await self._attach(row, known)

    async def _undo(self, row: Row, handle: Handle | None) -> None:
        """Half-made: nobody was told of it, so nothing of it stays, and its key is free."""
        if handle is not None:
            await self._end_orphan(handle)
        await self._core.store.commit(
            ("DELETE FROM sandboxes WHERE id = ?", (row.info.id,)),
            ("DELETE FROM steps WHERE scope = '' AND subject = ? AND state = 0", (row.info.id,)),
            durable=False,
        )

    async def _gone(self, row: Row, reason: EndReason) -> None:
        """A row without a sandbox. One that was being stopped is stopped."""
        was_stopping = row.info.state == "stopping" and row.info.end_reason is not None
        exit_ = Exit(reason=row.info.end_reason if was_stopping and row.info.end_reason else reason)
        ours = was_stopping and exit_.reason in ("stopped", "idle", "lifetime")
        box = Box(row.info, row.base)
        clock = self._core.clock
        box.end(boxes.ended(row.info, "stopped" if ours else "lost", exit_, clock.wall()), clock.boot())
        # What went with a sandbox that nobody stopped may have ended before, nobody knows how.
        await self._core.store.commit(box.row(), *(self._ends(box.info) if ours else ()))

    def _ends(self, info: SandboxInfo) -> Iterator[Statement]:
        """Of all that was begun in a sandbox that is being stopped, or was: nobody waits for it any more."""
        for step in self._core.steps.open(info.id):
            yield self._core.steps.end(info.id, step.key, boxes.lost(info), step.subject, spooled=False)[0]

    async def _attach(self, row: Row, handle: Handle) -> None:
        core = self._core
        try:
            runtime = await core.backend(handle.backend).attach(handle)
        except SandboxLost as error:
            known = error.detail.get("reason")
            # A stop of ours has its mark in the row: this one was another's, who had no row of it.
            foreign = known == "stopped" or known not in get_args(EndReason)
            await self._gone(row, "lost" if foreign else cast(EndReason, known))
            return
        box = Box(row.info, row.base)
        box.adopt(runtime)
        box.expires_boot = row.expires_boot
        number, last_boot = core.steps.last(box.id)
        box.next_step = number + 1
        self._keep(box)
        box.idle_boot = max(row.idle_boot or 0.0, last_boot or 0.0)
        box.ready.set_result(None)
        core.add(box)
        core.admission.restore(box.id, Need.of(row.info.spec))
        failpoint.at("recover.attached")
        if row.info.state == "stopping":
            await core.store.commit(*self._ends(row.info))
            core.deadlines.watch(box.id, core.clock.boot())
        else:
            await self._connect(box)
            self._lifecycle.settle(box)

    async def _connect(self, box: Box) -> None:
        """It reaches what it may; if it cannot be told, what it could before, or nothing."""
        try:
            await self._networks.put(box)
        except DsecError as error:
            log.error("%s: its policy: %s", box.id, error)

    def _keep(self, box: Box) -> None:
        """The newest programs that were talked to keep their output; some before them may not have been let go."""
        programs = self._core.steps.kept(box.id, 2 * PROGRAMS_KEPT)
        for step in programs[:-PROGRAMS_KEPT]:
            if box.guest is not None:
                box.guest.discard(step.subject)
        for step in programs[-PROGRAMS_KEPT:]:
            box.kept.append(step.subject)
            self._core.admission.restore_spool(step.subject, spool_mib(how_of(step)))

    async def _end_orphan(self, handle: Handle) -> None:
        log.warning("sandbox %s has no row: ending it", handle.id)
        try:
            runtime = await self._core.backend(handle.backend).attach(handle)
        except SandboxLost:
            return
        await runtime.stop()

    def _sweep_spool(self) -> None:
        """Files of answers whose rows were never written, or are gone."""
        spool = self._core.store.spool
        known = {row[0] for row in self._core.store.read("SELECT spool FROM steps WHERE spool IS NOT NULL")}
        for path in spool.rglob("*"):
            if path.is_file() and str(path.relative_to(spool)) not in known:
                path.unlink(missing_ok=True)

    async def _steps(self) -> None:
        """Every step that was begun: its run is waited for, or it will be said that its end is not known."""
        core = self._core
        creations = [step for step in core.steps.open(NODE_SCOPE) if step.kind == "create"]
        drop: list[Statement] = [core.steps.drop(step.scope, step.key) for step in creations]
        for box in list(core.boxes.values()):
            if box.info.state == "running":
                for step in core.steps.open(box.id):
                    if step.kind in ("run", "spawn", "session"):
                        core.runs.resume(box, step)
                    elif step.kind == "command" and step.extra is not None:
                        self._resume_command(box, step)
        if drop:
            await core.store.commit(*drop, durable=False)


async def _bounded(work: Iterable[Awaitable[None]]) -> None:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(item: Awaitable[None]) -> None:
        async with gate:
            await item

    await asyncio.gather(*(one(item) for item in work))
