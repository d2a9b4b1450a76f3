"""What is kept of an output: its head and its tail."""

from __future__ import annotations

from dsec.model.states import Output


class Capture:
    """The head and the tail of one output stream; `spool_bytes` of its newest stay readable beside the result."""

    def __init__(self, head_bytes: int, tail_bytes: int, spool_bytes: int = 0) -> None:
        self._head_limit = head_bytes
        self._result_tail = tail_bytes
        self._tail_limit = max(tail_bytes, spool_bytes)
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def append(self, data: bytes) -> None:
        """Keep what belongs to the head; then only the newest."""
        self.total += len(data)
        room = self._head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail += data
            if len(self.tail) > self._tail_limit:
                del self.tail[: len(self.tail) - self._tail_limit]

    def skip(self, count: int) -> None:
        """So many bytes there were that nobody has any more: what is kept from now on is a tail."""
        if count > 0:
            self.total += count
            self._head_limit = len(self.head)
            self.tail.clear()

    def kept_from(self, offset: int) -> list[tuple[int, bytes]]:
        """What is still kept from an offset on, as (offset, bytes)."""
        pieces = []
        if offset < len(self.head):
            pieces.append((offset, bytes(self.head[offset:])))
        tail_start = self.total - len(self.tail)
        skip = max(0, offset - tail_start)
        if skip < len(self.tail):
            pieces.append((tail_start + skip, bytes(self.tail[skip:])))
        return pieces

    def output(self) -> Output:
        """As a value."""
        tail = self.tail[max(0, len(self.tail) - self._result_tail) :]
        return Output(head=bytes(self.head), tail=bytes(tail), total=self.total)
