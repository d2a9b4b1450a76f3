"""Sessions: a shell that lives on, and the commands it is given, one after the other.

The shell reads its commands from an input that stays open. After each it writes one line to its descriptor 3, which no
command has: what it answered. The backend tells of descriptor 3 only after everything that was written to standard
output and error before, so that line is the exact border between the output of two commands. Before each command a
*fence* is made: what the command begins can be killed by itself, and the shell with its earlier jobs lives on.

A session is its shell: its id is that of the program. A command is a step like a run; where its output begins is
written down before it is given, so an agent that is started again goes on waiting for it, and gives none twice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from dsec.backends.base import Guest, ProgramStatus, Sink
from dsec.backends.capture import Capture
from dsec.model import limits
from dsec.model.errors import (
    DsecError,
    Exhausted,
    InvalidState,
    NotFound,
    ProgramNotStarted,
    SandboxLost,
    Unavailable,
    Unknown,
)
from dsec.model.processes import CommandSpec, How, Program, Session, SessionSpec
from dsec.model.specs import RunSpec
from dsec.model.states import Cause, RunOutcome, Usage
from dsec.node.box import Box
from dsec.node.core import Core, check_key, encode, value_of
from dsec.node.files import FileCalls, remove, write
from dsec.node.plan import shown_command
from dsec.node.programs import Programs, launched
from dsec.node.runs import Flight, decode_result, new_process_id, result_of
from dsec.node.shelltext import GIVE_UP, Border, Lack, border_behind, script
from dsec.node.steps import BEGUN, Answer, Step, content_hash

log = logging.getLogger("dsec.node.sessions")

# After a command was cut its shell says what it answered, unless it cannot be reached: then it is killed too.
ANSWER_WITHIN_S: Final = 2.0
# A shell that waits for nothing gives up by itself. Until then nothing is killed: not what it needs for that.
GIVES_UP_WITHIN_S: Final = 0.05
ASKED_AGAIN_S: Final = 0.25
# Before a kill is asked for again that a runtime did not answer.
KILL_AGAIN_S: Final = 0.1
SIGKILL: Final = 9
SHELLS: Final = (("bash", "--noprofile", "--norc"), ("sh",))


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """A command as it is written down before it is given: its place in the shell's streams, and its number."""

    session: str
    number: int
    offsets: tuple[int, ...]
    input_at: int
    input_bytes: int
    fence: int
    usage: Usage
    limits_hit: tuple[str, ...]
    met: dict[str, int] = {}
    stdin: str | None = None  # the file with what it reads
    ends_boot: float | None = None  # when (boot clock) its time is over
    timeout_s: float | None = None
    first: bool = False  # it says when its shell may be told to give up
    began_at: float = 0.0  # wall clock
    began_boot: float = 0.0


_decode_given = msgspec.msgpack.Decoder(Given).decode


