"""Inspect AI's sandbox provider `dsec`: each sample has a sandbox of its own.

Task(..., sandbox="dsec")
Task(..., sandbox=SandboxEnvironmentSpec("dsec", DsecSandboxConfig(base="debian:12", cpu=2, user="nobody")))
"""

from __future__ import annotations

import asyncio
import errno
import posixpath
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, Self, overload

import dsec
from dsec.adapters import missing

try:
    import yaml
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxConnection,
        SandboxEnvironment,
        SandboxEnvironmentConfigType,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        sandboxenv,
    )
    from pydantic import BaseModel, ConfigDict, model_validator
except ModuleNotFoundError as error:
    raise missing(error, "inspect") from error

__all__ = ["DsecSandboxConfig", "DsecSandboxEnvironment"]

CONFIG_FILES: Final = ["dsec.yaml", "dsec.yml"]
# Each sandbox has the first, by which `inspect sandbox cleanup` finds it, and its task's name.
LABEL: Final = {"inspect_ai": "sample"}
TASK_LABEL: Final = "inspect_ai.task"
# An evaluation asks for more sandboxes at once than a node may have room for: samples wait for their turn.
WAIT_S: Final = 3600.0
# Longer input goes to the program as it reads.
_INPUT_BYTES: Final = 1024 * 1024
_LABEL_CHARS: Final = 256
# Of the limits a run can meet, those that a program may have failed for. Its output is all here.
_TOLD_LIMITS: Final = ("memory", "pids", "disk")
# What an agent writes itself. The rest of a call is the task's code, whose mistakes are errors.
_AGENTS_FIELDS: Final = ("command", "cwd", "env")


_TAKES: Final = "a DsecSandboxConfig, or the path of a YAML file with its fields"


