# Generated from dsec/sdk/_async/output.py by scripts/generate_sync.py: edit that file.

"""Output of a program that is talked to: read at its offsets, taken up again when the connection breaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from dsec.model.errors import NodeUnreachable, Unsupported
from dsec.model.states import RunResult
from dsec.sdk import codec, programs
from dsec.sdk._sync.closing import Closing
from dsec.sdk._sync.net import sleep
from dsec.sdk._sync.transport import Items, Retry, Transport
from dsec.sdk.http1 import Broken, Garbage, Late
from dsec.sdk.keywords import explained
from dsec.sdk.programs import OutputItem

if TYPE_CHECKING:
    from dsec.sdk._sync.lines import Lines
    from dsec.sdk._sync.programs import Process
    from dsec.sdk._sync.socket import Socket


@explained
class Follow(Closing):
    """Both streams of a program as they come, to its end: an iterator of `(stream, data)`, on a connection of its own.

    A connection that breaks is made again where it was: no byte is lost or comes twice. `offsets`: the next byte of
    each stream. `dropped`: bytes of each that are not kept any more and were passed over. `result`: how the program
    ended, once the iteration is over.
    """

    def __init__(
        self,
        transport: Transport,
        program: str,
        offsets: tuple[int, int] = (0, 0),
        *,
        wait: bool = True,
        lossy: bool = False,
        on_broken: Callable[[bool], object] | None = None,
    ) -> None:
        self.offsets = {1: offsets[0], 2: offsets[1]}
        self.dropped = {1: 0, 2: 0}
        self.result: RunResult | None = None
        # When to give up with Late, and nothing is lost; not part of the public surface.
        self.deadline: float | None = None
        self._transport = transport
        self._program = program
        self._wait = wait
        self._lossy = lossy
        # Told when the connection is lost (True) and when it is there again (False).
        self._on_broken = on_broken
        self._broken = False
        self._items: Items | Socket | None = None
        self._retry: Retry | None = None
        self._over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, bytes]:
        while not self._over:
            item = self._item(self.deadline)
            if item.stream is not None and (data := self._new(item.stream, item.offset, item.data)):
                if self._retry is not None:
                    self._retry.went_on()
                return item.stream, data
            if item.error is not None:
                self.close()
                raise item.error.error()
            if item.program is not None and self._wait and item.program.state != "ended":
                self._drop()  # the server was through with it too early
                sleep(self._transport.timing.backoff_max_s)
            elif item.result is not None or item.program is not None:
                self._end(item)
        raise StopIteration

    def lines(self) -> Lines:
        """What comes as whole lines, from where it is now on."""
        from dsec.sdk._sync.lines import Lines  # few need it, and what it needs

        return Lines(self)

    def close(self) -> None:
        """Read no longer. The program goes on."""
        self._over = True
        if self._items is not None:
            self._items.close()
            self._items = None

    def standing(self) -> dict[int, int]:
        """Where it stands in each stream; empty: it holds nobody back. Not part of the public surface."""
        return {} if self._over or self._lossy or self._items is None else dict(self.offsets)

    def _item(self, end: float | None = None) -> OutputItem:
        if self._retry is None:
            self._retry = Retry(self._transport)
        while True:
            try:
                if self._items is None:
                    self._items = self._open()
                item = self._items.next(OutputItem, end)
                self._tell(broken=False)
                return item
            except Broken as error:
                self._drop()
                self._tell(broken=True)
                self._again(self._retry, error)
                if end is not None and time.monotonic() >= end:
                    raise Late from None
            except Garbage as error:
                self.close()
                raise self._transport.garbage(error) from error
            except Late:  # all of what came is kept
                raise
            except BaseException:  # also cancelled: a part of an item may have been taken from it
                self._drop()
                raise

    def _again(self, retry: Retry, error: Broken) -> None:
        try:
            retry.after(error)
        except NodeUnreachable:
            self._retry = None  # who goes on all the same has all the tries again
            raise

    def _open(self) -> Items | Socket:
        if self._wait and self._transport.sockets:
            try:
                return self._connect()
            except Unsupported as error:
                # What lies between us and the server lets no WebSocket through: it was asked a plain GET.
                if error.detail.get("mechanism") != "WebSocket":
                    raise
                self._transport.sockets = False
        return self._transport.stream("GET", self._path())

    def _connect(self, writer: str | None = None) -> Socket:
        # Imported here: what it needs costs a command's start some milliseconds.
        from dsec.sdk._sync.socket import SILENCE_S, connect

        query = codec.query(
            stdout_offset=self.offsets[1],
            stderr_offset=self.offsets[2],
            lossy=self._lossy,
            silence_s=SILENCE_S,
            writer=writer,
        )
        return connect(self._transport, self._program, query)

    def _path(self) -> str:
        query = codec.query(
            stdout_offset=self.offsets[1],
            stderr_offset=self.offsets[2],
            follow="1" if self._wait else "0",
            lossy=self._lossy,
        )
        return f"{self._program}/output{query}"

    def _new(self, stream: int, offset: int, data: bytes) -> bytes:
        if stream not in self.offsets:
            raise self._transport.garbage(Garbage(f"output of stream {stream}"))
        seen = self.offsets[stream]
        # After a broken connection a server may start a little earlier than asked; nobody gets a byte twice.
        new = data[max(seen - offset, 0) :]
        self.dropped[stream] += max(offset - seen, 0)
        self.offsets[stream] = max(seen, offset + len(data))
        return new

    def _end(self, item: OutputItem) -> None:
        self.result = item.result or (item.program.result if item.program is not None else None)
        items, self._items = self._items, None
        self._over = True
        if self.result is not None:
            for stream, output in ((1, self.result.out), (2, self.result.err)):
                # The end of a stream may not be kept: what is missing of it is missing, too.
                self.dropped[stream] += max(output.total - self.offsets[stream], 0)
                self.offsets[stream] = max(self.offsets[stream], output.total)
        if items is None:
            return
        try:
            items.drain()
        except (Broken, Garbage):
            return  # all of it was there; only the connection is of no more use
        finally:
            items.close()

    def _drop(self) -> None:
        if self._items is not None:
            self._items.close()
            self._items = None

    def _tell(self, *, broken: bool) -> None:
        if broken != self._broken:
            self._broken = broken
            if self._on_broken is not None:
                self._on_broken(broken)


@explained
class Reader(Closing):
    """One stream of a program as it comes, to its end: an iterator of bytes, on a connection of its own.

    A `for` loop that was left goes on where it was with the same reader. `offset`: the next byte. `dropped`: bytes that
    are not kept any more and were passed over.
    """

    def __init__(self, process: Process, follow: Follow, stream: int) -> None:
        self._process = process
        self._follow = follow
        self._stream = stream
        self._begun = False

    @property
    def offset(self) -> int:
        """The next byte."""
        return self._follow.offsets[self._stream]

    @property
    def dropped(self) -> int:
        """Bytes that are not kept any more and were passed over."""
        return self._follow.dropped[self._stream]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        if not self._begun:
            if self._stream == 2 and self._process.one_stream():
                self.close()
            self._begun = True
        while True:
            stream, data = self._follow.__next__()
            if stream == self._stream:
                return data

    def close(self) -> None:
        """Read no longer. The program goes on."""
        self._follow.close()


@explained
class Output:
    """One output stream of a program. Iterating it reads from the first byte that is kept; each iteration is a reader
    of its own, and none takes bytes from another."""

    def __init__(self, process: Process, stream: int) -> None:
        self._process = process
        self._stream = stream

    def __iter__(self) -> Reader:
        return self.follow()

    def follow(self, offset: int = 0, *, lossy: bool = False) -> Reader:
        """A reader from an offset on. A slow one holds the program back; with `lossy` it misses bytes instead."""
        offset = programs.one_offset(offset)
        offsets = (offset, 0) if self._stream == 1 else (0, offset)
        return Reader(self._process, self._process.follow(offsets, lossy=lossy), self._stream)

    def located(self, offset: int = 0) -> tuple[int, bytes]:
        """The offset and the bytes of what is kept now from `offset` on, or from later where that is not kept."""
        transport = self._process._client.transport
        retry = Retry(transport)
        path = f"{self._process._path}/output{codec.query(raw=self._stream, offset=offset or None)}"
        while True:
            try:
                answer = transport.open("GET", path, accept=codec.OCTETS)
                try:
                    at = answer.head.headers.get(b"x-dsec-offset", b"")
                    return int(at) if at.isdigit() else offset, answer.read()
                finally:
                    answer.close()
            except Broken as error:
                retry.after(error)
            except Garbage as error:
                raise transport.garbage(error) from error
