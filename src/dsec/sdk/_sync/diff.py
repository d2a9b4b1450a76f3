# Generated from dsec/sdk/_async/diff.py by scripts/generate_sync.py: edit that file.

"""`sbx.diff()`: what of a sandbox's files is not as it was in its layers."""

from __future__ import annotations

from collections.abc import Iterator

from dsec.model.errors import Exhausted
from dsec.model.files import DiffReport, FileChange
from dsec.model.limits import DIFF_MAX
from dsec.sdk import codec
from dsec.sdk._sync.transport import Items, Retry, Transport
from dsec.sdk.http1 import Broken, Garbage
from dsec.sdk.keywords import explained


@explained
class Diff:
    """What `diff` returns: iterate over it, each time anew. After the end `report` says how much there was."""

    def __init__(self, transport: Transport, sandbox: str, path: bytes, limit: int | None) -> None:
        self._transport = transport
        self._call = f"{sandbox}/diff{codec.query(path=path, limit=limit)}"
        self._limit = limit
        self.report: DiffReport | None = None

    def __iter__(self) -> Iterator[FileChange]:
        """Each change, as it is found; a directory comes before what is in it."""
        self.report = None
        items, first = self._begin()
        try:
            while first.report is None:
                for change in first.changes:
                    yield change.exact()
                first = self._next(items)
            items.drain()
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

    def _begin(self) -> tuple[Items, codec.DiffItem]:
        """Up to the first item; a connection that breaks before it is made again."""
        retry = Retry(self._transport)
        while True:
            try:
                items = self._transport.stream("GET", self._call)
                try:
                    return items, self._next(items)
                except BaseException:  # also cancelled: nobody reads on
                    items.close()
                    raise
            except Broken as error:
                retry.after(error)
            except Garbage as error:
                raise self._transport.garbage(error) from error

    def _next(self, items: Items) -> codec.DiffItem:
        while True:
            item = items.next(codec.DiffItem)
            if item.error is not None:
                raise item.error.error()
            if item.changes or item.report is not None:
                return item
