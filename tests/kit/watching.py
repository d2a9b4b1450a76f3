"""A watch held against a model: each change of the model is told of, or an overflow is."""

from __future__ import annotations

import threading
import time
from typing import Final

import dsec
from tests.kit.filemodel import TOP, Seen

# Only ends what would never end: an agent that was killed takes seconds to come back.
PATIENCE_S: Final = 60.0
_AGAIN_S: Final = 0.05
_PREFIX: Final = b"/" + TOP + b"/"

Flat = dict[bytes, Seen]


class Watching:
    """Listens to one sandbox from a thread of its own. A watch that is broken for good counts as an overflow."""

    def __init__(self, sbx: dsec.Sandbox) -> None:
        self._sbx = sbx
        self._news = threading.Condition()
        self._told: list[tuple[str, bytes]] = []
        self._over = False
        self.broken = 0  # how often it was begun again
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    def mark(self) -> int:
        """How much has been told until now."""
        with self._news:
            return len(self._told)

    def since(self, mark: int) -> list[tuple[str, bytes]]:
        """What was told since."""
        with self._news:
            return self._told[mark:]

    def stop(self) -> None:
        """Listen no more; the sandbox is being stopped, which ends the watch."""
        self._over = True

    def missing(self, before: Flat, after: Flat, mark: int) -> list[bytes]:
        """Of what differs now, what was not told of since."""
        changed = [path for path in before.keys() | after.keys() if path and differs(before.get(path), after.get(path))]
        deadline = time.monotonic() + PATIENCE_S
        with self._news:
            while missing := self._untold(changed, after, mark):
                if not self._news.wait(deadline - time.monotonic()):
                    break
        return missing

    def _untold(self, changed: list[bytes], after: Flat, mark: int) -> list[bytes]:
        told = self._told[mark:]
        if any(kind == "overflow" for kind, _ in told):
            return []
        named = {path for _, path in told}
        gone = {path for kind, path in told if kind in ("deleted", "created")}
        return [
            path
            for path in changed
            # What was in a directory that went, or that another took the place of, went with it.
            if path not in named and (path in after or not any(above in gone for above in parents(path)))
        ]

    def _tell(self, kind: str, path: bytes) -> None:
        with self._news:
            self._told.append((kind, path.removeprefix(_PREFIX)))
            self._news.notify_all()

    def _listen(self) -> None:
        while not self._over:
            try:
                with self._sbx.files.watch(b"/" + TOP) as watch:
                    if self._ready.is_set():
                        self._tell("overflow", b"")
                    self._ready.set()
                    for event in watch:
                        self._tell(event.kind, event.raw_path or event.path.encode())
            except dsec.DsecError:
                self.broken += 1
                time.sleep(_AGAIN_S)


def differs(one: Seen | None, other: Seen | None) -> bool:
    """Whether it is something that a watch tells of; a time alone may be that of the same content."""
    if one is None or other is None:
        return one is not other
    return (one.kind, one.mode, one.content) != (other.kind, other.mode, other.content)


def parents(path: bytes) -> list[bytes]:
    parts = path.split(b"/")
    return [b"/".join(parts[:end]) for end in range(1, len(parts))]
