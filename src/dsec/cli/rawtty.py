"""The terminal we run in: handed to a program as it is, and given back whatever happens."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final, NoReturn, Self

# Signals that end us: the terminal is given back first. In raw mode none of them comes from its keys.
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# What a program may have left behind that was not asked to clean up: the other screen, a hidden cursor, colours, keys
# of an application, bracketed paste, mouse reports. The other screen's end puts the cursor where it was saved last, so
# it is saved before: without that some terminals put it at the top of the only screen.
_CLEAN: Final = b"\x1b7\x1b[?1049l\x1b[?25h\x1b[0m\x1b[?1l\x1b>\x1b[?2004l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l"


def size(fd: int) -> tuple[int, int]:
    """Rows and columns; what is no terminal, or does not know, is 24 x 80."""
    try:
        found = os.get_terminal_size(fd)
    except OSError:
        return 24, 80
    return (found.lines, found.columns) if found.lines and found.columns else (24, 80)


def write_all(fd: int, data: bytes) -> None:
    """All of it, though a terminal may take a little at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class RawTerminal:
    """A context in which every key goes to the program and every byte of it comes to the terminal.

    However it is left (also by a signal that ends us, or by an exception), the terminal is as it was before.
    """

    def __init__(self, fd: int, on_resize: Callable[[], object]) -> None:
        self._fd = fd
        self._on_resize = on_resize
        self._before: list[object] | None = None
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._fd)
        atexit.register(self.restore)
        for number in _ENDING:
            self._handle(number, self._end)
        self._handle(signal.SIGWINCH, lambda number, frame: self._on_resize())
        self._handle(signal.SIGTSTP, self._stop)
        self._raw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
        atexit.unregister(self.restore)
        for number, before in self._handlers.items():
            signal.signal(number, before)  # type: ignore[arg-type]  # what signal.signal gave

    def restore(self) -> None:
        """As it was. Can be repeated."""
        if self._before is not None:
            try:
                # Now: output that waits for a stopped terminal must not keep us.
                termios.tcsetattr(self._fd, termios.TCSANOW, self._before)  # type: ignore[arg-type]  # of tcgetattr
            except (termios.error, OSError):
                return  # the terminal has gone

    def clean(self) -> None:
        """Undo what a program that we leave may have done to the screen."""
        try:
            os.write(sys.stdout.fileno(), _CLEAN)
        except OSError:
            return  # the terminal has gone

    def _raw(self) -> None:
        tty.setraw(self._fd, termios.TCSANOW)

    def _handle(self, number: int, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handlers[number] = signal.signal(number, handler)

    def _end(self, number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        # Continued: the shell that did so has the terminal in its own mode.
        self._raw()
        self._on_resize()


class Keys:
    """Finds the keys that detach (^P ^Q) in what is typed."""

    FIRST: Final = 0x10
    SECOND: Final = 0x11

    def __init__(self) -> None:
        self.held = False
        self.detached = False

    def feed(self, data: bytes) -> bytes:
        """What goes to the program. A ^P at the end is held until the next key, or `release`."""
        out = bytearray()
        for byte in data:
            if self.held and byte == self.SECOND:
                self.held, self.detached = False, True
                break
            if self.held:
                out.append(self.FIRST)
            self.held = byte == self.FIRST
            if not self.held:
                out.append(byte)
        return bytes(out)

    def release(self) -> bytes:
        """No second key came in time: the first was meant for the program."""
        held, self.held = self.held, False
        return bytes([self.FIRST]) if held else b""
