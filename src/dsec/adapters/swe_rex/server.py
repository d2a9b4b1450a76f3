"""The server: SWE-ReX's calls, each by one of the SDK."""

from __future__ import annotations

import asyncio
import hmac
import io
import shutil
import socket
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import uvicorn
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from swerex.exceptions import (
    CommandTimeoutError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
    SwerexException,
)
from swerex.runtime.abstract import (
    Action,
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    CloseBashSessionResponse,
    CloseResponse,
    Command,
    CommandResponse,
    CreateBashSessionRequest,
    CreateBashSessionResponse,
    IsAliveResponse,
    ReadFileRequest,
    ReadFileResponse,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)

import dsec
from dsec.adapters.swe_rex.sessions import BashSession

# The token of `python -m dsec.adapters.swe_rex`.
TOKEN_ENV: Final = "DSEC_SWE_REX_TOKEN"
READ_MAX_BYTES: Final = 256 * 1024 * 1024
UNPACKED_MAX_BYTES: Final = 8 * 1024**3
# Answers that are kept for a request that comes again.
ANSWERS_KEPT: Final = 64
ANSWERS_KEPT_BYTES: Final = 64 * 1024 * 1024
# A request is held in memory, an upload on the disk.
REQUEST_MAX_BYTES: Final = 256 * 1024 * 1024
UPLOAD_MAX_BYTES: Final = 8 * 1024**3
# The framework's status for an error of its runtime, which the client raises again.
_RUNTIME_ERROR: Final = 511
_ONE_STREAM: Final = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh"]

Call = Callable[[Request], Awaitable[BaseModel]]