class DsecSandboxConfig(BaseModel):
    """`url` is the node's, as for `dsec.Client`. All other fields are those of `dsec.Spec`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    url: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        dsec.Spec.build(**self.fields())  # InvalidSpec, which is a ValueError, names the wrong field
        return self

    def fields(self) -> dict[str, Any]:
        """The fields of the Spec."""
        return {"wait_s": WAIT_S, **(self.model_extra or {})}


@cache
def client_of(url: str | None) -> dsec.AsyncClient:
    return dsec.AsyncClient(url)


# Of this process, by id: what is still to be stopped when a task ends.
_alive: dict[str, dsec.AsyncSandbox] = {}


@sandboxenv(name="dsec")
class DsecSandboxEnvironment(SandboxEnvironment):
    """One sandbox."""

    def __init__(self, sandbox: dsec.AsyncSandbox, url: str | None) -> None:
        super().__init__()
        self.sandbox = sandbox
        self._url = url
        self._directory: str | None = None

    @classmethod
    def config_files(cls) -> list[str]:
        """Found beside a task by themselves."""
        return CONFIG_FILES

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """A configuration as a log has it."""
        return DsecSandboxConfig(**config)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Create the sandbox of a sample."""
        given = _config(config)
        fields = given.fields()
        fields["labels"] = {**fields.get("labels", {}), **LABEL, TASK_LABEL: task_name[:_LABEL_CHARS]}
        sandbox = await client_of(given.url).create(**fields)
        _alive[sandbox.id] = sandbox
        return {"default": cls(sandbox, given.url)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Stop it. An interrupted sample's too: it takes milliseconds, and Inspect shields it."""
        for environment in environments.values():
            await _stop(environment.as_type(cls).sandbox)

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        """Stop what is left, or say how to."""
        for sandbox in list(_alive.values()):
            if cleanup:
                await _stop(sandbox)
            else:
                del _alive[sandbox.id]
                print(f"left: {sandbox.id} (dsec stop {sandbox.id}; else its idle timeout ends it)")

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """`inspect sandbox cleanup dsec [ID]`: stop all that evaluations have left on the default node, or one."""
        client = client_of(None)
        if id is not None:
            await (await client.get(id)).stop(grace_s=0)
            return
        async for sandbox in client.list(labels=LABEL):
            await _stop(sandbox)
            print(f"stopped {sandbox.id}")

    async def exec(  # noqa: PLR0917 - the arguments are Inspect's
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a program. A timeout ends all it has started; it is exact, so that nothing is tried again after one."""
        kept = _Output()
        stdin = input.encode() if isinstance(input, str) else input
        try:
            with _platform_errors():
                where = await self._absolute(cwd)
                result = await self._run(cmd, stdin, kept, cwd=where, env=env, user=user, timeout_s=timeout)
        except dsec.ProgramNotStarted as error:
            if error.detail.get("errno") in (errno.EACCES, errno.EPERM):
                raise PermissionError(error.detail["errno"], error.message) from error
            return ExecResult(False, error.exit_code, "", f"{error.message}\n")
        except dsec.InvalidSpec as error:
            if error.detail.get("field") not in _AGENTS_FIELDS:
                raise
            return ExecResult(False, 126, "", f"{error.message}\n")
        except _TooMuch as error:
            limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR
            raise OutputLimitExceededError(limit, kept.text(error.stream)) from None
        if result.cause == "timeout":
            late = TimeoutError(f"Command timed out after {timeout} seconds")
            # Where Inspect looks for what to show of it.
            vars(late)["truncated_output"] = kept.text(1) + kept.text(2)
            raise late
        return ExecResult(result.ok, result.exit_code, kept.text(1), _with_limits(kept.text(2), result))

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a whole file, with its directories."""
        with _platform_errors():
            await self.sandbox.files.write(file, contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...
    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """A whole file."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with _platform_errors():
            data = await self.sandbox.files.read(file, length=limit + 1)
        if len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """How a person gets in."""
        try:
            state = (await self.sandbox.info()).state
        except (dsec.NotFound, dsec.Unavailable) as error:
            raise ConnectionError(error.message) from error
        if state != "running":
            raise ConnectionError(f"{self.sandbox.id} is {state}")
        words = ["dsec", "shell", *(["--url", self._url] if self._url else []), *(["--user", user] if user else [])]
        return SandboxConnection(type="dsec", command=shlex.join([*words, self.sandbox.id]), container=self.sandbox.id)

    def default_polling_interval(self) -> float:
        """Seconds between questions of a sandbox service; a call costs about a millisecond."""
        return 0.2

    async def _absolute(self, cwd: str | None) -> str | None:
        if cwd is None or cwd.startswith("/"):
            return cwd
        if self._directory is None:
            self._directory = (await self.sandbox.files.stat(".")).path
        return posixpath.join(self._directory, cwd)

    async def _run(self, cmd: list[str], stdin: bytes | None, kept: _Output, **options: Any) -> dsec.RunResult:
        if stdin is None or len(stdin) <= _INPUT_BYTES:
            return await self.sandbox.run(cmd, stdin=stdin, on_output=kept.add, **options)
        async with await self.sandbox.spawn(cmd, **options) as process:
            giving = asyncio.create_task(_give(process, stdin))
            try:
                async for stream, data in process.follow():
                    kept.add(stream, data)
                result = await process.wait()
            finally:
                giving.cancel()
                await asyncio.wait([giving])
            if not giving.cancelled():
                giving.result()
            return result


class _TooMuch(Exception):
    def __init__(self, stream: int) -> None:
        super().__init__(stream)
        self.stream = stream


class _Output:
    """Both streams, each up to the limit of the moment."""

    def __init__(self) -> None:
        self._limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        self._kept = {1: bytearray(), 2: bytearray()}

    def add(self, stream: int, data: bytes) -> None:
        """Ends the program, which would go on saying what nobody can have, when it is too much."""
        kept = self._kept[stream]
        room = self._limit - len(kept)
        kept += data[:room]
        if len(data) > room:
            raise _TooMuch(stream)

    def text(self, stream: int) -> str:
        return self._kept[stream].decode("utf-8", "replace")


async def _give(process: dsec.AsyncProcess, data: bytes) -> None:
    try:
        await process.stdin.write(data)
        await process.stdin.close()
    except (dsec.InvalidState, dsec.NotFound):
        return  # it has ended, or reads no more: its own business, as with a pipe
    except dsec.DsecError:
        # Half an input would be taken for the whole; the caller hears of this error once the program is gone.
        await process.kill()
        raise


def _with_limits(stderr: str, result: dsec.RunResult) -> str:
    """What a failed program has said, and why it may have: who is killed for want of memory says nothing itself."""
    met = [limit for limit in result.limits_hit if limit in _TOLD_LIMITS]
    if result.ok or not met:
        return stderr
    behind = "" if stderr.endswith("\n") or not stderr else "\n"
    return f"{stderr}{behind}the sandbox's limit was met: {', '.join(met)}\n"


@contextmanager
def _platform_errors() -> Iterator[None]:
    """What is no doing of a program is never shown as if it were."""
    try:
        yield
    except (dsec.Unavailable, dsec.NotFound, dsec.Exhausted, dsec.DeadlineExceeded) as error:
        raise SandboxUnavailableError(error.message) from error


async def _stop(sandbox: dsec.AsyncSandbox) -> None:
    with suppress(dsec.SandboxLost, dsec.NotFound):  # it has ended by itself
        await sandbox.stop(grace_s=0)
    _alive.pop(sandbox.id, None)


def _config(config: object) -> DsecSandboxConfig:
    if config is None:
        return DsecSandboxConfig()
    if isinstance(config, DsecSandboxConfig):
        return config
    if isinstance(config, str):
        return DsecSandboxConfig(**_read(Path(config)))
    _refuse(type(config).__name__)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError as error:
        # In its text: of an error Inspect shows only that.
        raise FileNotFoundError(f"{path}: no such file; the sandbox dsec takes {_TAKES}") from error
    except yaml.YAMLError as error:
        raise TypeError(f"{path}: no YAML: {error}; the sandbox dsec takes {_TAKES}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        _refuse(f"{path}: not a mapping")
    if "services" in content:
        _refuse(f"{path}: a Compose file, and a sample has one sandbox, on a layer (base=)")
    return content


def _refuse(what: str) -> NoReturn:
    raise TypeError(f"{what}: the sandbox dsec takes {_TAKES}")
