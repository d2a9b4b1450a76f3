"""The client of the native runtime: one connection, many requests, across restarts of the runtime.

The runtime's listening socket is held by the keeper, so connecting waits while the runtime is replaced. When the
connection breaks, requests that are safe to repeat are sent again, streams attach where they were, and only what cannot
be known is raised as `Unknown`: a program that was in flight when the *keeper* changed too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from dsec.model import limits
from dsec.model.errors import Conflict, DeadlineExceeded, DsecError, Unavailable, Unknown, Unsupported
from dsec.wire import frames, ops
from dsec.wire import values as v
from dsec.wire.discards import Discards
from dsec.wire.frames import FrameError
from dsec.wire.link import Link
from dsec.wire.ops import Op
from dsec.wire.pending import Pending, Sink, Stream, Subscription

log = logging.getLogger(__name__)

# How long a call waits for a runtime that does not answer, and the pauses between attempts.
RECONNECT_DEADLINE_S: Final = 20.0
BACKOFF_FIRST_S: Final = 0.01
BACKOFF_MAX_S: Final = 1.0
# For calls that only read or move something small.
CALL_DEADLINE_S: Final = 30.0
# What a call may take beyond the time that its own arguments give it.
MARGIN_S: Final = 30.0

T = TypeVar("T")

_NOTHING = v.Nothing()


class RuntimeClient:
    """A connection to `runtime.sock`. Made without I/O; connects with the first call and again when it must.

    `revive` is awaited when nobody listens, which means that the keeper is gone: it may start a new one.
    """

    def __init__(
        self,
        path: Path,
        *,
        deadline_s: float = RECONNECT_DEADLINE_S,
        revive: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.path = path
        self.hello: v.Hello | None = None
        self._deadline_s = deadline_s
        self._revive = revive
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending[Any]] = {}
        self._subscription: Subscription | None = None
        self._link: Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._waiting = 0
        self._discards = Discards(self._forget)
        self._closed = False
        self._trouble = "not connected yet"

    # Calls.

    async def connect(self) -> v.Hello:
        """Who answers; connects when that has not been done."""
        await self._ready()
        assert self.hello is not None
        return self.hello

    async def probe(self) -> v.Probe:
        """What the kernel can do."""
        return await self._call(ops.PROBE, _NOTHING, deadline_s=CALL_DEADLINE_S + MARGIN_S)

    async def layer_mount(self, digest: str, path: str) -> None:
        """Mount a layer; idempotent."""
        await self._call(ops.LAYER_MOUNT, v.LayerArgs(digest, path))

    async def layer_unmount(self, digest: str) -> None:
        """Unmount a layer. Conflict: a sandbox uses it."""
        await self._call(ops.LAYER_UNMOUNT, v.LayerArgs(digest))

    async def layers(self) -> tuple[v.LayerArgs, ...]:
        """The layers that are mounted."""
        return (await self._call(ops.LAYER_LIST, _NOTHING)).layers

    async def create(self, plan: v.SandboxPlan) -> v.SandboxStatus:
        """Make a sandbox. Conflict: its id is in use."""
        pending = self._new(Pending, ops.CREATE, v.CreateArgs(plan), plan.id)
        try:
            return await self._answer(pending, plan.deadline_ms / 1000 + MARGIN_S)
        except Conflict as error:
            if pending.sent > 1 and error.detail.get("reason") == "exists":
                # Sent twice because the connection broke: the first one made it.
                return await self.get(plan.id)
            raise

    async def sandboxes(self) -> tuple[v.SandboxStatus, ...]:
        """Every sandbox the runtime knows."""
        return (await self._call(ops.LIST, _NOTHING)).sandboxes

    async def get(self, sandbox_id: str) -> v.SandboxStatus:
        """One sandbox."""
        return await self._call(ops.GET, v.IdArgs(sandbox_id), sandbox_id)

    async def stop(self, sandbox_id: str, grace_s: float = 0.0) -> v.SandboxStatus:
        """End a sandbox and release what it had; idempotent."""
        args = v.StopArgs(sandbox_id, round(grace_s * 1000))
        return await self._call(ops.STOP, args, sandbox_id, deadline_s=grace_s + 2 * MARGIN_S)

    async def network_start(self) -> None:
        """The process for sandboxes' connections runs, and listens."""
        await self._call(ops.NETWORK_START, _NOTHING)

    async def network_steer(self, sandbox_id: str) -> None:
        """Give a sandbox to the process for connections, closed. Not one that it has already: LaunchFailed."""
        await self._call(ops.NETWORK_STEER, v.IdArgs(sandbox_id), sandbox_id)

    async def usage(self, sandbox_id: str) -> v.SandboxUsage:
        """What a sandbox uses now."""
        return await self._call(ops.USAGE, v.IdArgs(sandbox_id), sandbox_id)

    async def run(
        self, args: v.RunStart, *, sink: Sink | None = None, started: Callable[[], None] | None = None
    ) -> v.RunResult:
        """Start a program and wait for its end; the same run id attaches. Cancelling stops nothing."""
        pending = self._new(Pending if sink is None else Stream, ops.RUN, args, args.sandbox)
        pending.on_started = started
        return await self._follow(pending, sink)

    async def attach(self, args: v.RunAttach, *, sink: Sink | None = None) -> v.RunResult:
        """Wait for a program that was started before. NotFound: never launched, or forgotten."""
        return await self._follow(self._new(Pending if sink is None else Stream, ops.ATTACH, args, args.sandbox), sink)

    async def kill(
        self, sandbox_id: str, run: str, signal: int = 0, cause: Literal["killed", "timeout"] = "killed"
    ) -> None:
        """Signal a program; 0 kills its whole tree."""
        args = v.RunKill(sandbox_id, run, signal, cause)
        await self._call(ops.SIGNAL if signal else ops.KILL_TREE, args, sandbox_id)

    async def kill_fence(
        self, sandbox_id: str, run: str, fence: int, cause: Literal["killed", "timeout"] = "killed"
    ) -> None:
        """Kill what a run has begun since a fence, the newest, was made. Its own process lives on."""
        await self._call(ops.KILL_TREE, v.FenceKill(sandbox_id, run, 0, cause, fence), sandbox_id)

    async def fence(self, sandbox_id: str, run: str) -> int:
        """From now on what a run begins can be killed by itself."""
        return (await self._call(ops.FENCE, v.RunRef(sandbox_id, run), sandbox_id)).fence

    async def status(self, sandbox_id: str, run: str) -> v.RunStatus:
        """A run as it is now."""
        return await self._call(ops.STATUS, v.RunRef(sandbox_id, run), sandbox_id)

    async def write_stdin(self, args: v.RunStdin) -> v.InputSize:
        """More input for a run; returns once little of it waits to be read. Safe to repeat: a piece has its place."""
        return await self._answer(self._new(Pending, ops.STDIN, args, args.sandbox), None)

    async def read_output(self, args: v.RunRead) -> v.Piece:
        """Kept output of a run."""
        return await self._call(ops.READ, args, args.sandbox)

    async def resize(self, args: v.RunResize) -> None:
        """Another size for a run's terminal."""
        await self._call(ops.RESIZE, args, args.sandbox)

    async def processes(self, sandbox_id: str) -> v.ProcessTable:
        """Every process alive in a sandbox."""
        return await self._call(ops.PROCESSES, v.SandboxRef(sandbox_id), sandbox_id)

    async def runs(self, sandbox_id: str) -> tuple[v.RunInfo, ...]:
        """Programs of a sandbox."""
        return (await self._call(ops.RUN_LIST, v.SandboxRef(sandbox_id), sandbox_id)).runs

    async def forget(self, sandbox_id: str, run: str) -> None:
        """Free a kept result."""
        await self._call(ops.FORGET, v.RunRef(sandbox_id, run), sandbox_id)

    def discard(self, sandbox_id: str, run: str) -> None:
        """As `forget`, but with the next request or a little later, and without a word when it cannot be sent."""
        self._discards.add(v.RunRef(sandbox_id, run))

    async def shutdown(self, *, restart: bool) -> None:
        """End the runtime; with `restart` the keeper starts the binary that is on disk now."""
        await self._last_words(ops.SHUTDOWN, v.ShutdownArgs(restart))

    async def stop_keeper(self) -> None:
        """End keeper and runtime. Conflict: a sandbox lives."""
        await self._last_words(ops.STOP_KEEPER, _NOTHING)

    async def subscribe(self, on_ended: Callable[[v.SandboxStatus], None], on_gap: Callable[[], None]) -> None:
        """Hear of every sandbox that ends. `on_gap`: the connection was broken, some ends may have been missed."""
        self._subscription = Subscription(on_ended, on_gap)
        if self._link is not None and self._up.is_set():
            self._send_subscription(self._link)
        await self._ready()

    async def close(self) -> None:
        """Close the connection; what was started goes on."""
        self._closed = True
        self._subscription = None
        self._discards.close()
        self._up.set()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._link is not None:
            self._link.close()
        self._fail_all(Unavailable("the connection to the runtime was closed"))
        await asyncio.sleep(0)  # lets the transport close its socket before the loop may end

    # Sending.

    def _new(self, kind: type[Pending[Any]], op: Op[T], args: Any, sandbox_id: str | None = None) -> Pending[T]:
        return kind(next(self._ids), op, args, asyncio.get_running_loop().create_future(), sandbox_id)

    async def _call(
        self, op: Op[T], args: Any, sandbox_id: str | None = None, deadline_s: float = CALL_DEADLINE_S
    ) -> T:
        return await self._answer(self._new(Pending, op, args, sandbox_id), deadline_s)

    async def _answer(self, pending: Pending[T], deadline_s: float | None) -> T:
        if deadline_s is not None:
            late = DeadlineExceeded(f"the runtime did not answer {pending.op.name} within {deadline_s:g} s")
            pending.timer = asyncio.get_running_loop().call_later(deadline_s, pending.fail, late)
        try:
            await self._send(pending)
            return await pending.future
        finally:
            pending.settle()
            self._pending.pop(pending.id, None)

    async def _send(self, pending: Pending[Any]) -> None:
        frame = frames.encode(pending.request())
        while (link := self._link) is None or not (link.alive and self._up.is_set()):
            if link is not None and self._up.is_set():
                # It is closing, and that is told in a turn of the event loop: nothing below would wait for one.
                await asyncio.sleep(0)
            await self._ready()
            if pending.future.done():  # too late
                return
        self._pending[pending.id] = pending
        pending.sent += 1
        # In one piece, and the request first: the runtime, woken for a result that is not wanted any more, would do
        # that before it hears of the request, and often on the CPU that we are about to send it from.
        for ref in self._discards.take():
            frame += frames.encode(v.Request(next(self._ids), ops.FORGET.name, ref))
        link.send_frame(frame)
        if link.congested:
            await link.drain()

    async def _follow(self, pending: Pending[v.RunResult], sink: Sink | None) -> v.RunResult:
        if sink is None:
            return await self._answer(pending, None)
        assert isinstance(pending, Stream)
        pending.args = _with_window(pending.args)
        try:
            await self._send(pending)
            await pending.pump(sink, self._ack)
            result: v.RunResult = await pending.future
            return result
        finally:
            # Cancelled, or the sink raised: the program goes on, and must not wait for credit.
            if not pending.future.done():
                self._ack(pending.id, pending.detach())
            pending.settle()

    def _ack(self, request: int, count: int) -> None:
        link = self._link
        if count and link is not None and link.alive and request in self._pending:
            link.send(v.Request(next(self._ids), "run.ack", v.RunAck(request, count)))

    def _forget(self, refs: list[v.RunRef]) -> None:
        link = self._link
        if link is not None and link.alive and self._up.is_set():
            for ref in refs:
                link.send(v.Request(next(self._ids), ops.FORGET.name, ref))

    async def _last_words(self, op: Op[v.Nothing], args: Any) -> None:
        """An operation after which the runtime may be gone before it answers."""
        try:
            await self._call(op, args)
        except _Broken:
            return

    # Receiving.

    def _answered(self, answer: v.Answer) -> None:
        id_ = answer.id
        if answer.ev is None:
            if (pending := self._pending.get(id_)) is not None:
                pending.finish(answer)  # before it is taken out: an answer that does not decode fails it
                del self._pending[id_]
        elif answer.ev == "ended":
            if self._subscription is not None and answer.status is not None:
                self._subscription.on_ended(answer.status)
        elif (pending := self._pending.get(id_)) is not None:
            if answer.ev == "started":
                pending.started()
            elif answer.ev == "out":
                self._ack(id_, pending.out(answer))

    def _lost(self, link: Link, error: Exception | None) -> None:
        if link is not self._link:
            return
        self._link = None
        self._up.clear()
        self._trouble = f"the connection broke: {error or 'closed by the runtime'}"
        if isinstance(error, FrameError):
            self._fail_all(error)
        for pending in list(self._pending.values()):
            if isinstance(pending, Stream) and pending.detached:
                del self._pending[pending.id]
            elif not pending.op.repeat:
                del self._pending[pending.id]
                pending.fail(_Broken(f"{pending.op.name}: the connection broke before the runtime answered"))
        if self._wanted():
            self._start_connecting()

    def _fail_all(self, error: DsecError) -> None:
        pending, self._pending = self._pending, {}
        for request in pending.values():
            request.fail(error)

    # Connecting.

    def _wanted(self) -> bool:
        return not self._closed and bool(self._pending or self._subscription or self._waiting)

    async def _ready(self) -> None:
        """Connected, or Unavailable when that took too long."""
        if self._closed:
            raise Unavailable("the connection to the runtime was closed")
        self._waiting += 1
        try:
            self._start_connecting()
            async with asyncio.timeout(self._deadline_s):
                await self._up.wait()
        except TimeoutError:
            raise self._unavailable() from None
        finally:
            self._waiting -= 1
        if self._closed:
            raise Unavailable("the connection to the runtime was closed")

    def _unavailable(self) -> Unavailable:
        return Unavailable(
            f"the runtime at {self.path} does not answer ({self._trouble}); is the keeper running?",
            detail={"socket": str(self.path), "reason": self._trouble},
        )

    def _start_connecting(self) -> None:
        if self._connecting is None and self._link is None and not self._closed:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("connecting to the runtime failed", exc_info=error)
        if self._link is None and self._wanted():
            self._start_connecting()

    async def _connect(self) -> None:
        """Try until it works, or until nobody wants it any more."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._deadline_s
        pause = BACKOFF_FIRST_S
        while self._wanted():
            try:
                async with asyncio.timeout(self._deadline_s):
                    return await self._attempt()
            except TimeoutError:
                self._trouble = f"no answer within {self._deadline_s:g} s"
            except (OSError, DsecError) as error:
                self._trouble = str(error)
                if self._revive is not None and isinstance(error, ConnectionRefusedError | FileNotFoundError):
                    await self._try_revive()
            if loop.time() > give_up:
                self._fail_all(self._unavailable())
            await asyncio.sleep(pause)
            pause = min(pause * 2, BACKOFF_MAX_S)

    async def _try_revive(self) -> None:
        assert self._revive is not None
        try:
            await self._revive()
        except (OSError, DsecError) as error:
            self._trouble = f"starting it failed: {error}"

    async def _attempt(self) -> None:
        _, link = await asyncio.get_running_loop().create_unix_connection(
            lambda: Link(self._answered, self._lost), str(self.path)
        )
        self._link = link
        try:
            hello = self._new(Pending, ops.HELLO, v.HelloArgs())
            self._pending[hello.id] = hello
            link.send(hello.request())
            self._greeted(link, await hello.future)
        except BaseException:  # also cancelled: no link is kept on which nobody was greeted
            self._pending.pop(hello.id, None)
            self._link = None
            link.close()
            raise

    def _greeted(self, link: Link, hello: v.Hello) -> None:
        if hello.protocol != v.PROTOCOL:
            raise Unsupported.lacks("runtime", "protocol", f"it speaks version {hello.protocol}, not {v.PROTOCOL}")
        before, self.hello = self.hello, hello
        if before is not None and before.instance != hello.instance:
            self._keeper_changed()
        for pending in list(self._pending.values()):
            link.send(pending.request())
            pending.sent += 1
        if self._subscription is not None:
            self._send_subscription(link)
        self._up.set()

    def _keeper_changed(self) -> None:
        """Nothing is left that knows how the programs in flight ended; sent again they would run twice."""
        for pending in list(self._pending.values()):
            if pending.is_run and pending.sent:
                del self._pending[pending.id]
                pending.fail(
                    Unknown(
                        f"process {pending.args.run}: keeper and runtime died while it was in flight; "
                        "it may or may not have run to its end",
                        sandbox_id=pending.sandbox_id,
                    )
                )

    def _send_subscription(self, link: Link) -> None:
        subscription = self._subscription
        assert subscription is not None
        link.send(v.Request(next(self._ids), "subscribe", _NOTHING))
        subscription.sent += 1
        if subscription.sent > 1:
            subscription.on_gap()


class _Broken(Unknown):
    """The connection broke while something that must not be repeated was in flight."""


def _with_window(args: v.RunStart | v.RunAttach) -> v.RunStart | v.RunAttach:
    return msgspec.structs.replace(args, stream=True, window=limits.STREAM_WINDOW_BYTES)
