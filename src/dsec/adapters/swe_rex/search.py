"""Where a pattern is in what a program has shown, without waiting for it on the event loop.

Both come from others, and `re` can take for ever for some pairs of them, during which its process does nothing else.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from swerex.exceptions import CommandTimeoutError

from dsec.adapters.swe_rex import searcher

# What has none of these stands for itself, as most do that are expected: prompts.
_SPECIAL: Final = frozenset(r".^$*+?{}[]\|()")

# Of CPU, for one text.
SEARCH_S: Final = 5.0


class Search:
    """Looks for patterns; those that are no plain text have a process of their own, from the first on."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()
        self._closed = False

    async def find(self, patterns: list[str], text: str) -> tuple[int, int, int] | None:
        """Which pattern, start and end of the match that begins first. None: there is none, or it was closed.

        CommandTimeoutError: it took too long. ValueError: what is no pattern.
        """
        if all(_SPECIAL.isdisjoint(pattern) for pattern in patterns):
            found = [(start, which) for which, one in enumerate(patterns) if (start := text.find(one)) >= 0]
            if not found:
                return None
            start, which = min(found)
            return which, start, start + len(patterns[which])
        async with self._asking:
            try:
                return await self._ask(patterns, text)
            except BaseException:  # also cancelled: its answer would be taken for the next one's
                await self._end()
                raise

    async def _ask(self, patterns: list[str], text: str) -> tuple[int, int, int] | None:
        if self._closed:
            return None
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", str(Path(searcher.__file__))),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        data = text.encode("utf-8", "surrogateescape")
        line = b""
        with suppress(BrokenPipeError, ConnectionResetError):
            asked = {"patterns": patterns, "cpu_s": SEARCH_S, "size": len(data)}
            process.stdin.write(json.dumps(asked).encode() + b"\n" + data)
            await process.stdin.drain()
            line = await process.stdout.readline()
        if not line:
            code = await process.wait()
            if self._closed:
                return None
            if code == -signal.SIGPROF:
                limit = f"{SEARCH_S:g} seconds of CPU"
                raise CommandTimeoutError(f"looking for {patterns!r} in what the program has shown took over {limit}")
            raise RuntimeError(f"what looks for patterns has ended with {code}")
        answer = json.loads(line)
        if isinstance(answer, str):
            raise ValueError(answer)
        return None if answer is None else (answer[0], answer[1], answer[2])

    async def close(self) -> None:
        """For good. Who waits for an answer has none."""
        self._closed = True
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
