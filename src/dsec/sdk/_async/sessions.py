"""Shells that live on between commands: `session`."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dsec.model.errors import DsecError, NotFound, ProgramNotStarted, SandboxLost
from dsec.model.ids import check_key, new_key
from dsec.model.processes import SessionSpec
from dsec.model.states import RunResult
from dsec.sdk import codec, programs, values
from dsec.sdk._async.run import AsyncRun
from dsec.sdk.keywords import explained
from dsec.sdk.programs import SessionInfo

if TYPE_CHECKING:
    from dsec.sdk._async.client import AsyncClient


@explained
class AsyncSession:
    """A handle on a session: directory, variables and functions last from one `run` to the next.

    Leaving it as a context manager ends it with all it has started. It pickles to the URL, the sandbox and its id.
    """

    def __init__(self, client: AsyncClient, sandbox_id: str, session_id: str) -> None:
        self._client = client
        self._sandbox_id = sandbox_id
        self._id = session_id
        self._sandbox = f"/v1/sandboxes/{codec.quote(sandbox_id)}"
        self._path = f"{self._sandbox}/sessions/{codec.quote(session_id)}"

    @property
    def id(self) -> str:
        """Its id within its sandbox."""
        return self._id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._id} in {self._sandbox_id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._client.url, self._sandbox_id, self._id)

    async def run(
        self,
        command: values.Command,
        *,
        stdin: str | bytes | None = None,
        timeout_s: float | None = None,
        on_output: values.OnOutput | None = None,
        check: bool = False,
        key: str | None = None,
    ) -> RunResult:
        """Run a command in the session's shell, after those that were given before.

        A str is shell text: `cd`, `export` and functions last. The rest is as `sandbox.run` has it: output, timeout,
        cancelling and key are the command's. One that ends the shell (`exit`, `exec`) ends the session with its exit
        code; afterwards InvalidState.
        """
        spec = programs.make_command(command, stdin=stdin, timeout_s=timeout_s)
        run = AsyncRun(self._client.transport, self._sandbox, spec, on_output, key, session=codec.quote(self._id))
        result = await run.result()
        if check and not result.ok:
            raise values.command_failed(command, result, self._sandbox_id)
        return result

    async def info(self) -> SessionInfo:
        """What its node knows of it now."""
        return await self._client.transport.call("GET", self._path, SessionInfo)

    async def close(self) -> None:
        """End it, with all it has started. Can be repeated."""
        await self._client.transport.call("DELETE", self._path, codec.Nothing, key=new_key())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except (NotFound, SandboxLost):
            return
        except DsecError as close_error:
            if error is None:
                raise
            # The caller's own error tells more; this one must not hide it.
            error.add_note(f"and ending {self._id} failed: {close_error}")


async def start(client: AsyncClient, sandbox_id: str, spec: SessionSpec, key: str | None) -> AsyncSession:
    """Start a session."""
    key = new_key() if key is None else check_key(key, "key")
    path = f"/v1/sandboxes/{codec.quote(sandbox_id)}/sessions"
    try:
        made = await client.transport.call("POST", path, SessionInfo, body=codec.encode(spec), key=key)
    except ProgramNotStarted as error:
        if spec.shell is not None and error.detail.get("field") == "command":
            error.message += f"; shell={spec.shell!r} is a program inside (a name for the session itself is key=)"
        raise
    return AsyncSession(client, sandbox_id, made.id)


def _restore(url: str, sandbox_id: str, session_id: str) -> AsyncSession:
    from dsec.sdk._async.client import shared

    return AsyncSession(shared(url), sandbox_id, session_id)
