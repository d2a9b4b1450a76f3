"""File calls: a helper inside the sandbox does the work."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import msgspec

from dsec.backends.base import DataSink, Files, Piece
from dsec.model.errors import InvalidSpec, SandboxLost, Unavailable
from dsec.model.files import Entry, FileEvent, Listing, TreeReport
from dsec.model.limits import LIST_PAGE_MAX, PATH_MAX_BYTES
from dsec.model.specs import check_user
from dsec.node.box import Box
from dsec.node.core import Core, check_key, encode
from dsec.node.steps import content_hash
from dsec.node.store import Statement

MODE_MAX: Final = 0o7777

T = TypeVar("T")

_entry = msgspec.msgpack.Decoder(Entry).decode
_report = msgspec.msgpack.Decoder(TreeReport).decode


class FileCalls:
    """The file calls of a node. Paths are bytes; `user` None is the sandbox's own."""

    def __init__(self, core: Core, ready: Callable[[str], Awaitable[Box]]) -> None:
        self._core = core
        self._ready = ready

    @asynccontextmanager
    async def _helper(self, ref: str, user: str | None) -> AsyncIterator[Files]:
        if user is not None:
            check_user(user)
        box = await self._ready(ref)

        async def open_helper(name: str) -> Files:
            return await box.running_guest().files(user=name, cwd=box.base.cwd)

        box.running_guest()
        with self._core.going_on(box):
            async with box.helpers.use(user or box.base.user, open_helper) as helper:
                yield helper

    async def _read_only(self, ref: str, user: str | None, work: Callable[[Files], Awaitable[T]]) -> T:
        """Once more with another helper when the first was cut short: reading twice is as good as once."""
        try:
            async with self._helper(ref, user) as helper:
                return await work(helper)
        except Unavailable as error:
            if isinstance(error, SandboxLost) or error.code != "helper_gone":
                raise
        async with self._helper(ref, user) as helper:
            return await work(helper)

    async def _change(
        self,
        ref: str,
        call: tuple[str, Sequence[object]],
        work: Callable[[Files], Awaitable[T]],
        *,
        user: str | None,
        key: str | None,
    ) -> bytes:
        """Under a key at most once; without one as often as it is asked for, for what can be repeated."""

        async def done() -> tuple[bytes, list[Statement]]:
            try:
                async with self._helper(ref, user) as helper:
                    return encode(await work(helper)), []
            except Unavailable as error:
                if error.detail.get("asked") is not False:
                    raise
            # The first was dead and heard nothing of it: another does it, once.
            async with self._helper(ref, user) as helper:
                return encode(await work(helper)), []

        if key is None:
            return (await done())[0]
        box = await self._ready(ref)
        kind, args = call
        digest = content_hash(kind, [args, user])
        return await self._core.once(box.id, check_key(key), digest, kind, done, begin=True)

    # -- what reads ---------------------------------------------------------------------------------------------------

    async def stat(self, ref: str, path: bytes, *, follow: bool = True, user: str | None = None) -> Entry:
        """One file."""
        check_path(path)
        return await self._read_only(ref, user, lambda helper: helper.stat(path, follow=follow))

    async def list(
        self, ref: str, path: bytes, *, cursor: bytes | None = None, limit: int | None = None, user: str | None = None
    ) -> Listing:
        """A page of a directory."""
        check_path(path)
        if limit is not None and not 1 <= limit <= LIST_PAGE_MAX:
            raise InvalidSpec.field("limit", limit, f"1 to {LIST_PAGE_MAX}")
        return await self._read_only(ref, user, lambda helper: helper.list(path, cursor=cursor, limit=limit))

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
        async with self._helper(ref, user) as helper:
            await helper.read(path, offset=offset, length=length, opened=opened, sink=sink)

    async def tree_out(self, ref: str, path: bytes, sink: DataSink, *, user: str | None = None) -> TreeReport:
        """A tree as a tar stream."""
        check_path(path)
        async with self._helper(ref, user) as helper:
            return await helper.tree_out(path, sink)

    async def watch(
        self,
        ref: str,
        path: bytes,
        sink: Callable[[FileEvent | None], Awaitable[None]],
        *,
        recursive: bool,
        user: str | None = None,
    ) -> str:
        """Changes, until what is watched is gone."""
        check_path(path)
        async with self._helper(ref, user) as helper:
            return await helper.watch(path, recursive=recursive, sink=sink)

    # -- what changes -------------------------------------------------------------------------------------------------

    async def write(
        self,
        ref: str,
        path: bytes,
        pieces: AsyncIterator[Piece],
        *,
        mode: int | None = None,
        parents: bool = False,
        exclusive: bool = False,
        user: str | None = None,
        key: str | None = None,
    ) -> Entry:
        """A whole file, or nothing."""
        check_path(path)
        check_mode(mode)

        async def work(helper: Files) -> Entry:
            return await helper.write(path, pieces, mode=mode, parents=parents, exclusive=exclusive)

        args = [path, mode, parents, exclusive]
        return _entry(await self._change(ref, ("file.write", args), work, user=user, key=key))

    async def append(
        self,
        ref: str,
        path: bytes,
        pieces: AsyncIterator[Piece],
        *,
        mode: int | None = None,
        parents: bool = False,
        user: str | None = None,
        key: str | None = None,
    ) -> Entry:
        """More at the end of a file."""
        check_path(path)
        check_mode(mode)

        async def work(helper: Files) -> Entry:
            return await helper.append(path, pieces, mode=mode, parents=parents)

        return _entry(await self._change(ref, ("file.append", [path, mode, parents]), work, user=user, key=key))

    async def tree_in(
        self,
        ref: str,
        path: bytes,
        pieces: AsyncIterator[Piece],
        *,
        parents: bool = False,
        owners: bool = False,
        user: str | None = None,
        key: str | None = None,
    ) -> TreeReport:
        """Unpack a tar stream."""
        check_path(path)

        async def work(helper: Files) -> TreeReport:
            return await helper.tree_in(path, pieces, parents=parents, owners=owners)

        return _report(await self._change(ref, ("file.tree", [path, parents, owners]), work, user=user, key=key))

    async def mkdir(
        self,
        ref: str,
        path: bytes,
        *,
        parents: bool = False,
        mode: int | None = None,
        user: str | None = None,
        key: str | None = None,
    ) -> Entry:
        """Make a directory."""
        check_path(path)
        check_mode(mode)

        async def work(helper: Files) -> Entry:
            await helper.mkdir(path, parents=parents, mode=mode)
            return await helper.stat(path)

        return _entry(await self._change(ref, ("file.mkdir", [path, parents, mode]), work, user=user, key=key))

    async def remove(
        self, ref: str, path: bytes, *, recursive: bool = False, user: str | None = None, key: str | None = None
    ) -> None:
        """Remove it."""
        check_path(path)
        await self._change(
            ref,
            ("file.remove", [path, recursive]),
            lambda helper: helper.remove(path, recursive=recursive),
            user=user,
            key=key,
        )

    async def move(
        self,
        ref: str,
        source: bytes,
        target: bytes,
        *,
        replace: bool = False,
        user: str | None = None,
        key: str | None = None,
    ) -> Entry:
        """Give it another place."""
        check_path(source, "source")
        check_path(target, "target")

        async def work(helper: Files) -> Entry:
            await helper.move(source, target, replace=replace)
            return await helper.stat(target, follow=False)

        return _entry(await self._change(ref, ("file.move", [source, target, replace]), work, user=user, key=key))

    async def chmod(
        self, ref: str, path: bytes, mode: int, *, user: str | None = None, key: str | None = None
    ) -> Entry:
        """Set its permission bits."""
        check_path(path)
        check_mode(mode)

        async def work(helper: Files) -> Entry:
            await helper.chmod(path, mode)
            return await helper.stat(path)

        return _entry(await self._change(ref, ("file.chmod", [path, mode]), work, user=user, key=key))


def check_path(path: bytes, field: str = "path") -> bytes:
    """Raises InvalidSpec for what no kernel takes."""
    if not path or b"\0" in path or len(path) > PATH_MAX_BYTES:
        raise InvalidSpec.field(field, path, f"1 to {PATH_MAX_BYTES} bytes without NUL")
    return path


def check_mode(mode: int | None) -> int | None:
    """Raises InvalidSpec for what are no permission bits."""
    if mode is not None and not 0 <= mode <= MODE_MAX:
        raise InvalidSpec.field("mode", mode, "0 to 0o7777")
    return mode
