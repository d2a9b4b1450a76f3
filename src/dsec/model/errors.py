"""The error tree. Only code, message and detail cross the wire.

A program's failure is a value (`RunResult`); the platform's is one of these. A message says what was tried,
on what, and what to do.
"""

from __future__ import annotations

from errno import ENOENT
from typing import Any, ClassVar, Literal, NoReturn, Self

Retry = Literal["never", "elsewhere", "later"]

_REGISTRY: dict[str, type[DsecError]] = {}


def no_attribute(self: object, name: str) -> NoReturn:
    """The `__getattr__` of what callers hold: AttributeError, which says how ours is called."""
    text = f"{type(self).__name__!r} object has no attribute {name!r}"
    if not name.startswith("_"):
        from dsec.model.words import way

        text += way(name, (cls.__name__ for cls in type(self).__mro__))
    raise AttributeError(text, name=name, obj=self)


class DsecError(Exception):
    """Anything the platform could not do. `code` is stable; `retry` says whether trying again can help."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    default_retry: ClassVar[Retry] = "never"

    def __init__(
        self,
        message: str,
        *,
        detail: dict[str, Any] | None = None,
        retry: Retry | None = None,
        request_id: str | None = None,
        sandbox_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail: dict[str, Any] = dict(detail or {})
        self.retry: Retry = retry or self.default_retry
        self.request_id = request_id
        self.sandbox_id = sandbox_id

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:
            _REGISTRY[cls.code] = cls

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, vars(self)))


def _rebuild(cls: type[DsecError], message: str, state: dict[str, Any]) -> DsecError:
    error = cls(message)
    vars(error).update(state)
    return error


class Rejected(DsecError):
    """The request itself is at fault; nothing was made."""

    code = "rejected"
    status = 400


class InvalidSpec(Rejected, ValueError):
    """A field has a value that is not allowed; `detail["field"]` names it."""

    code = "invalid_spec"

    @classmethod
    def field(cls, name: str, value: object, allowed: str) -> Self:
        """An error that names the field, shows the value (shortened) and says what is allowed."""
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        return cls(f"{name}={shown} is not allowed; allowed: {allowed}", detail={"field": name, "allowed": allowed})


class Unsupported(Rejected, NotImplementedError):
    """This node or backend cannot do it; `detail["mechanism"]` names what is missing."""

    code = "unsupported"
    status = 422
    default_retry: ClassVar[Retry] = "elsewhere"

    @classmethod
    def lacks(cls, what: str, mechanism: str, reason: str) -> Self:
        """An error that says what was asked, which mechanism is missing and why."""
        return cls(
            f"{what}: not possible here: {mechanism}: {reason}",
            detail={"mechanism": mechanism, "reason": reason},
        )


class Denied(Rejected, PermissionError):
    """The caller may not do this."""

    code = "denied"
    status = 403


class Unauthenticated(Rejected, PermissionError):
    """No valid credentials came with the request."""

    code = "unauthenticated"
    status = 401


class NotFound(DsecError, LookupError):
    """No such sandbox, process, layer or job."""

    code = "not_found"
    status = 404


class Conflict(DsecError):
    """The request contradicts what is there: a name in use, a key reused with other content."""

    code = "conflict"
    status = 409


class InvalidState(Conflict):
    """The sandbox is not in a state that allows this. One that has ended is `SandboxLost`."""

    code = "invalid_state"


class InputClosed(InvalidState, BrokenPipeError):
    """Nobody reads this input any more: the program has ended, or has closed it; `detail["id"]` names the program."""

    code = "input_closed"


class Diverged(Conflict):
    """A replayed step does not match the recorded one."""

    code = "diverged"


class Unknown(Conflict):
    """It was begun and its end is not known; it may or may not have taken effect."""

    code = "unknown"


class Exhausted(DsecError):
    """Something is used up; later or elsewhere it may work."""

    code = "exhausted"
    status = 429
    default_retry: ClassVar[Retry] = "later"


class NodeFull(Exhausted):
    """This node has no room; `detail["resource"]` says of what."""

    code = "node_full"
    status = 503
    default_retry: ClassVar[Retry] = "elsewhere"


class NoCapacity(Exhausted):
    """No node has room."""

    code = "no_capacity"
    status = 503


class QuotaExceeded(Exhausted):
    """The project's quota is used up."""

    code = "quota_exceeded"


class RateLimited(Exhausted):
    """Too many requests."""

    code = "rate_limited"


