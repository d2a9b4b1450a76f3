"""Making an image file out of a directory or an archive: starts the worker, watches it, reads its verdict."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from dsec.images.admit import Report
from dsec.images.orders import IMAGE_NAME, NOBODY, Message, Order
from dsec.model.errors import DsecError, InvalidSpec, NodeDiskFull, Unavailable

Progress = Callable[[str], None]

# lz4 is what every kernel we support reads (zstd: 6.10). 64 KiB clusters, measured on the Debian base (527 MB plain):
# 301 MB in 3.0 s; 4 KiB clusters 324 MB in 4.3 s; lz4hc 259 MB in 18 s.
COMPRESSION: Final = ("-zlz4", "-C65536")
NIL_UUID: Final = "00000000-0000-0000-0000-000000000000"
TIMEOUT_S: Final = 3_600.0
DISK_SLACK_BYTES: Final = 1 << 20
WATCH_EVERY_S: Final = 0.2
REFUSED_MAX_CHARS: Final = 500


def image_options(*, whiteouts: bool) -> list[str]:
    """Options that make the same image of the same content, wherever and whenever."""
    options = ["--quiet", "-b4096", "-T0", "--mkfs-time", f"-U{NIL_UUID}", *COMPRESSION, "--sort=path"]
    return [*options, *(["--aufs"] if whiteouts else []), "--tar=f"]


def build(
    staging: Path,
    order: Order,
    *,
    what: str,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> tuple[Path, Report]:
    """The image, in `staging` (an empty directory of the caller's). What the source did wrong raises InvalidSpec."""
    staging.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(staging, NOBODY, NOBODY)
    command = [sys.executable, "-P", "-m", "dsec.images.worker"]
    with subprocess.Popen(
        command,
        cwd=staging,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(order.archive_fd,) if order.archive_fd >= 0 else (),
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        done = threading.Event()
        guard = threading.Thread(target=_guard, args=(process, done, cancel), daemon=True)
        guard.start()
        try:
            last = _converse(process, order, progress)
        finally:
            done.set()
            guard.join()
            _kill(process)
        if cancel is not None and cancel.is_set():
            raise Unavailable(f"importing {what} was cancelled")
        assert process.stderr is not None
        said = process.stderr.read(4096).decode(errors="replace")
    return staging / IMAGE_NAME, _verdict(last, process.returncode, said, what, staging)


def _converse(process: subprocess.Popen[bytes], order: Order, progress: Progress | None) -> Message:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(msgspec.json.encode(order) + b"\n")
    process.stdin.close()
    last = Message()
    for line in process.stdout:
        last = msgspec.json.decode(line, type=Message)
        if progress is not None and last.entries:
            progress(f"{last.entries} entries, {last.content_bytes / 1e6:.0f} MB")
    return last


def _guard(process: subprocess.Popen[bytes], done: threading.Event, cancel: threading.Event | None) -> None:
    """Ends the worker and mkfs.erofs when the caller cancels or time is up."""
    deadline = time.monotonic() + TIMEOUT_S
    while not done.wait(WATCH_EVERY_S):
        if time.monotonic() > deadline or (cancel is not None and cancel.is_set()):
            _kill(process)
            return


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole session: mkfs.erofs too. Its leader is reaped only later, so its number cannot be another's."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _verdict(last: Message, status: int, said: str, what: str, staging: Path) -> Report:
    if last.report is not None:
        return last.report
    if last.refused:
        raise InvalidSpec(f"{what} cannot be a layer: {last.refused[:REFUSED_MAX_CHARS]}", detail={"field": "source"})
    reason = last.failed or said.strip().rpartition("\n")[2] or f"the worker ended with status {status}"
    raise failure(f"making a layer of {what}", reason, staging, written_bytes=last.content_bytes)


def failure(doing: str, reason: str, staging: Path, *, written_bytes: int = 0) -> DsecError:
    """The error for a tool that failed: a full disk has a name of its own.

    mkfs.erofs does not tell it apart, and its scratch file is gone once it has ended: so the disk was full if what it
    had been given by then does not fit.
    """
    room = os.statvfs(staging)
    free = room.f_bavail * room.f_frsize
    if os.strerror(errno.ENOSPC) in reason or free < written_bytes + DISK_SLACK_BYTES:
        return NodeDiskFull(
            f"{doing}: the disk under {staging.parent} is full ({free} bytes are free, {written_bytes} were to be "
            f"written): {reason}"
        )
    return Unavailable(f"{doing} failed: {reason}", retry="never")
