"""The end of sandboxes: stopped on request, by their limits, or by themselves; and what is kept of them."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from dsec.backends.base import Exit, Runtime
from dsec.model import failpoint
from dsec.model.errors import DsecError, NodeDiskFull, SandboxLost
from dsec.model.states import EndReason, SandboxInfo, State
from dsec.node import box as boxes
from dsec.node.box import Box
from dsec.node.core import Core
from dsec.node.network import NetworkPolicies

log = logging.getLogger("dsec.node.lifecycle")

STOP_RETRY_S: Final = 5.0
CLOSE_S: Final = 5.0
# For the ends of what ran in a sandbox to be recorded. A reader that does not read holds up that of its run.
LAND_S: Final = 1.0
# What has ended, and its steps, are kept for repeated keys and for `list`: this long, and this many at most.
ENDED_KEEP_S: Final = 86_400.0
ENDED_KEEP_MAX: Final = 20_000
_COLLECT_EVERY: Final = 256  # endings between two collections
_COLLECT_BATCH: Final = 2_000
_WATCH_RETRY_S: Final = 1.0


class Lifecycle:
    """Ends sandboxes, each exactly once, whoever asks first."""

    def __init__(self, core: Core, networks: NetworkPolicies) -> None:
        self._core = core
        self._networks = networks
        self._endings = 0
        core.due = self._due

    def settle(self, box: Box) -> None:
        """A sandbox runs: watch for its end and for its limits."""
        box.watcher = asyncio.get_running_loop().create_task(self._watch(box))
        self._core.deadlines.watch(box.id, box.next_deadline())

    async def stop(self, box: Box, by: str, grace_s: float = 0.0) -> SandboxInfo:
        """End a sandbox for good because of a call. Whoever comes second waits for the first."""
        if box.info.state == "creating" and not box.ready.done():
            return await self._abandon(box, by)
        return await asyncio.shield(self._ending(box, "stopped", grace_s, by))

    async def _abandon(self, box: Box, by: str) -> SandboxInfo:
        if box.creator is not None:
            box.creator.cancel()
        error = await asyncio.shield(box.ready)
        if error is None:  # it was ready before the cancellation arrived
            return await asyncio.shield(self._ending(box, "stopped", 0.0, by))
        return boxes.ended(box.info, "stopped", Exit(reason="stopped"), self._core.clock.wall())

    def _ending(self, box: Box, reason: EndReason, grace_s: float, by: str | None = None) -> asyncio.Task[SandboxInfo]:
        if box.stopping is None:
            if box.info.end_reason is None:
                box.change(ended_by=by)
            box.stopping = asyncio.get_running_loop().create_task(self._stop(box, reason, grace_s))
        return box.stopping

    async def _stop(self, box: Box, reason: EndReason, grace_s: float) -> SandboxInfo:
        try:
            box.change(state="stopping", end_reason=box.info.end_reason or reason)
            await self._mark(box)
            failpoint.at("stop.marked")
            if not grace_s:  # what has time to end may need what it reaches
                await self._networks.forget(box)
            if box.runtime is not None:  # None: its creation failed, and so did undoing it
                await box.runtime.stop(grace_s=grace_s)
            failpoint.at("stop.ended")
            return await self.finish(box, "stopped", Exit(reason=box.info.end_reason or reason))
        except (DsecError, failpoint.Injected) as error:
            self._again(box, error)
            raise

    async def _mark(self, box: Box) -> None:
        try:
            await self._core.store.commit(box.row(), durable=False)
        except NodeDiskFull as error:
            # To stop is what makes room. Without the mark an agent that dies now calls it lost instead of stopped.
            log.warning("sandbox %s is stopped without a note of it: %s", box.id, error)

    def _again(self, box: Box, error: Exception) -> None:
        # Not given up: it holds room and processes. The next caller, or the timer, tries again.
        log.warning("sandbox %s could not be stopped, trying again in %g s: %s", box.id, STOP_RETRY_S, error)
        box.stopping = None
        self._core.deadlines.watch(box.id, self._core.clock.boot() + STOP_RETRY_S)

    async def _watch(self, box: Box) -> None:
        assert box.runtime is not None
        exit_ = await self._await_end(box.runtime)
        if box.stopping is None and box.id in self._core.boxes:
            box.stopping = asyncio.get_running_loop().create_task(self._lost(box, box.runtime, exit_))
            box.stopping.add_done_callback(_log_failure)

    async def _await_end(self, runtime: Runtime) -> Exit:
        while True:
            try:
                return await runtime.wait()
            except SandboxLost as error:
                return Exit(reason="lost", detail=error.message)
            except DsecError as error:
                log.warning("waiting for the end of %s: %s", runtime.handle.id, error)
                await asyncio.sleep(_WATCH_RETRY_S)

    async def _lost(self, box: Box, runtime: Runtime, exit_: Exit) -> SandboxInfo:
        try:
            log.warning("sandbox %s ended by itself: %s %s", box.id, exit_.reason, exit_.detail)
            box.change(state="stopping", end_reason=exit_.reason)
            await runtime.stop()
            failpoint.at("lost.released")
            return await self.finish(box, "stopped" if exit_.reason == "stopped" else "lost", exit_)
        except (DsecError, failpoint.Injected) as error:
            self._again(box, error)
            raise

    async def close(self) -> None:
        """Let endings that are under way come to theirs; those that do not are gone on with at the next start."""
        ending = [box.stopping for box in self._core.boxes.values() if box.stopping is not None]
        if ending:
            await asyncio.wait(ending, timeout=CLOSE_S)

    async def finish(self, box: Box, state: State, exit_: Exit) -> SandboxInfo:
        """It has ended and everything is released: say so on the disk, then to everybody."""
        await self._networks.forget(box)
        await self._landed(box)
        box.end(boxes.ended(box.info, state, exit_, self._core.clock.wall()), self._core.clock.boot())
        # A creation that was never answered frees its key.
        freed = "DELETE FROM steps WHERE scope = '' AND subject = ? AND state = 0"
        undone = [(freed, (box.id,))] if exit_.reason == "create_failed" else []
        try:
            await self._core.store.commit(box.row(), *undone)
        except NodeDiskFull as error:
            # It is released, and nobody is told otherwise.
            log.warning("the end of sandbox %s is written once there is room: %s", box.id, error)
            self._core.owed.add_end(box.info, box.row(), *undone)
        failpoint.at("stop.recorded")
        self._core.remove(box)
        if box.watcher is not None:
            box.watcher.cancel()
        self._endings += 1
        if self._endings % _COLLECT_EVERY == 0:
            self.collect()
        return box.info

    async def _landed(self, box: Box) -> None:
        """What ran in it ended before it did, and is recorded before it: nothing happens to a sandbox after its end."""
        ending = [flight.done for flight in box.flights.values()]
        if ending:
            await asyncio.wait(ending, timeout=LAND_S)

    def _due(self, box: Box, now: float) -> float | None:
        if box.info.state == "stopping":
            if box.stopping is None:
                self._begin_ending(box, box.info.end_reason or "stopped")
            return None
        if box.info.state != "running" or box.stopping is not None:
            return None
        idle = box.idle_deadline()
        if box.expires_boot is not None and box.expires_boot <= now:
            self._begin_ending(box, "lifetime")
        elif idle is not None and idle <= now:
            self._begin_ending(box, "idle")
        else:
            return box.next_deadline()
        return None

    def _begin_ending(self, box: Box, reason: EndReason) -> None:
        # The state changes before anything is awaited: a call that comes now is refused, never cut off half-way.
        log.info("sandbox %s ends: %s", box.id, reason)
        box.change(state="stopping", end_reason=reason)
        self._ending(box, reason, 0.0).add_done_callback(_log_failure)

    def collect(self) -> None:
        """Forget what ended long ago, or is beyond the number that is kept, with its steps and files."""
        core = self._core
        before = core.clock.wall() - ENDED_KEEP_S
        # By both clocks: one of them may have been set, the other one begins anew with the machine.
        sql = (
            "SELECT id FROM sandboxes WHERE ended_at IS NOT NULL AND (ended_at < ? AND coalesce(idle_boot < ?, 1) "
            "OR id IN (SELECT id FROM sandboxes WHERE ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT -1 OFFSET ?)) "
            "LIMIT ?"
        )
        bounds = (before, core.clock.boot() - ENDED_KEEP_S, ENDED_KEEP_MAX, _COLLECT_BATCH)
        gone = [row[0] for row in core.store.read(sql, bounds)]
        statements = [
            statement
            for id_ in gone
            for statement in (
                ("DELETE FROM steps WHERE scope = ?", (id_,)),
                ("DELETE FROM sandboxes WHERE id = ?", (id_,)),
            )
        ]
        old = "DELETE FROM steps WHERE scope = '' AND ended_at < ? AND subject NOT IN (SELECT id FROM sandboxes)"
        core.store.commit(
            *statements, (old, (before,)), durable=False, gone=[core.store.spool / id_ for id_ in gone]
        ).add_done_callback(_log_failure)


def _log_failure(future: asyncio.Future[SandboxInfo] | asyncio.Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("%s", error)
