"""What is told of a sandbox's files against its layers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from dsec.backends.base import Files, Piece
from dsec.backends.conformance.kit import Subject, check, equal, expect, sandbox
from dsec.model.errors import FileError, FileNotFound
from dsec.model.files import DiffReport, FileChange


@check()
async def a_new_sandbox_has_no_changes(subject: Subject) -> None:
    """What a backend itself puts into a sandbox is mounted, or no change."""
    async with sandbox(subject) as box:
        with closing(await box.guest.files(user="0", cwd="/", diff=True)) as files:
            equal(await diff(files, b"/"), {}, "changes")


@check()
async def changes_are_what_is_there_against_what_was(subject: Subject) -> None:
    """Each path once; what was made and removed, or changed and changed back, is none."""
    async with sandbox(subject) as box:
        with closing(await box.guest.files(user="0", cwd="/", diff=True)) as files:
            mode = (await files.stat(b"/tmp")).mode
            await write(files, b"/tmp/new/file", b"12345")
            await write(files, b"/tmp/\xff", b"")
            await write(files, b"/tmp/short-lived", b"")
            await files.remove(b"/tmp/short-lived", recursive=False)
            await files.chmod(b"/tmp", 0o711)
            await files.remove(b"/usr/bin", recursive=True)
            changes = await diff(files, b"/")
            made = {b"/tmp/new", b"/tmp/new/file", b"/tmp/\xff"}
            equal({path for path, one in changes.items() if one.kind == "added"}, made, "what was added")
            equal(changes[b"/tmp/new/file"].size, 5, "its size")
            equal(changes[b"/tmp"].what, ("mode",), "what changed of /tmp")
            gone = {path for path, one in changes.items() if one.kind == "deleted"}
            expect(all((path + b"/").startswith(b"/usr/bin/") for path in gone), f"deleted: {gone}")
            equal(changes[b"/usr/bin"].now, None, "what was deleted, now")
            equal(len(changes), len(made) + 1 + len(gone), "changes")
            await files.chmod(b"/tmp", mode)
            await files.remove(b"/tmp/new", recursive=True)
            equal(set(await diff(files, b"/tmp")), {b"/tmp/\xff"}, "what is left")


@check()
async def changes_are_told_of_a_part_and_in_bounds(subject: Subject) -> None:
    """A path that is not there and was not, one that is mounted, and a limit."""
    async with sandbox(subject) as box:
        with closing(await box.guest.files(user="0", cwd="/tmp", diff=True)) as files:
            for name in (b"a", b"b", b"c"):
                await write(files, name, b"x")
            equal(set(await diff(files, b"b")), {b"/tmp/b"}, "below a relative path")
            equal(await diff(files, b"/usr"), {}, "where nothing changed")
            told: list[FileChange] = []
            report = await tell(files, b"/tmp", told, limit=2)
            equal((len(told), report.added, report.more), (2, 2, True), "with a limit")
            for path, kind in ((b"/nothing", FileNotFound), (b"/proc", FileError)):
                try:
                    await diff(files, path)
                except kind:
                    continue
                expect(False, f"{path!r} was not refused")
            expect(files.usable, "a refusal ends it")


async def tell(files: Files, path: bytes, told: list[FileChange], *, limit: int | None = None) -> DiffReport:
    async def sink(changes: tuple[FileChange, ...]) -> None:
        told.extend(changes)

    return await files.diff(path, limit=limit, sink=sink)


async def diff(files: Files, path: bytes) -> dict[bytes, FileChange]:
    """By path; none comes twice, and as many as were counted."""
    told: list[FileChange] = []
    report = await tell(files, path, told)
    found = {one.raw_path or one.path.encode(): one for one in told}
    equal(len(found), len(told), "different paths")
    equal(report.added + report.changed + report.deleted, len(told), "counted changes")
    return found


async def write(files: Files, path: bytes, data: bytes) -> None:
    async def pieces() -> AsyncIterator[Piece]:
        yield data

    await files.write(path, pieces(), mode=None, parents=True, exclusive=False)


@contextmanager
def closing(files: Files) -> Iterator[Files]:
    try:
        yield files
    finally:
        files.close()
