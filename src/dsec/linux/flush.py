"""fdatasync of a file without waiting for it: by the kernel (Linux AIO) or, where that is refused, by a thread.

A thread that waits costs the interpreter two hand-overs of its lock for each flush, on the path of every answer:
0.2-0.5 ms of CPU beside a busy event loop. The kernel's own worker needs none; it says so through an eventfd.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

Done = Callable[[OSError | None], None]

_CMD_FDSYNC: Final = 3
_FLAG_RESFD: Final = 1
# io_setup, io_destroy, io_submit, io_getevents: glibc has no wrappers for them.
_NUMBERS: Final = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}


class Flusher(Protocol):
    """One flush at a time of one file."""

    def start(self, done: Done) -> None:
        """Begin; `done` is called on the running event loop, with what went wrong."""
        ...

    def close(self) -> OSError | None:
        """Wait for a flush that is under way and let go; what went wrong with it. `done` is not called any more."""
        ...


class _Iocb(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("reqprio", ctypes.c_int16),
        ("fildes", ctypes.c_uint32),
        ("buf", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("resfd", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("obj", ctypes.c_uint64),
        ("res", ctypes.c_int64),
        ("res2", ctypes.c_int64),
    )


def flusher(fd: int) -> Flusher:
    """The cheapest that works here. The descriptor stays the caller's, and must outlive it."""
    try:
        return KernelFlusher(fd)
    except OSError:  # refused by a system call filter, unknown to this kernel, or fs.aio-max-nr is used up
        return ThreadFlusher(fd)


class KernelFlusher:
    """By the kernel. Raises OSError when it does not do that."""

    def __init__(self, fd: int) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None:
            raise OSError(f"no Linux AIO known for {platform.machine()}")
        self._setup, self._destroy, self._submit, self._getevents = numbers
        # PyDLL keeps the interpreter's lock: none of these calls waits, but for the one in `close`.
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        self._eventfd = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done: Done | None = None
        self._event = _Event()
        self._call(ctypes.c_long(self._setup), ctypes.c_long(1), ctypes.byref(self._context))
        try:
            self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._iocb = _Iocb(opcode=_CMD_FDSYNC, fildes=fd, flags=_FLAG_RESFD, resfd=self._eventfd)
            self._iocbs = (ctypes.POINTER(_Iocb) * 1)(ctypes.pointer(self._iocb))
            # Made once: they are the same for every flush, and there is one for every answer.
            one = ctypes.c_long(1)
            self._to_begin = (ctypes.c_long(self._submit), self._context, one, self._iocbs)
            self._to_reap = (ctypes.c_long(self._getevents), self._context, one, one, ctypes.byref(self._event), None)
            self._begin()  # once, to see that this file's kind can be flushed so
            self._reap()
            os.eventfd_read(self._eventfd)
        except OSError:
            self._release()
            raise

    def _call(self, *args: object) -> int:
        result = int(self._syscall(*args))
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return result

    def _begin(self) -> None:
        self._call(*self._to_begin)

    def _reap(self) -> OSError | None:
        self._call(*self._to_reap)
        error = -int(self._event.res)
        return OSError(error, os.strerror(error)) if error > 0 else None

    def start(self, done: Done) -> None:
        self._watch(asyncio.get_running_loop())
        self._begin()
        self._done = done

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:
            self._unwatch()
            loop.add_reader(self._eventfd, self._ended)
            self._loop = loop

    def _unwatch(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._eventfd)
        self._loop = None

    def _ended(self) -> None:
        done = self._done
        if done is None:
            return
        os.eventfd_read(self._eventfd)
        self._done = None
        done(self._reap())

    def close(self) -> OSError | None:
        self._unwatch()
        under_way, self._done = self._done is not None, None
        error = self._reap() if under_way else None
        self._release()
        return error

    def _release(self) -> None:
        with contextlib.suppress(OSError):
            self._call(ctypes.c_long(self._destroy), self._context)
        if self._eventfd >= 0:
            os.close(self._eventfd)


class ThreadFlusher:
    """By a thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._thread = ThreadPoolExecutor(1, "dsec-flush")
        self._job: Future[None] | None = None
        self._closed = False

    def start(self, done: Done) -> None:
        loop = asyncio.get_running_loop()

        def say(error: OSError | None) -> None:
            if not self._closed:
                done(error)

        def ended(job: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(say, _failure(job))

        self._job = self._thread.submit(os.fdatasync, self._fd)
        self._job.add_done_callback(ended)

    def close(self) -> OSError | None:
        self._closed = True
        self._thread.shutdown()
        return None if self._job is None else _failure(self._job)


def _failure(job: Future[None]) -> OSError | None:
    error = job.exception()
    return error if isinstance(error, OSError) else None
