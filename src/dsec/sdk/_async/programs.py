"""Programs that are talked to: `spawn`, `process`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakSet

from dsec.model import limits
from dsec.model.errors import (
    Conflict,
    DeadlineExceeded,
    DsecError,
    InvalidState,
    NodeUnreachable,
    NotFound,
    SandboxLost,
)
from dsec.model.ids import check_key, new_key
from dsec.model.processes import InputState, Program, SpawnSpec
from dsec.model.states import RunResult
from dsec.sdk import codec, programs
from dsec.sdk._async.net import finish, sleep
from dsec.sdk._async.output import AsyncFollow, AsyncOutput
from dsec.sdk._async.transport import AsyncTransport
from dsec.sdk._async.writer import AsyncWriter, Left
from dsec.sdk.http1 import Broken, Garbage
from dsec.sdk.keywords import explained
from dsec.sdk.values import seconds

if TYPE_CHECKING:
    from dsec.sdk._async.attach import AsyncAttachment
    from dsec.sdk._async.client import AsyncClient
    from dsec.sdk._async.lines import AsyncLines
    from dsec.sdk.lines import Line, Pattern

_EMPTY: Final = codec.encode({})
# How long one question for a program's end may stay open; then it is asked anew.
_WAIT_S: Final = 20.0
# Before input is offered again of which nothing was taken.
_INPUT_PAUSE_S: Final = 0.05


@explained
class AsyncInput:
    """The standard input of a program.

    Every piece says where it belongs, so that a broken connection neither loses nor doubles a byte. A write that was
    cancelled, or ended by NodeUnreachable, counts up to `offset`; what was on its way goes first with the next write.
    One handle writes at a time: Conflict when another has written meanwhile. Then nothing of a piece is taken (but of
    one that was ended by NodeUnreachable it is not known), and the next write goes where the input is by then.
    """

    def __init__(self, transport: AsyncTransport, program: str, offset: int | None, writer: AsyncWriter) -> None:
        self._transport = transport
        self._program = program
        self._path = f"{program}/stdin"
        self._writer = writer
        # Where what is pending begins; None: not known before the server was asked.
        self._offset = offset
        self._pending = b""
        self._closed = False

    @property
    def offset(self) -> int | None:
        """Where the next byte written goes; None: not known before the first write of a handle that was found again."""
        return self._writer.reached(self)

    def reached(self) -> int | None:
        """As of any channel of its writer."""
        return None if self._offset is None else self._offset + len(self._pending)

    async def settle(self) -> Left:
        """As of any channel of its writer."""
        await self._flush()
        return self._offset, b""

    async def _come(self) -> None:
        left = await self._writer.left(self)
        if left is not None:
            self._offset, self._pending = left
        self._writer.begin(self)

    async def write(self, data: str | bytes | bytearray | memoryview) -> None:
        """Give the program all of `data`: returns once it is taken, which waits while the program reads nothing.

        InputClosed (a BrokenPipeError): nobody reads it any more.
        """
        view = memoryview(programs.input_bytes(data))
        async with self._writer.lock:
            if self._closed:
                raise programs.closed_here(self._program)
            await self._come()
            await self._flush()
            for start in range(0, len(view), programs.INPUT_BYTES):
                self._pending = bytes(view[start : start + programs.INPUT_BYTES])
                await self._flush()

    async def close(self) -> None:
        """The end of the input, once the program has read what was written. Can be repeated.

        For a terminal there is none: write b"\\x04" (^D).
        """
        async with self._writer.lock:
            if not self._closed:
                await self._come()
                await self._flush(eof=True)
                self._closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def locate(self) -> int:
        """Ask where the input is: before writing to a program that others write to as well."""
        async with self._writer.lock:
            await self._come()
            await self._flush()
            self._offset = (await self._send(0, b"", eof=False)).size
            return self._offset

    async def _flush(self, *, eof: bool = False) -> None:
        if self._offset is None:
            self._offset = (await self._send(0, b"", eof=False)).size
        while self._pending or eof:
            state = await self._give(self._offset, eof=eof)
            taken = state.size - self._offset
            if state.closed and taken < len(self._pending):
                self._pending = b""
                raise programs.nobody_reads(self._program, state.size)
            if (taken > len(self._pending) and not state.closed) or taken < 0:
                self._pending, self._offset = b"", state.size
                raise programs.another_wrote(state.size)
            self._pending = self._pending[taken:]
            self._offset = state.size
            if not self._pending:
                return
            if not taken:
                await sleep(_INPUT_PAUSE_S)

    async def _give(self, offset: int, *, eof: bool) -> InputState:
        try:
            return await self._send(offset, self._pending, eof=eof)
        except NodeUnreachable:
            raise
        except DsecError:
            # Refused: it did not come in.
            self._pending, self._offset = b"", None
            raise

    async def _send(self, offset: int, data: bytes, *, eof: bool) -> InputState:
        path = self._path + codec.query(offset=offset, eof=eof, writer=self._writer.id)
        return await self._transport.call("POST", path, InputState, body=data, media=codec.OCTETS)


@explained
class AsyncProcess:
    """A handle on a program that a call has started; `spawn` and `process` give it.

    Leaving it as a context manager kills the program with all it has started. It pickles to the URL, the sandbox and
    its id.
    """

    def __init__(
        self,
        client: AsyncClient,
        sandbox_id: str,
        program_id: str,
        *,
        input_offset: int | None = None,
        spec: SpawnSpec | None = None,
    ) -> None:
        self._client = client
        self._sandbox_id = sandbox_id
        self._id = program_id
        self._path = f"/v1/sandboxes/{codec.quote(sandbox_id)}/processes/{codec.quote(program_id)}"
        self._input_offset = input_offset
        self._writer = AsyncWriter()
        # What is known of how it was started; None: nothing before it is asked.
        self._tty = None if spec is None else spec.tty is not None
        self._spool_bytes = None if spec is None else spec.spool_bytes
        self._waited = (0, 0)  # where `wait_for` goes on in each stream
        self._found: Line | None = None  # the last line that it returned
        # Those that were made here and are still held: one that is not read on holds the program back.
        self._readers: WeakSet[AsyncFollow] = WeakSet()

    @property
    def id(self) -> str:
        """Its id within its sandbox."""
        return self._id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._id} in {self._sandbox_id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._client.url, self._sandbox_id, self._id)

    @cached_property
    def stdin(self) -> AsyncInput:
        """Its standard input, if it was spawned with one."""
        return AsyncInput(self._client.transport, self._path, self._input_offset, self._writer)

    @cached_property
    def stdout(self) -> AsyncOutput:
        """Its standard output; of a program with a terminal all of its output."""
        return AsyncOutput(self, 1)

    @cached_property
    def stderr(self) -> AsyncOutput:
        """Its standard error; empty for a program with a terminal, which has one output."""
        return AsyncOutput(self, 2)

    async def output(self, offset: int = 0, *, stream: int | str = 1) -> bytes:
        """What is kept of stdout (`stream=2` or "stderr": of stderr) now, from an offset on, without waiting for more.

        InvalidSpec: there is no such stream.
        """
        which = self.stdout if programs.stream_number(stream) == 1 else self.stderr
        return (await which.located(programs.one_offset(offset)))[1]

    def follow(
        self,
        offsets: tuple[int, int] = (0, 0),
        *,
        wait: bool = True,
        lossy: bool = False,
        on_broken: Callable[[bool], object] | None = None,
    ) -> AsyncFollow:
        """Both streams as they come, in one iteration of `(stream, data)`; afterwards its `result` is there.

        `wait=False`: only what is kept now. A slow reader holds the program back; with `lossy` it misses bytes instead.
        `on_broken(True)`: the connection is lost and is being made again; `on_broken(False)`: it is there.
        """
        offsets = programs.pair(offsets)
        made = AsyncFollow(self._client.transport, self._path, offsets, wait=wait, lossy=lossy, on_broken=on_broken)
        self._readers.add(made)
        return made

    def lines(self, offsets: tuple[int, int] = (0, 0), *, lossy: bool = False) -> AsyncLines:
        """Both streams by whole lines as they come: an iterator of `Line`, a str with `stream`, `data` and `ending`.

        A line comes once its newline is there, or the output has ended; one of more than 1 MiB comes in pieces. Each
        call reads from the first byte that is kept (or from `offsets`), and takes nothing from another. Who keeps one
        and does not read it holds the program back as soon as that is further than what is kept: `close()` it, or use
        it as a context manager; with `lossy` it misses bytes instead.
        """
        return self.follow(offsets, lossy=lossy).lines()

    async def wait_for(self, pattern: Pattern, timeout_s: float | None = None) -> Line:
        """The first line of its output that has the text `pattern`, or in which `re.compile(...)` finds something.

        The next call with this handle goes on behind that line in its stream; what had come before is looked at, too.
        ProgramEnded: it ended without such a line; DeadlineExceeded after `timeout_s`: it goes on. Both show the last
        output. A prompt without a newline is no line: `attach` is for those. InvalidSpec: a text with a newline.
        """
        from dsec.sdk._async.lines import wait_for  # few need it, and what it needs

        found = await wait_for(self, pattern, timeout_s, self._waited, self._found)
        first, second = self._waited
        ends = (max(first, found.end), second) if found.stream == 1 else (first, max(second, found.end))
        self._waited, self._found = ends, found
        return found

    def attach(
        self,
        offsets: tuple[int, int] = (0, 0),
        *,
        lossy: bool = False,
        on_broken: Callable[[bool], object] | None = None,
    ) -> AsyncAttachment:
        """As `follow`, and its input, its terminal's size and signals for it over the same connection."""
        from dsec.sdk._async.attach import AsyncAttachment  # few need it, and what it needs

        offsets = programs.pair(offsets)
        made = AsyncAttachment(
            self._client.transport, self._path, offsets, writer=self._writer, lossy=lossy, on_broken=on_broken
        )
        self._readers.add(made)
        return made

    async def info(self) -> Program:
        """What its node knows of it now; its result, once it has ended."""
        return await self._client.transport.call("GET", self._path, Program)

    async def wait(self, timeout_s: float | None = None) -> RunResult:
        """How it ended, once it has. DeadlineExceeded after `timeout_s`: the program goes on. Nothing is killed.

        Where a reader of this handle, which is not read on, holds the program back, the error says so.
        """
        seconds(timeout_s)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _WAIT_S if end is None else min(max(end - time.monotonic(), 0.0), _WAIT_S)
            query = codec.query(timeout_s=f"{left:.3f}")
            program = await self._client.transport.call("POST", f"{self._path}/wait{query}", Program)
            if program.result is not None:
                return program.result
            if program.state == "ended":
                raise Conflict(f"{self._id} has ended, and its result is not known", detail={"id": self._id})
            if end is not None and time.monotonic() >= end:
                text = f"{self._id} has not ended after {timeout_s:g} s; {await self._held() or 'it goes on'}"
                raise DeadlineExceeded(text)

    async def _held(self) -> str:
        """What to say of a reader of this handle that is so far behind that it holds the program back."""
        kept = limits.SPOOL_BYTES if self._spool_bytes is None else max(self._spool_bytes, limits.MIB)
        for reader in list(self._readers):
            for stream, at in reader.standing().items():
                try:
                    # Of what is that far ahead there is something only when the reader is left behind.
                    _, ahead = await AsyncOutput(self, stream).located(at + kept)
                except DsecError:
                    return ""
                if ahead:
                    holds = "may hold it back" if self._spool_bytes is None else "holds it back"
                    return (
                        f"a reader of this handle (an iterator of its output, lines(), follow() or attach()) {holds}: "
                        f"it stands at byte {at} of stream {stream}, more than {kept} bytes behind and not read on; "
                        "read it to its end, close() it, or make it with lossy=True"
                    )
        return ""

    async def one_stream(self) -> bool:
        """Whether it has a terminal, and so one output, its stdout."""
        if self._tty is None:
            self._tty = (await self.info()).tty
        return self._tty

    async def resize(self, rows: int, cols: int) -> None:
        """Give its terminal another size; it gets SIGWINCH."""
        body = codec.encode(programs.size(rows, cols))
        await self._client.transport.call("POST", f"{self._path}/resize", codec.Nothing, body=body)

    async def signal(self, number: int | str) -> None:
        """Send a signal, `signal.SIGTERM`, another number or a name ("TERM"), to the program itself: of a shell's text
        to the shell, not to what it has started, which `kill` ends, too. InvalidSpec: it is none.

        After its end nothing happens, also to what it has left behind: `kill` ends that.
        """
        await self._kill({"signal": programs.signal_number(number)})

    async def kill(self) -> None:
        """Kill it with all it has started; after its end, what it has left behind."""
        await self._kill({})

    async def _kill(self, body: dict[str, int]) -> None:
        data = codec.encode(body) if body else _EMPTY
        await self._client.transport.call("POST", f"{self._path}/kill", codec.Nothing, body=data, key=new_key())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.kill()
        except (NotFound, SandboxLost, InvalidState):
            return  # it has ended
        except DsecError as kill_error:
            if error is None:
                raise
            # The caller's own error tells more; this one must not hide it.
            error.add_note(f"and killing {self._id} failed: {kill_error}")


