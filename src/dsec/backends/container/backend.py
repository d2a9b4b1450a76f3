"""The container backend: plans in, sandboxes out. All work is the native runtime's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from dsec.backends.base import Exit, Guest, Handle, LayerMount, StartPlan
from dsec.backends.container import plans
from dsec.backends.container.endings import Endings, known
from dsec.backends.container.guest import ContainerGuest, lost
from dsec.backends.container.network import ContainerNetworks
from dsec.model import failpoint
from dsec.model.errors import Conflict, DeadlineExceeded, DsecError, NotFound, SandboxLost, Unavailable
from dsec.model.states import Capabilities, Usage
from dsec.wire import values as v
from dsec.wire.runtime import RuntimeClient

log = logging.getLogger(__name__)


class ContainerRuntime:
    """One container."""

    def __init__(self, client: RuntimeClient, handle: Handle, ended: asyncio.Future[Exit], endings: Endings) -> None:
        self._client = client
        self._handle = handle
        self._ended = ended
        self._endings = endings
        self._guest = ContainerGuest(client, handle, ended)
        self._stopped: Exit | None = None

    @property
    def handle(self) -> Handle:
        return self._handle

    def guest(self) -> Guest:
        return self._guest

    async def wait(self) -> Exit:
        if self._stopped is not None:
            return self._stopped
        return await asyncio.shield(self._ended)

    async def stop(self, *, grace_s: float = 0.0) -> Exit:
        # Also when it has ended by itself: stopping is what releases all it had.
        if self._stopped is None:
            try:
                self._stopped = plans.ending(await self._client.stop(self._handle.id, grace_s))
            except (NotFound, SandboxLost):
                self._stopped = known(self._ended) or Exit(reason="lost")
            self._endings.ended(self._handle.id, self._stopped)
        return self._stopped

    async def usage(self) -> Usage:
        return plans.usage(await self._used())

    async def oom_kills(self) -> int:
        return (await self._used()).oom_kills

    async def _used(self) -> v.SandboxUsage:
        if (exit_ := known(self._ended)) is not None:
            raise lost(self._handle.id, exit_)
        try:
            return await self._client.usage(self._handle.id)
        except NotFound as error:
            raise SandboxLost(error.message, sandbox_id=self._handle.id) from error


class ContainerBackend:
    """Containers through the runtime that listens in `run_dir`.

    `revive` is awaited when nobody listens there; `ensure_runtime` is what it usually does.
    """

    name = "container"

    def __init__(self, run_dir: Path, *, revive: Callable[[], Awaitable[None]] | None = None) -> None:
        self.client = RuntimeClient(run_dir / "runtime.sock", revive=revive)
        self.networks = ContainerNetworks(self.client, run_dir / "net.sock")
        self._endings = Endings(self.client)
        # Digests known to be mounted, of the keeper with this instance: asking again for each start costs a round trip.
        self._mounted: set[str] = set()
        self._mounted_for = ""
        # The kinds of writable parts that work on this node, best first.
        self._uppers: tuple[str, ...] | None = None
        self._undoing: set[asyncio.Task[None]] = set()

    async def probe(self) -> Capabilities:
        try:
            return plans.capabilities(self.name, await self._probed())
        except DsecError as error:
            return Capabilities(backend=self.name, available=False, reason=error.message)

    async def _probed(self) -> v.Probe:
        found = await self.client.probe()
        self._uppers = found.upper
        return found

    async def start(self, plan: StartPlan) -> ContainerRuntime:
        await self._mount(plan.layers)
        failpoint.at("container.start.mounted")
        ended = await self._endings.watch(plan.id)
        creating = asyncio.ensure_future(self._create(plan))
        try:
            status = await asyncio.shield(creating)
            failpoint.at("container.start.created")
        except Conflict:
            raise  # another one has this id, and whoever holds it waits for its end
        except BaseException as error:  # also cancelled: nothing of the start stays, and it goes on
            self._endings.unwatch(plan.id)
            if _may_exist(error):
                await self._undo(plan.id, creating)
            raise
        return ContainerRuntime(self.client, plans.handle(self.name, status), ended, self._endings)

    async def attach(self, handle: Handle) -> ContainerRuntime:
        ended = await self._endings.watch(handle.id)
        try:
            status = await self.client.get(handle.id)
        except NotFound:
            raise self._gone(handle.id, Exit(reason="lost", detail="the runtime does not know it")) from None
        if status.state == "ended":
            raise self._gone(handle.id, plans.ending(status))
        if status.started_ns != handle.data.get("started_ns", status.started_ns):
            raise self._gone(handle.id, Exit(reason="lost", detail="another one has its id"))
        return ContainerRuntime(self.client, plans.handle(self.name, status), ended, self._endings)

    async def survey(self) -> list[Handle]:
        found = await self.client.sandboxes()
        return [plans.handle(self.name, status) for status in found if status.state == "running"]

    async def close(self) -> None:
        if self._undoing:
            await asyncio.wait(self._undoing)
        self._endings.close()
        await self.networks.close()
        await self.client.close()

    async def mounted_layers(self) -> list[LayerMount]:
        """The layers that are mounted on this node."""
        return [LayerMount(digest=layer.digest, path=layer.path) for layer in await self.client.layers()]

    async def unmount_layer(self, digest: str) -> None:
        """Let a layer go, so that its file can be removed; idempotent. Conflict: a sandbox uses it."""
        self._mounted.discard(digest)
        try:
            await self.client.layer_unmount(digest)
        except NotFound:
            return

    async def _mount(self, layers: tuple[LayerMount, ...]) -> None:
        hello = self.client.hello or await self.client.connect()
        if hello.instance != self._mounted_for:
            self._mounted_for = hello.instance
            self._mounted.clear()
        missing = [layer for layer in layers if layer.digest not in self._mounted]
        if missing:
            await asyncio.gather(*(self.client.layer_mount(layer.digest, layer.path) for layer in missing))
            self._mounted.update(layer.digest for layer in missing)

    async def _create(self, plan: StartPlan) -> v.SandboxStatus:
        uppers = self._uppers
        if uppers is None:
            uppers = (await self._probed()).upper
        wanted = plans.sandbox_plan(plan, uppers[0] if uppers else None)
        try:
            return await self.client.create(wanted)
        except NotFound:
            # A layer was unmounted behind our back: by another agent, or with the pinned namespace.
            self._mounted.clear()
            await self._mount(plan.layers)
            return await self.client.create(wanted)

    async def _undo(self, sandbox_id: str, creating: asyncio.Future[v.SandboxStatus]) -> None:
        """See to it that nothing of a start stays; goes on though whoever started it is cancelled again."""
        task = asyncio.get_running_loop().create_task(self._remove(sandbox_id, creating))
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)
        await asyncio.shield(task)

    async def _remove(self, sandbox_id: str, creating: asyncio.Future[v.SandboxStatus]) -> None:
        try:
            await creating
        except DsecError as error:
            if not _may_exist(error):
                return
        try:
            await self.client.stop(sandbox_id)
        except NotFound:
            return
        except DsecError as error:
            # Not raised: whoever was cancelled must hear that, and a survey finds what lives without an owner.
            log.warning("%s: what its start had made could not be removed: %s", sandbox_id, error)

    def _gone(self, sandbox_id: str, exit_: Exit) -> SandboxLost:
        self._endings.ended(sandbox_id, exit_)
        return lost(sandbox_id, exit_)


def _may_exist(error: BaseException) -> bool:
    """Whether a sandbox may have been made though the call failed. What the runtime refused it has undone itself."""
    if not isinstance(error, DsecError):
        return True  # cancelled, or a fault of ours
    return type(error) in (Unavailable, DeadlineExceeded)