class Shell:
    """What a node knows of a session's shell beside its program."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()  # first come, first served
        self.waiting = 0
        self.last = 0  # what the last command answered
        self.ends: tuple[int, ...] | None = None  # where the output of the next begins
        self.minds = False  # it is known to mind being told to give up


class Command(Flight):
    """A command between its beginning and its recorded end."""

    __slots__ = ("base", "cut", "number", "session")

    def __init__(self, session: str, digest: bytes, step: int, at: float, command: str) -> None:
        how = How(kind="command")
        super().__init__(digest, new_process_id(), step, at, command, how=how)
        self.session = session
        self.number = 0
        self.base: tuple[int, ...] = (0, 0, 0)
        # Set to what ends it early: `killed` or `timeout`.
        self.cut: asyncio.Future[Cause] = self.done.get_loop().create_future()

    def end_early(self, cause: Cause) -> None:
        """Its time is over, or it is not wanted any more."""
        if not self.cut.done():
            self.cut.set_result(cause)


class Sessions:
    """The sessions of a node."""

    def __init__(
        self, core: Core, ready: Callable[[str], Awaitable[Box]], programs: Programs, files: FileCalls
    ) -> None:
        self._core = core
        self._ready = ready
        self._programs = programs
        self._files = files

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def start(self, ref: str, spec: SessionSpec, key: str | None = None) -> Session:
        """A shell that waits for commands. Under a key once. ProgramNotStarted: no such shell, directory or user."""
        spec.check()
        box = await self._ready(ref)
        box.running_guest()
        if sum(flight.how.kind == "session" for flight in box.programs.values()) >= limits.SESSIONS_MAX:
            raise Exhausted(
                f"sandbox {box.id} has {limits.SESSIONS_MAX} sessions, the most allowed; close one",
                detail={"resource": "sessions", "limit": limits.SESSIONS_MAX},
            )
        shells = SHELLS if spec.shell is None else ((spec.shell,),)
        key = check_key(key)
        for number, argv in enumerate(shells):
            try:
                return await self._start(box, spec, argv, key if number == 0 else f"{key[:120]}.sh")
            except ProgramNotStarted as error:
                if number + 1 == len(shells) or error.detail.get("field") != "command":
                    raise
        raise AssertionError("no shell to try")

    async def _start(self, box: Box, spec: SessionSpec, argv: tuple[str, ...], key: str) -> Session:
        how = How(kind="session", stdin=True, control=True, keepalive=spec.keepalive)
        run = RunSpec(command=list(argv), cwd=spec.cwd, env=spec.env, user=spec.user)
        found = self._core.runs.start(box, run, key, content_hash("session", [spec, list(argv)]), how=how)
        answer = await launched(found)
        if isinstance(answer, DsecError):
            value_of(answer)
        if isinstance(found, Flight):
            return await self.get(box.id, found.process_id)
        step = self._core.steps.find(box.id, key, content_hash("session", [spec, list(argv)]), "session")
        assert step is not None
        return await self.get(box.id, step.subject)

    async def get(self, ref: str, session_id: str) -> Session:
        """One session, alive or ended."""
        box = self._core.alive(ref)
        scope = self._core.past(ref).id if box is None else box.id
        program = await self._programs.find(ref, session_id)
        if program.kind != "session":
            raise NotFound(f"sandbox {scope} has no session {session_id!r}", sandbox_id=scope)
        return self._shown(scope, box, program)

    def _shown(self, scope: str, box: Box | None, program: Program) -> Session:
        shell = None if box is None else box.shells.get(program.id)
        sql = "SELECT extra FROM steps WHERE scope = ? AND kind = 'command'"
        given = [row[0] for row in self._core.store.read(sql, (scope,))]
        return Session(
            id=program.id,
            program=program.id,
            shell=program.command,
            state="ended" if program.state == "ended" else "running",
            commands=sum(_decode_given(extra).session == program.id for extra in given if extra),
            busy=shell is not None and shell.turn.locked(),
            started_at=program.started_at,
            exit_code=None if program.result is None else program.result.exit_code,
        )

    async def list(self, ref: str) -> list[Session]:
        """Those that are alive."""
        box = await self._ready(ref)
        box.running_guest()
        alive = [flight.process_id for flight in box.programs.values() if flight.how.kind == "session"]
        return [await self.get(box.id, id_) for id_ in alive]

    async def close(self, ref: str, session_id: str) -> Session:
        """End it, with all it has begun. Nothing to do when it has ended."""
        box = await self._ready(ref)
        session = await self.get(ref, session_id)
        await self._programs.kill_left(box, session_id)
        if session.state == "running":
            flight = box.programs.get(session_id)
            if flight is not None:
                await flight.answer()
            session = await self.get(ref, session_id)
        return session

    # -- commands -----------------------------------------------------------------------------------------------------

    async def run(
        self, ref: str, session_id: str, spec: CommandSpec, key: str | None = None, sink: Sink | None = None
    ) -> Flight | Answer:
        """Begin a command, join the one under the key, or give its recorded answer."""
        spec.check()
        key, digest = check_key(key), content_hash("command", [session_id, spec])
        box = self._core.alive(ref)
        found = self._core.steps.find(self._core.past(ref).id if box is None else box.id, key, digest, "command")
        if box is not None and (flight := box.flights.get(key)) is not None:
            return flight
        if found is not None and found.state != BEGUN:
            return self._core.steps.answer(found)
        box = await self._ready(ref)
        box.running_guest()
        if found is not None:
            # Begun and nobody waits: its end could not be told. Where its output begins is known, and read again.
            return self.resume(box, found)
        session = await self.get(ref, session_id)
        if session.state == "ended":
            raise self._over(box.id, session)
        shell = box.shells.setdefault(session_id, Shell())
        if shell.waiting >= limits.COMMANDS_WAITING_MAX:
            raise Exhausted(
                f"{limits.COMMANDS_WAITING_MAX} commands wait for session {session_id}, the most allowed",
                detail={"resource": "commands", "limit": limits.COMMANDS_WAITING_MAX},
            )
        shown = shown_command(RunSpec(command=spec.command, argv=spec.argv))
        command = Command(session_id, digest, box.next_step, self._core.clock.wall(), shown)
        command.sink = sink
        box.next_step += 1
        self._core.runs.take_off(box, key, command, lambda: self._carry_out(box, key, shell, command, spec))
        return command

    def resume(self, box: Box, step: Step) -> Command:
        """Nobody waits for it: wait for a command that had been given, or find out that it was not."""
        assert step.extra is not None
        given = _decode_given(step.extra)
        command = Command(given.session, step.hash, step.step, step.begun_at, step.command)
        command.process_id = step.subject
        shell = box.shells.setdefault(given.session, Shell())
        self._core.runs.take_off(box, step.key, command, lambda: self._go_on(box, step.key, shell, command, given))
        return command

    async def _carry_out(self, box: Box, key: str, shell: Shell, command: Command, spec: CommandSpec) -> Answer:
        shell.waiting += 1
        try:
            async with shell.turn:
                if command.cut.done():
                    raise InvalidState(f"the command was {command.cut.result()} before its turn", sandbox_id=box.id)
                return await self._in_turn(box, key, shell, command, spec)
        finally:
            shell.waiting -= 1

    async def _in_turn(self, box: Box, key: str, shell: Shell, command: Command, spec: CommandSpec) -> Answer:
        guest = box.running_guest()
        try:
            fence = await guest.fence(command.session)
            status = await guest.status(command.session)
        except SandboxLost as error:
            raise box.end_told(error) from error
        except DsecError as error:
            raise await self._why_not(box, command, error) from error
        if status.ended or status.input is None or status.input.closed:
            raise await self._why_not(box, command, None)
        number = secrets.randbelow(10**12)
        stdin = None if spec.stdin is None else f"/dev/shm/.dsec-{number}"
        text = script(spec.text(), number, shell.last, stdin, first=not shell.minds)
        given = Given(
            session=command.session,
            number=number,
            offsets=shell.ends or status.totals,
            input_at=status.input.size,
            input_bytes=len(text),
            fence=fence,
            usage=status.usage,
            limits_hit=status.limits_hit,
            met=status.met,
            stdin=stdin,
            ends_boot=None if spec.timeout_s is None else self._core.clock.boot() + spec.timeout_s,
            timeout_s=spec.timeout_s,
            first=not shell.minds,
            began_at=self._core.clock.wall(),
            began_boot=self._core.clock.boot(),
        )
        if stdin is not None:
            await self._put_stdin(box, command, stdin, spec.stdin or b"")
        begin = self._core.steps.begin(
            box.id,
            key,
            command.hash,
            "command",
            step=command.step,
            subject=command.process_id,
            command=command.command,
            extra=encode(given),
        )
        await self._core.store.commit(begin, durable=False)
        command.number, command.base = number, given.offsets
        command.launch()
        giving = asyncio.ensure_future(_give(guest, command.session, given.input_at, text))
        try:
            return await self._finish(box, key, shell, command, given)
        finally:
            giving.cancel()
            await asyncio.gather(giving, return_exceptions=True)

    async def _go_on(self, box: Box, key: str, shell: Shell, command: Command, given: Given) -> Answer | None:
        async with shell.turn:
            guest = box.running_guest()
            command.number, command.base = given.number, given.offsets
            taken: int | None = None
            # How its shell ended may not be known either: then nor is that of the command, see `_finish`.
            with suppress(NotFound, Unknown):
                status = await guest.status(command.session)
                taken = None if status.input is None else status.input.size
            if taken == given.input_at:
                await self._core.store.commit(self._core.steps.drop(box.id, key), durable=False)
                return None  # nothing of it was given
            command.launch()
            if taken is not None and taken < given.input_at + given.input_bytes:
                # Half of its text: the rest is lost, and the shell would take the next command for it.
                with suppress(NotFound):
                    await guest.kill(command.session)
                error = Unknown(f"command {command.process_id} was cut short while it was given; its session is over")
                return await self._core.runs.record(box, key, command, error)
            return await self._finish(box, key, shell, command, given)

    async def _finish(self, box: Box, key: str, shell: Shell, command: Command, given: Given) -> Answer:
        guest, loop = box.running_guest(), asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None
        if given.ends_boot is not None:
            left = max(0.0, given.ends_boot - self._core.clock.boot())
            # While nobody was there it may have ended in time.
            if left or not await _has_answered(guest, command):
                timer = loop.call_later(left, command.end_early, "timeout")
        captures = tuple(Capture(limits.OUTPUT_HEAD_BYTES, limits.OUTPUT_TAIL_BYTES) for _ in range(2))
        minds = asyncio.Event()
        if not given.first:
            minds.set()
        border = Border(given.number, minds.set)
        reading = asyncio.ensure_future(self._read(guest, command, captures, border))
        ending = asyncio.ensure_future(self._cut(guest, command, given.fence, minds))
        try:
            died = await reading
            if died is None and command.cut.done():
                border, died = await self._after_cut(guest, command, given, captures)
            if died is not None and command.cut.done():
                # By itself, or with a program it had become; what that had begun is there yet.
                await _insist(lambda: guest.kill(command.session))
        except SandboxLost as error:
            return await self._core.runs.record(box, key, command, box.end_told(error))
        except (NotFound, Unknown) as error:
            unknown = Unknown(f"the end of command {command.process_id} is not known: {error.message}")
            return await self._core.runs.record(box, key, command, unknown)
        finally:
            if timer is not None:
                timer.cancel()
            reading.cancel()
            ending.cancel()
            await asyncio.gather(reading, ending, return_exceptions=True)
            if given.stdin is not None:
                with suppress(DsecError):
                    await self._files.do(box.id, remove(given.stdin.encode()))
        duration_s = self._core.clock.boot() - given.began_boot
        status: ProgramStatus | None = None
        if died is None:
            shell.minds = True
            shell.last = 128 + SIGKILL if command.cut.done() else border.answer or 0
            out, err = (base + c.total for base, c in zip(given.offsets, captures, strict=False))
            shell.ends = (out, err, border.end)
            if border.not_begun is not None:
                return await self._core.runs.record(box, key, command, _not_begun(box, given, border.not_begun))
            with suppress(DsecError):
                status = await guest.status(command.session)
        cause = command.cut.result() if command.cut.done() else None
        outcome = _outcome(border, died, cut=cause, status=status, given=given, captures=captures)
        outcome = msgspec.structs.replace(outcome, started_at=given.began_at, duration_s=duration_s)
        result = msgspec.structs.replace(result_of(command, outcome), session_ended=died is not None)
        return await self._core.runs.record(box, key, command, encode(result))

    async def _read(
        self, guest: Guest, command: Command, captures: tuple[Capture, ...], border: Border
    ) -> RunOutcome | None:
        """Everything more up to the border; the shell's own end, if that comes first."""
        out, err = (capture.total for capture in captures)

        async def sink(stream: int, offset: int, data: bytes) -> None:
            capture = captures[stream - 1]
            capture.skip(offset - capture.total)
            capture.append(data)
            if command.sink is not None and not command.detached:
                await command.sink(stream, offset, data)

        return await _up_to(border, guest, command, sink, (out, err))

    async def _cut(self, guest: Guest, command: Command, fence: int, minds: asyncio.Event) -> None:
        """Once it is to end: its shell gives up the text, and what it has begun is killed.

        In this order: a shell whose program is killed first would begin the next one. This is cancelled once the shell
        has answered; one that has not in time is killed.
        """
        await asyncio.wait((command.cut,))  # not the future itself, which would be cancelled with us
        with suppress(TimeoutError):
            await asyncio.wait_for(minds.wait(), ANSWER_WITHIN_S)
            await _insist(lambda: guest.kill(command.session, GIVE_UP))
            await asyncio.sleep(GIVES_UP_WITHIN_S)
            await _insist(lambda: guest.kill_fence(command.session, fence))
            for _ in range(round(ANSWER_WITHIN_S / ASKED_AGAIN_S)):
                await asyncio.sleep(ASKED_AGAIN_S)
                # Its text may only have come after the signal.
                await _insist(lambda: guest.kill(command.session, GIVE_UP))
        await _insist(lambda: guest.kill(command.session))

    async def _after_cut(
        self, guest: Guest, command: Command, given: Given, captures: tuple[Capture, ...]
    ) -> tuple[Border, RunOutcome | None]:
        """The border behind a cut command: its shell may have given up before what it has begun was killed.

        What the shell has to say of that is of this command and not of the next.
        """
        number = secrets.randbelow(10**12)
        border = Border(number)
        await _insist(lambda: guest.kill_fence(command.session, given.fence))
        with suppress(DsecError):
            status = await guest.status(command.session)
            if status.input is not None:
                await _give(guest, command.session, status.input.size, border_behind(number))
        # A shell that was not reached, or does not answer any more, is killed by `_cut`.
        return border, await self._read(guest, command, captures, border)

    def follow(self, box: Box, command: Command, sink: Sink, offsets: tuple[int, int]) -> asyncio.Task[object]:
        """Read along with a command that another call has begun; ends with it."""
        return asyncio.ensure_future(self._follow(box, command, sink, offsets))

    async def _follow(self, box: Box, command: Command, sink: Sink, offsets: tuple[int, int]) -> None:
        await asyncio.wait((command.started, command.done), return_when=asyncio.FIRST_COMPLETED)
        await _up_to(Border(command.number), box.running_guest(), command, sink, offsets)

    async def _put_stdin(self, box: Box, command: Command, path: str, data: bytes) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield data

        await self._files.do(box.id, write(path.encode(), pieces(), mode=0o644, exclusive=True))

    async def _why_not(self, box: Box, command: Command, error: DsecError | None) -> DsecError:
        """Why a command could not be given: nearly always its shell has ended."""
        flight = box.programs.get(command.session)
        if flight is not None:
            await asyncio.wait((flight.done,), timeout=ANSWER_WITHIN_S)
        session = await self.get(box.id, command.session)
        if session.state == "ended" or error is None:
            return self._over(box.id, session)
        return error

    def _over(self, scope: str, session: Session) -> InvalidState:
        """The error of a call that comes after the end. What ended it may have been the cut of its last command."""
        how = "" if session.exit_code is None else f" (its shell answered {session.exit_code})"
        detail: dict[str, Any] = {"session": session.id, "exit_code": session.exit_code}
        if (found := self._cut_last(scope, session.id)) is not None:
            given, cause = found
            after = f" after its timeout of {given.timeout_s:g} s" if given.timeout_s and cause == "timeout" else ""
            how = f": its last command was stopped{after}, and its shell did not come back"
            detail["cause"] = cause
        elif session.exit_code is not None and not session.commands:
            how = f": its shell, {session.shell}, ended with {session.exit_code} before any command: is it a shell?"
        way = "start another, under another key if it has one"
        return InvalidState(f"session {session.id} has ended{how}; {way}", detail=detail)

    def _cut_last(self, scope: str, session: str) -> tuple[Given, Cause] | None:
        """The last command of a session and what ended it early, if the shell ended with it."""
        for step in self._core.steps.of_kind(scope, "command"):
            if step.extra is None or (given := _decode_given(step.extra)).session != session:
                continue
            answer = self._core.steps.answer(step) if step.state != BEGUN else None
            if not isinstance(answer, bytes):
                return None
            result = decode_result(answer)
            return (given, result.cause) if result.session_ended and result.cause in ("timeout", "killed") else None
        return None


