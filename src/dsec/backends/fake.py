"""A backend in memory: the same semantics as the real ones, no kernel.

Unit tests and simulated nodes run over it. A `World` is the machine: it outlives any one `FakeBackend`, as sandboxes
outlive a node agent, so a second backend over the same world attaches to what the first one started. Time comes from
a `Clock` that a test replaces; faults are armed on demand (`world.faults`). What it can run stands in `fake_programs`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from dsec.backends.base import (
    Exit,
    Files,
    Guest,
    Handle,
    Inside,
    Networks,
    ProcessInfo,
    ProgramStatus,
    RunPlan,
    Sink,
    StartPlan,
)
from dsec.backends.fake_files import FakeFiles, Tree, check_user
from dsec.backends.fake_runs import FakeRun
from dsec.model import failpoint
from dsec.model.errors import (
    Conflict,
    DsecError,
    InvalidSpec,
    InvalidState,
    NodeFull,
    NotFound,
    SandboxLost,
    Unknown,
    Unsupported,
)
from dsec.model.processes import InputState, OutputPiece, Process, Terminal
from dsec.model.states import Capabilities, Capability, EndReason, RunOutcome, Usage

TERM: Final = 15
# Ended sandboxes that still answer `stop` and `attach` with how they ended.
ENDED_KEPT: Final = 10_000
# What an idle sandbox of the fake is said to use.
IDLE_MEMORY_BYTES: Final = 1 << 20


class Clock(Protocol):
    """Where time comes from. `time` is seconds since the epoch, `monotonic` never goes back."""

    def time(self) -> float: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The real clock."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Faults:
    """Errors that the next calls raise, and delays that every call has, by operation.

    Operations: probe start attach survey stop usage run run_attach kill processes forget files files.call.
    """

    def __init__(self) -> None:
        self._errors: dict[str, list[Exception]] = {}
        self.delay_s: dict[str, float] = {}
        self.calls: Counter[str] = Counter()

    def fail(self, operation: str, error: Exception, times: int = 1) -> None:
        """Let the next `times` calls of the operation raise the error."""
        self._errors.setdefault(operation, []).extend([error] * times)

    async def visit(self, operation: str, clock: Clock) -> None:
        """Called at the start of each operation."""
        self.calls[operation] += 1
        if delay := self.delay_s.get(operation):
            await clock.sleep(delay)
        if errors := self._errors.get(operation):
            raise errors.pop(0)


class _Sandbox:
    """One sandbox of a world."""

    def __init__(self, world: World, plan: StartPlan, handle: Handle) -> None:
        self.world = world
        self.plan = plan
        self.handle = handle
        self.runs: dict[str, FakeRun] = {}
        self.directories = {"/", "/tmp", "/root", "/home", "/bin", "/usr", "/usr/bin", "/etc", "/dev", "/proc", "/sys"}
        self.tree = Tree(self.directories, world.clock.time, plan.disk_bytes)
        self.ports: dict[int, tuple[str, int]] = {}  # what listens inside, and where that is outside
        self.exit: Exit | None = None
        self.unknown = False
        self.ended = asyncio.Event()
        self.cpu_s = 0.0

    def end(self, exit_: Exit) -> Exit:
        """End it, and with it all that runs in it; the first reason stays."""
        if self.exit is None:
            self.exit = exit_
            self.world.remove(self)
            for run in self.runs.values():
                run.lose(self.lost())
            self.ended.set()
        return self.exit

    def lost(self, reason: EndReason = "lost") -> SandboxLost:
        """The error for a call on it after its end."""
        reason = self.exit.reason if self.exit else reason
        return SandboxLost(
            f"sandbox {self.plan.id} has ended ({reason})", detail={"reason": reason}, sandbox_id=self.plan.id
        )

    def alive(self) -> None:
        """Raises SandboxLost after its end."""
        if self.exit is not None:
            raise self.lost()

    def find(self, process_id: str) -> FakeRun:
        """A run that was launched and not forgotten."""
        run = self.runs.get(process_id)
        if run is not None:
            return run
        if self.unknown:
            raise Unknown(f"process {process_id}: nothing is left that knows whether it ran", sandbox_id=self.plan.id)
        raise NotFound(f"process {process_id} of {self.plan.id} was never started, or is forgotten")


class World:
    """A machine with sandboxes on it. `capacity` and `memory_bytes` bound what fits."""

    def __init__(
        self, *, clock: Clock | None = None, capacity: int = 1_000_000, memory_bytes: int | None = None
    ) -> None:
        self.id = secrets.token_hex(8)
        self.clock: Clock = clock or SystemClock()
        self.capacity = capacity
        self.memory_bytes = memory_bytes
        self.faults = Faults()
        self.sandboxes: dict[str, _Sandbox] = {}
        self.ended: dict[str, _Sandbox] = {}
        self._reserved: set[str] = set()
        self._next_pid = 100

    def inventory(self) -> set[str]:
        """All that exists in this world, for a comparison before and after."""
        things = {f"reserved:{id_}" for id_ in self._reserved}
        for id_, sandbox in self.sandboxes.items():
            things.add(f"sandbox:{id_}")
            things.update(f"process:{id_}/{run.plan.process_id}" for run in sandbox.runs.values() if run.alive)
        return things

    def lose(self, sandbox_id: str, reason: EndReason = "init_died", detail: str = "") -> None:
        """Let a sandbox end by itself: its init died, it ran out of memory, the machine lost it."""
        self.sandboxes[sandbox_id].end(Exit(reason=reason, detail=detail))

    def crash(self, *, keep_sandboxes: bool = True) -> None:
        """What happens when runtime and keeper die together: runs in flight become Unknown, kept results are gone."""
        for sandbox in list(self.sandboxes.values()):
            runs, sandbox.runs, sandbox.unknown = sandbox.runs, {}, True
            for run in runs.values():
                run.lose(Unknown(f"process {run.plan.process_id}: the runtime died while it ran"))
            if not keep_sandboxes:
                sandbox.end(Exit(reason="lost", detail="the runtime died"))

    def next_pid(self) -> int:
        """A process number that is not in use."""
        self._next_pid += 1
        return self._next_pid

    @contextmanager
    def reserve(self, plan: StartPlan) -> Iterator[None]:
        """Hold a place for a sandbox while it is being started. Raises Conflict or NodeFull."""
        if plan.id in self.sandboxes or plan.id in self.ended or plan.id in self._reserved:
            raise Conflict(f"sandbox {plan.id} exists already", sandbox_id=plan.id)
        if len(self.sandboxes) + len(self._reserved) >= self.capacity:
            raise NodeFull(f"{self.capacity} sandboxes live here", detail={"resource": "sandboxes"})
        used = sum(sandbox.plan.memory_bytes for sandbox in self.sandboxes.values())
        if self.memory_bytes is not None and used + plan.memory_bytes > self.memory_bytes:
            raise NodeFull("the memory of this machine is used up", detail={"resource": "memory"})
        self._reserved.add(plan.id)
        try:
            yield
        finally:
            self._reserved.discard(plan.id)

    def add(self, sandbox: _Sandbox) -> None:
        """A sandbox has been started."""
        self.sandboxes[sandbox.plan.id] = sandbox

    def remove(self, sandbox: _Sandbox) -> None:
        """A sandbox has ended."""
        self.sandboxes.pop(sandbox.plan.id, None)
        self.ended[sandbox.plan.id] = sandbox
        if len(self.ended) > ENDED_KEPT:
            del self.ended[next(iter(self.ended))]


class FakeGuest:
    """Programs in a sandbox of the fake."""

    def __init__(self, sandbox: _Sandbox) -> None:
        self._sandbox = sandbox
        self._world = sandbox.world

    async def _visit(self, operation: str) -> None:
        await self._world.faults.visit(operation, self._world.clock)
        self._sandbox.alive()

    async def run(
        self, plan: RunPlan, *, sink: Sink | None = None, started: Callable[[], None] | None = None
    ) -> RunOutcome:
        await self._visit("run")
        box = self._sandbox
        run = box.runs.get(plan.process_id)
        if plan.tty is not None:
            raise _no_terminals()
        if plan.control:
            raise _no_sessions()
        if run is None:
            run = FakeRun(plan, box.plan, box.directories, self._world.clock, self._world.next_pid())
            box.runs[plan.process_id] = run
            run.start()
        if started is not None:
            started()
        return await run.follow(sink, (0, 0))

    async def attach(
        self, process_id: str, *, sink: Sink | None = None, offsets: tuple[int, ...] = (0, 0), lossy: bool = False
    ) -> RunOutcome:
        await self._visit("run_attach")
        return await self._sandbox.find(process_id).follow(sink, offsets, lossy=lossy)

    async def write_stdin(self, process_id: str, offset: int, data: bytes, *, eof: bool) -> InputState:
        await self._visit("write_stdin")
        run = self._sandbox.find(process_id)
        if not run.plan.stdin_open:
            raise Conflict(f"the input of {process_id} is not open", detail={"reason": "stdin"})
        if offset > run.input.size:
            raise InvalidSpec.field("offset", offset, f"at most {run.input.size}, where its input is now")
        if not run.input.ended:
            await run.input.give(data[run.input.size - offset :], eof=eof)
        return InputState(size=run.input.size, closed=run.input.ended)

    async def resize(self, process_id: str, size: Terminal) -> None:
        raise _no_terminals()

    async def read_output(self, process_id: str, stream: int, offset: int, limit: int) -> OutputPiece:
        await self._visit("read_output")
        return self._sandbox.find(process_id).kept(stream, offset, limit)

    async def status(self, process_id: str) -> ProgramStatus:
        await self._visit("status")
        return self._sandbox.find(process_id).status()

    async def fence(self, process_id: str) -> int:
        raise _no_sessions()

    async def kill_fence(self, process_id: str, fence: int) -> None:
        raise _no_sessions()

    async def inside(self) -> Inside:
        await self._visit("inside")
        init = Process(pid=1, ppid=0, argv=("init",), name="init", uid=0, status="S")
        runs = [
            Process(
                pid=run.pid,
                ppid=0,
                id=run.plan.process_id,
                main=True,
                argv=tuple(map(os.fsdecode, run.plan.argv)),
                name=os.fsdecode(run.plan.argv[0]).rpartition("/")[2],
                cwd=run.plan.cwd,
                uid=0,
                status="S",
                cpu_s=run.cpu_s,
                memory_bytes=run.memory_bytes,
            )
            for run in self._sandbox.runs.values()
            if run.alive
        ]
        return Inside(processes=(init, *runs))

    async def kill(self, process_id: str, signal: int | None = None) -> None:
        await self._visit("kill")
        run = self._sandbox.find(process_id)
        if signal is None:
            run.kill_tree("killed")
        else:
            run.signal(signal)

    async def processes(self) -> list[ProcessInfo]:
        await self._visit("processes")
        return [
            ProcessInfo(process_id=key, state="running" if run.alive else "ended", pid=run.pid if run.alive else None)
            for key, run in self._sandbox.runs.items()
        ]

    async def forget(self, process_id: str) -> None:
        await self._world.faults.visit("forget", self._world.clock)
        run = self._sandbox.runs.get(process_id)
        if run is not None and run.alive:
            raise Conflict(f"process {process_id} is still running; kill it or wait for it first")
        self.discard(process_id)

    async def dial(self, port: int) -> socket.socket:
        await self._visit("dial")
        self._sandbox.alive()
        place = self._sandbox.ports.get(port)
        if place is None:
            raise InvalidState(f"port {port} of the sandbox: nothing listens on it", detail={"port": port})
        sock = socket.create_connection(place)
        sock.setblocking(False)
        return sock

    async def files(self, *, user: str, cwd: str, diff: bool = False) -> Files:
        await self._visit("files")
        if (error := check_user(user)) is not None:
            raise error
        return FakeFiles(self._sandbox.tree, user=user, cwd=cwd, visit=lambda: self._visit("files.call"))

    def discard(self, process_id: str) -> None:
        run = self._sandbox.runs.get(process_id)
        if run is not None and not run.alive:
            self._sandbox.cpu_s += run.cpu_s
            del self._sandbox.runs[process_id]


def _no_terminals() -> Unsupported:
    return Unsupported.lacks("a terminal", "terminals", "nothing real runs in the fake")


def _no_sessions() -> Unsupported:
    return Unsupported.lacks("a session", "a real shell", "nothing real runs in the fake")


class FakeRuntime:
    """One sandbox of the fake."""

    def __init__(self, sandbox: _Sandbox) -> None:
        self._sandbox = sandbox
        self._guest = FakeGuest(sandbox)

    @property
    def handle(self) -> Handle:
        return self._sandbox.handle

    def guest(self) -> Guest:
        return self._guest

    async def wait(self) -> Exit:
        await self._sandbox.ended.wait()
        assert self._sandbox.exit is not None
        return self._sandbox.exit

    async def stop(self, *, grace_s: float = 0.0) -> Exit:
        box = self._sandbox
        await box.world.faults.visit("stop", box.world.clock)
        running = [run for run in box.runs.values() if run.alive]
        if grace_s > 0 and running:
            error = box.lost("stopped")
            for run in running:
                run.signal(TERM, error)
            await _grace(running, grace_s, box.world.clock)
        return box.end(Exit(reason="stopped"))

    async def usage(self) -> Usage:
        box = self._sandbox
        await box.world.faults.visit("usage", box.world.clock)
        box.alive()
        running = [run for run in box.runs.values() if run.alive]
        memory = IDLE_MEMORY_BYTES + sum(run.memory_bytes for run in running)
        cpu = box.cpu_s + sum(run.cpu_s for run in box.runs.values())
        return Usage(cpu_user_s=cpu, memory_bytes=memory, memory_peak_bytes=memory, disk_bytes=0, pids=1 + len(running))

    async def oom_kills(self) -> int:
        return 0


async def _grace(runs: list[FakeRun], grace_s: float, clock: Clock) -> None:
    """Wait until all have ended, at most as long as the clock says."""
    timer = asyncio.ensure_future(clock.sleep(grace_s))
    ended = asyncio.gather(*(run.done.wait() for run in runs))
    try:
        await asyncio.wait((timer, ended), return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
        ended.cancel()


class FakeBackend:
    """The fake as a `Backend`. `name` may be that of a real one, for a node that should not notice."""

    def __init__(self, world: World | None = None, *, name: str = "fake", clock: Clock | None = None) -> None:
        self.name = name
        self.world = world or World(clock=clock)
        self.networks: Networks | None = None  # its sandboxes have nothing to reach

    async def probe(self) -> Capabilities:
        try:
            await self.world.faults.visit("probe", self.world.clock)
        except DsecError as error:
            return Capabilities(backend=self.name, available=False, reason=error.message)
        features = {
            name: Capability(available=True, mechanism="memory") for name in ("run", "stream", "attach", "survey")
        }
        features["loopback"] = Capability(available=True, mechanism="nothing is reached from it")
        features["isolation"] = Capability(available=False, reason="nothing real runs in it")
        return Capabilities(backend=self.name, available=True, features=features)

    async def start(self, plan: StartPlan) -> FakeRuntime:
        clock = self.world.clock
        with self.world.reserve(plan):
            failpoint.at("fake.start.reserved")
            await self.world.faults.visit("start", clock)
            handle = Handle(backend=self.name, id=plan.id, data={"world": self.world.id})
            sandbox = _Sandbox(self.world, plan, handle)
            self.world.add(sandbox)
            try:
                failpoint.at("fake.start.made")
                await self.world.faults.visit("start.made", clock)
            except BaseException:
                # Cancelled or failed half-way: nothing of it stays, not even a record of its end.
                sandbox.end(Exit(reason="create_failed"))
                del self.world.ended[plan.id]
                raise
        return FakeRuntime(sandbox)

    async def attach(self, handle: Handle) -> FakeRuntime:
        await self.world.faults.visit("attach", self.world.clock)
        sandbox = self.world.sandboxes.get(handle.id)
        if sandbox is None:
            if (ended := self.world.ended.get(handle.id)) is not None:
                raise ended.lost()
            raise SandboxLost(f"sandbox {handle.id} is not on this machine", sandbox_id=handle.id)
        return FakeRuntime(sandbox)

    async def survey(self) -> list[Handle]:
        await self.world.faults.visit("survey", self.world.clock)
        return [sandbox.handle for sandbox in self.world.sandboxes.values()]

    async def close(self) -> None:
        """Nothing to let go of: the world lives on."""
