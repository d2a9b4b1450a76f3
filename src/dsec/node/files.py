"""File calls: a helper inside the sandbox does the work.

What is asked is a value, made and checked by the function of its name, and `FileCalls.do` does any of them. Those that
stream are methods of their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec

from dsec.backends.base import DataSink, Files, Piece
from dsec.model.errors import DsecError, Exhausted, FileNotFound, InvalidSpec, LaunchFailed, Unknown
from dsec.model.files import DiffReport, Entry, FileChange, FileEvent, Listing, TreeReport, Written
from dsec.model.limits import DIFF_MAX, LIST_PAGE_MAX, MIB, PATH_MAX_BYTES
from dsec.model.specs import check_user
from dsec.node.box import Box
from dsec.node.core import Core, check_key, encode
from dsec.node.steps import content_hash
from dsec.node.store import Statement
from dsec.wire.files import HelperGone

MODE_MAX: Final = 0o7777
# By its number: a sandbox may have another of that name, or none.
ROOT: Final = "0"
# Of one watch, one after the other: what kills them all is not waited for.
WATCH_HELPERS_MAX: Final = 16

T = TypeVar("T")


@dataclass(frozen=True)
class Call(Generic[T]):
    """One call of one sandbox's files, checked. Paths are bytes."""

    kind: str
    # By what two of them under one key are the same.
    args: tuple[object, ...]
    work: Callable[[Files], Awaitable[T]]
    answer: Any
    changes: bool = True


def stat(path: bytes, *, follow: bool = True) -> Call[Entry]:
    """One file."""
    check_path(path)
    return Call("file.stat", (path, follow), lambda helper: helper.stat(path, follow=follow), Entry, changes=False)


def listing(path: bytes, *, cursor: bytes | None = None, limit: int | None = None) -> Call[Listing]:
    """A page of a directory."""
    check_path(path)
    if limit is not None and not 1 <= limit <= LIST_PAGE_MAX:
        raise InvalidSpec.field("limit", limit, f"1 to {LIST_PAGE_MAX}")

    async def work(helper: Files) -> Listing:
        return await helper.list(path, cursor=cursor, limit=limit)

    return Call("file.list", (path, cursor, limit), work, Listing, changes=False)


def write(
    path: bytes,
    pieces: AsyncIterator[Piece],
    *,
    mode: int | None = None,
    parents: bool = False,
    exclusive: bool = False,
) -> Call[Written]:
    """A whole file, or nothing."""
    check_path(path)
    check_mode(mode)

    async def work(helper: Files) -> Written:
        return await helper.write(path, pieces, mode=mode, parents=parents, exclusive=exclusive)

    return Call("file.write", (path, mode, parents, exclusive), work, Written)


def append(path: bytes, pieces: AsyncIterator[Piece], *, mode: int | None = None, parents: bool = False) -> Call[Entry]:
    """More at the end of a file."""
    check_path(path)
    check_mode(mode)

    async def work(helper: Files) -> Entry:
        return await helper.append(path, pieces, mode=mode, parents=parents)

    return Call("file.append", (path, mode, parents), work, Entry)


def tree_in(
    path: bytes, pieces: AsyncIterator[Piece], *, parents: bool = False, owners: bool = False
) -> Call[TreeReport]:
    """Unpack a tar stream."""
    check_path(path)

    async def work(helper: Files) -> TreeReport:
        return await helper.tree_in(path, pieces, parents=parents, owners=owners)

    return Call("file.tree", (path, parents, owners), work, TreeReport)


def mkdir(path: bytes, *, parents: bool = False, mode: int | None = None) -> Call[Entry]:
    """Make a directory."""
    check_path(path)
    check_mode(mode)

    async def work(helper: Files) -> Entry:
        return await helper.mkdir(path, parents=parents, mode=mode)

    return Call("file.mkdir", (path, parents, mode), work, Entry)


def remove(path: bytes, *, recursive: bool = False) -> Call[None]:
    """Remove it."""
    check_path(path)
    return Call("file.remove", (path, recursive), lambda helper: helper.remove(path, recursive=recursive), None)


def move(source: bytes, target: bytes, *, replace: bool = False) -> Call[Entry]:
    """Give it another place."""
    check_path(source, "source")
    check_path(target, "target")

    async def work(helper: Files) -> Entry:
        return await helper.move(source, target, replace=replace)

    return Call("file.move", (source, target, replace), work, Entry)


def chmod(path: bytes, mode: int) -> Call[Entry]:
    """Set its permission bits."""
    check_path(path)
    check_mode(mode)
    return Call("file.chmod", (path, mode), lambda helper: helper.chmod(path, mode), Entry)