async def _insist(kill: Callable[[], Awaitable[None]]) -> None:
    """Until it is done, or there is nothing to be killed any more: what a runtime that died meanwhile was asked for,
    the next may know nothing of.
    """
    while True:
        try:
            return await kill()
        except (Unknown, Unavailable) as error:
            log.info("asked for again: %s", error)
            await asyncio.sleep(KILL_AGAIN_S)
        except DsecError:
            return


def _not_begun(box: Box, given: Given, lacks: Lack) -> ProgramNotStarted:
    if lacks == "stdin":
        text = f"cannot open {given.stdin or '/dev/null'}, which the command was to read: nothing ran. Programs of the "
        text += "sandbox can remove it; `run` needs it not"
    else:
        text = "may not have the descriptors that it needs to be given a command: nothing ran. `ulimit -n` of at least "
        text += "64 in a session, or in a subshell"
    return ProgramNotStarted(f"the session's shell {text}", detail={"field": lacks}, sandbox_id=box.id)


async def _up_to(
    border: Border, guest: Guest, command: Command, sink: Sink, offsets: tuple[int, int]
) -> RunOutcome | None:
    """Read a command's output, at its own offsets, up to the border; the shell's own end, if that comes first."""
    base, reached = command.base, asyncio.Event()

    async def own(stream: int, offset: int, data: bytes) -> None:
        if reached.is_set():
            return
        if stream != 3:
            await sink(stream, offset - base[stream - 1], data)
        elif border.feed(offset, data):
            reached.set()

    at = (base[0] + offsets[0], base[1] + offsets[1], base[2])
    attached = asyncio.ensure_future(guest.attach(command.session, sink=own, offsets=at))
    over = asyncio.ensure_future(reached.wait())
    try:
        await asyncio.wait((attached, over), return_when=asyncio.FIRST_COMPLETED)
        return None if reached.is_set() else await attached
    finally:
        over.cancel()
        attached.cancel()
        await asyncio.gather(attached, over, return_exceptions=True)


