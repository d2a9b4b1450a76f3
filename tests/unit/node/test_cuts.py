"""A command of a session that is cut: what is asked of the runtime, and in which order."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from dsec.backends.base import Guest
from dsec.model.errors import DsecError, NotFound, Unavailable, Unknown
from dsec.node import sessions
from dsec.node.sessions import Command, Sessions
from dsec.node.shelltext import GIVE_UP

pytestmark = pytest.mark.unit

FENCE = 7


class Asked:
    """Stands for a guest: what was asked of it; a runtime that dies now and then answers some of it with an error."""

    def __init__(self, *answers: DsecError | None) -> None:
        self.calls: list[str] = []
        self._answers = list(answers)

    async def kill(self, process_id: str, signal: int | None = None) -> None:
        self._said("give up" if signal == GIVE_UP else "kill all")

    async def kill_fence(self, process_id: str, fence: int) -> None:
        assert fence == FENCE
        self._said("kill")

    def _said(self, what: str) -> None:
        self.calls.append(what)
        if self._answers and (error := self._answers.pop(0)) is not None:
            raise error


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIVES_UP_WITHIN_S", "ASKED_AGAIN_S", "KILL_AGAIN_S"):
        monkeypatch.setattr(sessions, name, 0.001)
    monkeypatch.setattr(sessions, "ANSWER_WITHIN_S", 0.003)


async def cut(guest: Asked, *, minds: bool = True) -> list[str]:
    command = Command("p-1", b"", 1, 0.0, "sleep")
    told = asyncio.Event()
    if minds:
        told.set()
    command.end_early("timeout")
    await cast(Any, Sessions)._cut(None, cast(Guest, guest), command, FENCE, told)
    return guest.calls


def test_a_shell_is_told_before_anything_is_killed_and_in_the_end_killed_itself() -> None:
    again = ["give up"] * 3  # its text may have come after the first
    assert asyncio.run(cut(Asked())) == ["give up", "kill", *again, "kill all"]


@pytest.mark.parametrize("error", [Unknown("the runtime died"), Unavailable("there is none")])
def test_what_a_runtime_took_with_it_is_asked_for_again_before_the_next(error: DsecError) -> None:
    calls = asyncio.run(cut(Asked(error, error, None, error)))
    assert calls[:5] == ["give up", "give up", "give up", "kill", "kill"]
    assert calls[-1] == "kill all"


def test_what_is_gone_is_not_asked_for_again() -> None:
    calls = asyncio.run(cut(Asked(NotFound("ended"), NotFound("ended"))))
    assert calls[:3] == ["give up", "kill", "give up"]


def test_a_shell_that_does_not_say_that_it_minds_is_not_told() -> None:
    """The signal would end it, as if it had failed to come back."""
    assert asyncio.run(cut(Asked(), minds=False)) == ["kill all"]
