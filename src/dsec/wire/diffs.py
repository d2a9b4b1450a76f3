"""What the file helper says of a diff. Each value is checked as it is decoded: there may be a million of them."""

from __future__ import annotations

from typing import Literal

import msgspec

from dsec.model.files import Difference, FileChange, FileState, FileType, shown


class State(msgspec.Struct, frozen=True):
    """A file, now or before."""

    type: FileType
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    target: bytes | None = None

    def state(self) -> FileState:
        """As the node tells it."""
        target, raw = shown(self.target) if self.target is not None else (None, None)
        return FileState(
            type=self.type,
            size=self.size,
            mode=self.mode,
            uid=self.uid,
            gid=self.gid,
            mtime=self.mtime_ns / 1e9,
            target=target,
            raw_target=raw,
        )


class Change(msgspec.Struct, frozen=True):
    """One path."""

    kind: Literal["added", "changed", "deleted"]
    path: bytes
    before: State | None = None
    now: State | None = None
    what: tuple[Difference, ...] = ()
    unsure: str | None = None

    def change(self) -> FileChange:
        """As the node tells it."""
        text, raw = shown(self.path)
        return FileChange(
            kind=self.kind,
            path=text,
            raw_path=raw,
            before=None if self.before is None else self.before.state(),
            now=None if self.now is None else self.now.state(),
            what=self.what,
            unsure=self.unsure,
        )