async def spawn(client: AsyncClient, sandbox_id: str, spec: SpawnSpec, key: str | None) -> AsyncProcess:
    """Start a program. A caller that gives up meanwhile leaves none behind."""
    # What is started under a key of the caller's may have been given input before.
    offset = 0 if key is None else None
    key = new_key() if key is None else check_key(key, "key")
    body = codec.encode(spec)
    try:
        program = await _started(client, sandbox_id, body, key)
    except NodeUnreachable as error:
        if client.transport.met:
            error.detail["idempotency_key"] = key
            error.add_note(f"if the call arrived, the program runs; the same spawn with key={key!r} gives its handle")
        raise
    except Exception:  # the server's answer: there is nothing to undo
        raise
    except BaseException as error:  # the caller's: KeyboardInterrupt, a cancelled task
        await finish(_undo(client, sandbox_id, body, key, error), client.transport.timing.kill_s)
        raise
    return AsyncProcess(client, sandbox_id, program.id, input_offset=offset, spec=spec)


async def _started(client: AsyncClient, sandbox_id: str, body: bytes, key: str) -> Program:
    path = f"/v1/sandboxes/{codec.quote(sandbox_id)}/processes"
    return await client.transport.call("POST", path, Program, body=body, key=key)


async def _undo(client: AsyncClient, sandbox_id: str, body: bytes, key: str, error: BaseException) -> bool:
    """Find what was started under the key, and kill it."""
    try:
        program = await _started(client, sandbox_id, body, key)
        await AsyncProcess(client, sandbox_id, program.id).kill()
    except (DsecError, Broken, Garbage) as failure:
        error.add_note(f"the program may be running: killing it failed: {failure}")
        return False
    return True


def _restore(url: str, sandbox_id: str, program_id: str) -> AsyncProcess:
    from dsec.sdk._async.client import shared

    return AsyncProcess(shared(url), sandbox_id, program_id)
