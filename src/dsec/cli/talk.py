"""A program and this terminal, or these pipes, talk until it ends or the user leaves it."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from dsec.cli.rawtty import Keys, size
from dsec.model.errors import Conflict, DsecError, InvalidState, NodeUnreachable, Unsupported

if TYPE_CHECKING:
    from dsec.model.states import RunResult
    from dsec.sdk._sync.attach import Attachment
    from dsec.sdk._sync.output import Follow
    from dsec.sdk._sync.programs import Process

READ_BYTES: Final = 64 * 1024
# Of input on its way to the program; then no more is read from the terminal or pipe.
_INPUT_BYTES: Final = 1024 * 1024
# How long a ^P may be the first of the two keys that detach.
_KEYS_S: Final = 0.5
# How long a terminal's user is kept while the node is away; before that `detach` is his to decide.
_AWAY_S: Final = 600.0
# Input after such a pause asks where it is: another terminal may have written meanwhile.
_ALONE_S: Final = 1.0

Write = Callable[[int, bytes], object]


class Talk:
    """One attachment. The main thread waits for keys and signals, one thread writes output, one sends input."""

    def __init__(
        self,
        process: Process,
        write: Write,
        *,
        stdin: int | None,
        terminal: bool,
        offsets: tuple[int, int] = (0, 0),
        say: Callable[[str], object],
    ) -> None:
        self._process = process
        self._write = write
        self._stdin = stdin
        self._terminal = terminal
        self._say = say
        self._over = False
        attached = _attached(process, offsets, self._broken)
        self._follow: Follow = attached or process.follow(offsets, on_broken=self._broken)
        self._set_size = process.resize if attached is None else attached.resize
        self._keys = Keys()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._input = _Input(process.stdin if attached is None else _AttachedInput(attached), self._wake, say)
        self._resized = threading.Event()
        self._error: BaseException | None = None

    @property
    def follow(self) -> Follow:
        """The output as far as it has come."""
        return self._follow

    def resized(self) -> None:
        """The terminal has another size. Called by a signal's handler."""
        self._resized.set()

    def run(self) -> RunResult | None:
        """How the program ended; None: the user has detached."""
        workers = [self._receive, self._input.run]
        if self._terminal:
            workers.append(self._resize)
        for work in workers:
            # Daemons: one that waits for a node or a terminal that is stuck must not keep us.
            threading.Thread(target=work, daemon=True).start()
        # A signal that comes just before we wait, or that another thread is given, would else be acted on with the next
        # key only.
        before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            while not self._over:
                self._turn()
                if self._keys.detached:
                    return None
            if self._error is not None:
                raise self._error
            if self._follow.result is None:
                raise InvalidState(f"{self._process.id} has ended, and its result is not known")
            return self._follow.result
        finally:
            signal.set_wakeup_fd(before)
            self._over = True
            self._input.end()
            self._resized.set()

    def _turn(self) -> None:
        reading = [self._wake_read]
        if self._stdin is not None and self._input.room():
            reading.append(self._stdin)
        ready, _, _ = select.select(reading, [], [], _KEYS_S if self._keys.held else None)
        if not ready:
            self._input.put(self._keys.release())
        if self._wake_read in ready:
            os.read(self._wake_read, READ_BYTES)
        if self._stdin is not None and self._stdin in ready:
            self._take(self._stdin)

    def _take(self, stdin: int) -> None:
        try:
            data = os.read(stdin, READ_BYTES)
        except OSError:
            data = b""  # a terminal that was hung up
        if data:
            self._input.put(self._keys.feed(data) if self._terminal else data)
            return
        self._stdin = None
        if self._terminal:
            raise SystemExit(129)  # as SIGHUP, which not everybody sends
        self._input.close()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            return  # it is awake

    def _receive(self) -> None:
        since: float | None = None
        try:
            while not self._over:
                try:
                    for stream, data in self._follow:
                        since = None
                        self._write(stream, data)
                    break
                except NodeUnreachable:
                    since = since or time.monotonic()
                    if not self._terminal or time.monotonic() - since > _AWAY_S:
                        raise
                    self._say("the node is still away; ^P ^Q leaves, the program goes on")
        except BaseException as error:  # noqa: BLE001 - a thread's edge: raised in the main one
            self._error = error
        self._over = True
        self._wake()

    def _broken(self, broken: bool) -> None:
        if not self._over:
            self._say("connection lost; making it again" if broken else "connected again")

    def _resize(self) -> None:
        assert self._stdin is not None
        terminal = self._stdin
        while self._resized.wait() and not self._over:
            self._resized.clear()
            try:
                self._set_size(*size(terminal))
            except DsecError:
                continue  # it has ended, or the node is away: the output's thread tells


