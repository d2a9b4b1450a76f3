"""A sandbox backend of langchain's deepagents.

with dsec.Client().create(base="debian:12") as sbx:
    agent = create_deep_agent(model=..., backend=DsecSandbox(sbx))
"""

from __future__ import annotations

from typing import Final

import dsec
from dsec.adapters import missing

try:
    from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
    from deepagents.backends.sandbox import BaseSandbox
except ModuleNotFoundError as error:
    raise missing(error, "deepagents") from error

__all__ = ["DsecSandbox"]

TIMEOUT_S: Final = 1800.0
# As `timeout` of coreutils and the framework's own backends have it.
_TIMED_OUT: Final = 124
_NOT_STARTED: Final = 126
# The framework shows a model one output: both streams, in the order they were written.
_ONE_STREAM: Final = ["/bin/sh", "-c", 'exec /bin/sh -c "$1" 2>&1', "sh"]


class DsecSandbox(BaseSandbox):
    """A sandbox, which its caller makes and stops. Searching, reading and editing need python3 in it.

    What a program does is an answer; a lost sandbox or node raises.
    """

    def __init__(self, sandbox: dsec.Sandbox, *, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: of a command that names none; 0: none."""
        self.sandbox = sandbox
        self._timeout_s = timeout_s

    @property
    def id(self) -> str:
        """The sandbox's id."""
        return self.sandbox.id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a shell command. A timeout (0: none) ends it with all it has started."""
        limit = self._timeout_s if timeout is None else timeout
        try:
            result = self.sandbox.run([*_ONE_STREAM, command], timeout_s=limit or None)
        except dsec.ProgramNotStarted as error:
            return ExecuteResponse(output=error.message, exit_code=error.exit_code)
        except dsec.InvalidSpec as error:
            if error.detail.get("field") != "command":
                raise
            return ExecuteResponse(output=error.message, exit_code=_NOT_STARTED)
        output, code = result.stdout, result.exit_code
        if result.cause == "timeout":
            output += f"\nError: Command timed out after {limit:g} seconds."
            code = _TIMED_OUT
        elif result.cause == "oom":
            output += "\nError: Command was killed: out of memory."
        return ExecuteResponse(output=output, exit_code=code, truncated=result.truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files, each whole or not at all, with their directories."""
        return [FileUploadResponse(path=path, error=self._write(path, content)) for path, content in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files."""
        return [self._read(path) for path in paths]

    def _write(self, path: str, content: bytes) -> str | None:
        if not path.startswith("/"):
            return "invalid_path"
        try:
            self.sandbox.files.write(path, content)
        except (dsec.FileError, dsec.InvalidSpec) as error:
            return _told(error)
        return None

    def _read(self, path: str) -> FileDownloadResponse:
        if not path.startswith("/"):
            return FileDownloadResponse(path=path, error="invalid_path")
        try:
            return FileDownloadResponse(path=path, content=self.sandbox.files.read(path))
        except (dsec.FileError, dsec.InvalidSpec) as error:
            return FileDownloadResponse(path=path, error=_told(error))


def _told(error: dsec.FileError | dsec.InvalidSpec) -> str:
    """In the framework's words, where it has one."""
    words: dict[type[Exception], str] = {
        dsec.FileNotFound: "file_not_found",
        dsec.PermissionDenied: "permission_denied",
        dsec.IsADirectory: "is_directory",
        dsec.InvalidSpec: "invalid_path",
    }
    return words.get(type(error), error.message)
