"""What calls have started in a sandbox, as its events tell: also what has ended, and of a sandbox that has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from dsec.model.errors import NotFound

if TYPE_CHECKING:
    from dsec.model.events import Event
    from dsec.model.processes import Program
    from dsec.sdk._sync.sandbox import Sandbox

KINDS: Final = ("run", "spawn", "session", "command")
ENDED: Final = ("stopped", "lost")


class Started(msgspec.Struct):
    """One program. `started_at`, `ended_at`: seconds since the epoch, where they are known; `how`: how it ended."""

    id: str
    kind: str
    command: str
    step: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    how: str = ""

    @property
    def running(self) -> bool:
        """Whether nothing is known of its end."""
        return not self.how


def started(sandbox: Sandbox) -> list[Started]:
    """The programs that calls have started, the newest first: all that run, and of those that ended what the kept
    events tell of."""
    running = sandbox.state not in ENDED
    programs = sandbox.processes().programs if sandbox.state == "running" else ()
    found = {one.id: one for one in _of_events(sandbox.events())}
    for program in programs:
        found.setdefault(program.id, _of_program(program))
    if not running:
        for one in found.values():
            one.how = one.how or "ended with the sandbox"
    return sorted(found.values(), key=lambda one: one.step, reverse=True)


def _of_events(events: Iterable[Event]) -> Iterator[Started]:
    found: dict[str, Started] = {}
    for event in events:
        kind, _, what = event.kind.partition(".")
        if kind not in KINDS or event.process_id is None:
            continue
        one = found.setdefault(
            event.process_id, Started(event.process_id, kind, event.command or "", step=event.step or 0)
        )
        if what == "started":
            one.started_at = event.at
        elif what == "ended":
            one.ended_at = event.at
            one.how = _how(event)
            if one.started_at is None and (took := event.detail.get("duration_s")) is not None:
                one.started_at = event.at - took
    return iter(found.values())


def _how(event: Event) -> str:
    code, cause = event.detail.get("exit_code"), event.detail.get("cause")
    if code is None:
        return str(event.detail.get("error", "ended"))
    return f"exit {code}" if cause == "exited" else f"{cause} ({code})"


def _of_program(program: Program) -> Started:
    return Started(program.id, program.kind, program.command, step=program.step, started_at=program.started_at)


def newest_running(sandbox: Sandbox) -> str:
    """The id of the newest spawned program that runs. NotFound, with what ended not long ago."""
    running = [program for program in sandbox.processes().programs if program.kind == "spawn"]
    if running:
        return max(running, key=lambda program: program.step).id
    ended = [one for one in started(sandbox) if one.kind == "spawn"]
    if ended:
        last = ended[0]
        raise NotFound(f"no spawned program runs in this sandbox; the newest was {last.id} ({last.how})")
    raise NotFound(_nothing(sandbox))


def newest(sandbox: Sandbox) -> tuple[Started, bool]:
    """The newest spawned program, whether or not it runs; and whether there are others. NotFound."""
    spawned = [one for one in started(sandbox) if one.kind == "spawn"]
    if not spawned:
        raise NotFound(_nothing(sandbox))
    return spawned[0], len(spawned) > 1


def _nothing(sandbox: Sandbox) -> str:
    return (
        "no program was spawned in this sandbox (`dsec exec -d`, `spawn`); the output of `run` and of a session's "
        f"commands is in their results (`dsec ps -a {sandbox.id}` lists all)"
    )