class _Stdin(Protocol):
    """The input of a program, however it gets there."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def locate(self) -> object: ...


class _AttachedInput:
    """The input of a program over the connection that brings its output."""

    def __init__(self, attached: Attachment) -> None:
        self.write = attached.write
        self.close = attached.close_input
        self.locate = attached.locate


def _attached(process: Process, offsets: tuple[int, int], on_broken: Callable[[bool], object]) -> Attachment | None:
    """One connection for both ways, which answers keys sooner; None where no WebSocket comes through."""
    attached = process.attach(offsets, on_broken=on_broken)
    try:
        attached.ready()
    except Unsupported:
        return None
    return attached


class _Input:
    """Input on its way: put in by the main thread, sent by one of its own."""

    def __init__(self, stdin: _Stdin, wake: Callable[[], object], say: Callable[[str], object]) -> None:
        self._stdin = stdin
        self._wake = wake
        self._say = say
        self._waiting = bytearray()
        self._eof = False
        self._over = False
        self._changed = threading.Condition()

    def room(self) -> bool:
        """Whether more may be put in."""
        return len(self._waiting) < _INPUT_BYTES

    def put(self, data: bytes) -> None:
        """More input."""
        with self._changed:
            if not self._over:
                self._waiting += data
                self._changed.notify()

    def close(self) -> None:
        """The end of the input comes after what was put in."""
        with self._changed:
            self._eof = True
            self._changed.notify()

    def end(self) -> None:
        """Nobody wants it any more."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def run(self) -> None:
        """Send it until its end."""
        try:
            while (data := self._next()) is not None:
                self._send(data)
                self._wake()  # there is room
            if not self._over:
                self._patiently(self._stdin.close)
        except InvalidState:
            return  # nobody reads it any more
        except DsecError as error:
            if not self._over:
                self._say(f"input does not reach the program: {error.message}")
        finally:
            self._discard()

    def _next(self) -> bytes | None:
        with self._changed:
            began = time.monotonic()
            self._changed.wait_for(lambda: self._waiting or self._eof or self._over)
            if self._over or not self._waiting:
                return None
            data = bytes(self._waiting[:READ_BYTES])
            del self._waiting[:READ_BYTES]
        if time.monotonic() - began > _ALONE_S:
            self._patiently(self._stdin.locate)
        return data

    def _send(self, data: bytes) -> None:
        try:
            self._patiently(lambda: self._stdin.write(data), lambda: self._stdin.write(b""))
        except Conflict as error:
            if isinstance(error, InvalidState):
                raise
            self._stdin.locate()  # another terminal of the same program was quicker

    def _patiently(self, work: Callable[[], object], again: Callable[[], object] | None = None) -> None:
        """What a node that is away has not taken is kept by the SDK, and goes first with what comes next."""
        while not self._over:
            try:
                work()
                return
            except NodeUnreachable:
                work = again or work

    def _discard(self) -> None:
        # The pipe or terminal is still read: whoever writes into it is not to be held up, nor the keys that detach.
        with self._changed:
            self._over = True
            self._waiting.clear()
