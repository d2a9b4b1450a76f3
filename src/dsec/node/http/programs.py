"""The calls for programs that are talked to."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any, Final, Literal

import msgspec

from dsec.model.errors import DsecError, InvalidSpec, NotFound, Unavailable
from dsec.model.ids import check_key
from dsec.model.processes import InputState, OutputPiece, Program, SpawnSpec, Terminal
from dsec.model.states import RunResult
from dsec.node.agent import Node
from dsec.node.http.codec import flag, number, one
from dsec.node.http.exchange import Exchange
from dsec.node.http.files import OCTETS
from dsec.node.http.route import Empty, Route, S
from dsec.node.http.streams import until
from dsec.node.programs import ProgramList
from dsec.node.steps import WireError

# Where the first byte of a raw answer stands in the stream.
OFFSET_HEADER: Final = b"x-dsec-offset"
WAIT_DEFAULT_S: Final = 20.0


class OutputItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One item of a program's output; the last has its result, or what it is now, or why this is over."""

    stream: Literal[1, 2] | None = None
    offset: int | None = None
    data: bytes | None = None
    result: RunResult | None = None
    program: Program | None = None
    error: WireError | None = None


async def spawn(node: Node, ex: Exchange, spec: SpawnSpec) -> None:
    await ex.reply(201, await node.programs.spawn(ex.params[0], spec, ex.key))


async def programs(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, await node.programs.list(ex.params[0]))


async def program(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, await node.programs.find(ex.params[0], ex.params[1]))


async def wait(node: Node, ex: Exchange, _: None) -> None:
    timeout_s = number(ex.fields, "timeout_s", WAIT_DEFAULT_S, float)
    await ex.reply(200, await node.programs.wait(ex.params[0], ex.params[1], timeout_s))


async def stdin(node: Node, ex: Exchange, _: None) -> None:
    offset, eof, writer = number(ex.fields, "offset", 0, int), flag(ex.fields, "eof"), writer_of(ex)
    data = await ex.body()
    await ex.reply(200, await node.programs.write(ex.params[0], ex.params[1], offset, data, eof=eof, writer=writer))


def writer_of(ex: Exchange) -> str:
    """Who gives input; all who do not say are one."""
    writer = one(ex.fields, "writer")
    return "" if writer is None else check_key(writer, "writer")


async def resize(node: Node, ex: Exchange, size: Terminal) -> None:
    await node.programs.resize(ex.params[0], ex.params[1], size)
    await ex.reply(200, Empty())


async def output(node: Node, ex: Exchange, _: None) -> None:
    raw = one(ex.fields, "raw")
    if raw is not None:
        if raw not in ("1", "2"):
            raise InvalidSpec.field("raw", raw, "1 (standard output) or 2 (standard error)")
        await RawOutput(node, ex, int(raw)).serve()
        return
    await OutputStream(node, ex).serve()


class Reader(ABC):
    """A client that reads the output of a program."""

    def __init__(self, node: Node, ex: Exchange) -> None:
        self.node = node
        self.ex = ex
        self.ref, self.id = ex.params[0], ex.params[1]
        self.follow = "follow" not in ex.fields or flag(ex.fields, "follow")
        self.lossy = flag(ex.fields, "lossy")

    async def along(self, offsets: tuple[int, int]) -> bool:
        """Read along until its end; False when the client left first, or there is nothing to read along with."""
        following = self.node.programs.follow(self.ref, self.id, self.sink, offsets, lossy=self.lossy)
        if following is None:
            return True
        flight, task = following
        gone = asyncio.ensure_future(self.ex.gone())
        try:
            if not await until(self.ex, gone, (task,)):
                return False
            error = task.exception()
            if isinstance(error, DsecError) and not isinstance(error, NotFound):
                raise error
            return await until(self.ex, gone, (flight.done,))
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @abstractmethod
    async def sink(self, stream: int, offset: int, data: bytes) -> None:
        """A piece of output."""

    async def kept(self, stream: int, offset: int) -> int:
        """All that is kept of a stream from an offset on; where that ends."""
        while True:
            piece = await self.node.programs.read(self.ref, self.id, stream, offset)
            if not piece.data:
                return max(offset, piece.offset)
            await self.sink(stream, piece.offset, piece.data)
            offset = piece.offset + len(piece.data)


