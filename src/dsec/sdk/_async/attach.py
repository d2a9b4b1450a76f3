"""One connection to a program that carries both ways: its output, its input, its terminal's size, signals for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from dsec.model.errors import Conflict, DsecError, InvalidState
from dsec.model.ids import new_key
from dsec.model.limits import KIB, SPOOL_BYTES
from dsec.sdk import programs
from dsec.sdk._async.net import AsyncCondition, AsyncLock, notified
from dsec.sdk._async.output import AsyncFollow
from dsec.sdk._async.socket import AsyncSocket
from dsec.sdk._async.transport import AsyncTransport
from dsec.sdk._async.writer import AsyncWriter, Left
from dsec.sdk.http1 import Broken, Late
from dsec.sdk.keywords import explained
from dsec.sdk.programs import OutputItem
from dsec.wire.attach import WINDOW_BYTES

# Of one message of input.
_PIECE_BYTES: Final = 64 * KIB
# Output that came while a writer waited for its turn, and that nobody has taken yet: then the writer waits for that.
_READY_MAX_BYTES: Final = SPOOL_BYTES


@explained
class AsyncAttachment(AsyncFollow):
    """A program's output as `follow` gives it, and its input, over one connection.

    One task iterates, others write, resize and signal. Whatever breaks is made again where it was: no byte of input or
    output is lost or comes twice. Who writes much and reads nothing waits as soon as its program does.
    """

    def __init__(
        self,
        transport: AsyncTransport,
        program: str,
        offsets: tuple[int, int] = (0, 0),
        *,
        writer: AsyncWriter,
        lossy: bool = False,
        on_broken: Callable[[bool], object] | None = None,
    ) -> None:
        super().__init__(transport, program, offsets, lossy=lossy, on_broken=on_broken)
        self._changed = AsyncCondition()
        self._reading = False  # somebody waits for what comes
        self._ready: deque[OutputItem] = deque()
        self._ready_bytes = 0
        self._ended = False  # the last item has come
        self._writer = writer
        self._sending = AsyncLock()
        # The connection, once the server has said where the input is.
        self._socket: AsyncSocket | None = None
        # Where what was sent and is not known to be taken begins; None: where the server says it is.
        self._base: int | None = None
        self._own = 0  # of what the server said was taken, this writer gave all from there on
        self._sent = bytearray()
        self._pending = b""
        self._input_closed = False
        self._taken_over = 0  # another has written, up to there
        self._asked: dict[str, dict[str, Any]] = {}
        self._refused: dict[str, DsecError] = {}

    async def ready(self) -> None:
        """Connect now, and not with the first use. Unsupported: what lies between lets no WebSocket through."""
        await self._until(self._settled)

    # Output.

    async def _item(self, end: float | None = None) -> OutputItem:
        await self._until(lambda: bool(self._ready), consumer=True, end=end)
        async with self._changed:
            item = self._ready.popleft()
            self._ready_bytes -= len(item.data)
            self._changed.notify_all()
        return item

    async def _until(self, ready: Callable[[], bool], *, consumer: bool = False, end: float | None = None) -> None:
        """Until that is so. Whoever waits, and finds nobody reading, reads for all. Late: the time `end` has come."""
        while True:
            async with self._changed:
                while not ready() and (self._reading or not (consumer or self._ready_bytes < _READY_MAX_BYTES)):
                    if end is not None and time.monotonic() >= end:
                        raise Late
                    await notified(self._changed, end)
                if ready():
                    return
                if self._over:
                    raise InvalidState("this attachment was closed")
                self._reading = True
            try:
                await self._step(end)
            finally:
                self._reading = False
                async with self._changed:
                    self._changed.notify_all()

    async def _step(self, end: float | None) -> None:
        """Take one item from the connection."""
        item = await super()._item(end)
        if item.started is not None:
            await self._begin(item)
            return
        if item.input is not None:
            self._note(item)
        if item.done is not None:
            self._asked.pop(item.done, None)
            if item.error is not None:
                self._refused[item.done] = item.error.error()
        elif item.error is not None and item.error.code == Conflict.code and "input_size" in (item.error.detail or {}):
            # The output goes on, over a new connection; the writer hears of it.
            self._drop()
            self._lose_input()
            self._taken_over = int((item.error.detail or {})["input_size"])
        elif item.last or item.stream is not None:
            self._ended = self._ended or item.last
            self._ready.append(item)
            self._ready_bytes += len(item.data)

    async def _begin(self, hello: OutputItem) -> None:
        """A connection was made: what it has to be told first."""
        socket = self._items
        if not isinstance(socket, AsyncSocket):
            return
        try:
            async with self._sending:
                if hello.input is None:  # it has none, or has ended
                    self._input_closed = True
                    self._lose_input()
                self._note(hello)
                for start in range(0, len(self._sent), _PIECE_BYTES):
                    piece = bytes(self._sent[start : start + _PIECE_BYTES])
                    await socket.give((self._base or 0) + start, piece)
                for asked in list(self._asked.values()):
                    await socket.control(asked)
                self._socket = socket
        except Broken:
            self._drop()

    def _drop(self) -> None:
        self._socket = None
        super()._drop()

    async def _open(self) -> AsyncSocket:
        return await self._connect(self._writer.id)

    def close(self) -> None:
        """Read and write no longer. The program goes on."""
        self._socket = None
        super().close()

    # Input.

    def _note(self, item: OutputItem) -> None:
        state = item.input
        if state is None:
            return
        self._own = self._own if item.own is None else item.own
        if self._base is None:
            self._base, self._input_closed = state.size, state.closed
        elif state.closed:
            self._input_closed = True
            self._sent.clear()
            self._base = state.size
        elif 0 <= (taken := state.size - self._base) <= len(self._sent) and not self._base < self._own:
            del self._sent[:taken]
            self._base = state.size
        else:
            self._lose_input()
            self._base = self._taken_over = state.size

    def _lose_input(self) -> None:
        self._sent.clear()
        self._base = None
        self._asked = {key: asked for key, asked in self._asked.items() if "eof" not in asked}

    async def write(self, data: str | bytes | bytearray | memoryview) -> None:
        """Give the program all of `data`: returns once it is on its way, of which little is at any time.

        InputClosed: nobody reads it any more. Conflict: another client has written, and what was on its way is lost.
        A write that NodeUnreachable has ended goes on with the next.
        """
        view = memoryview(programs.input_bytes(data))
        async with self._writer.lock:
            await self._come()
            await self._flush()
            for start in range(0, len(view), _PIECE_BYTES):
                self._pending = bytes(view[start : start + _PIECE_BYTES])
                await self._flush()

    async def close_input(self) -> None:
        """The end of the input: returns once the program is given it. For a terminal there is none: write b"\\x04"."""
        async with self._writer.lock:
            await self._come()
            await self._flush()
            await self._until(self._settled)
            self._check_alone()
            if not self._input_over():
                await self._ask({"eof": (self._base or 0) + len(self._sent)})
                self._check_alone()
                self._input_closed = True

    async def locate(self) -> None:
        """Ask where the input is: before writing to a program that others write to as well."""
        async with self._writer.lock:
            await self._come()
            await self._flush()
            await self._until(lambda: self._settled() and not self._sent)
            if not self._input_over():
                async with self._sending:
                    self._base = None
                await self._ask({"locate": True})

    def reached(self) -> int | None:
        """As of any channel of its writer."""
        return None if self._base is None else self._base + len(self._sent) + len(self._pending)

    async def settle(self) -> Left:
        """As of any channel of its writer."""
        if self._input_over():
            return self._base, b""
        if self._over:
            return self._base, bytes(self._sent) + self._pending
        await self._flush()
        await self._until(lambda: self._input_over() or (self._settled() and not self._sent))
        self._check_alone()
        return self._base, b""

    async def _come(self) -> None:
        """Go on where another channel of the same writer was."""
        if self._over and not self._input_over():
            raise InvalidState("this attachment was closed")
        left = await self._writer.left(self)
        if left is not None:
            await self._until(self._settled)
            self._check_alone()
            if not self._input_over():
                await self._go_on(*left)
        self._writer.begin(self)

    async def _go_on(self, offset: int | None, data: bytes) -> None:
        async with self._sending:
            self._base = None
        await self._ask({"locate": True})
        self._check_alone()
        if offset is not None and self._base is not None and not self._input_over() and self._base > offset:
            if self._own > offset:
                self._writer.begin(self)  # what was left is lost, and this was said
                raise programs.another_wrote(self._base)
            data = data[self._base - offset :]
        self._pending = data

    async def _flush(self) -> None:
        self._check_alone()
        while self._pending:
            await self._until(lambda: self._input_over() or bool(self._taken_over) or self._room())
            self._check_alone()
            if self._input_over():
                self._pending = b""
                raise programs.nobody_reads(self._program)
            async with self._sending:
                if self._base is None:  # it was broken meanwhile
                    continue
                offset = self._base + len(self._sent)
                piece, self._pending = self._pending, b""
                self._sent += piece
                await self._told(piece, offset)

    def _check_alone(self) -> None:
        if self._taken_over:
            size, self._taken_over, self._pending = self._taken_over, 0, b""
            raise programs.another_wrote(size)

    def _settled(self) -> bool:
        return self._input_over() or bool(self._taken_over) or self._base is not None

    def _room(self) -> bool:
        return self._base is not None and len(self._sent) + len(self._pending) <= WINDOW_BYTES

    def _input_over(self) -> bool:
        return self._input_closed or self._ended

    async def _told(self, what: bytes | dict[str, Any], offset: int = 0) -> None:
        """Sent, where there is a connection; a new one is told anyway."""
        if self._socket is None:
            return
        try:
            if isinstance(what, bytes):
                await self._socket.give(offset, what)
            else:
                await self._socket.control(what)
        except Broken:
            self._socket = None  # who reads finds it broken as well

    # The rest.

    async def resize(self, rows: int, cols: int) -> None:
        """Give its terminal another size; it gets SIGWINCH."""
        size = programs.size(rows, cols)
        await self._ask({"resize": {"rows": size.rows, "cols": size.cols}})

    async def signal(self, number: int | str) -> None:
        """Send a signal, a number or a name ("TERM"), to the program itself."""
        await self._ask({"signal": programs.signal_number(number)})

    async def _ask(self, what: dict[str, Any]) -> None:
        key = new_key()
        asked = {**what, "key": key}
        async with self._sending:
            self._asked[key] = asked
            await self._told(asked)
        await self._until(lambda: key not in self._asked or self._ended or self._over)
        self._asked.pop(key, None)
        if (refused := self._refused.pop(key, None)) is not None:
            raise refused