class Runtime:
    """The calls, on one sandbox."""

    def __init__(self, sandbox: dsec.AsyncSandbox) -> None:
        self._sandbox = sandbox
        # None: being started.
        self._sessions: dict[str, BashSession | None] = {}

    async def is_alive(self, _: Request) -> BaseModel:
        """Whether the sandbox runs."""
        try:
            state = (await self._sandbox.info()).state
        except dsec.DsecError as error:
            return IsAliveResponse(is_alive=False, message=error.message)
        return IsAliveResponse(is_alive=state == "running", message="" if state == "running" else f"it is {state}")

    async def create_session(self, request: Request) -> BaseModel:
        """Start a shell under a name."""
        wanted = CreateBashSessionRequest.model_validate_json(await request.body())
        if wanted.session in self._sessions:
            raise SessionExistsError(f"session {wanted.session} already exists")
        self._sessions[wanted.session] = None
        try:
            session, output = await BashSession.start(self._sandbox, wanted)
        except BaseException:  # also cancelled: the name is free again
            self._sessions.pop(wanted.session, None)
            raise
        if wanted.session not in self._sessions:
            await session.close()
            raise SessionDoesNotExistError(f"session {wanted.session!r} was closed while it was started")
        self._sessions[wanted.session] = session
        return CreateBashSessionResponse(output=output)

    async def run_in_session(self, request: Request) -> BaseModel:
        """A command, something typed, or an interrupt."""
        action = _ACTION.validate_json(await request.body())
        return await self._session(action.session).run(action)

    async def close_session(self, request: Request) -> BaseModel:
        """End a shell."""
        wanted = CloseBashSessionRequest.model_validate_json(await request.body())
        session = self._session(wanted.session)
        del self._sessions[wanted.session]
        await session.close()
        return CloseBashSessionResponse()

    async def execute(self, request: Request) -> BaseModel:
        """A program, as `subprocess.run` would start it."""
        wanted = Command.model_validate_json(await request.body())
        words = [wanted.command] if isinstance(wanted.command, str) else wanted.command
        words = ["/bin/sh", "-c", *words] if wanted.shell else words
        words = [*_ONE_STREAM, *words] if wanted.merge_output_streams else words
        try:
            result = await self._sandbox.run(words, cwd=wanted.cwd, env=wanted.env, timeout_s=wanted.timeout)
        except dsec.ProgramNotStarted as error:
            # The builtin's own class for this errno, as there.
            raise OSError(error.detail.get("errno") or 0, error.message) from error
        if result.cause == "timeout":
            raise CommandTimeoutError(f"Timeout ({wanted.timeout:g}s) exceeded while running command")
        code = result.exit_code if result.signal is None else -result.signal
        response = CommandResponse(stdout=_text(result.out), stderr=_text(result.err), exit_code=code)
        if wanted.check and code != 0:
            message = f"Command {wanted.command!r} failed with exit code {code}.\n{response.stdout}\n{response.stderr}"
            raise NonZeroExitCodeError(f"{wanted.error_msg}: {message}" if wanted.error_msg else message)
        return response

    async def read_file(self, request: Request) -> BaseModel:
        """The text of a file, as `Path.read_text` reads it."""
        wanted = ReadFileRequest.model_validate_json(await request.body())
        data = await self._sandbox.files.read(wanted.path, length=READ_MAX_BYTES + 1)
        if len(data) > READ_MAX_BYTES:
            raise ValueError(f"{wanted.path} has more than {READ_MAX_BYTES} bytes, the most that are read at once")
        text = io.TextIOWrapper(io.BytesIO(data), encoding=wanted.encoding or "utf-8", errors=wanted.errors)
        return ReadFileResponse(content=text.read())

    async def write_file(self, request: Request) -> BaseModel:
        """Write a whole file, with its directories."""
        wanted = WriteFileRequest.model_validate_json(await request.body())
        await self._sandbox.files.write(wanted.path, wanted.content)
        return WriteFileResponse()

    async def upload(self, request: Request) -> BaseModel:
        """A file, or a directory as a zip archive."""
        async with request.form() as form:
            file, target = form.get("file"), form.get("target_path")
            if not isinstance(file, UploadFile) or not isinstance(target, str):
                raise ValueError("an upload has a file and a target_path")
            with tempfile.TemporaryDirectory(prefix="dsec-swe-rex-") as directory:
                unzip = str(form.get("unzip", "")).lower() in ("true", "1", "on", "yes")
                source = await asyncio.to_thread(_store, file, Path(directory), unzip=unzip)
                await self._sandbox.files.upload(source, target)
        return UploadResponse()

    async def close(self, _: Request) -> BaseModel:
        """End all sessions. The sandbox is its maker's."""
        while self._sessions:
            _name, session = self._sessions.popitem()
            if session is not None:
                await session.close()
        return CloseResponse()

    def _session(self, name: str) -> BashSession:
        session = self._sessions.get(name)
        if session is None:
            raise SessionDoesNotExistError(f"session {name!r} does not exist")
        return session


_ACTION: Final[TypeAdapter[BashAction | BashInterruptAction]] = TypeAdapter(Action)


