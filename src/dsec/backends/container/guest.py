"""Programs in a container, through the runtime: nothing of ours that is trusted runs inside."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from dsec.backends.base import Exit, Files, Handle, Inside, ProcessInfo, ProgramStatus, RunPlan, Sink
from dsec.backends.container import plans
from dsec.backends.container.endings import known
from dsec.model.errors import NotFound, SandboxLost
from dsec.model.processes import InputState, OutputPiece, Terminal
from dsec.model.states import RunOutcome
from dsec.wire import values as v
from dsec.wire.dial import dial
from dsec.wire.files import FileClient
from dsec.wire.runtime import RuntimeClient

T = TypeVar("T")

# How long the report of a sandbox's end may take once it is known that it ends.
END_KNOWN_WITHIN_S: Final = 5.0


def lost(sandbox_id: str, exit_: Exit) -> SandboxLost:
    """The error for a call on a sandbox that has ended."""
    detail = f": {exit_.detail}" if exit_.detail else ""
    return SandboxLost(
        f"sandbox {sandbox_id} has ended ({exit_.reason}{detail})",
        detail={"reason": exit_.reason},
        sandbox_id=sandbox_id,
    )


class ContainerGuest:
    """The `Guest` of a container."""

    def __init__(self, client: RuntimeClient, handle: Handle, ended: asyncio.Future[Exit]) -> None:
        self._client = client
        self._id = handle.id
        self._ended = ended

    async def _ask(self, call: Awaitable[T]) -> T:
        """NotFound may mean the program or the sandbox; the sandbox's end is what a caller has to hear of first."""
        try:
            return await call
        except SandboxLost:
            # Its end is reported when all of it is released; by then it is known why.
            await asyncio.wait((self._ended,), timeout=END_KNOWN_WITHIN_S)
            raise lost(self._id, known(self._ended) or Exit(reason="lost", detail="it is being ended")) from None
        except NotFound:
            self._alive()
            status = await self._status()
            if status is None or status.state == "ended":
                raise lost(self._id, _how(status)) from None
            raise

    async def _status(self) -> v.SandboxStatus | None:
        try:
            return await self._client.get(self._id)
        except NotFound:
            return None

    def _alive(self) -> None:
        if (exit_ := known(self._ended)) is not None:
            raise lost(self._id, exit_)

    async def run(
        self, plan: RunPlan, *, sink: Sink | None = None, started: Callable[[], None] | None = None
    ) -> RunOutcome:
        self._alive()
        start = plans.run_start(self._id, plan)
        return plans.outcome(await self._ask(self._client.run(start, sink=sink, started=started)))

    async def attach(
        self, process_id: str, *, sink: Sink | None = None, offsets: tuple[int, ...] = (0, 0), lossy: bool = False
    ) -> RunOutcome:
        self._alive()
        attach = v.RunAttach(sandbox=self._id, run=process_id, offsets=offsets, lossy=lossy)
        return plans.outcome(await self._ask(self._client.attach(attach, sink=sink)))

    async def kill(self, process_id: str, signal: int | None = None) -> None:
        self._alive()
        await self._ask(self._client.kill(self._id, process_id, signal or 0))

    async def write_stdin(self, process_id: str, offset: int, data: bytes, *, eof: bool) -> InputState:
        self._alive()
        args = v.RunStdin(sandbox=self._id, run=process_id, offset=offset, d=data, eof=eof)
        return plans.input_state(await self._ask(self._client.write_stdin(args)))

    async def resize(self, process_id: str, size: Terminal) -> None:
        self._alive()
        args = v.RunResize(sandbox=self._id, run=process_id, rows=size.rows, cols=size.cols)
        await self._ask(self._client.resize(args))

    async def read_output(self, process_id: str, stream: int, offset: int, limit: int) -> OutputPiece:
        self._alive()
        args = v.RunRead(sandbox=self._id, run=process_id, s=stream, offset=offset, max=limit)
        return plans.piece(stream, await self._ask(self._client.read_output(args)))

    async def status(self, process_id: str) -> ProgramStatus:
        self._alive()
        return plans.status(await self._ask(self._client.status(self._id, process_id)))

    async def fence(self, process_id: str) -> int:
        self._alive()
        return await self._ask(self._client.fence(self._id, process_id))

    async def kill_fence(self, process_id: str, fence: int) -> None:
        self._alive()
        await self._ask(self._client.kill_fence(self._id, process_id, fence))

    async def inside(self) -> Inside:
        self._alive()
        return plans.inside(await self._ask(self._client.processes(self._id)))

    async def processes(self) -> list[ProcessInfo]:
        self._alive()
        runs = await self._ask(self._client.runs(self._id))
        return [plans.process(run) for run in runs]

    async def forget(self, process_id: str) -> None:
        try:
            await self._client.forget(self._id, process_id)
        except (NotFound, SandboxLost):
            return  # forgotten, or gone with its sandbox

    async def dial(self, port: int) -> socket.socket:
        self._alive()
        return await self._ask(dial(self._client.path, self._id, port))

    async def files(self, *, user: str, cwd: str, diff: bool = False) -> Files:
        self._alive()
        return await self._ask(FileClient.open(self._client.path, self._id, user=user, cwd=cwd, diff=diff))

    def discard(self, process_id: str) -> None:
        self._client.discard(self._id, process_id)


def _how(status: v.SandboxStatus | None) -> Exit:
    return plans.ending(status) if status is not None else Exit(reason="lost", detail="the runtime does not know it")
