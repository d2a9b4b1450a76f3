"""One connection to a program: its output, its input, its terminal's size, signals for it, and its end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final

import msgspec

from dsec.model import ids, limits
from dsec.model.errors import Conflict, DsecError, InvalidSpec, InvalidState
from dsec.model.processes import InputState, Terminal
from dsec.model.states import RunResult
from dsec.node.agent import Node
from dsec.node.http import codec
from dsec.node.http.exchange import Exchange
from dsec.node.http.programs import Reader, writer_of
from dsec.node.http.socket import SILENCE_MAX_S, SILENCE_S, SocketExchange
from dsec.node.programs import another_wrote
from dsec.node.steps import WireError
from dsec.wire import attach as wire
from dsec.wire import websocket

# Control messages that wait to be carried out, or to be answered to a client that does not read. One who sends more is
# refused.
_CONTROLS_MAX: Final = 256
# Of input that waits, so much is handed on at once.
_PIECE_BYTES: Final = 256 * limits.KIB
# Before input is offered again of which nothing was taken.
_PAUSE_S: Final = 0.05


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client asks for beside giving input."""

    resize: Terminal | None = None
    signal: int | None = None
    key: str | None = None
    eof: int | None = None
    locate: bool = False


class Up(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the server tells beside giving output."""

    started: str | None = None
    offsets: tuple[int, int] | None = None
    own: int | None = None
    input: InputState | None = None
    done: str | None = None
    result: RunResult | None = None
    error: WireError | None = None


_decode_control = codec.Codec(Control).decode


class Attachment(Reader):
    """A client and a program."""

    def __init__(self, node: Node, ex: SocketExchange) -> None:
        super().__init__(node, ex)
        self.socket = ex.socket
        self.exchange = ex
        self.offsets = [codec.number(ex.fields, name, 0, int) for name in ("stdout_offset", "stderr_offset")]
        if min(self.offsets) < 0:
            raise InvalidSpec.field("stdout_offset", min(self.offsets), "0 or more")
        silence_s = codec.number(ex.fields, "silence_s", SILENCE_S, float)
        if not SILENCE_S <= silence_s <= SILENCE_MAX_S:
            raise InvalidSpec.field("silence_s", silence_s, f"{SILENCE_S:g} to {SILENCE_MAX_S:g}")
        self.socket.silence_s = silence_s
        self._writer = writer_of(ex)
        self._input = Input()
        self._eof_key: str | None = None
        self._terminal = False
        self._controls: deque[Control] = deque()
        # Each carries out what waits of its kind: input, which may wait for its program, holds back nothing else.
        self._giving: asyncio.Task[None] | None = None
        self._obeying: asyncio.Task[None] | None = None
        # Answers leave when the client reads; until then they hold up neither.
        self._answers: deque[Up] = deque()
        self._telling: asyncio.Task[None] | None = None
        # Done with an error: what a client sent, or what came of it, ends the connection.
        self._refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        """What there is, then what comes; meanwhile what the client sends; in the end how it ended."""
        program = await self.node.programs.find(self.ref, self.id)  # NotFound, while there is HTTP to say it
        self._terminal = program.tty
        state: InputState | None = None
        own: int | None = None
        if program.stdin and program.state != "ended":
            state, own = await self.node.programs.input_state(self.ref, self.id, self._writer)
        if program.stdin:
            self._input.begin(state or InputState(size=0, closed=True), own or 0)
        self.exchange.accept(wire.PROTOCOL, self._came)
        await self._tell(Up(started=self.id, offsets=(self.offsets[0], self.offsets[1]), input=state, own=own))
        down = asyncio.ensure_future(self._down())
        try:
            await asyncio.wait((down, self._refused), return_when=asyncio.FIRST_COMPLETED)
            (self._refused if self._refused.done() else down).result()
        finally:
            tasks = [task for task in (down, self._giving, self._obeying, self._telling) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Down.

    async def _down(self) -> None:
        if not await self.along((self.offsets[0], self.offsets[1])):
            return
        for stream in (1, 2):
            await self.kept(stream, self.offsets[stream - 1])
        found = await self.node.programs.find(self.ref, self.id)
        if found.result is None:
            found = await self.node.programs.wait(self.ref, self.id, 0)  # raises what is recorded of its end
        if found.result is None:
            raise Conflict(f"{self.id} is not read along any more and has not ended; attach again", retry="later")
        if self._telling is not None:
            await self._telling
        await self._tell(Up(result=found.result))
        self.socket.close(websocket.NORMAL)

    async def sink(self, stream: int, offset: int, data: bytes) -> None:
        await self.socket.send(wire.lead(stream, offset), data)
        self.offsets[stream - 1] = offset + len(data)

    async def _tell(self, what: Up) -> None:
        await self.socket.send(wire.CONTROL_BYTE + codec.encode_json(what))

    def _answer(self, what: Up) -> None:
        """To be told when the client reads. Of how far its input is, only the last is of interest."""
        if self._answers and what.done is None and self._answers[-1].done is None:
            self._answers[-1] = what
        else:
            self._answers.append(what)
        if self._telling is None:
            self._telling = self._begun(self._tell_answers())

    async def _tell_answers(self) -> None:
        while self._answers:
            await self._tell(self._answers.popleft())
        self._telling = None

    # Up.

    def _came(self, data: memoryview) -> None:
        """A message, on the event loop: kept, within bounds, or refused."""
        if self._refused.done():
            return
        try:
            if not data:
                raise InvalidSpec.field("message", "empty", "a channel and what belongs to it")
            if data[0] == wire.STDIN:
                self._input.take(*wire.piece(data))
            elif data[0] == wire.CONTROL:
                self._take_control(bytes(data[1:]))
            else:
                raise InvalidSpec.field("channel", data[0], f"{wire.STDIN} or {wire.CONTROL}")
        except DsecError as error:
            self._refused.set_exception(error)
            return
        if self._giving is None and self._input.waiting:
            self._giving = self._begun(self._give())
        if self._obeying is None and self._controls:
            self._obeying = self._begun(self._obey())

    def _begun(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._refused.done():
            self._refused.set_exception(error)

    def _take_control(self, data: bytes) -> None:
        control = _decode_control(data, codec.JSON)
        if control.key is not None:
            ids.check_key(control.key, "key")
        if len(self._controls) + len(self._answers) >= _CONTROLS_MAX:
            raise InvalidSpec.field(
                "message", f"more than {_CONTROLS_MAX} at once", "to wait for `done`, and to read it"
            )
        if control.eof is not None and not self._terminal and self._input.end(control.eof):
            self._eof_key = control.key
        else:
            self._controls.append(control)

    async def _obey(self) -> None:
        """Carries out what was asked for, one after the other; what is refused under a key ends nothing."""
        while self._controls:
            control = self._controls.popleft()
            try:
                state, own = await self._carry_out(control)
            except DsecError as error:
                if control.key is None:
                    raise
                error.request_id = self.exchange.request_id
                self._answer(Up(done=control.key, error=WireError.of(error)))
                continue
            if control.key is not None or state is not None:
                self._answer(Up(done=control.key, input=state, own=own))
        self._obeying = None

    async def _carry_out(self, control: Control) -> tuple[InputState | None, int | None]:
        if control.resize is not None:
            await self.node.programs.resize(self.ref, self.id, control.resize)
        if control.signal is not None:
            await self.node.kill(self.ref, self.id, control.signal or None, control.key)
        if control.eof is not None and self._terminal:
            raise InvalidSpec.field("eof", control.eof, "no end for a terminal: send ^D (byte 4)")
        if not control.locate:
            return None, None
        if self._input.waiting:
            raise InvalidState("input is on its way; ask where it is once that is taken")
        state, own = await self.node.programs.input_state(self.ref, self.id, self._writer)
        self._input.begin(state, own)
        return state, own

    async def _give(self) -> None:
        """Hands on what waits, until nothing does."""
        while self._input.waiting:
            offset, data, eof = self._input.next(_PIECE_BYTES)
            state = await self.node.programs.write(self.ref, self.id, offset, data, eof=eof, writer=self._writer)
            if self._input.taken(state, eof=eof):
                done = self._eof_key if self._input.ended else None
                self._answer(Up(input=state, done=done))
            elif self._input.waiting:
                await asyncio.sleep(_PAUSE_S)
        self._giving = None


class Input:
    """Input that has come and was not taken yet: at most a window of it, whatever pieces it came in."""

    def __init__(self) -> None:
        self._open = False
        self._own = 0  # what was taken from there on was given by this client
        self._at = 0  # where what waits begins
        self._data = bytearray()
        self._eof: int | None = None
        self.ended = False  # its end was handed on, or nobody reads it
        self._closed = False

    def begin(self, state: InputState, own: int) -> None:
        """The program has one, and so much of it was taken; from `own` on what this client gave."""
        self._open, self._own, self._at, self._closed = True, own, state.size, state.closed

    def take(self, offset: int, data: memoryview) -> None:
        """A piece. What this client gave before is passed over. Conflict: there are another's bytes. InvalidSpec: it
        cannot be placed."""
        if not self._open:
            raise InvalidSpec.field("channel", wire.STDIN, "a program that was spawned with an input")
        if self._closed:
            return  # nobody reads it any more, which the client is told or has been
        end = self._at + len(self._data)
        if offset > end:
            raise InvalidSpec.field("offset", offset, f"{end}, where the input is, or less")
        if data and offset < self._own:
            raise another_wrote(offset, self._at)
        new = data[end - offset :]
        if len(self._data) + len(new) > wire.WINDOW_BYTES:
            allowed = f"at most {wire.WINDOW_BYTES} bytes beyond those told as taken"
            raise InvalidSpec.field("stdin", f"{len(self._data) + len(new)} bytes", allowed)
        if new and self._eof is not None and end >= self._eof:
            raise InvalidSpec.field("stdin", f"bytes from {end} on", f"nothing after its end at {self._eof}")
        self._data += new

    def end(self, offset: int) -> bool:
        """It ends there; False: it has ended already. Raises InvalidSpec for another place than where it is."""
        end = self._at + len(self._data)
        if not self._open or (offset != end and not self._closed):
            raise InvalidSpec.field("eof", offset, f"{end}, where the input is")
        if self._closed or self.ended:
            return False
        self._eof = offset
        return True

    @property
    def waiting(self) -> bool:
        """Whether something is to be handed on."""
        return bool(self._data) or (self._eof is not None and not self.ended)

    def next(self, limit: int) -> tuple[int, bytes, bool]:
        """Where it belongs, what it is, whether it is the last."""
        data = bytes(self._data[:limit])
        return self._at, data, self._eof is not None and len(data) == len(self._data)

    def taken(self, state: InputState, *, eof: bool) -> bool:
        """What came of it, given to the program as the last or not; whether that is news."""
        if state.closed:
            self._closed = self.ended = True
            self._data.clear()
            return True
        count = state.size - self._at
        if not 0 <= count <= len(self._data):
            taken = "another client that is the same writer has written to this input"
            raise Conflict(taken, detail={"input_size": state.size})
        del self._data[:count]
        self._at = state.size
        self.ended = eof and not self._data
        return count > 0 or self.ended


async def attach(node: Node, ex: Exchange, _: None) -> None:
    assert isinstance(ex, SocketExchange)  # by its route
    if await ex.offered(wire.PROTOCOL):
        await Attachment(node, ex).serve()
