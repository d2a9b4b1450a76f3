"""Programs that are talked to: started and not waited for, given input, read from any offset, found again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import msgspec

from dsec.backends.base import Guest, Sink
from dsec.model import limits
from dsec.model.errors import Conflict, Exhausted, InvalidSpec, InvalidState, NotFound, SandboxLost, Unknown
from dsec.model.processes import How, InputState, OutputPiece, Process, Program, SpawnSpec, Terminal
from dsec.model.states import SandboxInfo
from dsec.node.box import Box, lost
from dsec.node.core import Core, check_key, check_seconds, value_of
from dsec.node.runs import Flight, decode_result, how_of, kept_output, never_launched
from dsec.node.steps import ANSWERED, BEGUN, Answer, content_hash

log = logging.getLogger("dsec.node.programs")

# A writer whose program reads nothing is told how far it came after this long, and offers the rest again.
INPUT_WAIT_S: Final = 5.0
WAIT_MAX_S: Final = 60.0
PIECE_BYTES: Final = 256 * limits.KIB


class ProgramList(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Programs in flight, and every process alive inside. `more`: there are some beyond those listed."""

    programs: list[Program]
    processes: tuple[Process, ...]
    more: bool = False


class Programs:
    """The programs of a node's sandboxes."""

    def __init__(self, core: Core, ready: Callable[[str], Awaitable[Box]]) -> None:
        self._core = core
        self._ready = ready

    @asynccontextmanager
    async def _guest(self, ref: str) -> AsyncIterator[tuple[Box, Guest]]:
        """A sandbox in which something goes on meanwhile."""
        box = await self._ready(ref)
        guest = box.running_guest()
        with self._core.going_on(box):
            yield box, guest

    # -- starting and finding -----------------------------------------------------------------------------------------

    async def spawn(self, ref: str, spec: SpawnSpec, key: str | None = None) -> Program:
        """A program that has been launched. Under a key once."""
        spec.check()
        how = How(kind="spawn", stdin=spec.stdin, tty=spec.tty, keepalive=spec.keepalive, spool_bytes=spec.spool_bytes)
        key, digest = check_key(key), content_hash("spawn", spec)
        async with self._guest(ref) as (box, _):
            found = self._core.runs.start(box, spec.run_spec(), key, digest, how=how)
            answer = await launched(found)
            if answer is not None and never_launched(answer):
                found = self._core.runs.start(box, spec.run_spec(), key, digest, how=how)
                answer = await launched(found)
            if isinstance(found, Flight):
                if answer is not None:
                    value_of(answer)  # its error
                return shown(found)
            result = decode_result(value_of(found))
            return await self.find(ref, result.process_id)

    async def find(self, ref: str, process_id: str) -> Program:
        """One program; of an ended one what is recorded."""
        box = self._core.alive(ref)
        if box is not None and (flight := box.programs.get(process_id)) is not None:
            return shown(flight)
        return self._recorded(self._core.past(ref) if box is None else box.info, process_id)[0]

    def _recorded(self, sandbox: SandboxInfo, process_id: str) -> tuple[Program, Answer | None]:
        scope = sandbox.id
        step = self._core.steps.by_subject(scope, process_id)
        if step is None:
            raise NotFound(f"sandbox {scope} has no program {process_id!r}", sandbox_id=scope)
        how = how_of(step)
        answer = None if step.state == BEGUN else self._core.steps.answer(step)
        if answer is None and sandbox.ended_at is not None:
            answer = lost(sandbox)  # it went with its sandbox, and nobody was there to write it down
        program = Program(
            id=process_id,
            kind=how.kind,
            state="running" if answer is None else "ended",
            step=step.step,
            command=step.command,
            started_at=step.begun_at,
            tty=how.tty is not None,
            stdin=how.stdin,
            keepalive=how.keepalive,
            result=decode_result(answer) if step.state == ANSWERED and isinstance(answer, bytes) else None,
        )
        return program, answer

    async def list(self, ref: str) -> ProgramList:
        """Programs in flight and every process alive inside."""
        async with self._guest(ref) as (box, guest):
            inside = await guest.inside()
            programs = [shown(flight) for flight in box.flights.values()]
            return ProgramList(programs=programs, processes=inside.processes, more=inside.more)

    async def wait(self, ref: str, process_id: str, timeout_s: float) -> Program:
        """Its end, or what it is after `timeout_s`. Raises what its end is recorded as when that is an error."""
        check_seconds("timeout_s", timeout_s, 0, WAIT_MAX_S)
        box = self._core.alive(ref)
        flight = None if box is None else box.programs.get(process_id)
        if flight is not None:
            waiting = asyncio.ensure_future(flight.answer())
            with suppress(TimeoutError):
                value_of(await asyncio.wait_for(waiting, timeout_s))
            if not flight.done.done():
                return shown(flight)
        program = await self.find(ref, process_id)
        if program.state == "ended" and program.result is None:
            _, answer = self._recorded(self._core.past(ref) if box is None else box.info, process_id)
            if answer is not None:
                value_of(answer)
        return program

    # -- talking ------------------------------------------------------------------------------------------------------

    async def write(
        self, ref: str, process_id: str, offset: int, data: bytes, *, eof: bool, writer: str = ""
    ) -> InputState:
        """More input, at its offset. Waits a while when the program reads nothing.

        What lies below the size is a repeat if `writer` has given all of the input from there on; else it is another's
        place: Conflict, and nothing is given. An empty piece that is not the end only asks.
        """
        if offset < 0:
            raise InvalidSpec.field("offset", offset, "0 or more")
        if len(data) > limits.INPUT_PIECE_MAX_BYTES:
            raise InvalidSpec.field("data", f"{len(data)} bytes", f"at most {limits.INPUT_PIECE_MAX_BYTES} bytes")
        async with self._guest(ref) as (box, guest):
            flight = box.programs.get(process_id)
            how = self._how(box, process_id, flight)
            if how.kind == "session":
                raise InvalidState(f"{process_id} is a session's shell: its input are the commands", sandbox_id=box.id)
            if not how.stdin:
                raise InvalidState(f"{process_id} was started without an input", sandbox_id=box.id)
            if eof and how.tty is not None:
                raise InvalidSpec.field("eof", True, "no end for a terminal: send ^D (byte 4)")
            if flight is None:
                return InputState(size=offset, closed=True)
            if not data and not eof:
                return await _give(guest, process_id, offset, data, eof=eof)
            # Until its answer: the size that it tells is this writer's alone.
            async with flight.writing:
                await self._claim(box, guest, flight, writer, offset)
                return await _give(guest, process_id, offset, data, eof=eof)

    async def _claim(self, box: Box, guest: Guest, flight: Flight, writer: str, offset: int) -> None:
        """Let this writer give from that offset on. Conflict: bytes from there on are another's."""
        newest, begins = flight.how.writer
        if writer == newest and offset >= begins:
            await flight.keep_writer()
            return
        state = await _input(guest, flight.process_id)
        if state is None or state.closed or offset > state.size:
            return  # it is not taken, and its answer says why
        if offset < state.size:
            raise another_wrote(offset, state.size, box.id)
        await self._core.runs.change_writer(box, flight, (writer, state.size))

    async def input_state(self, ref: str, process_id: str, writer: str = "") -> tuple[InputState, int]:
        """How much input was taken so far; from which offset on all of it was given by `writer`."""
        async with self._guest(ref) as (box, guest):
            flight = box.programs.get(process_id)
            state = None if flight is None else await _input(guest, process_id)
            if flight is None or state is None:
                return InputState(size=0, closed=True), 0
            newest, begins = flight.how.writer
            return state, min(begins, state.size) if writer == newest else state.size

    async def kill_left(self, box: Box, process_id: str) -> None:
        """Kill a program, or what it has left behind."""
        try:
            await box.running_guest().kill(process_id)
        except (NotFound, Unknown):  # what a dead keeper knew of is dead itself
            log.debug("nothing is known of process %s any more", process_id)
        except SandboxLost as error:
            raise box.end_told(error) from error

    def _how(self, box: Box, process_id: str, flight: Flight | None) -> How:
        if flight is not None:
            return flight.how
        step = self._core.steps.by_subject(box.id, process_id)
        if step is None:
            raise NotFound(f"sandbox {box.id} has no program {process_id!r}", sandbox_id=box.id)
        return how_of(step)

    async def resize(self, ref: str, process_id: str, size: Terminal) -> None:
        """Another size for its terminal. Nothing happens after its end."""
        size.check()
        async with self._guest(ref) as (box, guest):
            flight = box.programs.get(process_id)
            if self._how(box, process_id, flight).tty is None:
                raise InvalidState(f"{process_id} has no terminal; spawn it with tty", sandbox_id=box.id)
            if flight is not None:
                with suppress(NotFound, Conflict):  # it has just ended
                    await guest.resize(process_id, size)

    async def read(self, ref: str, process_id: str, stream: int, offset: int) -> OutputPiece:
        """A piece of what is kept of an output from an offset on, without waiting."""
        if stream not in (1, 2) or offset < 0:
            raise InvalidSpec.field("offset", offset, "0 or more, of stream 1 or 2")
        box = self._core.alive(ref)
        if box is not None and box.guest is not None and box.info.state == "running":
            with suppress(NotFound):
                async with self._guest(ref) as (_, guest):
                    return await guest.read_output(process_id, stream, offset, PIECE_BYTES)
        past = self._core.past(ref) if box is None else box.info
        return self._read_recorded(past, process_id, stream, offset)

    def _read_recorded(self, sandbox: SandboxInfo, process_id: str, stream: int, offset: int) -> OutputPiece:
        program, _ = self._recorded(sandbox, process_id)
        if program.result is None:
            return OutputPiece(stream=stream, offset=offset, data=b"", total=offset, ended=True)
        output = program.result.out if stream == 1 else program.result.err
        kept = ((at, data) for _, at, data in kept_output(output, stream, offset))
        return OutputPiece.first_of(stream, kept, output.total, ended=True)

    def follow(
        self, ref: str, process_id: str, sink: Sink, offsets: tuple[int, int], *, lossy: bool
    ) -> tuple[Flight, asyncio.Task[object]] | None:
        """Read along with a program in flight; the task ends when it does. None: it is not in flight."""
        box = self._core.alive(ref)
        flight = None if box is None else box.programs.get(process_id)
        if box is None or flight is None or box.guest is None:
            return None
        return flight, asyncio.ensure_future(self._follow(box, box.guest, process_id, sink, offsets, lossy=lossy))

    async def _follow(
        self, box: Box, guest: Guest, process_id: str, sink: Sink, offsets: tuple[int, int], *, lossy: bool
    ) -> None:
        with self._core.going_on(box):  # an open stream
            await guest.attach(process_id, sink=sink, offsets=offsets, lossy=lossy)


