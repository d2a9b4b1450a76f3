"""Streaming answers: runs, batches, imports. A client that vanishes stops none of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Literal, TypeVar

import msgspec

from dsec.backends.base import Sink
from dsec.model.errors import DsecError, InvalidSpec, NotFound
from dsec.model.states import RunResult
from dsec.node.agent import Node
from dsec.node.core import decode_info, value_of
from dsec.node.http.codec import number, one
from dsec.node.http.exchange import HEARTBEAT_S, Exchange
from dsec.node.layers import ImportRequest
from dsec.node.runs import Flight, decode_result, kept_output, never_launched
from dsec.node.steps import Answer, WireError

T = TypeVar("T")


async def until(exchange: Exchange, gone: asyncio.Future[Any], waited: Iterable[asyncio.Future[Any]]) -> bool:
    """Wait for the first of some futures, with heartbeats; False when the client left first."""
    futures = {*waited, gone}
    while True:
        done, _ = await asyncio.wait(futures, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return done != {gone}
        await exchange.heartbeat()


class RunItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One item of a run's stream."""

    started: str | None = None
    step: int | None = None
    stream: Literal[1, 2] | None = None
    offset: int | None = None
    data: bytes | None = None
    result: RunResult | None = None
    error: WireError | None = None


Begin = Callable[[Sink | None], Awaitable[Flight | Answer]]


async def serve_run(node: Node, ex: Exchange, ref: str, begin: Begin) -> None:
    """Answer a call that runs something: whole, or with stream=1 as it comes."""
    if ex.fields:
        offsets = (number(ex.fields, "stdout_offset", 0, int), number(ex.fields, "stderr_offset", 0, int))
        if min(offsets) < 0:
            raise InvalidSpec.field("stdout_offset", min(offsets), "0 or more")
        if one(ex.fields, "stream") in ("1", "true"):
            await RunStream(node, ex, offsets, begin).serve(ref)
            return
        if one(ex.fields, "stream") not in (None, "0", "false"):
            raise InvalidSpec.field("stream", ex.fields["stream"][0], "1 or 0")
    answer = await _answer(begin)
    if never_launched(answer):
        answer = await _answer(begin)
    value = value_of(answer)
    if ex.msgpack:
        await ex.reply_bytes(200, value, msgpack=True)  # it is kept as it is sent
    else:
        await ex.reply(200, decode_result(value))


async def _answer(begin: Begin) -> Answer:
    found = await begin(None)
    return await found.answer() if isinstance(found, Flight) else found


class RunStream:
    """One client that reads along with a run."""

    def __init__(self, node: Node, exchange: Exchange, offsets: tuple[int, int], begin: Begin) -> None:
        self._node = node
        self._begin = begin
        self._exchange = exchange
        self._offsets = offsets
        self._flight: Flight | None = None
        self._said = False

    async def serve(self, ref: str) -> None:
        """Start or join the run, send what it prints, then its result."""
        found = await self._begin(self.sink)
        gone = asyncio.ensure_future(self._exchange.gone())
        try:
            answer = await self._follow(ref, found, gone) if isinstance(found, Flight) else found
            if answer is not None and never_launched(answer):
                found = await self._begin(self.sink)
                answer = await self._follow(ref, found, gone) if isinstance(found, Flight) else found
            elif not isinstance(found, Flight):
                await self._recorded(found)
            if answer is not None:
                await self._end(answer)
        finally:
            gone.cancel()

    async def sink(self, stream: int, offset: int, data: bytes) -> None:
        """Output of the run; waits while the client does not read."""
        await self._say_started()
        await self._exchange.item({"stream": stream, "offset": offset, "data": data})

    async def _say_started(self) -> None:
        if not self._said and self._flight is not None:
            self._said = True
            await self._exchange.item({"started": self._flight.process_id, "step": self._flight.step})

    async def _follow(self, ref: str, flight: Flight, gone: asyncio.Future[None]) -> Answer | None:
        self._flight = flight
        mine = flight.sink == self.sink
        if not await until(self._exchange, gone, (flight.started, flight.done)):
            if mine:
                flight.detach()
            return None
        if flight.launched:
            await self._say_started()
        reading = None if mine else self._node.attach(ref, flight.process_id, self.sink, self._offsets)
        try:
            if reading is not None and not await until(self._exchange, gone, (reading,)):
                return None
            if reading is not None and isinstance(reading.exception(), NotFound):
                # It ended, was recorded and forgotten between our look and our call.
                answer = await flight.answer()
                await self._recorded(answer)
                return answer
            if not await until(self._exchange, gone, (flight.done,)):
                if mine:
                    flight.detach()
                return None
            return await flight.answer()
        finally:
            if reading is not None:
                reading.cancel()

    async def _recorded(self, answer: Answer) -> None:
        if isinstance(answer, DsecError):
            return
        result = decode_result(answer)
        if not self._said:
            self._said = True
            await self._exchange.item({"started": result.process_id, "step": result.step})
        for kept, output in ((1, result.out), (2, result.err)):
            for stream, offset, data in kept_output(output, kept, self._offsets[kept - 1]):
                await self._exchange.item({"stream": stream, "offset": offset, "data": data})

    async def _end(self, answer: Answer) -> None:
        value = value_of(answer)
        result = msgspec.Raw(value) if self._exchange.msgpack else decode_result(value)
        await self._exchange.item({"result": result})
        await self._exchange.finish()


async def next_or_none(iterator: AsyncIterator[T]) -> T | None:
    """The next item, or None at the end."""
    return await anext(iterator, None)


async def batch(exchange: Exchange, items: AsyncIterator[tuple[int, Answer]]) -> None:
    """Sandboxes as they get ready."""
    gone = asyncio.ensure_future(exchange.gone())
    counts = {"created": 0, "failed": 0}
    try:
        while True:
            step = asyncio.ensure_future(next_or_none(items))
            if not await until(exchange, gone, (step,)):
                step.cancel()
                return
            item = step.result()
            if item is None:
                break
            index, answer = item
            if isinstance(answer, DsecError):
                counts["failed"] += 1
                error = msgspec.structs.replace(WireError.of(answer), request_id=exchange.request_id)
                await exchange.item({"index": index, "error": error})
            else:
                counts["created"] += 1
                sandbox = msgspec.Raw(answer) if exchange.msgpack else decode_info(answer)
                await exchange.item({"index": index, "sandbox": sandbox})
        await exchange.item({"done": True, **counts})
        await exchange.finish()
    finally:
        gone.cancel()


async def import_layer(node: Node, exchange: Exchange, request: ImportRequest) -> None:
    """Progress as it is made, then the layer."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()

    def progress(text: str) -> None:
        loop.call_soon_threadsafe(lines.put_nowait, text)

    work = asyncio.ensure_future(node.import_layer(request, progress))
    gone = asyncio.ensure_future(exchange.gone())
    line = asyncio.ensure_future(lines.get())
    try:
        while not work.done():
            if not await until(exchange, gone, (work, line)):
                return
            if line.done():
                await exchange.item({"progress": line.result()})
                line = asyncio.ensure_future(lines.get())
        while not lines.empty():
            await exchange.item({"progress": lines.get_nowait()})
        await exchange.item({"layer": work.result()})
        await exchange.finish()
    finally:
        line.cancel()
        gone.cancel()
