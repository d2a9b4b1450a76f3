"""Types of the SDK that are not the model's: keyword arguments of `create`, listed processes, run commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from dsec.model import limits
from dsec.model.convert import USER, check_pair
from dsec.model.errors import CommandFailed, CreateFailed, DsecError, InvalidSpec
from dsec.model.network import Policy
from dsec.model.specs import RunSpec, Spec, os_bytes
from dsec.model.states import RunResult, State
from dsec.sdk.keywords import WrongArgument

Path = str | os.PathLike[str]
User = str | int
Command = str | Sequence[str | bytes | os.PathLike[str]]
OnOutput = Callable[[int, bytes], Any]
T = TypeVar("T")
States = State | Sequence[State] | Literal["any"]

# How much of a failed command, and of the last output of a program, stands in the message of an error.
_SHOWN_COMMAND_CHARS = 200
SHOWN_BYTES = 2000
SHOWN_LINES = 20


class ManyFields(TypedDict, total=False):
    """The fields of `dsec.Spec` as keyword arguments, without `wait_s`, which `create_many` has for all together."""

    backend: Literal["container", "microvm", "vm", "fncall"]
    image: str | None
    base: str | None
    environment: str | None
    snapshot: str | None
    workspace: str | None
    toolkits: Sequence[str]
    cpu: float
    memory_mib: int
    disk_mib: int
    pids: int
    idle_timeout_s: float | None
    lifetime_s: float | None
    on_idle: Literal["stop", "pause"]
    network: Mapping[str, Any] | Policy
    qos: Literal["best_effort", "latency"]
    env: Mapping[str, str]
    cwd: Path | None
    user: User | None
    hostname: str | None
    no_new_privs: bool
    job: str | None
    labels: Mapping[str, str]
    name: str | None
    if_exists: Literal["error", "get"]


class SpecFields(ManyFields, total=False):
    """The fields of `dsec.Spec`, as keyword arguments."""

    wait_s: float


def make_spec(spec: Spec | None, fields: Mapping[str, Any]) -> Spec:
    """The Spec a call names: one that is given, changed by keywords, checked."""
    return Spec.build(**fields) if spec is None else _changed(spec, fields)


def _changed(spec: Spec, fields: Mapping[str, Any]) -> Spec:
    if not isinstance(spec, Spec):
        raise InvalidSpec.field("spec", spec, "a dsec.Spec (fields go by keyword: base=, image=)")
    # Built anew also without fields: `msgspec.structs.replace` looks at no types.
    return Spec.build(**{**_asdict(spec), **fields})


def make_specs(specs: int | Sequence[Spec], fields: Mapping[str, Any]) -> list[Spec]:
    """The Specs of create_many: a sequence of them, or a number of equal ones. InvalidSpec says which is wrong."""
    if isinstance(specs, int) and not isinstance(specs, bool):
        if not 1 <= specs <= limits.CREATE_MANY_MAX:
            raise InvalidSpec.field("specs", specs, f"1 to {limits.CREATE_MANY_MAX}")
        if fields.get("name") is not None and specs > 1:
            raise InvalidSpec.field("name", fields["name"], "no name for several equal sandboxes; names are unique")
        return [Spec.build(**fields)] * specs
    if isinstance(specs, str | bytes) or not isinstance(specs, Sequence):
        raise InvalidSpec.field("specs", specs, "a number of equal sandboxes, or a list of dsec.Spec")
    if len(specs) > limits.CREATE_MANY_MAX:
        raise InvalidSpec.field("specs", f"{len(specs)} specs", f"at most {limits.CREATE_MANY_MAX}")
    made: dict[int, Spec] = {}  # one that stands in the list often is made once, and sent once
    given = list(specs)
    for index, spec in enumerate(given):
        if id(spec) not in made:
            made[id(spec)] = _one_of_many(index, spec, fields)
    return [made[id(spec)] for spec in given]


def _one_of_many(index: int, spec: Spec, fields: Mapping[str, Any]) -> Spec:
    try:
        return _changed(spec, fields)
    except InvalidSpec as error:
        if error.detail.get("field") in fields:
            raise  # of all of them
        raise InvalidSpec(f"specs[{index}]: {error.message}", detail={**error.detail, "index": index}) from error


def _asdict(spec: Spec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


def make_run(
    command: Command,
    *,
    cwd: Path | None,
    env: Mapping[str, str] | None,
    user: User | None,
    stdin: str | bytes | bytearray | memoryview | None,
    timeout_s: float | None,
) -> RunSpec:
    """The checked RunSpec of a call. Raises InvalidSpec naming the argument that is wrong."""
    shell, argv = _arguments(command)
    if stdin is not None and not isinstance(stdin, bytes):
        stdin = os_bytes("stdin", stdin) if isinstance(stdin, str) else _bytes(stdin)
    where, env, who = remote(cwd), variables(env), user_text(user)
    spec = RunSpec(command=shell, argv=argv, cwd=where, env=env, user=who, stdin=stdin, timeout_s=timeout_s)
    _check_types(spec)
    return spec.check()


def remote(path: Path | None) -> str | None:
    """A path of the sandbox as text; what is no path stays as it is, and is refused by who looks at it."""
    return os.fsdecode(path) if isinstance(path, os.PathLike) else path


def user_text(user: User | None) -> str | None:
    """A user, of a name or a number. Raises InvalidSpec for what is neither."""
    if isinstance(user, int) and not isinstance(user, bool):
        return str(user)
    if user is not None and not isinstance(user, str):
        raise InvalidSpec.field("user", user, USER)
    return user


def path_bytes(path: str | bytes | os.PathLike[str]) -> bytes:
    """A path of the sandbox as its kernel takes it. Raises InvalidSpec for what is none."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise WrongArgument.field("path", path, "a path of the sandbox: str, bytes or a Path")
    return os.fsencode(path)