class NodeDiskFull(Exhausted, OSError):
    """The node's own disk is full (not the sandbox's)."""

    code = "node_disk_full"
    status = 507
    default_retry: ClassVar[Retry] = "elsewhere"


class FileError(DsecError, OSError):
    """A file operation in a sandbox failed."""

    code = "file_error"
    status = 400


class FileNotFound(FileError, FileNotFoundError):
    """No such file in the sandbox."""

    code = "file_not_found"
    status = 404


class FileExists(FileError, FileExistsError):
    """The file is there already."""

    code = "file_exists"
    status = 409


class PermissionDenied(FileError, PermissionError):
    """The sandbox's own permissions forbid it."""

    code = "permission_denied"
    status = 403


class IsADirectory(FileError, IsADirectoryError):
    """A file was expected."""

    code = "is_a_directory"


class NoSpace(FileError):
    """The sandbox's own disk is full."""

    code = "no_space"
    status = 507


class Unavailable(DsecError):
    """The platform lost something; the program is not at fault."""

    code = "unavailable"
    status = 503
    default_retry: ClassVar[Retry] = "later"


class NodeUnreachable(Unavailable, ConnectionError):
    """No answer from the node."""

    code = "node_unreachable"


class SandboxLost(Unavailable):
    """The sandbox has ended, by a limit, by somebody's stop or by itself: no call on it can succeed any more.

    `detail["replaced_by"]` names the sandbox in which it goes on, if there is one.
    """

    code = "sandbox_lost"
    status = 410
    default_retry: ClassVar[Retry] = "never"

    @property
    def end_reason(self) -> str | None:
        """Why it ended, as in `SandboxInfo.end_reason`: `stopped idle lifetime init_died oom lost disk_lost reboot`."""
        return self.detail.get("reason")


class LaunchFailed(Unavailable):
    """The sandbox or process could not be started; `detail["step"]` and `detail["errno"]` say where."""

    code = "launch_failed"
    default_retry: ClassVar[Retry] = "elsewhere"


class SnapshotFailed(Unavailable):
    """A snapshot could not be made or restored."""

    code = "snapshot_failed"


class CorruptLayer(Unavailable):
    """A layer's bytes are not what its digest says."""

    code = "corrupt_layer"
    default_retry: ClassVar[Retry] = "elsewhere"


class DeadlineExceeded(DsecError, TimeoutError):
    """The platform did not answer in time. (A program's own timeout is a result, not this.)"""

    code = "deadline_exceeded"
    status = 504
    default_retry: ClassVar[Retry] = "later"


class ProgramNotStarted(DsecError, OSError):
    """A run named a program, directory or user that this sandbox does not have (or does not let it use).

    Neither the request's fault nor the platform's: what is in a sandbox is its programs' doing. `detail["field"]` is
    `command`, `cwd` or `user`; of a session's command `stdin`, when what it was to read was removed inside.
    """

    code = "program_not_started"
    status = 409

    @property
    def exit_code(self) -> int:
        """What a shell would return: 127 when there is no such program, 126 for everything else."""
        return 127 if self.detail.get("field") == "command" and self.detail.get("errno") == ENOENT else 126


class CommandFailed(DsecError):
    """`run(check=True)` and the program did not succeed; `result` has everything it said."""

    code = "command_failed"
    status = 400
    result: Any = None


class ProgramEnded(CommandFailed):
    """`process.wait_for(...)` and the program ended without such a line; `result` says how, also when it succeeded."""

    code = "program_ended"


class CreateFailed(DsecError):
    """One item of `create_many` failed: `index` says which, `error` why."""

    code = "create_failed"
    status = 503
    index: int = -1
    error: DsecError | None = None


class Unscored(DsecError):
    """A rollout could not be scored for a reason that is the platform's."""

    code = "unscored"


def from_wire(
    code: str,
    message: str,
    detail: dict[str, Any] | None = None,
    retry: Retry | None = None,
    *,
    request_id: str | None = None,
    sandbox_id: str | None = None,
) -> DsecError:
    """The error a code stands for; an unknown code (a newer server) becomes a plain DsecError that keeps it."""
    cls = _REGISTRY.get(code, DsecError)
    error = cls(message, detail=detail, retry=retry, request_id=request_id, sandbox_id=sandbox_id)
    if cls is DsecError and code != DsecError.code:
        error.detail.setdefault("code", code)
    return error


_REGISTRY[DsecError.code] = DsecError