class FileCalls:
    """The file calls of a node. `user` None is the sandbox's own."""

    def __init__(self, core: Core, ready: Callable[[str], Awaitable[Box]]) -> None:
        self._core = core
        self._ready = ready

    @asynccontextmanager
    async def _helper(self, ref: str, user: str | None, *, diff: bool = False) -> AsyncIterator[Files]:
        if user is not None:
            check_user(user)
        box = await self._ready(ref)
        name = user or box.base.user

        async def open_helper() -> Files:
            return await box.running_guest().files(user=name, cwd=box.base.cwd, diff=diff)

        box.running_guest()
        with self._core.going_on(box):
            try:
                async with box.helpers.use((name, diff), open_helper) as helper:
                    yield helper
            except (HelperGone, LaunchFailed) as error:
                raise await _with_reason(box, error) from error

    async def do(self, ref: str, call: Call[T], *, user: str | None = None, key: str | None = None) -> T:
        """Under a key at most once; without one as often as it is asked for, for what can be repeated."""

        async def attempt() -> T:
            try:
                async with self._helper(ref, user) as helper:
                    return await call.work(helper)
            except HelperGone as error:
                if call.changes and error.detail.get("asked") is not False:
                    text = f"{call.kind} was begun; whether it took effect is not known: {error.message}"
                    raise Unknown(text, detail=error.detail, sandbox_id=error.sandbox_id) from error
                raise

        async def done() -> T:
            # Another helper may be asked: the first had heard nothing of it, or reading twice is as good as once.
            with suppress(HelperGone):
                return await attempt()
            return await attempt()

        async def kept() -> tuple[bytes, list[Statement]]:
            return encode(await done()), []

        if key is None or not call.changes:
            return await done()
        box = await self._ready(ref)
        digest = content_hash(call.kind, [list(call.args), user])
        raw = await self._core.once(box.id, check_key(key), digest, call.kind, kept, begin=True)
        answer: T = msgspec.msgpack.decode(raw, type=call.answer)
        return answer

    async def read(
        self,
        ref: str,
        path: bytes,
        *,
        offset: int,
        length: int | None,
        opened: Callable[[Entry], Awaitable[None]],
        sink: DataSink,
        user: str | None = None,
    ) -> None:
        """A file's bytes, as they come."""
        check_path(path)
        if offset < 0 or (length is not None and length < 0):
            raise InvalidSpec.field("offset", min(offset, length or 0), "0 or more")
        begun = _Begun()

        async def attempt() -> None:
            async with self._helper(ref, user) as helper:
                await helper.read(path, offset=offset, length=length, opened=begun.by(opened), sink=sink)

        await begun.once_more(attempt)

    async def tree_out(self, ref: str, path: bytes, sink: DataSink, *, user: str | None = None) -> TreeReport:
        """A tree as a tar stream."""
        check_path(path)
        begun = _Begun()

        async def attempt() -> TreeReport:
            async with self._helper(ref, user) as helper:
                return await helper.tree_out(path, begun.by(sink))

        return await begun.once_more(attempt)

    async def watch(
        self,
        ref: str,
        path: bytes,
        sink: Callable[[FileEvent | None], Awaitable[None]],
        *,
        recursive: bool,
        user: str | None = None,
    ) -> str:
        """Changes, until what is watched is gone. What a helper that dies may have missed is said to be an overflow."""
        check_path(path)
        ready = False

        async def tell(event: FileEvent | None) -> None:
            nonlocal ready
            again, ready = ready, True
            await sink(FileEvent(kind="overflow") if again and event is None else event)

        for helpers_left in reversed(range(WATCH_HELPERS_MAX)):
            try:
                async with self._helper(ref, user) as helper:
                    return await helper.watch(path, recursive=recursive, sink=tell)
            except FileNotFound:
                if not ready:
                    raise
                break
            except HelperGone:
                if not helpers_left:
                    raise
        return "gone"

    async def diff(
        self,
        ref: str,
        path: bytes,
        sink: Callable[[tuple[FileChange, ...]], Awaitable[None]],
        *,
        limit: int | None = None,
    ) -> DiffReport:
        """What is not as it was in the layers, some at a time; whatever the rights of the sandbox's user."""
        check_path(path)
        if limit is not None and not 1 <= limit <= DIFF_MAX:
            raise InvalidSpec.field("limit", limit, f"1 to {DIFF_MAX}")
        begun = _Begun()

        async def attempt() -> DiffReport:
            async with self._helper(ref, ROOT, diff=True) as helper:
                return await helper.diff(path, limit=limit, sink=begun.by(sink))

        return await begun.once_more(attempt)


async def _with_reason(box: Box, error: HelperGone | LaunchFailed) -> DsecError:
    """The error with why a helper may have ended: it lives on the sandbox's memory, as all in it does."""
    killed = 0
    if box.runtime is not None:
        with suppress(DsecError):
            killed = await box.runtime.oom_kills()
    if not killed:
        return error
    mib = box.info.spec.memory_mib
    message = (
        f"{error.message}: the sandbox has no memory left for it: its kernel has ended {killed} processes to keep to "
        f"{mib} MiB (memory_mib)"
    )
    detail = error.detail | {"resource": "memory", "memory_limit_bytes": mib * MIB}
    kind = HelperGone if isinstance(error, HelperGone) else Exhausted
    return kind(message, detail=detail, sandbox_id=box.id)


class _Begun:
    """Whether anything of a streamed answer is out: until then, another helper may be asked for all of it."""

    def __init__(self) -> None:
        self._yes = False

    def by(self, sink: Callable[[T], Awaitable[None]]) -> Callable[[T], Awaitable[None]]:
        """The same sink."""

        def told(what: T) -> Awaitable[None]:
            self._yes = True
            return sink(what)

        return told

    async def once_more(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Its answer, by the second helper if the first is gone."""
        try:
            return await attempt()
        except HelperGone:
            if self._yes:
                raise
        return await attempt()


def check_path(path: bytes, field: str = "path") -> bytes:
    """Raises InvalidSpec for what no kernel takes."""
    if not path or b"\0" in path or len(path) > PATH_MAX_BYTES:
        raise InvalidSpec.field(field, path, f"1 to {PATH_MAX_BYTES} bytes without NUL")
    return path


def check_mode(mode: int | None) -> int | None:
    """Raises InvalidSpec for what are no permission bits."""
    if mode is not None and not 0 <= mode <= MODE_MAX:
        raise InvalidSpec.field("mode", mode, "0 to 0o7777")
    # 0o1000 and more without what makes use of the sticky bit: nobody means that.
    if mode is not None and 0o1000 <= mode <= 777 and set(str(mode)) <= set("01234567"):
        raise InvalidSpec.field("mode", mode, f"octal digits as such: 0o{mode}")
    return mode
