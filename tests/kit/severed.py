"""Letting an agent die inside a test's process: from one moment on nothing it does has an effect any more."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from dsec.model.errors import Unavailable
from dsec.node.store import Statement, Store


class Link:
    """What ties an agent to the world. Cut, every call hangs; released (at the test's end), every call raises."""

    def __init__(self) -> None:
        self.cut = False
        self.released = False
        self._hanging: set[asyncio.Future[Any]] = set()

    def hang(self) -> asyncio.Future[Any]:
        """What a dead agent waits for."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.released:
            future.set_exception(Unavailable("this agent is dead"))
        else:
            self._hanging.add(future)
        return future

    def release(self) -> None:
        """Let the tasks of the dead agent end."""
        self.cut = self.released = True
        for future in self._hanging:
            if not future.done():
                future.set_exception(Unavailable("this agent is dead"))


class Severable:
    """A backend, runtime or guest behind a link."""

    def __init__(self, target: Any, link: Link) -> None:
        self._target = target
        self._link = link

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._link.cut:
                return self._link.hang()
            result = found(*args, **kwargs)
            return self._follow(result) if inspect.isawaitable(result) else self._wrap(result)

        return call

    async def _follow(self, result: Any) -> Any:
        try:
            value = await result
        finally:
            if self._link.cut and not self._link.released:
                await self._link.hang()
        return self._wrap(value)

    def _wrap(self, value: Any) -> Any:
        return Severable(value, self._link) if hasattr(value, "guest") or hasattr(value, "forget") else value


class SeverableStore(Store):
    """A store behind a link."""

    link: Link

    def commit(self, *statements: Statement, **options: Any) -> asyncio.Future[None]:
        if self.link.cut:
            return self.link.hang()
        return super().commit(*statements, **options)

    def read(self, sql: str, args: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if self.link.cut:
            raise Unavailable("this agent is dead")
        return super().read(sql, args)
