"""Real, isolated, stateful sandboxes: `dsec.Client().create(...)`, `run`, `stop`.

Names are imported when they are first used: `import dsec` alone costs next to nothing.
"""

from __future__ import annotations

# As `typing.TYPE_CHECKING`, whose import alone would be most of the time `import dsec` takes.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from dsec.model.errors import (
        CommandFailed,
        Conflict,
        CorruptLayer,
        CreateFailed,
        DeadlineExceeded,
        Denied,
        Diverged,
        DsecError,
        Exhausted,
        FileError,
        FileExists,
        FileNotFound,
        InputClosed,
        InvalidSpec,
        InvalidState,
        IsADirectory,
        LaunchFailed,
        NoCapacity,
        NodeDiskFull,
        NodeFull,
        NodeUnreachable,
        NoSpace,
        NotFound,
        PermissionDenied,
        ProgramEnded,
        ProgramNotStarted,
        QuotaExceeded,
        RateLimited,
        Rejected,
        SandboxLost,
        SnapshotFailed,
        Unauthenticated,
        Unavailable,
        Unknown,
        Unscored,
        Unsupported,
    )
    from dsec.model.events import Event
    from dsec.model.files import DiffReport, Entry, FileChange, FileEvent, FileState, TreeReport, Written
    from dsec.model.network import NetworkReport, NetworkRow, Part, Policy, Rule
    from dsec.model.ports import Exposed
    from dsec.model.processes import Program, Terminal
    from dsec.model.specs import Spec
    from dsec.model.states import Capabilities, Capability, LayerInfo, NodeInfo, RunResult, SandboxInfo, Usage
    from dsec.sdk._async.batch import AsyncBatch
    from dsec.sdk._async.client import AsyncClient, AsyncJob
    from dsec.sdk._async.diff import AsyncDiff
    from dsec.sdk._async.events import AsyncEvents
    from dsec.sdk._async.files import AsyncFiles, AsyncWatch
    from dsec.sdk._async.programs import AsyncProcess
    from dsec.sdk._async.sandbox import AsyncSandbox
    from dsec.sdk._async.sessions import AsyncSession
    from dsec.sdk._sync.batch import Batch
    from dsec.sdk._sync.client import Client, Job
    from dsec.sdk._sync.diff import Diff
    from dsec.sdk._sync.events import Events
    from dsec.sdk._sync.files import Files, Watch
    from dsec.sdk._sync.programs import Process
    from dsec.sdk._sync.sandbox import Sandbox
    from dsec.sdk._sync.sessions import Session
    from dsec.sdk.lines import Line
    from dsec.sdk.programs import ProcessInfo, ProcessList, SessionInfo

    __version__: str

__all__ = [
    "AsyncBatch",
    "AsyncClient",
    "AsyncDiff",
    "AsyncEvents",
    "AsyncFiles",
    "AsyncJob",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSession",
    "AsyncWatch",
    "Batch",
    "Capabilities",
    "Capability",
    "Client",
    "CommandFailed",
    "Conflict",
    "CorruptLayer",
    "CreateFailed",
    "DeadlineExceeded",
    "Denied",
    "Diff",
    "DiffReport",
    "Diverged",
    "DsecError",
    "Entry",
    "Event",
    "Events",
    "Exhausted",
    "Exposed",
    "FileChange",
    "FileError",
    "FileEvent",
    "FileExists",
    "FileNotFound",
    "FileState",
    "Files",
    "InputClosed",
    "InvalidSpec",
    "InvalidState",
    "IsADirectory",
    "Job",
    "LaunchFailed",
    "LayerInfo",
    "Line",
    "NetworkReport",
    "NetworkRow",
    "NoCapacity",
    "NoSpace",
    "NodeDiskFull",
    "NodeFull",
    "NodeInfo",
    "NodeUnreachable",
    "NotFound",
    "Part",
    "PermissionDenied",
    "Policy",
    "Process",
    "ProcessInfo",
    "ProcessList",
    "Program",
    "ProgramEnded",
    "ProgramNotStarted",
    "QuotaExceeded",
    "RateLimited",
    "Rejected",
    "Rule",
    "RunResult",
    "Sandbox",
    "SandboxInfo",
    "SandboxLost",
    "Session",
    "SessionInfo",
    "SnapshotFailed",
    "Spec",
    "Terminal",
    "TreeReport",
    "Unauthenticated",
    "Unavailable",
    "Unknown",
    "Unscored",
    "Unsupported",
    "Usage",
    "Watch",
    "Written",
    "__version__",
]

_HOMES = {
    "dsec.model.events": ("Event",),
    "dsec.model.files": ("DiffReport", "Entry", "FileChange", "FileEvent", "FileState", "TreeReport", "Written"),
    "dsec.model.network": ("NetworkReport", "NetworkRow", "Part", "Policy", "Rule"),
    "dsec.model.ports": ("Exposed",),
    "dsec.model.processes": ("Program", "Terminal"),
    "dsec.model.specs": ("Spec",),
    "dsec.model.states": (
        "Capabilities",
        "Capability",
        "LayerInfo",
        "NodeInfo",
        "RunResult",
        "SandboxInfo",
        "Usage",
    ),
    "dsec.sdk._async.batch": ("AsyncBatch",),
    "dsec.sdk._async.client": ("AsyncClient", "AsyncJob"),
    "dsec.sdk._async.diff": ("AsyncDiff",),
    "dsec.sdk._async.events": ("AsyncEvents",),
    "dsec.sdk._async.files": ("AsyncFiles", "AsyncWatch"),
    "dsec.sdk._async.programs": ("AsyncProcess",),
    "dsec.sdk._async.sandbox": ("AsyncSandbox",),
    "dsec.sdk._async.sessions": ("AsyncSession",),
    "dsec.sdk._sync.batch": ("Batch",),
    "dsec.sdk._sync.client": ("Client", "Job"),
    "dsec.sdk._sync.diff": ("Diff",),
    "dsec.sdk._sync.events": ("Events",),
    "dsec.sdk._sync.files": ("Files", "Watch"),
    "dsec.sdk._sync.programs": ("Process",),
    "dsec.sdk._sync.sandbox": ("Sandbox",),
    "dsec.sdk._sync.sessions": ("Session",),
    "dsec.sdk.lines": ("Line",),
    "dsec.sdk.programs": ("ProcessInfo", "ProcessList", "SessionInfo"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "__version__":
        return _version()
    if name not in __all__:
        from dsec.model.words import of_module

        hint = "" if name.startswith("_") else of_module(name, __all__)
        raise AttributeError(f"module 'dsec' has no attribute {name!r}{hint}")
    value = getattr(import_module(_HOME.get(name, "dsec.model.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("dsec")
    except PackageNotFoundError:
        return "0+uninstalled"  # a checkout on the path
