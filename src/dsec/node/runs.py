"""Running programs: the hot path.

A flight is one run between its beginning and its recorded end. It has a task of its own, so a caller that vanishes
changes nothing, and everybody who comes with the same key waits for the same answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

import msgspec

from dsec.backends.base import Guest, RunPlan, Sink
from dsec.model import failpoint
from dsec.model.errors import (
    Conflict,
    DsecError,
    Exhausted,
    LaunchFailed,
    NodeDiskFull,
    NotFound,
    ProgramNotStarted,
    Rejected,
    SandboxLost,
    Unavailable,
    Unknown,
)
from dsec.model.limits import PROGRAMS_KEPT
from dsec.model.processes import How
from dsec.model.specs import RunSpec
from dsec.model.states import Output, RunOutcome, RunResult
from dsec.node.admission import Admission
from dsec.node.box import Box
from dsec.node.clock import Clock
from dsec.node.owed import Owed, Result
from dsec.node.plan import RUN, TALKED_TO, run_plan, shown_command, spool_mib
from dsec.node.steps import BEGUN, Answer, Step, Steps, conflict, state_and_body
from dsec.node.store import Store

log = logging.getLogger("dsec.node.runs")

RUNS_IN_FLIGHT_MAX: Final = 4096  # of one sandbox

encode = msgspec.msgpack.Encoder().encode
decode_how = msgspec.msgpack.Decoder(How).decode
decode_result = msgspec.msgpack.Decoder(RunResult).decode


def new_process_id() -> str:
    """Like `ids.new_process_id`, at a tenth of its price: one is made for every run."""
    return "p-" + secrets.token_hex(8)


# Not a coroutine yet: a task that is cancelled before its first step would leave it behind unawaited.
Work = Callable[[], Coroutine[Any, Any, Answer | None]]


class Flight:
    """One run that has begun and has no recorded end yet."""

    __slots__ = (
        "command",
        "detached",
        "done",
        "hash",
        "how",
        "owed",
        "process_id",
        "reading",
        "sink",
        "started",
        "started_at",
        "step",
        "task",
        "waiting",
        "writer_kept",
        "writing",
    )

    def __init__(
        self, digest: bytes, process_id: str, step: int, started_at: float, command: str, *, how: How = RUN
    ) -> None:
        self.how = how
        self.hash = digest
        self.process_id = process_id
        self.step = step
        self.started_at = started_at
        self.command = command
        self.done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.started: asyncio.Future[None] = self.done.get_loop().create_future()
        self.waiting: list[asyncio.Future[Answer]] = []
        self.sink: Sink | None = None
        self.detached = False
        self.owed = False  # its result is told from memory, and the runtime keeps it
        self.task: asyncio.Task[None] | None = None
        self.reading: asyncio.Task[RunOutcome] | None = None  # the call that feeds a streaming reader
        self.writing = asyncio.Lock()  # one gives input at a time
        self.writer_kept: asyncio.Future[None] | None = None  # done once `how.writer` is written down

    @property
    def launched(self) -> bool:
        """Whether its program is known to have been started."""
        return self.started.done()

    def launch(self) -> None:
        """Its program has been started."""
        if not self.started.done():
            self.started.set_result(None)

    def detach(self) -> None:
        """The streaming reader is gone: the run goes on without."""
        self.detached = True
        if self.reading is not None:
            self.reading.cancel()

    async def keep_writer(self) -> None:
        """Until it is written down who gives input."""
        if self.writer_kept is not None and not self.writer_kept.done():
            # One who gives up waiting leaves it to be written all the same.
            await asyncio.shield(self.writer_kept)
        if self.writer_kept is not None:
            self.writer_kept.result()

    async def answer(self) -> Answer:
        """What comes of it; cancelling this waits no longer and stops nothing."""
        if self.done.done():
            return self.done.result()
        # A future of its own, as in `asyncio.shield`, but told directly and not a turn of the event loop later.
        waiter: asyncio.Future[Answer] = self.done.get_loop().create_future()
        self.waiting.append(waiter)
        return await waiter

    def end(self, answer: Answer) -> None:
        """This came of it."""
        self.done.set_result(answer)
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(answer)


class Runs:
    """Runs of all sandboxes of a node."""

    def __init__(
        self,
        store: Store,
        steps: Steps,
        owed: Owed,
        admission: Admission,
        clock: Clock,
        *,
        became_idle: Callable[[Box], None],
    ) -> None:
        self._store = store
        self._owed = owed
        self._admission = admission
        self._steps = steps
        self._clock = clock
        self._became_idle = became_idle

    def start(
        self, box: Box, spec: RunSpec, key: str, digest: bytes, sink: Sink | None = None, *, how: How = RUN
    ) -> Flight | Answer:
        """Begin a run, join the one in flight under its key, or give the answer that came back before."""
        flight = box.flights.get(key)
        if flight is not None:
            if flight.hash != digest:
                raise conflict(key, how.kind, flight.command)
            return flight
        found = self._steps.find(box.id, key, digest, how.kind)
        if found is not None and found.state != BEGUN:
            return self._steps.answer(found)
        box.running_guest()
        if len(box.flights) >= RUNS_IN_FLIGHT_MAX:
            raise Exhausted(
                f"sandbox {box.id} has {RUNS_IN_FLIGHT_MAX} runs in flight, the most allowed; wait for one to end",
                detail={"resource": "runs", "limit": RUNS_IN_FLIGHT_MAX},
            )
        if found is not None:
            # Begun and nobody waits: the runtime was out of reach. The same process id starts it at most once.
            flight = Flight(digest, found.subject, found.step, found.begun_at, found.command, how=how)
        else:
            process_id = new_process_id()
            self._admission.hold_spool(process_id, spool_mib(how))
            flight = Flight(digest, process_id, box.next_step, self._clock.wall(), shown_command(spec), how=how)
            box.next_step += 1
        flight.sink = sink
        plan = run_plan(flight.process_id, spec, box.base, how)
        begun = found is not None
        self.take_off(box, key, flight, lambda: self._run(box, key, flight, plan, sink, begun=begun))
        return flight

    def resume(self, box: Box, step: Step) -> None:
        """After a restart: wait for a run that had begun, or find out that it never was launched."""
        flight = Flight(step.hash, step.subject, step.step, step.begun_at, step.command, how=how_of(step))
        flight.launch()
        guest = box.running_guest()
        self.take_off(box, step.key, flight, lambda: self._reattach(box, guest, step.key, flight))

    def take_off(self, box: Box, key: str, flight: Flight, work: Work) -> None:
        """Give a flight its task."""
        box.flights[key] = flight
        if flight.how.keepalive:
            box.active += 1
        if flight.how.kind in TALKED_TO:
            box.programs[flight.process_id] = flight
            self._admission.restore_spool(flight.process_id, spool_mib(flight.how))
        flight.task = asyncio.get_running_loop().create_task(self._fly(box, key, flight, work))

    async def _fly(self, box: Box, key: str, flight: Flight, work: Work) -> None:
        answer: Answer
        try:
            outcome = await work()
            answer = outcome if outcome is not None else _never_launched(flight)
        except asyncio.CancelledError:
            answer = Unavailable("the node is shutting down; repeat the call with the same key", sandbox_id=box.id)
        except DsecError as error:
            answer = error
        except Exception as error:  # the edge of this run's task: a fault of ours
            log.exception("a run failed in the node")
            answer = DsecError(f"the node failed: {type(error).__name__}; see its log", sandbox_id=box.id)
        del box.flights[key]
        flight.end(answer)
        if flight.how.keepalive:
            box.active -= 1
            if not box.active:
                self._became_idle(box)
        if flight.how.kind in TALKED_TO:
            self._keep(box, flight, answer)
        elif not flight.owed and isinstance(answer, bytes):
            _discard(box, flight)

    def _keep(self, box: Box, flight: Flight, answer: Answer) -> None:
        """A program that was talked to has ended: its output stays readable, that of the oldest makes room."""
        box.programs.pop(flight.process_id, None)
        box.kept.append(flight.process_id)
        if not isinstance(answer, bytes):
            self._admission.release_spool(flight.process_id)  # nothing of it is kept
        while len(box.kept) > PROGRAMS_KEPT:
            oldest = box.kept.popleft()
            self._admission.release_spool(oldest)
            if box.guest is not None:
                box.guest.discard(oldest)

    async def _run(
        self, box: Box, key: str, flight: Flight, plan: RunPlan, sink: Sink | None, *, begun: bool
    ) -> Answer:
        guest = box.running_guest()
        if not begun:
            await self._store.commit(
                self._steps.begin(
                    box.id,
                    key,
                    flight.hash,
                    flight.how.kind,
                    step=flight.step,
                    subject=flight.process_id,
                    command=flight.command,
                    extra=None if flight.how is RUN else encode(flight.how),
                ),
                durable=False,
                alone=True,
            )
            failpoint.at("run.begun")
        try:
            outcome = await self._outcome(flight, guest, plan, sink)
        except (Exhausted, LaunchFailed):
            # Nothing ran. The key is free again: trying once more can help.
            await self._store.commit(self._steps.drop(box.id, key), durable=False)
            raise
        except SandboxLost as error:
            return await self.record(box, key, flight, box.end_told(error))
        except (Rejected, ProgramNotStarted, Unknown) as error:
            return await self.record(box, key, flight, error)
        failpoint.at("run.ended")
        return await self.record(box, key, flight, encode(result_of(flight, outcome)))

    async def _reattach(self, box: Box, guest: Guest, key: str, flight: Flight) -> Answer | None:
        try:
            outcome = await guest.attach(flight.process_id)
        except NotFound:
            await self._store.commit(self._steps.drop(box.id, key), durable=False)
            return None
        except SandboxLost as error:
            return await self.record(box, key, flight, box.end_told(error))
        except Unknown as error:
            return await self.record(box, key, flight, error)
        return await self.record(box, key, flight, encode(result_of(flight, outcome)))

    async def _outcome(self, flight: Flight, guest: Guest, plan: RunPlan, sink: Sink | None) -> RunOutcome:
        if sink is None or flight.detached:
            return await guest.run(plan, started=flight.launch)
        reading = asyncio.ensure_future(guest.run(plan, sink=sink, started=flight.launch))
        flight.reading = reading
        try:
            return await reading
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
        finally:
            flight.reading = None
        # The reader left. Cancelling the call stopped nothing; the same process id attaches to it.
        return await guest.run(plan, started=flight.launch)

    async def change_writer(self, box: Box, flight: Flight, writer: tuple[str, int]) -> None:
        """Another gives input from that offset on: written down before a byte of it is given."""
        flight.how = msgspec.structs.replace(flight.how, writer=writer)
        key = next((key for key, other in box.flights.items() if other is flight), None)
        if key is not None:
            change = self._steps.note(box.id, key, encode(flight.how))
            flight.writer_kept = self._store.commit(change, durable=False, alone=True)
        await flight.keep_writer()

    async def record(self, box: Box, key: str, flight: Flight, answer: Answer) -> Answer:
        """Write down what came of a flight, before anybody is told; without room for it, once there is some."""
        statement, files = self._steps.end(box.id, key, answer, flight.process_id)
        try:
            await self._store.commit(statement, files=files)
        except NodeDiskFull:
            state, body = state_and_body(answer)
            owed = Result(state, body, statement, files, written=lambda: _discard(box, flight))
            flight.owed = self._owed.add_result(box.id, key, owed)
            if not flight.owed:
                raise
        failpoint.at("run.recorded")
        return answer


def _discard(box: Box, flight: Flight) -> None:
    """Nobody will ask the runtime for the result of a run any more; of a program that is talked to it stays."""
    if flight.how is RUN and box.guest is not None:
        box.guest.discard(flight.process_id)


def how_of(step: Step) -> How:
    """How the program of a row was started."""
    return RUN if step.extra is None else decode_how(step.extra)


def result_of(flight: Flight, outcome: RunOutcome) -> RunResult:
    """What the caller gets, from what the backend says and what only the node knows."""
    return RunResult(
        process_id=flight.process_id,
        exit_code=outcome.exit_code,
        cause=outcome.cause,
        signal=outcome.signal,
        limits_hit=outcome.limits_hit,
        out=outcome.out,
        err=outcome.err,
        started_at=outcome.started_at,
        duration_s=outcome.duration_s,
        usage=outcome.usage,
        step=flight.step,
    )


def never_launched(answer: Answer) -> bool:
    """Whether an answer says that a run found after a restart never was started: the call may simply be repeated."""
    return isinstance(answer, Unknown) and answer.detail.get("launched") is False


def _never_launched(flight: Flight) -> Conflict:
    return Unknown(
        f"process {flight.process_id} was begun but never launched: nothing ran; repeat the call with the same key",
        detail={"launched": False},
        retry="later",
    )


def kept_output(output: Output, stream: int, offset: int) -> Iterator[tuple[int, int, bytes]]:
    """What a recorded result still has of a stream from an offset on, as (stream, offset, bytes)."""
    if offset < len(output.head):
        yield stream, offset, output.head[offset:]
    tail_start = output.total - len(output.tail)
    skip = max(0, offset - tail_start)
    if skip < len(output.tail):
        yield stream, tail_start + skip, output.tail[skip:]