async def _input(guest: Guest, process_id: str) -> InputState | None:
    """How much input was taken so far; None: nobody knows of the program any more."""
    with suppress(NotFound):
        return (await guest.status(process_id)).input
    return None


async def _give(guest: Guest, process_id: str, offset: int, data: bytes, *, eof: bool) -> InputState:
    """Hand a piece on; what came of it, also when that takes long."""
    try:
        async with asyncio.timeout(INPUT_WAIT_S):
            return await guest.write_stdin(process_id, offset, data, eof=eof)
    except NotFound:
        return InputState(size=offset, closed=True)
    except (TimeoutError, Exhausted):
        return await _input(guest, process_id) or InputState(size=offset, closed=True)


def another_wrote(offset: int, size: int, sandbox_id: str | None = None) -> Conflict:
    """The error for a piece whose place another has taken."""
    return Conflict(
        f"another writer has written to this input: it is at {size}, this piece belongs at {offset}, and nothing of it "
        "was given now; ask where the input is (`process.stdin.locate()`), then write again",
        detail={"input_size": size, "offset": offset},
        sandbox_id=sandbox_id,
    )


async def launched(found: Flight | Answer) -> Answer | None:
    """Until a flight is known to have been launched (None), or its answer."""
    if not isinstance(found, Flight):
        return found
    await asyncio.wait((found.started, found.done), return_when=asyncio.FIRST_COMPLETED)
    return found.done.result() if found.done.done() else None


def shown(flight: Flight) -> Program:
    """A program in flight, or one that has just landed."""
    ended = flight.done.done()
    answer = flight.done.result() if ended else None
    return Program(
        id=flight.process_id,
        kind=flight.how.kind,
        state="ended" if ended else "running" if flight.launched else "starting",
        step=flight.step,
        command=flight.command,
        started_at=flight.started_at,
        tty=flight.how.tty is not None,
        stdin=flight.how.stdin,
        keepalive=flight.how.keepalive,
        result=decode_result(answer) if isinstance(answer, bytes) else None,
    )
