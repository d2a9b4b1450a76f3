"""What goes to a terminal: text from sandboxes is never let through as it is.

A program in a sandbox chooses its output, file names, even its own command line. Raw control characters would let it
set the window's title, write to the clipboard, or hide what happened.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

# What reorders or hides text, by Unicode's own properties (16.0): all format characters (Cf: bidirectional controls,
# zero-width ones, tags ...) and separators of lines (Zl, Zp), and what else is shown as nothing
# (Default_Ignorable_Code_Point) but for variation selectors: they are in every other emoji.
_HIDDEN: Final = (
    "\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e00ff\U000e01f0-\U000e0fff"
)
# With C0 and C1 controls and DEL (Cc), and surrogates (Cs), which stand for bytes that are not UTF-8.
_UNSAFE: Final = re.compile(f"[\x00-\x1f\x7f-\x9f{_HIDDEN}\ud800-\udfff]")
# In a stream of output a line's end, a tab and a return to the line's start are what they are, and colours stay.
_UNSAFE_STREAM: Final = re.compile(
    f"\x1b\\[[0-9;]{{0,32}}m|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f{_HIDDEN}\ud800-\udfff]"
)
_NOT_IN_JSON: Final = re.compile("[^\n\x20-\x7e]")
_COLOUR_BEGUN: Final = re.compile("\x1b(?:\\[[0-9;]{0,32})?\\Z")
_RESET: Final = "\x1b[0m"


def _escape(match: re.Match[str]) -> str:
    text = match.group()
    if len(text) > 1:
        return text  # a colour
    code = ord(text)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def safe(text: str) -> str:
    """One line, with everything a terminal might act on escaped."""
    return _UNSAFE.sub(_escape, text)


class Filter:
    """Makes a stream of output bytes safe for a terminal: invalid UTF-8 and controls are shown, not sent."""

    def __init__(self) -> None:
        import codecs

        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""
        self._coloured = False

    def feed(self, data: bytes, *, final: bool = False) -> str:
        """The text that can be shown now; what may be the start of a colour waits for its end."""
        text = self._held + self._decoder.decode(data, final)
        self._held = ""
        if not final and (begun := _COLOUR_BEGUN.search(text)):
            self._held = text[begun.start() :]
            text = text[: begun.start()]
        shown = _UNSAFE_STREAM.sub(_escape, text)
        self._coloured = self._coloured or "\x1b" in shown
        return shown + _RESET if final and self._coloured else shown


class Out(Protocol):
    """What can be written to."""

    def write(self, data: bytes, /) -> int: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


class Unbuffered:
    """A descriptor that is written to at once. A thread that is stuck in it does not hold a lock of the interpreter's,
    which could not end then."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> int:
        """All of it, though the other side may take a little at a time."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._fd)


class Sink:
    """Where a program's stream goes: to a file or pipe exactly, to a terminal made safe (unless `raw`)."""

    def __init__(self, out: Out, *, raw: bool = False) -> None:
        self._out = out
        self._filter = None if raw or not out.isatty() else Filter()
        # To a terminal that has another encoding a character's bytes in UTF-8 are others, and controls among them.
        self._encoding = getattr(sys.stdout, "encoding", None) or "utf-8"

    def write(self, data: bytes) -> None:
        """At once: nobody wants to wait for a buffer to fill."""
        self._out.write(self._encoded(self._filter.feed(data)) if self._filter else data)
        self._out.flush()

    def close(self) -> None:
        """What was held back."""
        if self._filter:
            self._out.write(self._encoded(self._filter.feed(b"", final=True)))
            self._out.flush()

    def _encoded(self, text: str) -> bytes:
        return text.encode(self._encoding, "backslashreplace")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns under their names, every cell made safe."""
    lines = [list(head), *([safe(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def show_json(value: object) -> None:
    """One JSON document, in ASCII: whatever is in it, a terminal shows it and a program reads it."""
    import msgspec

    print(_ascii(msgspec.json.format(msgspec.json.encode(value), indent=2)))


def show_json_line(value: object, *, flush: bool = False) -> None:
    """The same in one line: one of many."""
    import msgspec

    print(_ascii(msgspec.json.encode(value)), flush=flush)


def _ascii(document: bytes) -> str:
    return _NOT_IN_JSON.sub(_json_escape, document.decode("utf-8"))


def _json_escape(match: re.Match[str]) -> str:
    units = match.group().encode("utf-16-be")
    return "".join(f"\\u{int.from_bytes(units[i : i + 2], 'big'):04x}" for i in range(0, len(units), 2))


def safe_lines(text: str) -> str:
    """Lines of ours, with what others chose within them."""
    return "\n".join(map(safe, text.split("\n")))


def note(text: str) -> None:
    """A line for a person, beside the output."""
    print(safe_lines(text), file=sys.stderr)


def show_all_text() -> None:
    """From now on what an output's encoding does not have is escaped there, and is no error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def age(seconds: float) -> str:
    """A time span in one unit."""
    seconds = max(seconds, 0)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def size(count: float) -> str:
    """Bytes in a readable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
