"""What the parts of a node share: its sandboxes, names, store, clocks; and the rule for calls with a key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec

from dsec.backends.base import Backend
from dsec.linux import proc
from dsec.model import ids
from dsec.model.errors import DsecError, InvalidSpec, NodeDiskFull, NotFound, SandboxLost, Unknown, Unsupported
from dsec.model.states import SandboxInfo
from dsec.node.admission import Admission
from dsec.node.box import SELECT, Box, read_row
from dsec.node.clock import Clock, Deadlines
from dsec.node.layers import Layers
from dsec.node.owed import Owed
from dsec.node.runs import Runs
from dsec.node.steps import BEGUN, Answer, Steps, conflict
from dsec.node.store import Statement, Store

encode = msgspec.msgpack.Encoder().encode
decode_info = msgspec.msgpack.Decoder(SandboxInfo).decode

NODE_SCOPE: Final = ""

Work = Callable[[], Awaitable[tuple[bytes, list[Statement]]]]


class Terms(NamedTuple):
    """How a call that is made once goes about it; see `Core.once`."""

    kind: str
    subject: str
    begin: bool
    done: bool
    changes: Box | None


class Core:
    """The state of one node. Changed on the event loop only."""

    def __init__(
        self,
        *,
        node: str,
        backends: Mapping[str, Backend],
        layers: Layers,
        store: Store,
        admission: Admission,
        clock: Clock,
    ) -> None:
        self.node = ids.check_node(node)
        self.backends = dict(backends)
        self.layers = layers
        self.store = store
        self.admission = admission
        self.clock = clock
        self.owed = Owed(store, clock)
        self.steps = Steps(store, self.owed, clock)
        self.deadlines = Deadlines(clock, self._due)
        self.runs = Runs(store, self.steps, self.owed, admission, clock, became_idle=self.became_idle)
        self.online: tuple[int, ...] = proc.cpus()
        self.boxes: dict[str, Box] = {}
        self.names: dict[str, str] = {}
        self.calls: dict[tuple[str, str], tuple[bytes, asyncio.Future[Answer]]] = {}
        self.turn = 0
        self.gone: Callable[[Box], None] = lambda box: None
        self.due: Callable[[Box, float], float | None] = lambda box, now: None

    def _due(self, sandbox_id: str) -> float | None:
        box = self.boxes.get(sandbox_id)
        return None if box is None else self.due(box, self.clock.boot())

    def became_idle(self, box: Box) -> None:
        """Nothing is going on in a sandbox any more: its idle time starts now."""
        box.idle_boot = self.clock.boot()
        if box.id in self.boxes:
            self.deadlines.watch(box.id, box.idle_deadline())

    @contextmanager
    def going_on(self, box: Box) -> Iterator[None]:
        """Something goes on in a sandbox meanwhile: it is not idle. Its end is told as the node knows it."""
        box.active += 1
        try:
            yield
        except SandboxLost as error:
            raise box.end_told(error) from error
        finally:
            box.active -= 1
            if not box.active:
                self.became_idle(box)

    def backend(self, name: str) -> Backend:
        """A backend by name. Raises Unsupported."""
        backend = self.backends.get(name)
        if backend is None:
            raise Unsupported.lacks(f"backend {name}", name, f"this node has: {', '.join(sorted(self.backends))}")
        return backend

    def add(self, box: Box) -> None:
        """A sandbox exists from now on."""
        self.boxes[box.id] = box
        if box.info.name is not None:
            self.names[box.info.name] = box.id

    def remove(self, box: Box) -> None:
        """It exists no more: its name, its room and its deadlines are free."""
        self.boxes.pop(box.id, None)
        if box.info.name is not None and self.names.get(box.info.name) == box.id:
            del self.names[box.info.name]
        self.deadlines.forget(box.id)
        box.helpers.close()
        self.gone(box)
        for program in (*box.programs, *box.kept):
            self.admission.release_spool(program)
        self.admission.release(box.id)
        self.store.changed.ring()  # who follows it need not wait for a next write

    def alive(self, ref: str) -> Box | None:
        """A sandbox that is alive, by id or name."""
        return self.boxes.get(ref) or self.boxes.get(self.names.get(ref, ""))

    def past(self, ref: str) -> SandboxInfo:
        """A sandbox that has ended, by id or name (the latest of that name). Raises NotFound."""
        for info in self.owed.infos.values():
            if ref in (info.id, info.name):
                return info
        if ids.is_sandbox_id(ref):
            rows = self.store.read(f"{SELECT} WHERE id = ?", (ref,))
        else:
            ids.check_name(ref, "sandbox")
            sql = f"{SELECT} WHERE name = ? AND ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT 1"
            rows = self.store.read(sql, (ref,))
        if not rows:
            raise NotFound(f"no sandbox {ref!r} on node {self.node}, alive or ended not long ago")
        return read_row(rows[0]).info

    def shown(self, box: Box) -> SandboxInfo:
        """Its info, with the moments of its clocks as wall-clock time."""
        ahead = self.clock.wall() - self.clock.boot()
        running = box.info.state == "running"
        return msgspec.structs.replace(
            box.info,
            expires_at=None if box.expires_boot is None else box.expires_boot + ahead,
            idle_since=None if box.active or not running else box.idle_boot + ahead,
        )

    async def once(
        self,
        scope: str,
        key: str,
        digest: bytes,
        kind: str,
        work: Work,
        *,
        subject: str = "",
        begin: bool = False,
        done: bool = False,
        changes: Box | None = None,
    ) -> bytes:
        """Do something at most once under a key; the answer is on the disk, with what it changed, before it is given.

        `begin` writes a row before the work, for work whose effect outside could be lost track of: begun and never
        answered is Unknown. Errors are not kept: nothing was done, so the key may be tried again. `done`: the work
        cannot be taken back, so it is answered also when there is no room on the disk for the answer. `changes`: what
        it changes of this sandbox in memory only is as before when it cannot be written.
        """
        running = self.calls.get((scope, key))
        if running is not None:
            if running[0] != digest:
                raise conflict(key, kind)
            return value_of(await asyncio.shield(running[1]))
        owed = self.owed.answer(scope, key)
        if owed is not None:
            if owed[0] != digest:
                raise conflict(key, kind)
            return owed[1]
        found = self.steps.find(scope, key, digest, kind)
        if found is not None:
            if found.state == BEGUN:
                raise Unknown(f"{kind} under key {key!r} was begun; whether it took effect is not known")
            return value_of(self.steps.answer(found))
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.calls[scope, key] = (digest, future)
        try:
            answer = await self._work(scope, key, digest, work, Terms(kind, subject, begin, done, changes))
            future.set_result(answer)
            return answer
        except DsecError as error:
            future.set_result(error)
            raise
        finally:
            del self.calls[scope, key]
            if not future.done():
                future.set_result(Unknown(f"{kind} under key {key!r} was cut short"))

    async def _work(self, scope: str, key: str, digest: bytes, work: Work, terms: Terms) -> bytes:
        begin = terms.begin
        begun = self.steps.begin(scope, key, digest, terms.kind, subject=terms.subject)
        if begin:
            await self.store.commit(begun, durable=False)
        undo = None if terms.changes is None else terms.changes.remember()
        try:
            answer, statements = await work()
        except Unknown:
            # Its row stays: who asks again under the key is told the same, and it is not done twice.
            raise
        except DsecError:
            if begin:
                await self.store.commit(self.steps.drop(scope, key), durable=False)
            raise
        end, files = self.steps.end(scope, key, answer)
        change = (*([] if begin else [begun]), *statements)
        try:
            await self.store.commit(*change, end, files=files)
        except DsecError as error:
            if undo is not None:
                undo()
            if not (terms.done and isinstance(error, NodeDiskFull)):
                raise
            end, _ = self.steps.end(scope, key, answer, spooled=False)
            self.owed.add_answer(scope, key, digest, answer, *change, end)
        return answer


def value_of(answer: Answer) -> bytes:
    """The value of an answer, or its error raised."""
    if isinstance(answer, DsecError):
        # A fresh one each time: the same object raised for several callers would collect all their tracebacks.
        raise type(answer)(
            answer.message,
            detail=answer.detail,
            retry=answer.retry,
            sandbox_id=answer.sandbox_id,
        )
    return answer


def check_key(key: str | None) -> str:
    """A caller's key; one of ours when it gave none."""
    return ids.new_key() if key is None else ids.check_key(key)


def check_seconds(field: str, value: float, low: float, high: float) -> float:
    """A number of seconds within bounds. Raises InvalidSpec (also for NaN)."""
    if not low <= value <= high:
        raise InvalidSpec.field(field, value, f"{low:g} to {high:g}")
    return value