class OutputStream(Reader):
    """Both streams, as items."""

    def __init__(self, node: Node, ex: Exchange) -> None:
        super().__init__(node, ex)
        self.offsets = [number(ex.fields, "stdout_offset", 0, int), number(ex.fields, "stderr_offset", 0, int)]
        if min(self.offsets) < 0:
            raise InvalidSpec.field("stdout_offset", min(self.offsets), "0 or more")

    async def serve(self) -> None:
        """What there is, then what comes, then how it ended."""
        await self.node.programs.find(self.ref, self.id)  # NotFound, before anything is sent
        if self.follow and not await self.along((self.offsets[0], self.offsets[1])):
            return
        for stream in (1, 2):
            await self.kept(stream, self.offsets[stream - 1])
        await self._end()

    async def sink(self, stream: int, offset: int, data: bytes) -> None:
        await self.ex.item({"stream": stream, "offset": offset, "data": data})
        self.offsets[stream - 1] = offset + len(data)

    async def _end(self) -> None:
        found = await self.node.programs.find(self.ref, self.id)
        if self.follow and found.state == "ended":
            if found.result is None:
                found = await self.node.programs.wait(self.ref, self.id, 0)  # raises what is recorded of its end
            await self.ex.item({"result": found.result})
        else:
            await self.ex.item({"program": found})
        await self.ex.finish()


class RawOutput(Reader):
    """One stream, as bytes without a gap: from behind the last one on."""

    def __init__(self, node: Node, ex: Exchange, stream: int) -> None:
        super().__init__(node, ex)
        self.stream = stream
        self.offset = number(ex.fields, "offset", 0, int)
        self.follow = flag(ex.fields, "follow")
        self.opened = False

    async def serve(self) -> None:
        """What there is, with `follow` also what comes."""
        first = await self._first()
        await self.ex.open(OCTETS, ((OFFSET_HEADER, b"%d" % first.offset),))
        self.opened, self.offset = True, first.offset
        if first.data:
            await self.sink(self.stream, first.offset, first.data)
        if self.follow:
            other = await self.node.programs.read(self.ref, self.id, 3 - self.stream, 0)
            offsets = (self.offset, other.total) if self.stream == 1 else (other.total, self.offset)
            if not await self.along(offsets):
                return
            await self.kept(self.stream, self.offset)
            await self.node.programs.wait(self.ref, self.id, 0)  # no end is better than one that is not known
        else:
            await self._now(first.total)
        await self.ex.finish()

    async def _now(self, total: int) -> None:
        """What there was when it was asked for; less where the program has written over it since."""
        while self.offset < total:
            piece = await self.node.programs.read(self.ref, self.id, self.stream, self.offset)
            if not piece.data or piece.offset != self.offset:
                return
            await self.sink(self.stream, piece.offset, piece.data[: total - piece.offset])

    async def _first(self) -> OutputPiece:
        if self.offset < 0:
            raise InvalidSpec.field("offset", self.offset, "0 or more")
        await self.node.programs.find(self.ref, self.id)
        piece = await self.node.programs.read(self.ref, self.id, self.stream, self.offset)
        while piece.gap is not None:
            piece = await self.node.programs.read(self.ref, self.id, self.stream, piece.gap)
        return piece

    async def sink(self, stream: int, offset: int, data: bytes) -> None:
        if stream != self.stream:
            return
        if offset != self.offset:
            raise Unavailable(f"bytes {self.offset} to {offset} of the output are not kept any more")
        await self.ex.data(data)
        self.offset = offset + len(data)


P: Final = f"{S}/{{ref}}/processes"
_OUTPUT_QUERY: Final[tuple[tuple[str, Any], ...]] = (
    ("stdout_offset", int),
    ("stderr_offset", int),
    ("follow", Literal["0", "1"]),
    ("lossy", Literal["0", "1"]),
    ("raw", Literal["1", "2"]),
    ("offset", int),
)

PROGRAM_ROUTES: tuple[Route, ...] = (
    Route("POST", P, spawn, "Start a program and do not wait", body=SpawnSpec, answer=Program, status=201, keyed=True),
    Route("GET", P, programs, "Programs in flight, and every process alive inside", answer=ProgramList),
    Route("GET", f"{P}/{{id}}", program, "One program, also after its end", answer=Program),
    Route(
        "GET",
        f"{P}/{{id}}/output",
        output,
        "Its output from any offset on; with raw=1 or 2 one stream as bytes",
        item=OutputItem,
        query=_OUTPUT_QUERY,
    ),
    Route(
        "POST",
        f"{P}/{{id}}/stdin",
        stdin,
        "Input at its offset",
        answer=InputState,
        query=(("offset", int), ("eof", Literal["0", "1"]), ("writer", str)),
        octets_in="application/octet-stream",
    ),
    Route("POST", f"{P}/{{id}}/resize", resize, "Another size for its terminal", body=Terminal, answer=Empty),
    Route("POST", f"{P}/{{id}}/wait", wait, "Wait for its end", answer=Program, query=(("timeout_s", float),)),
)
