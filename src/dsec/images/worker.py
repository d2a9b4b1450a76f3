"""The process that makes one EROFS image: `python -m dsec.images.worker`, started by `build`.

A process of its own because what it reads is hostile: it gives up root before it looks at a byte of an archive, has
limits on memory, CPU time and file size, and can be killed at any moment. It feeds mkfs.erofs one clean tar stream,
whatever came in, so every source gets the same checks and the same bytes give the same image.

Standard input: one line of JSON (`Order`), and for an archive the descriptor `archive_fd`. Standard output: lines of
JSON (`Message`).
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import resource
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec

from dsec.images import tarstream
from dsec.images.admit import Admission
from dsec.images.orders import IMAGE_NAME, NOBODY, Message, Order
from dsec.images.tarstream import Reader, TarError, Writer
from dsec.images.walk import Item, walk
from dsec.model import limits

MEMORY_MAX_BYTES: Final = 4 * limits.GIB  # mkfs.erofs holds all inodes, about 1 KiB each
CPU_MAX_S: Final = 3_600
PROGRESS_EVERY_S: Final = 0.25
STDERR_MAX_BYTES: Final = 4_096
LOG_NAME: Final = "mkfs.log"


def main() -> None:
    """Reads the order, makes the image in the current directory, says how it went."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    _limit(order.image_max_bytes)
    admission = Admission(whiteouts=order.whiteouts, content_max_bytes=order.image_max_bytes)
    try:
        _make(order, admission)
        message = Message(report=admission.report())
    except (TarError, EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        message = Message(refused=str(error))
    except MkfsError as error:
        message = Message(failed=str(error), content_bytes=admission.report().content_bytes)
    except OSError as error:
        if error.errno is None:  # not the system's: bz2 says so that its input is damaged
            message = Message(refused=str(error))
        else:
            message = Message(failed=f"{error.strerror or error}: {error.filename or 'the stream'}")
    _say(message)


class MkfsError(Exception):
    """mkfs.erofs ended badly; the message is what it said."""


def _limit(image_max_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_MAX_S, CPU_MAX_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (image_max_bytes, image_max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _make(order: Order, admission: Admission) -> None:
    with _mkfs(order) as process:
        assert process.stdin is not None
        try:
            items = _items(order, admission)
            _feed(items, admission, Writer(cast("BinaryIO", process.stdin)))
            process.stdin.close()
        except BrokenPipeError:  # it ended early; what it said follows
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        except BaseException:  # mkfs.erofs must not outlive us; it goes on
            process.kill()
            # What is buffered for it can go nowhere; left to Popen, that would hide the error which ended it.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            raise
        _check(process)


def _mkfs(order: Order) -> subprocess.Popen[bytes]:
    """mkfs.erofs, unprivileged, reading the tar from its standard input."""
    program = os.open(order.mkfs, os.O_RDONLY | os.O_CLOEXEC)
    os.close(os.open(IMAGE_NAME, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    root = os.geteuid() == 0
    if root:
        os.chown(IMAGE_NAME, NOBODY, NOBODY)
    try:
        with Path(LOG_NAME).open("wb") as log:
            return subprocess.Popen(
                [*("mkfs.erofs", *order.options), IMAGE_NAME],
                # By descriptor: the path to it may lead through directories only root can enter.
                executable=f"/proc/self/fd/{program}",
                pass_fds=(program,),
                # SIGXFSZ stays ignored: mkfs.erofs tries a 2 TiB scratch area first and takes a temporary file
                # when that is refused; by default the signal would kill it.
                restore_signals=False,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={"TMPDIR": ".", "PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
                user=NOBODY if root else None,
                group=NOBODY if root else None,
                extra_groups=[] if root else None,
            )
    finally:
        os.close(program)


def _items(order: Order, admission: Admission) -> Iterator[Item]:
    if order.directory is not None:
        # Reading somebody's directory takes the caller's rights; nothing of it is interpreted but names.
        return walk(os.fsencode(order.directory), whiteouts=order.whiteouts, drop=admission.drop)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    archive = io.BufferedReader(io.FileIO(order.archive_fd), tarstream.CHUNK_BYTES)
    return _archive(Reader(_plain(archive)))


def _archive(reader: Reader) -> Iterator[Item]:
    for entry in reader:
        yield entry, reader.data() if entry.type == tarstream.REGULAR else None


def _plain(archive: io.BufferedReader[io.FileIO]) -> BinaryIO:
    """The archive without its compression, which its first bytes tell."""
    magic = archive.peek(6)[:6]
    if magic.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=archive))
    if magic == b"\xfd7zXZ\0":
        return cast("BinaryIO", lzma.LZMAFile(archive))
    if magic.startswith(b"BZh"):
        return cast("BinaryIO", bz2.BZ2File(archive))
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        raise TarError("the archive is compressed with zstd: unpack it first (zstd -d)")
    return cast("BinaryIO", archive)


def _feed(items: Iterator[Item], admission: Admission, writer: Writer) -> None:
    said = time.monotonic()
    for entry, data in items:
        admitted = admission.admit(entry)
        for one in admitted:
            writer.add(one, data if one is entry else None)
        if time.monotonic() - said > PROGRESS_EVERY_S:
            said = time.monotonic()
            report = admission.report()
            _say(Message(report.entries, report.content_bytes))
    writer.close()


def _check(process: subprocess.Popen[bytes]) -> None:
    status = process.wait()
    if status == 0:
        return
    with Path(LOG_NAME).open("rb") as log:
        said = log.read(STDERR_MAX_BYTES).decode(errors="replace").strip()
    how = f"exit status {status}" if status > 0 else f"signal {-status}"
    raise MkfsError(f"mkfs.erofs ended with {how}: {said or 'nothing said'}")


def _say(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
