"""The native runtime's errors as those of the model: the one place where they are translated."""

from __future__ import annotations

import errno
from typing import Any, Final

from dsec.model import limits
from dsec.model.errors import (
    Conflict,
    DeadlineExceeded,
    DsecError,
    Exhausted,
    InvalidSpec,
    LaunchFailed,
    NodeDiskFull,
    NodeFull,
    NotFound,
    ProgramNotStarted,
    SandboxLost,
    Unavailable,
    Unknown,
    Unsupported,
)
from dsec.wire.values import WireError

# The runtime's names for what a caller calls otherwise.
_FIELDS: Final = {"argv": "command", "run": "process_id", "pids_max": "pids", "upper": "disk_mib"}

_INSIDE: Final = {
    "no_program": ("command", "a program that exists in the sandbox and can be executed"),
    "no_user": ("user", "a user and group of the sandbox's /etc/passwd and /etc/group, or numbers"),
    "no_cwd": ("cwd", "a directory that exists in the sandbox and that the user may enter"),
}


def translate(error: WireError, *, op: str, sandbox_id: str | None = None) -> DsecError:
    """The model's error for what the runtime answered to `op`."""
    made = _translate(error, op, sandbox_id)
    made.sandbox_id = sandbox_id
    for key, value in error.detail.items():
        made.detail.setdefault(key, value)
    made.detail.setdefault("op", op)
    return made


def _translate(error: WireError, op: str, sandbox_id: str | None) -> DsecError:  # noqa: PLR0911, PLR0912 - a table
    detail: dict[str, Any] = error.detail
    message = error.message
    match error.code:
        case "no_program" | "no_user" | "no_cwd":
            return _not_started(error)
        case "bad_request":
            field = str(detail.get("field", ""))
            field = _FIELDS.get(field, field)
            return InvalidSpec(f"{field}: {message}" if field else message, detail={"field": field or None})
        case "too_long":
            limit = detail.get("limit", limits.ARG_MAX_BYTES)
            field = "stdin" if detail.get("field") == "stdin" else "command"
            return InvalidSpec(
                f"{field}: {message}; allowed: at most {limit} bytes",
                detail={"field": field, "limit": limit, "allowed": f"at most {limit} bytes"},
            )
        case "not_found":
            return NotFound(message)
        case "exists" | "conflict" | "busy":
            return Conflict(message, detail={"reason": error.code})
        case "unsupported":
            mechanism = str(detail.get("mechanism", "unknown"))
            return Unsupported.lacks(op, mechanism, message)
        case "no_space":
            return NodeDiskFull(f"the node's disk has no room: {message}")
        case "limit" if op == "run.stdin":
            return Exhausted(message, detail={"resource": "stdin"})
        case "limit" if detail.get("resource") == "terminals":
            return Exhausted(message, detail={"resource": "terminals"})
        case "limit":
            return NodeFull(
                f"a limit of the node is reached: {message}",
                detail={"resource": detail.get("resource", "descriptors or pids")},
            )
        case "launch":
            return LaunchFailed(_with_errno(message, detail.get("errno")))
        case "deadline":
            made = LaunchFailed(message) if op in LAUNCHING else DeadlineExceeded(message)
            made.detail["step"] = detail.get("step", "deadline")
            return made
        case "unknown":
            return Unknown(message)
        case "gone":
            return SandboxLost(f"sandbox {sandbox_id or ''} has ended: {message}")
        case _:
            return Unavailable(f"the runtime failed: {message}", detail={"runtime_code": error.code})


def _not_started(error: WireError) -> DsecError:
    field, allowed = _INSIDE[error.code]
    text, detail = f"{field}: {error.message}; allowed: {allowed}", {"field": field, "allowed": allowed}
    if error.detail.get("errno") == errno.ENAMETOOLONG:
        return InvalidSpec(text, detail=detail)  # in no sandbox could it be there
    return ProgramNotStarted(text, detail=detail)


LAUNCHING: Final = frozenset({"sandbox.create", "run.start"})


def _with_errno(message: str, number: object) -> str:
    name = errno.errorcode.get(number) if isinstance(number, int) else None
    return f"{message} ({name})" if name and name not in message else message
