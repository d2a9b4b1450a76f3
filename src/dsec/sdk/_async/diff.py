"""`sbx.diff()`: what of a sandbox's files is not as it was in its layers."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dsec.model.errors import Exhausted
from dsec.model.files import DiffReport, FileChange
from dsec.model.limits import DIFF_MAX
from dsec.sdk import codec
from dsec.sdk._async.transport import AsyncItems, AsyncRetry, AsyncTransport
from dsec.sdk.http1 import Broken, Garbage
from dsec.sdk.keywords import explained


@explained
class AsyncDiff:
    """What `diff` returns: iterate over it, each time anew. After the end `report` says how much there was."""

    def __init__(self, transport: AsyncTransport, sandbox: str, path: bytes, limit: int | None) -> None:
        self._transport = transport
        self._call = f"{sandbox}/diff{codec.query(path=path, limit=limit)}"
        self._limit = limit
        self.report: DiffReport | None = None

    async def __aiter__(self) -> AsyncIterator[FileChange]:
        """Each change, as it is found; a directory comes before what is in it."""
        self.report = None
        items, first = await self._begin()
        try:
            while first.report is None:
                for change in first.changes:
                    yield change.exact()
                first = await self._next(items)
            await items.drain()
            self.report = first.report
        except Broken as error:
            # What came would come again, and not in the same order.
            raise self._transport.unreachable(str(error), error.__cause__) from error
        except Garbage as error:
            raise self._transport.garbage(error) from error
        finally:
            items.close()
        if first.report.more and self._limit is None:
            raise Exhausted(
                f"more than {DIFF_MAX} changes: ask for a directory below, or with a limit",
                detail={"resource": "changes", "limit": DIFF_MAX},
                retry="never",
            )

    async def _begin(self) -> tuple[AsyncItems, codec.DiffItem]:
        """Up to the first item; a connection that breaks before it is made again."""
        retry = AsyncRetry(self._transport)
        while True:
            try:
                items = await self._transport.stream("GET", self._call)
                try:
                    return items, await self._next(items)
                except BaseException:  # also cancelled: nobody reads on
                    items.close()
                    raise
            except Broken as error:
                await retry.after(error)
            except Garbage as error:
                raise self._transport.garbage(error) from error

    async def _next(self, items: AsyncItems) -> codec.DiffItem:
        while True:
            item = await items.next(codec.DiffItem)
            if item.error is not None:
                raise item.error.error()
            if item.changes or item.report is not None:
                return item
