"""A program that looks for patterns, in a process of its own: one that backtracks for ever can only be ended with it.

It is run by its path, without this package: it needs the standard library alone and starts fast. On stdin, again and
again: a line `{"patterns": [...], "cpu_s": S, "size": N}` and N bytes of text; on stdout one line for each:
`[which, start, end]` in characters, `null` where none is found, or a text that says what is wrong with a pattern.

Who takes more CPU than that for one text is ended by the kernel (SIGPROF): nothing of Python's has a turn in a search.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from typing import Final

_MEMORY_BYTES: Final = 1 << 30


def search(patterns: list[str], text: str) -> list[int] | None:
    """The match that begins first: which pattern, its start and end."""
    found = [(match, which) for which, one in enumerate(patterns) if (match := re.search(one, text, re.DOTALL))]
    if not found:
        return None
    match, which = min(found, key=lambda each: each[0].start())
    return [which, match.start(), match.end()]


def _answer(patterns: list[str], text: str) -> list[int] | str | None:
    try:
        return search(patterns, text)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        return f"a pattern of {patterns!r} cannot be used: {error or type(error).__name__}"[:1000]


def main() -> None:
    """Until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    while line := sys.stdin.buffer.readline():
        asked = json.loads(line)
        text = sys.stdin.buffer.read(asked["size"]).decode("utf-8", "surrogateescape")
        signal.setitimer(signal.ITIMER_PROF, asked["cpu_s"])
        answer = _answer(asked["patterns"], text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
