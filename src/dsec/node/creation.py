"""Creating sandboxes, one or many: every step is undone when a later one fails."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Final, TypeAlias

import msgspec

from dsec.backends.base import Runtime, StartPlan
from dsec.model import failpoint, ids
from dsec.model.errors import (
    Conflict,
    DsecError,
    InvalidSpec,
    InvalidState,
    NodeDiskFull,
    NotFound,
    ProgramNotStarted,
    Unavailable,
)
from dsec.model.limits import CREATE_MANY_MAX
from dsec.model.specs import RunSpec, Spec
from dsec.model.states import LayerRef, SandboxInfo
from dsec.node import plan as plans
from dsec.node.admission import Need
from dsec.node.box import Box
from dsec.node.core import NODE_SCOPE, Core, encode, value_of
from dsec.node.layers import check_once, check_role, field_of, wanted, with_base
from dsec.node.lifecycle import Lifecycle
from dsec.node.network import NAMESERVER, NetworkPolicies
from dsec.node.steps import BEGUN, Answer, conflict, content_hash

log = logging.getLogger("dsec.node.creation")

# Starts in flight at once of one batch. The runtime's launchers are as many as the cores; more in flight only hides
# the way there and back.
BATCH_STARTS: Final = 16


class Created(msgspec.Struct, frozen=True):
    """What came of a creation: the sandbox, and whether it was made for this call."""

    info: SandboxInfo
    made: bool = True


# Nothing below this file of the kernel can exist.
_NO_PROGRAM: Final = b"/proc/version/none"
_CANCELLED: Final = InvalidState("the batch was cancelled before this one was made")
_decode_created = msgspec.msgpack.Decoder(Created).decode


_Stack: TypeAlias = tuple[Sequence[plans.Layer], Sequence[LayerRef]]
# Different lists of layers that are remembered.
STACKS_MAX: Final = 1024


class _Batch:
    """A batch that goes on, and whether no more of it is to be made."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.size = 0
        self.cancelled = False


