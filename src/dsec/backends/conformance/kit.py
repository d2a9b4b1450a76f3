"""What the checks are written with: the subject, a sandbox that cleans up after itself, expectations."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, TypeVar

import msgspec

from dsec.backends.base import Backend, Exit, Guest, Handle, RunPlan, Runtime, Sink, StartPlan
from dsec.model import ids
from dsec.model.errors import DsecError, NotFound, SandboxLost
from dsec.model.states import RunOutcome

# No check waits longer for anything; a program that should outlive a check sleeps longer than this.
PATIENCE_S: Final = 60.0
FOREVER: Final = "1000"

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Subject(Protocol):
    """A machine with a backend on it.

    `has` may contain: `posix` (a real user space: pipes, files, /proc), `isolation` (namespaces), `memory`, `pids`,
    `disk` (limits the kernel keeps), `layers` (layers are mounted from files).
    """

    has: frozenset[str]
    # A shell text that uses about this share of 1024 bytes of memory: formatted with `mib`.
    memory_hog: str

    def backend(self) -> Backend:
        """A new backend object over the same machine, as a restarted node agent would make."""
        ...

    def plan(self, **changes: Any) -> StartPlan:
        """A plan for a new small sandbox, with these fields changed."""
        ...

    def inventory(self) -> set[str]:
        """What exists outside this process because of sandboxes: processes, mounts, cgroups, files."""
        ...


class Violation(AssertionError):
    """The backend does not keep what the boundary promises."""


CheckFunction = Callable[[Subject], Awaitable[None]]


class Check:
    """One promise and the code that tries it."""

    def __init__(self, function: CheckFunction, needs: frozenset[str]) -> None:
        self.function = function
        self.needs = needs
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"

    @property
    def promise(self) -> str:
        """What is promised, in words."""
        return inspect.getdoc(self.function) or self.name

    def __repr__(self) -> str:
        return self.name


_registered: list[Check] = []


def check(*needs: str) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check; `needs` are abilities of a subject."""

    def register(function: CheckFunction) -> CheckFunction:
        _registered.append(Check(function, frozenset(needs)))
        return function

    return register


def checks(modules: Iterable[str]) -> tuple[Check, ...]:
    """The registered checks of these modules, in their order."""
    return tuple(c for module in modules for c in _registered if c.function.__module__ == module)


async def perform(check: Check, subject: Subject) -> None:
    """Try one check, bounded in time, and see that it left nothing behind."""
    before = subject.inventory()
    try:
        async with asyncio.timeout(4 * PATIENCE_S):
            await check.function(subject)
            await same_inventory(subject, before)
    except TimeoutError as error:
        raise Violation(f"{check.name} was not done within {4 * PATIENCE_S:g} s") from error


async def same_inventory(subject: Subject, before: set[str]) -> None:
    """Wait until nothing more exists than before. What is removed in the background gets a moment."""
    left: set[str] = set()
    for _ in range(200):
        left = subject.inventory() - before
        if not left:
            return
        await asyncio.sleep(0.02)
    raise Violation(f"left behind: {sorted(left)[:20]}")


def expect(condition: object, message: object) -> None:
    """Raises Violation unless the condition holds."""
    if not condition:
        raise Violation(message)