def variables(env: Mapping[str, str] | None) -> dict[str, str]:
    """Variables as a dict. Raises InvalidSpec for what is no mapping."""
    return {} if env is None else mapping("env", env)


def mapping(field: str, value: Mapping[str, T]) -> dict[str, T]:
    """A dict of what a caller gave. Raises InvalidSpec for what is no mapping; what is in it may be a secret."""
    if not isinstance(value, Mapping):
        text = f'{field} is of the type {type(value).__name__}; allowed: a dict, as {{"NAME": "value"}}'
        raise WrongArgument(text, detail={"field": field})
    return dict(value)


def label_map(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels as a dict. Raises InvalidSpec for what is no mapping of str to str."""
    found = mapping("labels", labels)
    for name, value in found.items():
        check_pair("labels", name, value)
    return found


def number(field: str, value: float) -> float:
    """A number of seconds. Raises InvalidSpec for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongArgument.field(field, value, "a number of seconds")
    return value


def check_id(field: str, value: object, of: str) -> None:
    """Raises InvalidSpec unless it may be the id of something in a sandbox."""
    if not isinstance(value, str) or not value:
        raise InvalidSpec.field(field, value, f"an id, which is a str, as {of}")


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytearray | memoryview):
        raise InvalidSpec.field("stdin", value, "str, bytes or None")
    return bytes(value)


def _check_types(spec: RunSpec) -> None:
    # A struct built by keyword is not validated by msgspec, and a caller without mypy finds out here.
    wrong = {
        "cwd": spec.cwd is not None and not isinstance(spec.cwd, str),
        "timeout_s": spec.timeout_s is not None
        and (isinstance(spec.timeout_s, bool) or not isinstance(spec.timeout_s, int | float)),
    }
    allowed = {"cwd": "a str or a path", "timeout_s": "a number of seconds"}
    for name, value in spec.env.items():
        check_pair("env", name, value)
    for name, bad in wrong.items():
        if bad:
            raise InvalidSpec.field(name, getattr(spec, name), allowed[name])


def _arguments(command: Command) -> tuple[str | list[str] | None, list[bytes] | None]:
    if isinstance(command, str):
        if command.isascii() or not escaped(command):
            return command, None
        return None, [b"/bin/sh", b"-c", os_bytes("command", command)]
    if isinstance(command, bytes | bytearray) or not isinstance(command, Sequence):
        raise InvalidSpec.field("command", command, "a str for the shell or a list of arguments")
    words: list[str | bytes] = []
    for word in command:
        if not isinstance(word, str | bytes | os.PathLike):
            raise InvalidSpec.field("command", word, "arguments that are str, bytes or paths")
        words.append(os.fspath(word))
    if all(isinstance(word, str) and not escaped(word) for word in words):
        return [word for word in words if isinstance(word, str)], None
    return None, [word if isinstance(word, bytes) else os_bytes("command", word) for word in words]


def escaped(text: str) -> bool:
    """Whether it stands for bytes that are not UTF-8 (surrogate escapes)."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def how_ended(result: RunResult) -> str:
    """What ended a program, to stand behind "ended"."""
    how = {
        "exited": f"exit code {result.exit_code}",
        "timeout": "its timeout",
        "oom": "running out of memory",
        "killed": "being killed",
        "policy": "breaking a policy",
    }.get(result.cause, f"signal {result.signal}")
    return f"by {how}"


def command_failed(command: Command, result: RunResult, sandbox_id: str) -> CommandFailed:
    """The error of `run(check=True)`: how it ended and its last words."""
    shown = command if isinstance(command, str) else " ".join(str(word) for word in command)
    if len(shown) > _SHOWN_COMMAND_CHARS:
        shown = shown[:_SHOWN_COMMAND_CHARS] + "..."
    message = f"the command ended {how_ended(result)} after {result.duration_s:.2f} s: {shown}"
    if result.limits_hit:
        message += f"\nlimits hit: {', '.join(result.limits_hit)}"
    for name, data in (("stderr", result.stderr_bytes), ("stdout", result.stdout_bytes)):
        if data.strip():
            message += f"\nend of {name}:\n{_last(data)}"
            break
    error = CommandFailed(message, detail={"exit_code": result.exit_code, "cause": result.cause}, sandbox_id=sandbox_id)
    error.result = result
    return error


def _last(data: bytes) -> str:
    """The last lines of an output."""
    lines = data[-SHOWN_BYTES:].decode("utf-8", "replace").rstrip().split("\n")
    return "\n".join(lines[-SHOWN_LINES:])


def seconds(timeout_s: object) -> float | None:
    """A time that is waited, or None. Raises InvalidSpec."""
    if timeout_s is None or (isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)):
        return timeout_s
    raise WrongArgument.field("timeout_s", timeout_s, "a number of seconds, or None")


def create_failed(index: int, cause: DsecError) -> CreateFailed:
    """The item of `create_many` that stands for one sandbox that could not be made."""
    error = CreateFailed(
        f"sandbox {index}: {cause.message}",
        detail={"index": index, "code": cause.code, **cause.detail},
        retry=cause.retry,
        request_id=cause.request_id,
    )
    error.index, error.error = index, cause
    return error
