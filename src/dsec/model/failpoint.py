"""Named places where a test can make the process fail: `failpoint.at("start.mounted")`.

`arm(name, nth, action)` or `DSEC_FAILPOINTS=name:nth:action[,...]` in the environment; actions are `error`
(raises `Injected`), `kill` (SIGKILL to this process) and `hang`. `seen` counts visits, so a sweep can fail at
the first, second, ... nth point of a scenario. When nothing is armed a visit costs one attribute read.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from typing import Final

ENV: Final = "DSEC_FAILPOINTS"

seen: Counter[str] = Counter()
_armed: dict[str, tuple[int, str]] = {}
_counting = False


class Injected(Exception):
    """The fault that an armed failpoint raises."""


def at(name: str) -> None:
    """A step that made something outside the process has just been taken."""
    if _counting or _armed:
        _visit(name)


def arm(name: str, nth: int = 1, action: str = "error") -> None:
    """Fail at the nth visit of `name` from now on."""
    if action not in ("error", "kill", "hang"):
        raise ValueError(f"action {action!r}: one of error, kill, hang")
    _armed[name] = (seen[name] + nth, action)


def count(on: bool = True) -> None:
    """Count visits (and forget earlier ones)."""
    global _counting  # noqa: PLW0603 - one switch for the process is the point
    seen.clear()
    _counting = on


def disarm() -> None:
    """Forget everything armed and counted."""
    _armed.clear()
    count(False)


def _visit(name: str) -> None:
    seen[name] += 1
    nth, action = _armed.get(name, (0, ""))
    if seen[name] != nth:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "hang":
        time.sleep(3600)
    raise Injected(name)


def _from_environment() -> None:
    for item in filter(None, os.environ.get(ENV, "").split(",")):
        name, nth, action = item.split(":")
        arm(name, int(nth), action)


_from_environment()
