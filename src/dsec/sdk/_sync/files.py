# Generated from dsec/sdk/_async/files.py by scripts/generate_sync.py: edit that file.

"""`sbx.files`: the files of a sandbox."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from dsec.model.errors import DeadlineExceeded, FileError, FileNotFound, InvalidSpec, InvalidState
from dsec.model.files import Entry, FileEvent, Listing, TreeReport, Written
from dsec.model.ids import new_key
from dsec.sdk import bodies, codec, local
from dsec.sdk._sync.closing import Closing
from dsec.sdk._sync.transport import Items, Retry
from dsec.sdk.http1 import Broken, Garbage, Late
from dsec.sdk.keywords import WrongArgument, explained
from dsec.sdk.values import User, seconds, user_text
from dsec.sdk.values import path_bytes as _path

if TYPE_CHECKING:
    from dsec.sdk._sync.client import Client

RemotePath = str | bytes | os.PathLike[str]
LocalPath = str | os.PathLike[str]
# By what the kernel says of a path that nothing is at: there is no such name, something on the way is no directory, or
# links lead in a circle.
NOT_THERE: Final = ("ENOENT", "ENOTDIR", "ELOOP")


@explained
class Files:
    """Files of one sandbox, with the rights of its user (or another of its users, by `user=`).

    Paths are those of the sandbox, absolute or relative to its directory; names that are not UTF-8 are bytes, or str as
    `os.fsdecode` gives. Errors are FileNotFound, FileExists, IsADirectory, PermissionDenied, NoSpace (the sandbox's own
    disk) and FileError for the rest, all of them OSErrors, with the kernel's name in `detail["errno"]`.
    """

    def __init__(self, client: Client, path: str) -> None:
        self._transport = client.transport
        self._path = f"{path}/files"

    def read(self, path: RemotePath, *, offset: int = 0, length: int | None = None, user: User | None = None) -> bytes:
        """The bytes of a regular file: all of them, or at most `length` from `offset` on.

        InvalidSpec when these are more than 256 MiB: `download` takes any size.
        """
        query = _query(path=_path(path), offset=offset or None, length=length, user=user)
        retry = Retry(self._transport)
        while True:
            try:
                answer = self._transport.open("GET", self._path + query, accept=codec.OCTETS)
                try:
                    return answer.read()
                finally:
                    answer.close()
            except Broken as error:
                retry.after(error)
            except Garbage as error:
                raise self._transport.garbage(error) from error

    def read_text(
        self, path: RemotePath, *, encoding: str = "utf-8", errors: str = "strict", user: User | None = None
    ) -> str:
        """The text of a file. UnicodeDecodeError: it is none; with `errors="replace"` as well as it goes."""
        data = self.read(path, user=user)
        try:
            return data.decode(encoding, errors)
        except UnicodeDecodeError as error:
            shown = os.fsdecode(_path(path))
            error.reason += f' in {shown!r}; read(path) gives its bytes, errors="replace" as much text as there is'
            raise

    def write(
        self,
        path: RemotePath,
        data: str | bytes | bytearray | memoryview,
        *,
        mode: int | None = None,
        parents: bool = True,
        exclusive: bool = False,
        user: User | None = None,
    ) -> Written:
        """Write a whole file: it is there with all of `data` when this returns, or as it was before when this raises.

        A file that is replaced keeps its mode, a new one has 0o644. `parents`: directories above it are made.
        `exclusive`: FileExists when it is there. Where a file cannot be replaced (`/etc/hosts`, which is mounted, or
        one in a directory that the user may not write to) it is overwritten in its place: then `atomic` of the answer
        is False, and a failure on the way says so in `detail["partial"]`.
        """
        query = _query(path=_path(path), mode=_octal(mode), parents=parents, exclusive=exclusive, user=user)
        key = new_key() if exclusive else None
        return (self._transport.upload("PUT", self._path + query, Written, _bytes(data), key=key)).exact()

    def append(
        self,
        path: RemotePath,
        data: str | bytes | bytearray | memoryview,
        *,
        mode: int | None = None,
        parents: bool = True,
        user: User | None = None,
    ) -> Entry:
        """Add to the end of a file, once, and make it if it is not there."""
        query = _query(path=_path(path), mode=_octal(mode), parents=parents, user=user)
        body = _bytes(data)
        return (self._transport.upload("POST", f"{self._path}:append{query}", Entry, body, key=new_key())).exact()

    def stat(self, path: RemotePath, *, follow: bool = True, user: User | None = None) -> Entry:
        """One file of any type; with `follow=False` a symbolic link itself."""
        query = _query(path=_path(path), follow=None if follow else 0, user=user)
        return (self._transport.call("GET", f"{self._path}:stat{query}", Entry)).exact()

    def exists(self, path: RemotePath, *, user: User | None = None) -> bool:
        """Whether something is there: not what a symbolic link to nowhere leads to, nor anything below a file."""
        try:
            self.stat(path, user=user)
        except FileError as error:
            if error.detail.get("errno") in NOT_THERE:
                return False
            raise
        return True

    def list(self, path: RemotePath = ".", *, user: User | None = None) -> list[Entry]:
        """What is in a directory, in the byte order of the names."""
        entries: list[Entry] = []
        cursor: bytes | None = None
        while True:
            query = _query(path=_path(path), cursor=cursor, user=user)
            page = self._transport.call("GET", f"{self._path}:list{query}", Listing)
            entries.extend(entry.exact() for entry in page.items)
            cursor = page.next_cursor
            if cursor is None:
                return entries

    def mkdir(
        self, path: RemotePath, *, parents: bool = False, mode: int | None = None, user: User | None = None
    ) -> Entry:
        """Make a directory. With `parents` also those above it, and one that is there is fine; else FileExists."""
        query = _query(path=_path(path), parents=parents, mode=_octal(mode), user=user)
        try:
            return self._change("mkdir", query)
        except FileNotFound as error:
            if not parents:
                error.message += "; the directory above it is not there: mkdir(path, parents=True) makes that, too"
            raise

    def remove(self, path: RemotePath, *, recursive: bool = False, user: User | None = None) -> None:
        """Remove a file, a link itself, or an empty directory; with `recursive` a directory and all below it."""
        query = _query(path=_path(path), recursive=recursive, user=user)
        self._transport.call("POST", f"{self._path}:remove{query}", codec.Nothing, key=new_key())

    def move(self, source: RemotePath, target: RemotePath, *, replace: bool = False, user: User | None = None) -> Entry:
        """Give a file or directory another place. `replace`: also where something is (not a full directory)."""
        query = _query(source=_path(source), target=_path(target), replace=replace, user=user)
        return self._change("move", query)

    def chmod(self, path: RemotePath, mode: int, *, user: User | None = None) -> Entry:
        """Set the permission bits of a file, as `0o755`."""
        if mode is None:
            raise InvalidSpec.field("mode", mode, "a number, as 0o755")
        return self._change("chmod", _query(path=_path(path), mode=_octal(mode), user=user))

    def upload(
        self,
        source: LocalPath,
        target: RemotePath,
        *,
        replace: bool = True,
        on_progress: bodies.Progress | None = None,
        user: User | None = None,
    ) -> TreeReport:
        """Copy a local file, or a directory with all below it, into the sandbox; `target` is its new path there.

        A file is whole or not there. A directory may be half there when this raises; what is in the way of its files is
        replaced, other files beside them stay. All have their local modes, but for a `target` that was a directory.
        `replace=False`: FileExists where anything is at `target`, and nothing is changed. Above it directories are made
        in any case. `on_progress(done, total)`: bytes; the total of a tree is None.
        """
        if not isinstance(replace, bool):
            raise InvalidSpec.field("replace", replace, "True or False")
        where, key = _path(target), None if replace else new_key()
        told = "a path of this machine; write(path, data) writes bytes or text"
        body = bodies.of_local(_local("source", source, told), on_progress)
        if isinstance(body, bodies.LocalTree):
            if not replace:
                self._claim(where, body.mode, user)
            query = _query(path=where, parents=True, user=user)
            return self._transport.upload("PUT", f"{self._path}:tree{query}", TreeReport, body)
        query = _query(path=where, mode=_octal(body.mode), parents=True, exclusive=not replace, user=user)
        entry = self._transport.upload("PUT", self._path + query, Entry, body, key=key)
        return TreeReport(entries=1, bytes=entry.size)

    def _claim(self, path: bytes, mode: int, user: User | None) -> None:
        """Make the directory, which is not there. Of several that do so at once one succeeds."""
        if above := path.rstrip(b"/").rpartition(b"/")[0]:
            self.mkdir(above, parents=True, user=user)
        self.mkdir(path, mode=mode, user=user)

    def download(
        self,
        source: RemotePath,
        target: LocalPath,
        *,
        on_progress: bodies.Progress | None = None,
        user: User | None = None,
    ) -> TreeReport:
        """Copy a file, or a directory with all below it, out of the sandbox; `target` is its new path here.

        A file is whole or not there. Above `target` directories are made. What a sandbox says is not trusted: nothing
        of a directory lands outside `target`, no owner and no set-id bit is taken over, and what is no file, directory
        or link inside it is left out and said so in the report.
        """
        here = _local("target", target, "a path of this machine; read(path) gives the bytes")
        entry = self.stat(source, user=user)
        retry = Retry(self._transport)
        while True:
            try:
                if entry.type == "directory":
                    return self._download_tree(source, local.Tree(here, on_progress), user)
                with local.File(here, on_progress) as file:
                    return self._download_file(source, file, user)
            except Broken as error:
                retry.after(error)
            except Garbage as error:
                raise self._transport.garbage(error) from error

    def watch(self, path: RemotePath = ".", *, recursive: bool = True, user: User | None = None) -> Watch:
        """Changes of a directory or file as they happen: a context manager to iterate.

        Entering it waits until nothing is missed. The iteration ends when what is watched is removed or moved.
        """
        return Watch(self, _query(path=_path(path), recursive=recursive, user=user))

    def _change(self, call: str, query: str) -> Entry:
        return (self._transport.call("POST", f"{self._path}:{call}{query}", Entry, key=new_key())).exact()

    def _download_file(self, source: RemotePath, file: local.File, user: User | None) -> TreeReport:
        query = _query(path=_path(source), user=user)
        answer = self._transport.open("GET", self._path + query, accept=codec.OCTETS)
        try:
            size = answer.head.headers.get(b"x-dsec-size", b"")
            file.expect(int(size) if size.isdigit() else None)
            while data := answer.piece():
                file.write(data)
        finally:
            answer.close()
        return file.done()

    def _download_tree(self, source: RemotePath, tree: local.Tree, user: User | None) -> TreeReport:
        query = _query(path=_path(source), user=user)
        items = self._transport.stream("GET", f"{self._path}:tree{query}")
        try:
            while True:
                item = items.next(codec.TreeItem)
                if item.data:
                    tree.feed(item.data)
                if item.error is not None:
                    raise item.error.error()
                if item.report is not None:
                    items.drain()
                    return tree.done(item.report)
        finally:
            items.close()
            tree.close()


@explained
class Watch(Closing):
    """Changes below a path of a sandbox; see `files.watch`."""

    def __init__(self, files: Files, query: str) -> None:
        self._transport = files._transport
        self._call = f"{files._path}:watch{query}"
        self._items: Items | None = None
        self._over = False
        self._entered = False

    def __enter__(self) -> Self:
        self._entered = True
        retry = Retry(self._transport)
        while self._items is None:
            self._connect(retry)
        return self

    def close(self) -> None:
        """Watch no longer; whoever waits for a change, in another thread too, is told that it has ended."""
        self._over = True
        if self._items is not None:
            self._items.close()

    def __iter__(self) -> Iterator[FileEvent]:
        """Each change. `overflow` says that some were missed, also while the connection was broken."""
        while (event := self._event(None)) is not None:
            yield event

    def next(self, timeout_s: float | None = None) -> FileEvent:
        """The next change. DeadlineExceeded (a TimeoutError): none came within `timeout_s` seconds, and the watch goes
        on; a connection that is broken is made again first. InvalidState: the watch has ended, or what was watched.
        """
        end = None if (wait_s := seconds(timeout_s)) is None else time.monotonic() + wait_s
        try:
            event = self._event(end)
        except Late:
            raise DeadlineExceeded(f"nothing has changed within {timeout_s:g} s") from None
        if event is None:
            raise InvalidState("the watch has ended: it was closed, or what was watched is gone")
        return event

    def _event(self, end: float | None) -> FileEvent | None:
        """None: there will be none any more. Late: the time `end` has come."""
        if not self._entered:
            raise InvalidState("files.watch: use it as `with sbx.files.watch(...) as changes:`")
        while not self._over:
            if self._items is None:
                try:
                    self._connect(Retry(self._transport))
                except FileNotFound:  # it was removed while nobody watched
                    self.close()
                    return None
                return FileEvent(kind="overflow")
            event = self._next(end)
            if event is not None:
                return event
        return None

    def _next(self, end: float | None) -> FileEvent | None:
        if self._items is None:
            return None
        try:
            item = self._items.next(codec.WatchItem, end)
        except Broken:
            self._items = None
            return None
        except Garbage as error:
            raise self._transport.garbage(error) from error
        if item.error is not None:
            raise item.error.error()
        if item.ended is not None:
            self.close()
        return item.event

    def _connect(self, retry: Retry) -> None:
        while True:
            try:
                items = self._transport.stream("GET", self._call)
                item = items.next(codec.WatchItem)
                while not item.ready:
                    if item.error is not None:
                        raise item.error.error()
                    item = items.next(codec.WatchItem)
                self._items = items
                if self._over:  # closed meanwhile, by another thread
                    items.close()
                return
            except Broken as error:
                if self._over:
                    return
                retry.after(error)
            except Garbage as error:
                raise self._transport.garbage(error) from error


def _local(field: str, path: object, allowed: str) -> Path:
    if isinstance(path, str) or (isinstance(path, os.PathLike) and isinstance(os.fspath(path), str)):
        return Path(path)
    # Its type: the bytes of a file are not shown.
    raise WrongArgument(f"{field} is of the type {type(path).__name__}; allowed: {allowed}", detail={"field": field})


def _query(*, user: User | None, **fields: str | bytes | int | bool | None) -> str:
    return codec.query(**fields, user=user_text(user))


def _octal(mode: int | None) -> str | None:
    if mode is None:
        return None
    if isinstance(mode, bool) or not isinstance(mode, int):
        raise InvalidSpec.field("mode", mode, "a number, as 0o755")
    return f"{mode:o}"


def _bytes(data: str | bytes | bytearray | memoryview) -> bodies.Bytes:
    if isinstance(data, str):
        return bodies.Bytes(data.encode())
    if not isinstance(data, bytes | bytearray | memoryview):  # bytes(5) would be five zeros
        # Its type: what is in it is not shown.
        text = f"data is of the type {type(data).__name__}; allowed: str or bytes{_made_of(data)}"
        raise WrongArgument(text, detail={"field": "data"})
    return bodies.Bytes(bytes(data))


def _made_of(data: object) -> str:
    """How what is no content becomes one."""
    if isinstance(data, os.PathLike):
        return " (upload(local, path) copies a file of this machine)"
    if hasattr(data, "read"):
        return " (data.read(); upload(local, path) copies a file of this machine)"
    return " (json.dumps(data) makes text of it)" if isinstance(data, dict | list | tuple) else ""
