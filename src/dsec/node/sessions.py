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
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Final

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
    Unknown,
)
from dsec.model.processes import CommandSpec, How, Program, Session, SessionSpec, quoted
from dsec.model.specs import RunSpec
from dsec.model.states import Cause, RunOutcome, Usage
from dsec.node.box import Box
from dsec.node.core import Core, check_key, encode, value_of
from dsec.node.files import FileCalls
from dsec.node.plan import shown_command
from dsec.node.programs import Programs, launched
from dsec.node.runs import Flight, new_process_id, result_of
from dsec.node.steps import BEGUN, Answer, Step, content_hash

log = logging.getLogger("dsec.node.sessions")

# After a command was killed its shell says what it answered, unless it is busy itself: then it is killed too.
ANSWER_WITHIN_S: Final = 2.0
SIGKILL: Final = 9
_CONTROL_LINE_MAX: Final = 4096
_STATUS: Final = re.compile(rb"(\d{1,12}) (\d{1,3})\Z")
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
    stdin: str | None = None  # the file with what it reads
    ends_boot: float | None = None  # when (boot clock) its time is over


_decode_given = msgspec.msgpack.Decoder(Given).decode


class Shell:
    """What a node knows of a session's shell beside its program."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()  # first come, first served
        self.waiting = 0
        self.last = 0  # what the last command answered
        self.ends: tuple[int, ...] | None = None  # where the output of the next begins


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


class Border:
    """Finds the line on the control stream that ends a command. What else comes there is not believed."""

    def __init__(self, number: int) -> None:
        self._number = b"%d" % number
        self._line = b""
        self.answer: int | None = None
        self.end = 0

    def feed(self, offset: int, data: bytes) -> bool:
        """Whether the command has ended."""
        for at, byte in enumerate(data):
            if byte != 0x0A:
                self._line = (self._line + data[at : at + 1])[-_CONTROL_LINE_MAX:]
                continue
            found = _STATUS.match(self._line)
            self._line = b""
            if found is not None and found[1] == self._number:
                self.answer, self.end = int(found[2]) & 0xFF, offset + at + 1
                return True
        return False


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
        if session.state == "running":
            with suppress(NotFound):
                await box.running_guest().kill(session_id)
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
        session = await self.get(ref, session_id)
        if session.state == "ended":
            raise _over(session_id, session.exit_code)
        if found is not None:
            raise Unknown(f"the command under key {key!r} was begun; whether it ran is not known", sandbox_id=box.id)
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

    def resume(self, box: Box, step: Step) -> None:
        """After a restart of the agent: wait for a command that had been given, or find out that it was not."""
        assert step.extra is not None
        given = _decode_given(step.extra)
        command = Command(given.session, step.hash, step.step, step.begun_at, step.command)
        command.process_id = step.subject
        shell = box.shells.setdefault(given.session, Shell())
        self._core.runs.take_off(box, step.key, command, lambda: self._go_on(box, step.key, shell, command, given))

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
        text = script(spec.text(), number, shell.last, stdin)
        given = Given(
            session=command.session,
            number=number,
            offsets=shell.ends or status.totals,
            input_at=status.input.size,
            input_bytes=len(text),
            fence=fence,
            usage=status.usage,
            limits_hit=status.limits_hit,
            stdin=stdin,
            ends_boot=None if spec.timeout_s is None else self._core.clock.boot() + spec.timeout_s,
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
            with suppress(NotFound):
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
        began = self._core.clock.wall()
        timer: asyncio.TimerHandle | None = None
        if given.ends_boot is not None:
            left = max(0.0, given.ends_boot - self._core.clock.boot())
            timer = loop.call_later(left, command.end_early, "timeout")
        captures = tuple(Capture(limits.OUTPUT_HEAD_BYTES, limits.OUTPUT_TAIL_BYTES) for _ in range(2))
        border = Border(given.number)
        reading = asyncio.ensure_future(self._read(guest, command, captures, border))
        ending = asyncio.ensure_future(self._cut(guest, command, given.fence, border))
        start = loop.time()
        try:
            died = await reading
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
                    await self._files.remove(box.id, given.stdin.encode(), recursive=False)
        duration_s = loop.time() - start
        status: ProgramStatus | None = None
        if died is None:
            shell.last = border.answer or 0
            out, err = (base + c.total for base, c in zip(given.offsets, captures, strict=False))
            shell.ends = (out, err, border.end)
            with suppress(DsecError):
                status = await guest.status(command.session)
        cause = command.cut.result() if command.cut.done() else None
        outcome = _outcome(border, died, cut=cause, status=status, given=given, captures=captures)
        outcome = msgspec.structs.replace(outcome, started_at=began, duration_s=duration_s)
        return await self._core.runs.record(box, key, command, encode(result_of(command, outcome)))

    async def _read(
        self, guest: Guest, command: Command, captures: tuple[Capture, ...], border: Border
    ) -> RunOutcome | None:
        """Everything up to the border; the shell's own end, if that comes first."""

        async def sink(stream: int, offset: int, data: bytes) -> None:
            capture = captures[stream - 1]
            capture.skip(offset - capture.total)
            capture.append(data)
            if command.sink is not None and not command.detached:
                await command.sink(stream, offset, data)

        return await _up_to(border, guest, command, sink, (0, 0))

    async def _cut(self, guest: Guest, command: Command, fence: int, border: Border) -> None:
        """Once it is to end: kill what it has begun, then, if its shell is busy itself, the shell."""
        await asyncio.wait((command.cut,))  # not the future itself, which would be cancelled with us
        with suppress(DsecError):
            await guest.kill_fence(command.session, fence)
        await asyncio.sleep(ANSWER_WITHIN_S)
        if border.answer is None:
            with suppress(DsecError):
                await guest.kill(command.session)

    def follow(self, box: Box, command: Command, sink: Sink, offsets: tuple[int, int]) -> asyncio.Task[object]:
        """Read along with a command that another call has begun; ends with it."""
        return asyncio.ensure_future(self._follow(box, command, sink, offsets))

    async def _follow(self, box: Box, command: Command, sink: Sink, offsets: tuple[int, int]) -> None:
        await asyncio.wait((command.started, command.done), return_when=asyncio.FIRST_COMPLETED)
        await _up_to(Border(command.number), box.running_guest(), command, sink, offsets)

    async def _put_stdin(self, box: Box, command: Command, path: str, data: bytes) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield data

        await self._files.write(box.id, path.encode(), pieces(), mode=0o644, parents=False, exclusive=True)

    async def _why_not(self, box: Box, command: Command, error: DsecError | None) -> DsecError:
        """Why a command could not be given: nearly always its shell has ended."""
        flight = box.programs.get(command.session)
        if flight is not None:
            await asyncio.wait((flight.done,), timeout=ANSWER_WITHIN_S)
        session = await self.get(box.id, command.session)
        if session.state == "ended" or error is None:
            return _over(command.session, session.exit_code)
        return error


def script(text: bytes, number: int, last: int, stdin: str | None) -> bytes:
    """What a shell is given for a command.

    `eval` keeps a syntax error to the command; `command` keeps the shell alive where an error of a special built-in
    would end it. No braces: bash 5.2 takes them for words after a text whose quotes were open. The first line gives the
    command the `$?` of the one before; what stands before `&&` ends no shell and sets off no trap. The answer has a
    line of its own, whatever else was written there.
    """
    before = b"(exit %d) && :\n" % last if last else b""
    source = quoted((stdin or "/dev/null").encode())
    return b"%s\\command eval %s <%s 3>&-\n\\command printf '\\n%%d %%d\\n' %d \"$?\" >&3\n" % (
        before,
        quoted(text + b"\n"),
        source,
        number,
    )


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


def _over(session_id: str, exit_code: int | None) -> InvalidState:
    how = "" if exit_code is None else f" (its shell answered {exit_code})"
    return InvalidState(
        f"session {session_id} has ended{how}; start another", detail={"session": session_id, "exit_code": exit_code}
    )
