"""Bash sessions as SWE-ReX has them.

Its own server types everything into one terminal and looks for a prompt in what comes back. Here a command is one of
a session of the sandbox, which tells exactly where its output ends and what its exit code is; only a program that is
talked to (`is_interactive_command`, `expect`) gets a terminal, its own, with the session's directory and environment.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Final

from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
)
from swerex.runtime.abstract import BashAction, BashInterruptAction, BashObservation, CreateBashSessionRequest

import dsec
from dsec.adapters.swe_rex.search import Search

# What the framework's own server says it has found when the shell is back.
PROMPT: Final = "SHELLPS1PREFIX"
_ESCAPES: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\^_]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
# What a terminal has shown and nobody has asked for: the newest of it is kept.
_SHOWN_BYTES: Final = 8 * 1024 * 1024
# For what is asked of a shell in between.
_ASIDE_S: Final = 30.0
_STATE: Final = """printf '%s\\0' "$PWD"; command env -0"""
_INTERRUPTED: Final = 130


class BashSession:
    """One session: a shell, and at times a program in a terminal."""

    def __init__(self, sandbox: dsec.AsyncSandbox, shell: dsec.AsyncSession) -> None:
        self._sandbox = sandbox
        self._shell = shell
        self._terminal: _Terminal | None = None
        # One at a time: the one before is ended first.
        self._opening = asyncio.Lock()
        self._ended = False
        self._commands: set[asyncio.Task[dsec.RunResult]] = set()

    @classmethod
    async def start(cls, sandbox: dsec.AsyncSandbox, request: CreateBashSessionRequest) -> tuple[BashSession, str]:
        """A session, and what its start has said."""
        shell = await sandbox.session("/bin/bash")
        session = cls(sandbox, shell)
        try:
            lines = ["exec 2>&1", *(f"source {path}" for path in request.startup_source)]
            # Without sources nothing of the caller's can take long.
            limit = request.startup_timeout if request.startup_source else _ASIDE_S
            result = await shell.run("\n".join(lines), timeout_s=limit)
            if result.cause == "timeout":
                raise CommandTimeoutError(f"the session's start was not through after {limit:g} seconds")
        except BaseException:  # also cancelled: nobody else knows of it
            await session.close()
            raise
        return session, _text(result.stdout_bytes)

    async def run(self, action: BashAction | BashInterruptAction) -> BashObservation:
        """Do what an action says."""
        if isinstance(action, BashInterruptAction):
            return await self._interrupt(action)
        if self._terminal is not None and (action.is_interactive_command or action.is_interactive_quit):
            return await self._type(self._terminal, action)
        if action.is_interactive_command or action.is_interactive_quit or action.expect:
            async with self._opening:
                await self._leave()
                self._terminal = terminal = await self._open(action.command)
            return await self._expect(terminal, action, "")
        return await self._command(action)

    async def close(self) -> None:
        """End it with all it has started."""
        async with self._opening:
            await self._leave()
        with suppress(dsec.NotFound, dsec.SandboxLost):
            await self._shell.close()

    async def _command(self, action: BashAction) -> BashObservation:
        await self._check_syntax(action.command)
        run = asyncio.create_task(self._shell.run(action.command, timeout_s=action.timeout))
        self._commands.add(run)
        try:
            result = await run
        except asyncio.CancelledError:
            if run.cancelled() and not _being_cancelled():
                return BashObservation(exit_code=_INTERRUPTED, failure_reason="interrupted")
            raise
        except (dsec.InvalidState, dsec.NotFound) as error:
            raise SessionDoesNotExistError(f"session {action.session!r}: {error.message}") from error
        finally:
            self._commands.discard(run)
            run.cancel()
        self._ended = result.session_ended
        if result.cause == "timeout":
            message = f"timeout after {action.timeout:g} seconds while running {action.command!r}"
            gone = "; its shell did not come back, and the session has ended with it" if self._ended else ""
            raise CommandTimeoutError(message + gone)
        output = _text(result.stdout_bytes if not result.truncated else result.stdout.encode())
        if action.check == "raise" and result.exit_code != 0:
            message = f"Command {action.command!r} failed with exit code {result.exit_code}. Its output:\n{output}"
            raise NonZeroExitCodeError(f"{action.error_msg}: {message}" if action.error_msg else message)
        code = None if action.check == "ignore" else result.exit_code
        return BashObservation(output=output, exit_code=code, expect_string=PROMPT)

    async def _check_syntax(self, command: str) -> None:
        checked = await self._sandbox.run(["/bin/bash", "-n"], stdin=command.encode() + b"\n", timeout_s=_ASIDE_S)
        if checked.exit_code:
            told = {"bash_stdout": checked.stdout, "bash_stderr": checked.stderr}
            raise BashIncorrectSyntaxError(f"{command!r} is no bash: {checked.stderr}", extra_info=told)

    async def _interrupt(self, action: BashInterruptAction) -> BashObservation:
        for command in list(self._commands):
            command.cancel()
        if self._commands:
            await asyncio.wait(list(self._commands))
        terminal = self._terminal
        if terminal is None and self._ended:
            raise SessionDoesNotExistError(f"the shell of session {action.session!r} has ended with its last command")
        if terminal is None:
            return BashObservation(exit_code=0, expect_string=PROMPT)
        before, output, matched = terminal.take(), "", PROMPT
        for _ in range(max(action.n_retry, 1)):
            await terminal.type("\x03")
            try:
                output, matched = await terminal.expect(action.expect, action.timeout)
                break
            except TimeoutError:
                continue
        else:
            output = terminal.take()
            await self._leave()
        if terminal.ended:
            await self._leave()
        return BashObservation(output=_plain(before + output).strip(), exit_code=0, expect_string=matched)

    async def _type(self, terminal: _Terminal, action: BashAction) -> BashObservation:
        # What was shown before is no answer to this.
        before = terminal.take()
        await terminal.type(f"{action.command}\n")
        return await self._expect(terminal, action, before)

    async def _expect(self, terminal: _Terminal, action: BashAction, before: str) -> BashObservation:
        try:
            output, matched = await terminal.expect(action.expect, action.timeout)
        except CommandTimeoutError:
            raise  # of a pattern
        except TimeoutError as error:
            message = f"timeout after {action.timeout:g} seconds while running {action.command!r}"
            raise CommandTimeoutError(message) from error
        if terminal.ended:
            await self._leave()
        # A terminal shows what is typed, too.
        shown = _plain(output).lstrip().removeprefix(action.command).strip()
        shown = f"{_plain(before).strip()}\n{shown}".strip()
        return BashObservation(output=shown, exit_code=0, expect_string=matched)

    async def _open(self, command: str) -> _Terminal:
        """A program in a terminal, with the directory and the environment the shell has now."""
        state = await self._shell.run(_STATE, timeout_s=_ASIDE_S, check=True)
        directory, *entries = state.stdout_bytes.rstrip(b"\0").split(b"\0")
        env = dict(entry.decode("utf-8", "surrogateescape").split("=", 1) for entry in entries if b"=" in entry)
        env = {"TERM": "dumb", **env, "PS1": "> "}
        words = ["/bin/bash", "-c", command]
        return _Terminal(await self._sandbox.spawn(words, tty=True, cwd=directory.decode(), env=env))

    async def _leave(self) -> None:
        terminal, self._terminal = self._terminal, None
        if terminal is not None:
            await terminal.close()


class _Terminal:
    """A program in a terminal, and what it has shown that nobody has taken yet."""

    def __init__(self, process: dsec.AsyncProcess) -> None:
        self._process = process
        self._shown = bytearray()
        self._begin = 0  # of it, in all that was shown
        self._news = asyncio.Event()
        self._search = Search()
        self.ended = False
        self._error: dsec.DsecError | None = None
        self._reading = asyncio.create_task(self._read())

    async def type(self, text: str) -> None:
        """As from a keyboard."""
        with suppress(dsec.InvalidState, dsec.NotFound):  # it has ended: `expect` says so
            await self._process.stdin.write(text)

    async def expect(self, patterns: list[str], timeout_s: float | None) -> tuple[str, str]:
        """What was shown before the first of the patterns (or the end), and which it was. TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                news = self._news
                # Before what was shown: of one that ends meanwhile the last words are looked through, too.
                ended, error, begin = self.ended, self._error, self._begin
                text = self._shown.decode("utf-8", "surrogateescape")
                if found := await self._search.find(patterns, text):
                    which, start, end = found
                    # What has come meanwhile stands behind it, and something may have gone from before it.
                    self._forget(begin + len(text[:end].encode("utf-8", "surrogateescape")) - self._begin)
                    return text[:start], patterns[which]
                if error is not None:
                    raise error
                if ended:
                    return self.take(), PROMPT
                await news.wait()

    def take(self) -> str:
        """What was shown and nobody has taken yet."""
        text = self._shown.decode("utf-8", "surrogateescape")
        self._forget(len(self._shown))
        return text

    def _forget(self, count: int) -> None:
        if count > 0:
            del self._shown[:count]
            self._begin += count

    async def close(self) -> None:
        """Kill it."""
        with suppress(dsec.NotFound, dsec.SandboxLost, dsec.InvalidState):
            await self._process.kill()
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self._search.close()

    async def _read(self) -> None:
        try:
            async for data in self._process.stdout:
                self._shown += data
                self._forget(len(self._shown) - _SHOWN_BYTES)
                self._tell()
        except dsec.DsecError as error:
            self._error = error
        finally:
            self.ended = True
            self._tell()

    def _tell(self) -> None:
        # An event for each piece of news: one that is used again is cleared by one waiter before another has looked.
        news, self._news = self._news, asyncio.Event()
        news.set()


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _plain(text: str) -> str:
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return _ESCAPES.sub("", text).replace("\r\n", "\n")


def _text(output: bytes) -> str:
    """As the framework has it: text without escapes; the prompt would stand on a line of its own."""
    return _plain(output.decode("utf-8", "surrogateescape")).removesuffix("\n")