async def _has_answered(guest: Guest, command: Command) -> bool:
    """Whether its shell has said by now what it answered."""
    border, at = Border(command.number), command.base[2]
    with suppress(DsecError):  # who reads its output learns why
        while (piece := await guest.read_output(command.session, 3, at, limits.OUTPUT_TAIL_BYTES)).data:
            if border.feed(piece.offset, piece.data):
                return True
            at = piece.offset + len(piece.data)
    return False


async def _give(guest: Guest, session: str, offset: int, text: bytes) -> None:
    for start in range(0, len(text), limits.INPUT_PIECE_MAX_BYTES):
        piece = text[start : start + limits.INPUT_PIECE_MAX_BYTES]
        try:
            state = await guest.write_stdin(session, offset + start, piece, eof=False)
        except DsecError as error:  # its end is seen by whoever reads
            log.debug("session %s took no more: %s", session, error)
            return
        if state.closed:
            return


def _outcome(
    border: Border,
    died: RunOutcome | None,
    *,
    cut: Cause | None,
    status: ProgramStatus | None,
    given: Given,
    captures: tuple[Capture, ...],
) -> RunOutcome:
    out, err = (capture.output() for capture in captures)
    hit = set(died.limits_hit if died else status.limits_hit if status else ()) - set(given.limits_hit) - {"output"}
    # What an earlier command of the session has met too is known by its count.
    hit |= {name for name, count in (status.met if status else {}).items() if count > given.met.get(name, 0)}
    hit |= {"memory"} if died and died.cause == "oom" else set()
    if out.dropped_bytes or err.dropped_bytes:
        hit.add("output")
    used = died.usage if died else status.usage if status else given.usage
    usage = Usage(
        cpu_user_s=max(0.0, used.cpu_user_s - given.usage.cpu_user_s),
        cpu_system_s=max(0.0, used.cpu_system_s - given.usage.cpu_system_s),
        memory_peak_bytes=used.memory_peak_bytes,
    )
    exit_code, signal = (died.exit_code, died.signal) if died else (border.answer or 0, None)
    cause: Cause = died.cause if died else "exited"
    if cut is not None:
        exit_code, signal, cause = 128 + SIGKILL, SIGKILL, cut
    elif not died and "memory" in hit and exit_code == 128 + SIGKILL:
        cause, signal = "oom", SIGKILL
    return RunOutcome(
        exit_code=exit_code,
        cause=cause,
        signal=signal,
        limits_hit=tuple(sorted(hit)),
        out=out,
        err=err,
        usage=usage,
    )
