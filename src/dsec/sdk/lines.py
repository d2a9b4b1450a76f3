"""Whole lines of a program's output, made of its bytes as they come."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Literal, Self

from dsec.model.errors import DeadlineExceeded, InvalidSpec, ProgramEnded, no_attribute
from dsec.model.limits import LINE_MAX_BYTES
from dsec.sdk.values import SHOWN_BYTES, SHOWN_LINES, how_ended

if TYPE_CHECKING:
    from dsec.model.states import RunResult

LineEnding = Literal["newline", "end", "cut", "gap"]
Pattern = str | bytes | re.Pattern[str] | re.Pattern[bytes]
Offsets = tuple[int, int]

_FIRST: Final[Offsets] = (0, 0)
_ONE_LINE: Final = "text of one line, without a newline; several lines are waited for one after the other"
_REGEX: Final = "; a str stands in the line as it is: a regular expression is re.compile(...)"
_ANEW: Final = "; sbx.process(id).wait_for(...) looks from the first line on"
_HELD_BACK: Final = (
    "; nothing has come: many programs hold their output back where it is no terminal, until there is much of it "
    "(`python3 -u`, `stdbuf -oL COMMAND` and spawn(tty=True) keep them from it)"
)
# Of a regular expression, and rare in what programs write: classes, repeated dots, sets, anchors, groups with a choice.
_SIGNS: Final = re.compile(r"\\[dDwWsSbB.()\[\]]|\.[*+?]|\[[^\]]+\]|^\^|\$$|\(\?|\([^)]*\|[^)]*\)|\w\|\w")
_SHOWN_PATTERN_CHARS: Final = 200
# The longest of UTF-8.
_CHARACTER_BYTES: Final = 4


class Line(str):
    """One line of a program's output: a str, without the newline, UTF-8 with replacement.

    `stream`: 1 or 2. `data`: its exact bytes, with the newline. `offset`: where they begin in the stream.
    `ending`: `newline`; `end`: the output ended without one; `cut`: it has more than LINE_MAX_BYTES (1 MiB) and the
    rest comes as the next; `gap`: what came behind it is not kept any more.
    """

    stream: int
    data: bytes
    offset: int
    ending: LineEnding

    def __new__(
        cls, text: str, stream: int = 1, data: bytes = b"", offset: int = 0, ending: LineEnding = "newline"
    ) -> Self:
        made = super().__new__(cls, text)
        made.stream, made.data, made.offset, made.ending = stream, data, offset, ending
        return made

    @property
    def end(self) -> int:
        """Where what is behind it begins in the stream."""
        return self.offset + len(self.data)


# Not within the class: a type checker would take every attribute for one that is there.
Line.__getattr__ = no_attribute  # type: ignore[attr-defined]  # of a class: asked for what it does not have


class Splitter:
    """Lines of both streams. `offsets`: where what is not a line yet begins."""

    def __init__(self, offsets: Offsets = _FIRST) -> None:
        self.offsets = {1: offsets[0], 2: offsets[1]}
        self._kept = {1: bytearray(), 2: bytearray()}

    def feed(self, stream: int, data: bytes, end: int) -> Iterator[Line]:
        """The lines that are whole now; `end`: where the data ends in its stream."""
        kept, begin = self._kept[stream], end - len(data)
        if begin != self.offsets[stream] + len(kept):
            yield from self._rest(stream, "gap")
            self.offsets[stream] = begin
        seen = len(kept)  # of what is kept nothing is a newline
        kept += data
        while True:
            newline = kept.find(b"\n", seen)
            if (len(kept) if newline < 0 else newline) > LINE_MAX_BYTES:
                yield self._take(stream, _whole_characters(kept), "cut")
            elif newline < 0:
                return
            else:
                yield self._take(stream, newline + 1, "newline")
            seen = 0

    def rest(self, ends: dict[int, int]) -> Iterator[Line]:
        """What is left of both when there comes no more; `ends`: where the streams ended."""
        for stream in (1, 2):
            missing = ends[stream] > self.offsets[stream] + len(self._kept[stream])
            yield from self._rest(stream, "gap" if missing else "end")
            self.offsets[stream] = ends[stream]

    def _rest(self, stream: int, ending: LineEnding) -> Iterator[Line]:
        if kept := self._kept[stream]:
            yield self._take(stream, len(kept), ending)

    def _take(self, stream: int, size: int, ending: LineEnding) -> Line:
        kept, offset = self._kept[stream], self.offsets[stream]
        data = bytes(kept[:size])
        del kept[:size]
        self.offsets[stream] = offset + size
        text = data.removesuffix(b"\n").removesuffix(b"\r") if ending == "newline" else data
        return Line(text.decode("utf-8", "replace"), stream, data, offset, ending)


class Wanted:
    """What `wait_for` looks for, and what it saw, for its error. Raises InvalidSpec for what is no pattern.

    `behind`: the line that the call before has returned; it and those before it in its stream are not looked at.
    """

    def __init__(self, pattern: Pattern, behind: Line | None = None) -> None:
        self._matches = _matcher(pattern)
        self._named = _named(pattern)
        self._looked = "no line of its output"
        if behind is not None:
            self._looked += f" behind {_named(str(behind))}, which the last call returned,"
        self._began = behind is None
        self._regex = _looks_like_regex(pattern)
        self._shown: deque[Line] = deque()
        self._shown_bytes = 0
        self._parts: list[Line] = []

    def found(self, line: Line, *, whole: bool) -> bool:
        """Whether that is the line; `whole=False`: more of it may come."""
        if not whole:
            self._parts.append(line)
            return False
        self._shown.append(line)
        self._shown_bytes += len(line.data)
        while len(self._shown) > SHOWN_LINES or (self._shown_bytes > SHOWN_BYTES and len(self._shown) > 1):
            self._shown_bytes -= len(self._shown.popleft().data)
        return self._matches(line)

    def ended_first(self, program: str, result: RunResult | None) -> ProgramEnded:
        """The error for a program that has ended without the line."""
        how = "has ended" if result is None else f"ended {how_ended(result)} after {result.duration_s:.2f} s"
        detail = {} if result is None else {"exit_code": result.exit_code, "cause": result.cause}
        text = f"{program} {how}, and {self._looked} had {self._named}{self._hint()}{self._last()}"
        error = ProgramEnded(text, detail=detail)
        error.result = result
        return error

    def too_late(self, program: str, timeout_s: float) -> DeadlineExceeded:
        """The error for a line that has not come in time."""
        text = f"{program} goes on, and {self._looked} had {self._named} within {timeout_s:g} s{self._hint()}"
        if not self._shown and not self._parts:
            text += _HELD_BACK
        text += self._last()
        for part in self._parts:
            text += f"\nand this, which is no line yet, for want of a newline:\n{part[-SHOWN_BYTES:]}"
        return DeadlineExceeded(text)

    def _hint(self) -> str:
        return (_REGEX if self._regex else "") + ("" if self._began else _ANEW)

    def _last(self) -> str:
        lines = "".join(f"\n{line[-SHOWN_BYTES:]}" for line in self._shown)
        return f"\nlast output:{lines}" if lines else ""


def _matcher(pattern: Pattern) -> Callable[[Line], bool]:
    if isinstance(pattern, str):
        if "\n" in pattern:
            raise InvalidSpec.field("pattern", pattern, _ONE_LINE)
        return lambda line: pattern in line
    if isinstance(pattern, bytes):
        if b"\n" in pattern[:-1]:
            raise InvalidSpec.field("pattern", pattern, _ONE_LINE)
        return lambda line: pattern in line.data
    if not isinstance(pattern, re.Pattern):
        raise InvalidSpec.field("pattern", pattern, "a str, which stands in the line, or re.compile(...)")
    search: Callable[..., object] = pattern.search
    if isinstance(pattern.pattern, str):
        return lambda line: search(line) is not None
    return lambda line: search(line.data.rstrip(b"\r\n")) is not None


def _named(pattern: Pattern) -> str:
    text = repr(pattern.pattern if isinstance(pattern, re.Pattern) else pattern)
    return text if len(text) <= _SHOWN_PATTERN_CHARS else text[:_SHOWN_PATTERN_CHARS] + "..."


def _looks_like_regex(pattern: Pattern) -> bool:
    """Whether a text was probably meant as a regular expression, which a text never is."""
    if not isinstance(pattern, str | bytes):
        return False
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    if _SIGNS.search(text) is None:
        return False
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _whole_characters(data: bytearray) -> int:
    """How much of what is longer than a line may be comes as one piece: no character is cut in two."""
    for size in range(LINE_MAX_BYTES, LINE_MAX_BYTES - _CHARACTER_BYTES, -1):
        if data[size] & 0xC0 != 0x80:
            return size
    return LINE_MAX_BYTES  # it is no UTF-8