class Creation:
    """Makes sandboxes."""

    def __init__(self, core: Core, lifecycle: Lifecycle, networks: NetworkPolicies) -> None:
        self._core = core
        self._networks = networks
        self._lifecycle = lifecycle
        self._flying: dict[str, asyncio.Task[None]] = {}
        self._batches: dict[str, _Batch] = {}
        self._stacks: tuple[object, dict[tuple[object, ...], _Stack]] = (None, {})
        self._closing = False

    async def close(self) -> None:
        """Undo what is being created: nobody was told of it, and its keys are free for the next agent."""
        self._closing = True
        flying = set(self._flying.values())
        for task in flying:
            task.cancel()
        await asyncio.gather(*flying, return_exceptions=True)

    def _cut_short(self) -> DsecError:
        if self._closing:
            return Unavailable("the node is shutting down; repeat the call with the same key")
        return InvalidState("the sandbox was stopped while it was being created")

    async def create(self, spec: Spec, key: str) -> Created:
        """A running sandbox. The creation has a task of its own: a caller that vanishes does not end it."""
        core = self._core
        digest = content_hash("create", spec)
        running = core.calls.get((NODE_SCOPE, key))
        if running is None:
            found = core.steps.find(NODE_SCOPE, key, digest, "create")
            if found is not None and found.state != BEGUN:
                return _decode_created(value_of(core.steps.answer(found)))
            if found is not None:
                raise Unavailable(f"the creation under key {key!r} is being undone; repeat the call", retry="later")
            future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            running = core.calls[NODE_SCOPE, key] = (digest, future)
            self._flying[key] = asyncio.get_running_loop().create_task(self._fly(spec, key, digest, future))
        if running[0] != digest:
            raise conflict(key, "create")
        return _decode_created(value_of(await asyncio.shield(running[1])))

    async def _fly(self, spec: Spec, key: str, digest: bytes, future: asyncio.Future[Answer]) -> None:
        answer: Answer
        try:
            answer = encode(await self._find_or_make(spec, key, digest))
        except asyncio.CancelledError:
            answer = self._cut_short()
        except DsecError as error:
            answer = error
        except Exception as error:  # the edge of this creation's task: a fault of ours
            log.exception("a creation failed in the node")
            answer = DsecError(f"the node failed: {type(error).__name__}; see its log")
        del self._core.calls[NODE_SCOPE, key], self._flying[key]
        future.set_result(answer)

    async def _find_or_make(self, spec: Spec, key: str, digest: bytes) -> Created:
        plans.refuse_unsupported(spec)
        await self._networks.check(spec.network, spec.backend)
        while spec.name is not None and (there := self._core.alive(spec.name)) is not None:
            if spec.if_exists != "get":
                raise Conflict(
                    f"a sandbox named {spec.name!r} exists: {there.id}; use if_exists='get' or another name",
                    detail={"name": spec.name, "id": there.id},
                )
            await asyncio.shield(there.ready)
            if there.info.state == "running":
                return await self._found(there, key, digest)
            if there.stopping is not None:
                await asyncio.wait({there.stopping})
            elif there.id in self._core.boxes:
                raise InvalidState(f"sandbox {there.id} named {spec.name!r} is {there.info.state}")
        box, start = self._prepare(spec)
        return await self._make(box, start, key, digest)

    async def _found(self, box: Box, key: str, digest: bytes) -> Created:
        core = self._core
        info = core.shown(box)
        begin = core.steps.begin(NODE_SCOPE, key, digest, "create", subject=box.id)
        created = Created(info, False)
        end, files = core.steps.end(NODE_SCOPE, key, encode(created), box.id)
        await core.store.commit(begin, end, files=files)
        return created

    def _prepare(self, spec: Spec) -> tuple[Box, StartPlan]:
        """Decide everything and take the name; nothing outside is made."""
        core = self._core
        core.backend(spec.backend)
        layers, refs = self._resolve(spec)
        sandbox_id = ids.new_sandbox_id(core.node)
        core.turn += 1
        nameserver = NAMESERVER if self._networks.names(spec.backend) else None
        start = plans.start_plan(sandbox_id, spec, layers, core.online, core.turn, nameserver=nameserver)
        info = SandboxInfo(
            id=sandbox_id,
            node=core.node,
            state="creating",
            backend=spec.backend,
            spec=with_base(spec),
            layers=tuple(refs),
            name=spec.name,
            job=spec.job,
            labels=dict(spec.labels),
            created_at=core.clock.wall(),
        )
        box = Box(info, plans.defaults(spec, [layer.info for layer in layers]))
        box.settings_from = plans.settings_from([layer.info for layer in layers], refs)
        box.creator = asyncio.current_task()
        core.add(box)
        return box, start

    def _resolve(self, spec: Spec) -> _Stack:
        """The layers of a spec. Most specs name the same ones: looked up once, as long as no name changes."""
        store = self._core.layers
        state = store.state()
        if self._stacks[0] != state:
            self._stacks = (state, {})
        named = (spec.base, spec.workspace, tuple(spec.toolkits))
        stack = self._stacks[1].get(named)
        if stack is not None:
            for layer in stack[0]:
                store.check_file(layer.info)
            return stack
        if len(self._stacks[1]) >= STACKS_MAX:
            self._stacks[1].clear()
        stack = self._stacks[1][named] = self._look_up(spec)
        return stack

    def _look_up(self, spec: Spec) -> _Stack:
        layers: list[plans.Layer] = []
        refs: list[LayerRef] = []
        for ref, role in wanted(spec):
            field = field_of(role)
            try:
                info = self._core.layers.resolve(ref)
            except NotFound as error:
                allowed = f"a layer of this node ({error.detail['hint']}); `dsec layer import` makes one"
                raise InvalidSpec.field(field, ref, allowed) from error
            check_role(field, ref, role, info)
            check_once(field, ref, info.digest, refs)
            layers.append(plans.Layer(info=info, path=self._core.layers.path(info.digest)))
            refs.append(LayerRef(ref=ref, digest=info.digest, role=role))
        return layers, refs

    async def _make(self, box: Box, start: StartPlan, key: str, digest: bytes) -> Created:
        core, spec = self._core, box.info.spec
        try:
            await core.admission.reserve(box.id, Need.of(spec), spec.wait_s)
            box.change(admitted_at=core.clock.wall())
            failpoint.at("create.admitted")
            begin = core.steps.begin(NODE_SCOPE, key, digest, "create", subject=box.id)
            await core.store.commit(box.row(), begin, durable=False)
            failpoint.at("create.begun")
            await self._start(box, start, key)
        except BaseException as error:  # also cancelled: what was made is undone, and it goes on
            await asyncio.shield(asyncio.ensure_future(self._undo(box, key, error)))
            raise
        return self._ready(box)

    async def _start(self, box: Box, start: StartPlan, key: str) -> None:
        core = self._core
        self._running(box, await core.backend(box.info.backend).start(start))
        failpoint.at("create.started")
        # Before anything of its own runs in it.
        await self._networks.put(box)
        failpoint.at("create.connected")
        if box.info.spec.cwd is not None or box.info.spec.user is not None or box.settings_from:
            await _check_inside(box)
        end, files = core.steps.end(NODE_SCOPE, key, encode(Created(core.shown(box))), box.id)
        await core.store.commit(box.row(), end, files=files)
        failpoint.at("create.recorded")

    def _ready(self, box: Box) -> Created:
        self._lifecycle.settle(box)
        box.creator = None
        box.ready.set_result(None)
        return Created(self._core.shown(box))

    def _running(self, box: Box, runtime: Runtime) -> None:
        clock, spec = self._core.clock, box.info.spec
        box.adopt(runtime)
        box.idle_boot = clock.boot()
        box.expires_boot = None if spec.lifetime_s is None else clock.boot() + spec.lifetime_s
        box.change(state="running", started_at=clock.wall())

    async def _forget(self, box: Box, key: str) -> None:
        core = self._core
        gone = ("DELETE FROM sandboxes WHERE id = ?", (box.id,)), core.steps.drop(NODE_SCOPE, key)
        try:
            await core.store.commit(*gone, durable=False)
        except NodeDiskFull:
            core.owed.add(*gone)  # nothing is left of it but, perhaps, its row

    async def _undo(self, box: Box, key: str, cause: BaseException) -> None:
        core = self._core
        error = cause if isinstance(cause, DsecError) else InvalidState(f"sandbox {box.id} was not created: {cause}")
        box.change(state="stopping", end_reason="create_failed")
        try:
            await self._networks.forget(box)
            if box.runtime is not None:
                await box.runtime.stop()
            await self._forget(box, key)
        except DsecError as failure:
            # It stays a sandbox that is being stopped, so the timer tries again; its name and room stay taken.
            log.error("undoing the creation of %s: %s", box.id, failure)
            core.deadlines.watch(box.id, core.clock.boot())
        else:
            core.remove(box)
        box.ready.set_result(error)

    async def create_many(self, specs: Sequence[Spec], key: str, *, atomic: bool) -> AsyncIterator[tuple[int, Answer]]:
        """Create many; (index, encoded info or error) as they get ready. Item keys derive from the batch's key."""
        if not 1 <= len(specs) <= CREATE_MANY_MAX:
            raise InvalidSpec.field("specs", f"{len(specs)} specs", f"1 to {CREATE_MANY_MAX}")
        async for item in self._all_or_none(specs, key) if atomic else self._each(specs, key):
            yield item

    def _go_on(self, key: str, size: int, tasks: Sequence[asyncio.Task[None]], batch: _Batch) -> None:
        """A batch goes on until its tasks have ended, whoever reads it."""
        batch.size = size
        batch.tasks.update(tasks)

        def ended(task: asyncio.Task[None]) -> None:
            batch.tasks.discard(task)
            if not batch.tasks and self._batches.get(key) is batch:
                del self._batches[key]

        for task in tasks:
            task.add_done_callback(ended)

    def cancel_many(self, key: str) -> None:
        """Make no more of a batch: what is not made yet ends as an error. Raises NotFound when none goes on."""
        batch = self._batches.get(key)
        if batch is None:
            raise NotFound(f"no batch goes on under key {key!r}")
        batch.cancelled = True
        tasks = {self._flying.get(item_key(key, index)) for index in range(batch.size)}
        for task in tasks:
            if task is not None:
                task.cancel()

    async def _each(self, specs: Sequence[Spec], key: str) -> AsyncIterator[tuple[int, Answer]]:
        results: asyncio.Queue[tuple[int, Answer]] = asyncio.Queue()
        todo = iter(range(len(specs)))
        batch = self._batches.setdefault(key, _Batch())

        async def worker() -> None:
            for index in todo:
                answer: Answer = _CANCELLED
                if not batch.cancelled:
                    answer = await self._item(specs[index], item_key(key, index))
                results.put_nowait((index, answer))

        # Not cancelled when the reader goes away: as with a single creation, what was asked for is done.
        workers = [asyncio.create_task(worker()) for _ in range(min(BATCH_STARTS, len(specs)))]
        self._go_on(key, len(specs), workers, batch)
        for _ in specs:
            yield await results.get()

    async def _item(self, spec: Spec, key: str) -> Answer:
        try:
            return encode((await self.create(spec, key)).info)
        except DsecError as error:
            return error

    async def _all_or_none(self, specs: Sequence[Spec], key: str) -> AsyncIterator[tuple[int, Answer]]:
        core = self._core
        keys = [item_key(key, index) for index in range(len(specs))]
        digests = [content_hash("create", spec) for spec in specs]
        if (NODE_SCOPE, keys[0]) in core.calls or core.steps.find(NODE_SCOPE, keys[0], digests[0], "create"):
            # The same batch again: each item has, or will have, an answer of its own.
            async for item in self._each(specs, key):
                yield item
            return
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Answer]] = [loop.create_future() for _ in specs]
        for name, digest, future in zip(keys, digests, futures, strict=True):
            core.calls[NODE_SCOPE, name] = (digest, future)
        flying = loop.create_task(self._fly_all(specs, keys, digests, futures))
        self._flying.update(dict.fromkeys(keys, flying))
        self._go_on(key, len(specs), [flying], self._batches.setdefault(key, _Batch()))
        for index, future in enumerate(futures):
            answer = await asyncio.shield(future)
            yield index, answer if isinstance(answer, DsecError) else encode(_decode_created(answer).info)

    async def _fly_all(
        self, specs: Sequence[Spec], keys: list[str], digests: list[bytes], futures: list[asyncio.Future[Answer]]
    ) -> None:
        made: list[tuple[Box, StartPlan]] = []
        answers: list[Answer]
        try:
            for spec in specs:
                plans.refuse_unsupported(spec)
                await self._networks.check(spec.network, spec.backend)
                if spec.name is not None and (there := self._core.alive(spec.name)) is not None:
                    raise Conflict(f"a sandbox named {spec.name!r} exists: {there.id}", detail={"name": spec.name})
                made.append(self._prepare(spec))
            await self._make_all(made, keys, digests)
            answers = [encode(self._ready(box)) for box, _ in made]
        except asyncio.CancelledError:
            answers = await self._undo_all(made, keys, self._cut_short())
        except DsecError as error:
            answers = await self._undo_all(made, keys, error)
        except Exception as error:  # the edge of this batch's task: a fault of ours
            log.exception("a batch failed in the node")
            answers = await self._undo_all(
                made, keys, DsecError(f"the node failed: {type(error).__name__}; see its log")
            )
        answers += answers[-1:] * (len(specs) - len(answers))
        for key, future, answer in zip(keys, futures, answers, strict=True):
            del self._core.calls[NODE_SCOPE, key], self._flying[key]
            future.set_result(answer)

    async def _make_all(self, made: list[tuple[Box, StartPlan]], keys: list[str], digests: list[bytes]) -> None:
        core = self._core
        needs = {box.id: Need.of(box.info.spec) for box, _ in made}
        await core.admission.reserve_all(needs, max(box.info.spec.wait_s for box, _ in made))
        for box, _ in made:
            box.change(admitted_at=core.clock.wall())
        rows = [box.row() for box, _ in made]
        begins = [
            core.steps.begin(NODE_SCOPE, key, digest, "create", subject=box.id)
            for (box, _), key, digest in zip(made, keys, digests, strict=True)
        ]
        await core.store.commit(*rows, *begins, durable=False)
        failpoint.at("batch.begun")
        todo = iter(zip(made, keys, strict=True))

        async def worker() -> None:
            for (box, start), key in todo:
                await self._start(box, start, key)

        workers = [asyncio.create_task(worker()) for _ in range(min(BATCH_STARTS, len(made)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _undo_all(self, made: list[tuple[Box, StartPlan]], keys: list[str], error: DsecError) -> list[Answer]:
        for (box, _), key in zip(made, keys, strict=False):
            await self._undo(box, key, error)
        return [error] * max(len(made), 1)


async def _check_inside(box: Box) -> None:
    """Raises InvalidSpec for a `cwd` or `user`, of the spec or of a layer, that the sandbox does not have; nobody was
    told of it yet.

    By a run without a program: user and directory are looked for first, and no layer needs to have a program for it.
    """
    spec = RunSpec(argv=[_NO_PROGRAM])
    try:
        await box.running_guest().run(plans.run_plan(ids.new_process_id(), spec, box.base))
    except ProgramNotStarted as error:
        field = error.detail.get("field")
        if field not in ("cwd", "user"):
            return
        layer = box.settings_from.get(field)
        if getattr(box.info.spec, field) is None and layer is not None:
            sets = f"a layer whose {field} is there; this one sets {getattr(box.base, field)!r}, and: {error.message}"
            cure = f"; import it again with another {field}, or give the sandbox one"
            raise InvalidSpec.field(field_of(layer.role), layer.ref, sets + cure) from error
        raise InvalidSpec(error.message, detail=error.detail) from error


def item_key(key: str, index: int) -> str:
    """The key of one item of a batch: the same again when the batch is repeated."""
    return "b-" + hashlib.blake2b(f"{index} {key}".encode(), digest_size=20).hexdigest()
