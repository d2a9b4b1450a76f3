"""Many sandboxes from one request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from dsec.model.errors import CreateFailed, DsecError, InvalidState, NotFound, SandboxLost, Unsupported
from dsec.model.ids import new_key
from dsec.model.specs import Spec
from dsec.sdk import codec
from dsec.sdk._async.net import each
from dsec.sdk._async.sandbox import AsyncSandbox
from dsec.sdk._async.transport import AsyncItems, AsyncRetry
from dsec.sdk.http1 import Broken, Garbage
from dsec.sdk.keywords import explained
from dsec.sdk.values import create_failed

if TYPE_CHECKING:
    from dsec.sdk._async.client import AsyncClient

_PATH: Final = "/v1/sandboxes:batch"


@explained
class AsyncBatch:
    """What `create_many` returns: enter it, iterate, and leaving stops every sandbox it made."""

    def __init__(self, client: AsyncClient, specs: Sequence[Spec], *, atomic: bool, wait_s: float) -> None:
        self._client = client
        self._transport = client.transport
        self._count = len(specs)
        self._atomic = atomic
        self._key = new_key()
        self._body = _encode(specs, atomic, wait_s)
        self._items: AsyncItems | None = None
        self._retry = AsyncRetry(self._transport)
        self._entered = False
        self._complete = not specs
        self._seen: set[int] = set()
        self._waiting: list[AsyncSandbox | CreateFailed] = []
        self._made: list[AsyncSandbox] = []

    def __len__(self) -> int:
        """How many were asked for."""
        return self._count

    async def __aenter__(self) -> Self:
        if self._entered:
            raise InvalidState("create_many: it was entered before; call it again for more sandboxes")
        self._entered = True
        try:
            if not self._complete:
                await self._connect()
            if self._atomic:
                await self._all_or_none()
        except BaseException:  # also cancelled: the block is not entered, so nobody would stop them
            await self._stop_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stop_all()
        except DsecError as stop_error:
            if error is None:
                raise
            error.add_note(f"and stopping the sandboxes failed: {stop_error}")

    async def __aiter__(self) -> AsyncIterator[AsyncSandbox | CreateFailed]:
        """Each sandbox as it gets ready, or CreateFailed in its place; each once, however often it is iterated."""
        if not self._entered:
            raise InvalidState("create_many: use it as `with client.create_many(...) as boxes:`")
        while True:
            if self._waiting:
                yield self._waiting.pop(0)
            elif not await self._advance():
                return

    async def _all_or_none(self) -> None:
        while await self._advance():
            pass
        failed = [item for item in self._waiting if isinstance(item, CreateFailed)]
        if failed:
            raise failed[0]

    async def _connect(self) -> None:
        while self._items is None:
            try:
                self._items = await self._transport.stream("POST", _PATH, body=self._body, key=self._key)
            except Broken as error:
                await self._retry.after(error)
            except Garbage as error:
                raise self._transport.garbage(error) from error

    async def _advance(self) -> bool:
        """Take one item from the stream; False: there are no more."""
        while not self._complete:
            await self._connect()
            assert self._items is not None  # _connect has made it
            try:
                item = await self._items.next(codec.BatchItem)
                if item.done:
                    self._complete = True
                    await self._items.drain()
                    break
                if self._take(item):
                    return True
            except Broken as error:
                self._drop()
                await self._retry.after(error)
            except Garbage as error:
                self._drop()
                raise self._transport.garbage(error) from error
        return False

    def _take(self, item: codec.BatchItem) -> bool:
        """Keep an item; False: we had it before the connection broke."""
        if item.index is None:
            if item.error is not None:
                self._complete = True
                raise item.error.error()
            return False
        if item.index in self._seen:
            return False
        self._seen.add(item.index)
        if item.sandbox is not None:
            sandbox = AsyncSandbox(self._client, item.sandbox.id, item.sandbox)
            self._made.append(sandbox)
            self._waiting.append(sandbox)
        elif item.error is not None:
            self._waiting.append(create_failed(item.index, item.error.error()))
        return True

    def _drop(self) -> None:
        if self._items is not None:
            self._items.close()
        self._items = None

    async def _stop_all(self) -> None:
        try:
            await self._cancel_rest()
        finally:
            self._drop()
            errors = await each(_stop, self._made)
        if errors:
            raise errors[0]

    async def _cancel_rest(self) -> None:
        """Have nothing more made, then learn of everything that was: a sandbox nobody knows would live on."""
        if self._complete or self._items is None:
            return
        # NotFound: it has ended by itself. Unsupported: this server makes them all. The stream says so.
        with suppress(NotFound, Unsupported):
            await self._transport.call("DELETE", _PATH, codec.Nothing, key=self._key)
        while await self._advance():
            pass


async def _stop(sandbox: AsyncSandbox) -> None:
    try:
        await sandbox.stop(grace_s=0)
    except (NotFound, SandboxLost):
        return


def _encode(specs: Sequence[Spec], atomic: bool, wait_s: float) -> bytes:
    first = specs[0] if specs else None
    # Equal specs go as one with a number: a job's thousands are one small request.
    if first is not None and all(spec is first for spec in specs):
        return codec.encode({"count": len(specs), "spec": first, "atomic": atomic, "wait_s": wait_s})
    return codec.encode({"specs": specs, "atomic": atomic, "wait_s": wait_s})