def equal(actual: object, expected: object, what: str = "value") -> None:
    """Raises Violation unless both are the same."""
    if actual != expected:
        raise Violation(f"{what}: {_short(actual)}, expected {_short(expected)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 400 else f"{text[:190]} ... {text[-190:]} ({len(text)} letters)"


T = TypeVar("T")
E = TypeVar("E", bound=DsecError)


async def raises(kind: type[E], awaitable: Awaitable[Any], what: str) -> E:
    """The error of this kind that awaiting raises. Anything else is a Violation."""
    try:
        result = await soon(awaitable, what)
    except kind as error:
        return error
    except DsecError as error:
        raise Violation(f"{what}: raised {error!r}, expected {kind.__name__}") from error
    raise Violation(f"{what}: {_short(result)}, expected {kind.__name__}")


async def soon(awaitable: Awaitable[T], what: str = "it") -> T:
    """The result, or a Violation when it does not come in time."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await awaitable
    except TimeoutError as error:
        raise Violation(f"{what} did not happen within {PATIENCE_S:g} s") from error


class Box:
    """A running sandbox with short ways to run things in it."""

    def __init__(self, runtime: Runtime, plan: StartPlan) -> None:
        self.runtime = runtime
        self.plan = plan

    @property
    def guest(self) -> Guest:
        """Its programs."""
        return self.runtime.guest()

    def command(self, *argv: str | bytes, **changes: Any) -> RunPlan:
        """A plan to run a program, with these fields changed."""
        fields: dict[str, Any] = {
            "process_id": ids.new_process_id(),
            "argv": tuple(arg.encode() if isinstance(arg, str) else arg for arg in argv),
            "env": {"PATH": PATH},
            "cwd": "/",
            "user": "root",
        }
        return RunPlan(**(fields | changes))

    async def run(self, *argv: str | bytes, sink: Sink | None = None, **changes: Any) -> RunOutcome:
        """Run a program to its end."""
        return await soon(self.guest.run(self.command(*argv, **changes), sink=sink), f"the end of {argv!r}")

    async def sh(self, text: str, sink: Sink | None = None, **changes: Any) -> RunOutcome:
        """Run a shell text to its end."""
        return await self.run("sh", "-c", text, sink=sink, **changes)

    async def text(self, text: str, **changes: Any) -> str:
        """What a shell text prints, without the last newline; it must succeed."""
        outcome = await self.sh(text, **changes)
        equal((outcome.exit_code, outcome.err.head), (0, b""), f"{text!r}")
        return (outcome.out.head + outcome.out.tail).decode().rstrip("\n")

    async def spawn(self, text: str, sink: Sink | None = None, **changes: Any) -> Spawned:
        """Start a shell text and return when it has been launched."""
        return await self.spawn_plan(self.command("sh", "-c", text, **changes), sink)

    async def spawn_plan(self, plan: RunPlan, sink: Sink | None = None) -> Spawned:
        """Start a program and return when it has been launched."""
        launched = asyncio.Event()
        task = asyncio.create_task(self.guest.run(plan, sink=sink, started=launched.set))
        waiter = asyncio.create_task(launched.wait())
        await soon(asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED), "the launch")
        waiter.cancel()
        if task.done() and not launched.is_set():
            task.result()
        return Spawned(plan.process_id, task)


class Spawned:
    """A program that was launched."""

    def __init__(self, process_id: str, task: asyncio.Task[RunOutcome]) -> None:
        self.process_id = process_id
        self.task = task

    async def end(self) -> RunOutcome:
        """How it ended."""
        return await soon(self.task, "the end of the program")


def encoded(handle: Handle) -> Handle:
    """A handle as it comes back from disk."""
    return msgspec.json.decode(msgspec.json.encode(handle), type=Handle)


@asynccontextmanager
async def backend(subject: Subject) -> AsyncIterator[Backend]:
    """A backend that is closed at the end."""
    made = subject.backend()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def sandbox(subject: Subject, over: Backend | None = None, **changes: Any) -> AsyncIterator[Box]:
    """A sandbox that is stopped at the end, whatever happened to it and to the backend object that made it."""
    maker = over or subject.backend()
    plan = subject.plan(**changes)
    box = Box(await soon(maker.start(plan), "the start"), plan)
    try:
        yield box
    finally:
        if over is None:
            await soon(box.runtime.stop(), "the stop")
            await maker.close()
        else:
            await stop_by_handle(subject, box.runtime.handle)


async def stop_by_handle(subject: Subject, handle: Handle) -> Exit | None:
    """Stop a sandbox through a backend object of its own."""
    async with backend(subject) as other:
        try:
            runtime = await soon(other.attach(handle), "attaching")
        except (SandboxLost, NotFound):
            return None
        return await soon(runtime.stop(), "the stop")
