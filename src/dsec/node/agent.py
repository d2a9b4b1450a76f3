"""The node agent: everything a node does, without HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

import msgspec

import dsec.node.box as boxes
from dsec.backends.base import Backend, Sink
from dsec.model import ids, limits
from dsec.model.errors import Conflict, DsecError, InvalidSpec, InvalidState, NotFound, SandboxLost, Unknown
from dsec.model.network import Network, NetworkReport, policy_of
from dsec.model.specs import RunSpec, Spec, check_labels
from dsec.model.states import ALIVE, Capabilities, LayerInfo, NodeInfo, SandboxInfo, Usage
from dsec.node.admission import Admission, Gauge, Room
from dsec.node.box import SELECT, Box, read_row
from dsec.node.clock import Clock
from dsec.node.core import NODE_SCOPE, Core, check_key, check_seconds, decode_info, encode
from dsec.node.creation import Created, Creation
from dsec.node.events import Events
from dsec.node.files import FileCalls
from dsec.node.layers import ImportRequest, Layers
from dsec.node.lifecycle import Lifecycle
from dsec.node.network import NetworkConfig, NetworkPolicies
from dsec.node.plan import TALKED_TO
from dsec.node.ports import Ports
from dsec.node.programs import Programs
from dsec.node.recovery import Recovery
from dsec.node.runs import Flight
from dsec.node.sessions import Command, Sessions
from dsec.node.steps import BEGUN, Answer, content_hash
from dsec.node.store import Statement, Store

log = logging.getLogger("dsec.node")

VERSION: Final = "0.1.0"
SIGNAL_MAX: Final = 64
_KILL_SEEN_S: Final = 5.0  # less than callers give to a kill
_LIST_CHUNK: Final = 512
_STOPS_AT_ONCE: Final = 64
_HOLDERS_SHOWN: Final = 5


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Some sandboxes, and where to go on."""

    items: list[SandboxInfo]
    next_cursor: str | None = None


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Which sandboxes to list. No states: those alive; `any`: all."""

    labels: Mapping[str, str] = {}
    job: str | None = None
    states: Collection[str] = ()
    limit: int = limits.LIST_PAGE_DEFAULT
    cursor: str = ""

    def matches(self, info: SandboxInfo) -> bool:
        """Whether a sandbox is asked for."""
        wanted = self.states or ALIVE
        return (
            ("any" in wanted or info.state in wanted)
            and (self.job is None or info.job == self.job)
            and all(info.labels.get(key) == value for key, value in self.labels.items())
        )


@runtime_checkable
class MountsLayers(Protocol):
    """A backend that keeps layers mounted after their last sandbox."""

    async def unmount_layer(self, digest: str) -> None:
        """Nothing to do when it is not mounted, or used."""
        ...


class Node:
    """One node over its backends. Call `start` first; `close` lets go and leaves the sandboxes alive."""

    def __init__(
        self,
        *,
        name: str,
        backends: Mapping[str, Backend],
        layers: Layers,
        store: Store,
        room: Room,
        gauge: Gauge,
        clock: Clock,
        network: NetworkConfig | None = None,
    ) -> None:
        admission = Admission(room, gauge, clock)
        self.core = Core(node=name, backends=backends, layers=layers, store=store, admission=admission, clock=clock)
        self.networks = NetworkPolicies(self.core, network or NetworkConfig())
        self._lifecycle = Lifecycle(self.core, self.networks)
        self._creation = Creation(self.core, self._lifecycle, self.networks)
        self.files = FileCalls(self.core, self._ready)
        self.programs = Programs(self.core, self._ready)
        self.sessions = Sessions(self.core, self._ready, self.programs, self.files)
        self.events = Events(self.core)
        self.ports = Ports(self.core, self._ready, self.networks.may_expose)
        self.core.gone = self.ports.ended
        self._started_at = clock.wall()

    async def start(self) -> None:
        """Find again what lives here."""
        await self.networks.start()
        await Recovery(self.core, self._lifecycle, self.networks, self.sessions.resume).run()
        await self.networks.settled()
        if self.core.boxes:
            await self.core.store.commit(*self.events.restarted(self.core.boxes), durable=False)
            await self.ports.start()

    async def close(self) -> None:
        """Let go of everything; sandboxes and their runs go on."""
        self.ports.close()
        self.core.deadlines.close()
        await self._creation.close()
        await self._lifecycle.close()
        tasks = [flight.task for box in self.core.boxes.values() for flight in box.flights.values() if flight.task]
        tasks += [box.watcher for box in self.core.boxes.values() if box.watcher]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for box in self.core.boxes.values():
            box.helpers.close()
        self.networks.close()
        self.core.store.close()
        for backend in self.core.backends.values():
            await backend.close()

    # -- the node -----------------------------------------------------------------------------------------------------

    async def capabilities(self) -> dict[str, Capabilities]:
        """What each backend can do here."""
        return {name: await backend.probe() for name, backend in self.core.backends.items()}

    async def info(self) -> NodeInfo:
        """The node, its room and what it can do."""
        core = self.core
        return NodeInfo(
            node=core.node,
            version=VERSION,
            started_at=self._started_at,
            sandboxes=len(core.boxes),
            capabilities=await self.capabilities(),
            capacity={**core.admission.snapshot(), "waiting": core.admission.waiting},
        )

    # -- sandboxes ----------------------------------------------------------------------------------------------------

    async def create(self, spec: Spec, key: str | None = None) -> Created:
        """A running sandbox."""
        return await self._creation.create(spec.check(), check_key(key))

    def create_many(
        self, specs: Sequence[Spec], key: str | None = None, *, atomic: bool = False
    ) -> AsyncIterator[tuple[int, Answer]]:
        """Many; (index, encoded info or error) as they get ready."""
        return self._creation.create_many([spec.check() for spec in specs], check_key(key), atomic=atomic)

    def cancel_many(self, key: str) -> None:
        """Make no more of a batch. Raises NotFound when none goes on under the key."""
        self._creation.cancel_many(ids.check_key(key))

    async def get(self, ref: str) -> SandboxInfo:
        """One sandbox, alive or ended."""
        box = self.core.alive(ref)
        return self.core.past(ref) if box is None else self.core.shown(box)

    async def _ready(self, ref: str) -> Box:
        """A sandbox that is alive, once its creation is over. Raises NotFound or SandboxLost."""
        box = self.core.alive(ref)
        if box is not None and not box.ready.done():
            await asyncio.shield(box.ready)
            box = self.core.alive(ref)
        if box is None:
            raise boxes.not_running(self.core.past(ref))
        return box

    async def stop(self, ref: str, key: str | None = None, *, grace_s: float = 0.0, caller: str = "") -> SandboxInfo:
        """End a sandbox for good; idempotent. Under a key a name means the sandbox it meant the first time."""
        check_seconds("grace_s", grace_s, 0, limits.GRACE_MAX_S)
        if key is None or ids.is_sandbox_id(ref):
            return await self._stop(
                ref, grace_s, caller
            )  # an id never means another sandbox: stopping again is harmless

        async def work() -> tuple[bytes, list[Statement]]:
            return encode(await self._stop(ref, grace_s, caller)), []

        digest = content_hash("stop", [ref, grace_s])
        return decode_info(await self.core.once(NODE_SCOPE, key, digest, "stop", work, done=True))

    async def _stop(self, ref: str, grace_s: float, caller: str) -> SandboxInfo:
        box = self.core.alive(ref)
        if box is None:
            return self.core.past(ref)
        return await self._lifecycle.stop(box, _by("stop", caller), grace_s)

    async def stop_job(self, job: str, caller: str = "") -> int:
        """End all sandboxes of a job; how many there were."""
        ids.check_name(job, "job")
        mine = iter([box for box in self.core.boxes.values() if box.info.job == job])
        stopped = 0

        async def worker() -> None:
            nonlocal stopped
            for box in mine:
                await self._lifecycle.stop(box, _by("job stop", caller))
                stopped += 1

        await asyncio.gather(*(worker() for _ in range(_STOPS_AT_ONCE)))
        return stopped

    async def find(self, query: Query) -> Page:
        """Sandboxes in the order of their ids."""
        if not 1 <= query.limit <= limits.LIST_PAGE_MAX:
            raise InvalidSpec.field("limit", query.limit, f"1 to {limits.LIST_PAGE_MAX}")
        unknown = set(query.states) - {*ALIVE, "stopped", "lost", "any"}
        if unknown:
            raise InvalidSpec.field("state", sorted(unknown)[0], f"{', '.join(ALIVE)}, stopped, lost, any")
        found = [box.info for id_, box in self.core.boxes.items() if id_ > query.cursor and query.matches(box.info)]
        if {"stopped", "lost", "any"} & set(query.states):
            found.extend(self._ended(query))
        found.sort(key=lambda info: info.id)
        more = len(found) > query.limit
        items = [
            self.core.shown(box) if (box := self.core.boxes.get(info.id)) else info for info in found[: query.limit]
        ]
        return Page(items=items, next_cursor=items[-1].id if more else None)

    def _ended(self, query: Query) -> list[SandboxInfo]:
        found: list[SandboxInfo] = []
        cursor = query.cursor
        while len(found) <= query.limit:
            sql = f"{SELECT} WHERE ended_at IS NOT NULL AND id > ? ORDER BY id LIMIT {_LIST_CHUNK}"
            rows = [read_row(columns).info for columns in self.core.store.read(sql, (cursor,))]
            if not rows:
                break
            cursor = rows[-1].id
            found.extend(info for info in rows if info.id not in self.core.boxes and query.matches(info))
        owed = self.core.owed.infos.items()
        found.extend(info for id_, info in owed if id_ > query.cursor and query.matches(info))
        return found

    async def extend(self, ref: str, seconds: float, key: str | None = None) -> SandboxInfo:
        """Move the end of the lifetime by `seconds`. Nothing to move without a lifetime."""
        check_seconds("seconds", seconds, 0, limits.LIFETIME_MAX_S)
        box = await self._ready(ref)

        async def work() -> tuple[bytes, list[Statement]]:
            box.running_guest()
            if box.expires_boot is not None:
                latest = self.core.clock.boot() + limits.LIFETIME_MAX_S
                if box.expires_boot + seconds > latest:
                    left = max(latest - box.expires_boot, 0.0)
                    raise InvalidSpec.field("seconds", seconds, f"at most {left:.0f} now: a life of 30 days ahead")
                box.expires_boot += seconds
            return self._touched(box)

        digest = content_hash("extend", seconds)
        return decode_info(await self.core.once(box.id, check_key(key), digest, "extend", work, changes=box))

    async def set_labels(self, ref: str, labels: dict[str, str], key: str | None = None) -> SandboxInfo:
        """Replace all labels."""
        check_labels(labels)
        box = await self._ready(ref)

        async def work() -> tuple[bytes, list[Statement]]:
            box.running_guest()
            box.change(labels=dict(labels))
            return self._touched(box)

        digest = content_hash("labels", labels)
        return decode_info(await self.core.once(box.id, check_key(key), digest, "labels", work, changes=box))

    async def set_network(self, ref: str, network: Network, key: str | None = None) -> SandboxInfo:
        """Replace what it may reach. When it returns no connection is left that is not allowed any more."""
        policy_of(network)
        box = await self._ready(ref)
        await self.networks.check(network, box.info.backend)
        return await self._network(
            box, key, content_hash("network", network), lambda: self.networks.replace(box, network)
        )

    async def patch_network(self, ref: str, changes: Network, key: str | None = None) -> SandboxInfo:
        """Lay a patch over what it may reach (`dsec.policy.merge`); what stays allowed is not disturbed."""
        policy_of(changes, patch=True)
        box = await self._ready(ref)
        digest = content_hash("network", ["patch", changes])
        return await self._network(box, key, digest, lambda: self.networks.patch(box, changes))

    async def _network(
        self, box: Box, key: str | None, digest: bytes, change: Callable[[], Awaitable[None]]
    ) -> SandboxInfo:
        changed = False

        async def work() -> tuple[bytes, list[Statement]]:
            nonlocal changed
            box.running_guest()
            await change()
            changed = True
            return self._touched(box)

        try:
            answer = await self.core.once(box.id, check_key(key), digest, "network", work, changes=box)
        except DsecError:
            if changed:
                await self.networks.put_back(box)
            raise
        await self.ports.close_denied(box)
        return decode_info(answer)

    async def network(self, ref: str) -> NetworkReport:
        """What it may reach, rule by rule, and what came of it."""
        box = await self._ready(ref)
        box.running_guest()
        return await self.networks.report(box)

    def _touched(self, box: Box) -> tuple[bytes, list[Statement]]:
        self.core.became_idle(box)
        return encode(self.core.shown(box)), [box.row()]

    async def usage(self, ref: str) -> Usage:
        """What a sandbox uses now."""
        box = await self._ready(ref)
        box.running_guest()
        assert box.runtime is not None
        try:
            return await box.runtime.usage()
        except SandboxLost as error:
            raise box.end_told(error) from error

    # -- programs -----------------------------------------------------------------------------------------------------

    async def run(self, ref: str, spec: RunSpec, key: str | None = None, sink: Sink | None = None) -> Flight | Answer:
        """Begin a run, join the one under the key, or give its recorded answer (msgpack of a RunResult)."""
        spec.check()
        key = check_key(key)
        digest = content_hash("run", spec)
        box = self.core.alive(ref)
        if box is None or not box.ready.done():
            try:
                box = await self._ready(ref)
            except SandboxLost:
                return self._past_run(ref, key, digest)
        return self.core.runs.start(box, spec, key, digest, sink)

    def _past_run(self, ref: str, key: str, digest: bytes) -> Answer:
        """What a run of an ended sandbox came to. Raises SandboxLost when there was none."""
        info = self.core.past(ref)
        found = self.core.steps.find(info.id, key, digest, "run")
        if found is None:
            raise boxes.not_running(info)
        if found.state == BEGUN:
            raise Unknown(
                f"process {found.subject} was running when sandbox {info.id} ended; how it ended is not known",
                sandbox_id=info.id,
            )
        return self.core.steps.answer(found)

    async def kill(self, ref: str, process_id: str, signal: int | None = None, key: str | None = None) -> None:
        """Send a signal to a program, or end its whole tree: then it is listed no more when this returns.

        When it has ended a signal does nothing; what it has left behind is killed all the same.
        """
        if signal is not None and not 1 <= signal <= SIGNAL_MAX:
            raise InvalidSpec.field("signal", signal, f"1 to {SIGNAL_MAX}, or none for the whole tree")
        box = await self._ready(ref)
        guest = box.running_guest()
        flight = next((flight for flight in box.flights.values() if flight.process_id == process_id), None)
        if flight is None:
            step = self.core.steps.by_subject(box.id, process_id)
            if step is None:
                raise NotFound(f"sandbox {box.id} has no program {process_id!r}", sandbox_id=box.id)
            if signal is None and step.kind in TALKED_TO:  # what a run leaves behind is its sandbox's
                await self.programs.kill_left(box, process_id)
            return

        async def work() -> tuple[bytes, list[Statement]]:
            if isinstance(flight, Command):
                if signal is not None:
                    raise InvalidState(f"{process_id} is a command of a session: it can be killed, not signalled")
                flight.end_early("killed")
                # Before it is answered: an answer that is kept tells of what is done.
                await asyncio.wait((flight.done,), timeout=_KILL_SEEN_S)
                return encode({}), []
            try:
                await guest.kill(process_id, signal)
            except NotFound:
                log.debug("process %s ended before the signal", process_id)
            except SandboxLost as error:
                raise box.end_told(error) from error
            return encode({}), []

        digest = content_hash("kill", [process_id, signal])
        await self.core.once(box.id, check_key(key), digest, "kill", work, subject=process_id, begin=True, done=True)
        if signal is None:
            # One that waits for a bad disk ends later.
            await asyncio.wait((flight.done,), timeout=_KILL_SEEN_S)

    def attach(self, ref: str, process_id: str, sink: Sink, offsets: tuple[int, int]) -> asyncio.Task[object] | None:
        """Read along with a run in flight; ends when it does."""
        box = self.core.alive(ref)
        if box is None or box.guest is None:
            return None
        found = next((flight for flight in box.flights.values() if flight.process_id == process_id), None)
        if isinstance(found, Command):
            return self.sessions.follow(box, found, sink, offsets)
        return asyncio.ensure_future(box.guest.attach(process_id, sink=sink, offsets=offsets))

    # -- layers -------------------------------------------------------------------------------------------------------

    def layers_in_use(self) -> dict[str, int]:
        """How many sandboxes stand on each layer."""
        counts: dict[str, int] = {}
        for box in self.core.boxes.values():
            for layer in box.info.layers:
                counts[layer.digest] = counts.get(layer.digest, 0) + 1
        return counts

    async def layers(self) -> list[LayerInfo]:
        """All layers of this node."""
        counts = self.layers_in_use()
        found = await asyncio.to_thread(self.core.layers.list)
        return [msgspec.structs.replace(layer, in_use=counts.get(layer.digest, 0)) for layer in found]

    async def layer(self, ref: str) -> LayerInfo:
        """One layer. Raises NotFound."""
        found = self.core.layers.resolve(ids.check_layer_ref(ref, "layer"))
        return msgspec.structs.replace(found, in_use=self.layers_in_use().get(found.digest, 0))

    async def remove_layer(self, ref: str, key: str | None = None) -> None:
        """Raises NotFound; Conflict while a sandbox uses it."""
        ids.check_layer_ref(ref, "layer")

        async def work() -> tuple[bytes, list[Statement]]:
            # On the loop, not in a thread: no sandbox can begin to use the layer between the check and the removal.
            digest = self.core.layers.resolve(ref).digest
            try:
                self.core.layers.remove(ref, set(self.layers_in_use()))
            except Conflict as error:
                raise self._held(error, digest) from error
            await self._unmount(digest)
            return encode({}), []

        digest = content_hash("layer.remove", ref)
        await self.core.once(NODE_SCOPE, check_key(key), digest, "layer.remove", work, done=True)

    def _held(self, error: Conflict, digest: str) -> Conflict:
        boxes_ = self.core.boxes.values()
        holders = sorted(box.id for box in boxes_ if any(layer.digest == digest for layer in box.info.layers))
        shown = ", ".join(holders[:_HOLDERS_SHOWN])
        more = f" and {len(holders) - _HOLDERS_SHOWN} more" if len(holders) > _HOLDERS_SHOWN else ""
        detail = {**error.detail, "sandboxes": holders[:_HOLDERS_SHOWN]}
        return Conflict(f"{error.message}: {shown}{more}", detail=detail)

    async def _unmount(self, digest: str) -> None:
        """The blocks of a removed layer are free once it is mounted nowhere."""
        try:
            self.core.layers.resolve(digest)
        except NotFound:
            for backend in self.core.backends.values():
                if isinstance(backend, MountsLayers):
                    await backend.unmount_layer(digest)

    async def import_layer(self, request: ImportRequest, progress: Callable[[str], None]) -> LayerInfo:
        """Make a layer; minutes for a whole distribution. The same content again is the same layer."""
        request.check()
        return await asyncio.to_thread(self.core.layers.import_layer, request, progress)


def _by(call: str, caller: str) -> str:
    return f"{call} by {caller}" if caller else call