class _Answers:
    """What was answered to a request, for when it comes again; one that is on is waited for."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], asyncio.Task[Response]] = OrderedDict()

    async def give(self, call: Call, request: Request) -> Response:
        key = request.url.path, request.headers.get("x-request-id", "")
        if not key[1]:
            return await _answer(call, request)
        task = self._known.get(key)
        if task is None:
            task = self._known[key] = asyncio.create_task(_answer(call, request))
            task.add_done_callback(lambda _: self._forget())
        return await asyncio.shield(task)

    def _forget(self) -> None:
        """The oldest, but none that is waited for."""
        answered = {key: task for key, task in self._known.items() if task.done()}
        size = sum(len(task.result().body) for task in answered.values())
        for key, task in answered.items():
            if len(self._known) <= ANSWERS_KEPT and size <= ANSWERS_KEPT_BYTES:
                return
            size -= len(task.result().body)
            del self._known[key]


async def _answer(call: Call, request: Request) -> Response:
    try:
        return JSONResponse((await call(request)).model_dump())
    except ValidationError as error:
        return JSONResponse(
            {"detail": error.errors(include_url=False, include_context=False, include_input=False)}, 422
        )
    except Exception as error:  # noqa: BLE001 - a request's edge: the client raises it again
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ in ("builtins", "swerex.exceptions"))
        # A class of ours would be unknown there; one that says nothing is the framework's own.
        kind = SwerexException if kind is Exception else kind
        about = {
            "message": str(error),
            "class_path": f"{kind.__module__}.{kind.__name__}",
            "traceback": "",
            "extra_info": getattr(error, "extra_info", {}),
        }
        return JSONResponse({"swerexception": about}, _RUNTIME_ERROR)


class _Guard:
    """Nobody without the token learns even which calls there are."""

    def __init__(self, inner: ASGIApp, token: str) -> None:
        self._inner = inner
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"x-api-key", b"")
            if not hmac.compare_digest(given, self._token):
                await JSONResponse({"detail": "X-API-Key is missing or wrong"}, 403)(scope, receive, send)
                return
            receive = _bounded(receive, UPLOAD_MAX_BYTES if scope["path"] == "/upload" else REQUEST_MAX_BYTES)
        await self._inner(scope, receive, send)


def _bounded(receive: Receive, most: int) -> Receive:
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > most:
            raise ValueError(f"the request has more than {most} bytes")
        return message

    return bounded


def app(sandbox: dsec.AsyncSandbox, auth_token: str) -> ASGIApp:
    """The protocol as an ASGI application. `auth_token`: what the framework's `auth_token` must be."""
    if not auth_token or not auth_token.isascii():
        raise ValueError("auth_token: ASCII letters, at least one")
    runtime, answers = Runtime(sandbox), _Answers()

    def route(path: str, call: Call, method: str = "POST") -> Route:
        async def endpoint(request: Request) -> Response:
            return await answers.give(call, request)

        return Route(path, endpoint, methods=[method])

    async def hello(_: Request) -> Response:
        return JSONResponse({"message": "hello world"})

    names = (
        "create_session",
        "run_in_session",
        "close_session",
        "execute",
        "read_file",
        "write_file",
        "upload",
        "close",
    )
    routes = [route(f"/{name}", getattr(runtime, name)) for name in names]
    routes += [route("/is_alive", runtime.is_alive, "GET"), Route("/", hello)]
    return _Guard(Starlette(routes=routes), auth_token)


@asynccontextmanager
async def serve(
    sandbox: dsec.AsyncSandbox, auth_token: str, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[tuple[str, int]]:
    """Serve a sandbox; gives host and port. On another address than 127.0.0.1 whoever has the token has a shell."""
    with socket.create_server((host, port)) as listening:
        config = uvicorn.Config(app(sandbox, auth_token), log_level="error", lifespan="off", access_log=False)
        server = _Server(config)
        running = asyncio.create_task(server.serve([listening]))
        try:
            await server.ready.wait()
            yield listening.getsockname()[:2]
        finally:
            server.should_exit = True
            await running


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the caller's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def _store(file: UploadFile, directory: Path, *, unzip: bool) -> Path:
    """What was sent, as a file or directory of this machine."""
    if not unzip:
        target = directory / "file"
        with target.open("wb") as out:
            shutil.copyfileobj(file.file, out)
        return target
    target = directory / "tree"
    target.mkdir()
    with zipfile.ZipFile(file.file) as archive:
        if sum(item.file_size for item in archive.infolist()) > UNPACKED_MAX_BYTES:
            raise ValueError(f"the archive unpacks to more than {UNPACKED_MAX_BYTES} bytes")
        archive.extractall(target)
    return target


def _text(output: Any) -> str:
    if output.dropped_bytes:
        return str(output.text())
    return bytes(output.head + output.tail).decode("utf-8", "backslashreplace")
