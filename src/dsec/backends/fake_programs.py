"""The programs a sandbox of the fake backend has: a handful of commands and a very small shell.

The shell knows `;`, `&&`, `||`, `&`, newlines, `>&2`, `> /dev/null`, `$NAME`, `$$` and `$?`. It is enough for the
conformance suite and for tests of a node; whatever else is asked for is "command not found", as in a real one.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import shlex
import signal as signals
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Final

from dsec.backends.base import RunPlan
from dsec.model.errors import ProgramNotStarted
from dsec.model.states import Cause

if TYPE_CHECKING:
    from dsec.backends.fake_runs import FakeRun, Input

Program = Callable[["FakeRun"], Coroutine[None, None, int]]

NOT_FOUND: Final = 127
BAD_USAGE: Final = 2
YES_LINES: Final = 8192
USERS: Final[Mapping[str, int]] = {"root": 0, "nobody": 65534}
UID_MAX: Final = 2**32 - 2
SHELLS: Final = frozenset({"sh", "bash"})
_SEARCHED = ("/bin", "/usr/bin", "/usr/local/bin")
_OPERATORS = frozenset({";", "&&", "||", "&"})
_VARIABLE = re.compile(r"\$(\$|\?|\w+|\{\w+\})")


class Died(Exception):
    """The program was killed by a signal that it sent itself, or by the memory limit."""

    def __init__(self, cause: Cause, signal: int) -> None:
        super().__init__(cause, signal)
        self.cause = cause
        self.signal = signal


class _Exit(Exception):
    """`exit N`: the shell ends."""


class Shell:
    """The state of one program: where it is, what its environment is, what it answered last."""

    def __init__(self, plan: RunPlan, directories: set[str]) -> None:
        self.plan = plan
        self.directories = directories
        self.env = dict(plan.env)
        self.cwd = plan.cwd
        self.status = 0
        self.stdin: Input | None = None  # None: nothing to read

    def path(self, name: str) -> str:
        """A name as an absolute path."""
        return posixpath.normpath(posixpath.join(self.cwd, name))

    async def script(self, run: FakeRun, text: str) -> int:
        """Run a shell text."""
        try:
            wanted = True
            for words, operator in _commands(text):
                if wanted and words:
                    if operator == "&":
                        run.spawn_child(self._background(words))
                        self.status = 0
                    else:
                        self.status = await self.command(run, words)
                if operator == "&&":
                    wanted = wanted and self.status == 0
                elif operator == "||":
                    wanted = self.status != 0
                else:
                    wanted = True
        except _Exit as leave:
            return int(leave.args[0]) & 0xFF
        return self.status

    def _child(self) -> Shell:
        child = Shell(self.plan, self.directories)
        child.stdin = self.stdin
        return child

    async def lines(self, run: FakeRun) -> int:
        """Run what comes on its input, each line once it is whole."""
        assert self.stdin is not None
        text = b""
        while data := await self.stdin.read():
            whole, _, text = (text + data).rpartition(b"\n")
            await self.script(run, os.fsdecode(whole))
        return await self.script(run, os.fsdecode(text))

    def _background(self, words: list[str]) -> Program:
        child = Shell(self.plan, self.directories)
        child.env, child.cwd = dict(self.env), self.cwd

        async def program(run: FakeRun) -> int:
            return await child.command(run, words)

        return program

    async def command(self, run: FakeRun, words: list[str]) -> int:
        """Run one command with its redirections."""
        words, stream = self._redirected([self._expand(run, word) for word in words])
        while words and re.match(r"\w+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            self.env[name] = value
        if not words:
            return 0
        name = words[0].rpartition("/")[2]
        if name in SHELLS and words[1:2] == ["-c"]:
            return await self._child().script(run, words[2])
        if (builtin := COMMANDS.get(name)) is None:
            await run.write(2, f"sh: {words[0]}: not found\n".encode())
            return NOT_FOUND
        return await _invoke(builtin, self, run, words, stream)

    def _expand(self, run: FakeRun, word: str) -> str:
        def value(match: re.Match[str]) -> str:
            name = match.group(1).strip("{}")
            return str({"$": run.pid, "?": self.status}.get(name, self.env.get(name, "")))

        return _VARIABLE.sub(value, word)

    @staticmethod
    def _redirected(words: list[str]) -> tuple[list[str], int]:
        """The words without redirections, and where standard output goes (0: nowhere)."""
        stream, plain, rest = 1, [], iter(words)
        for word in rest:
            if word == ">&2":
                stream = 2
            elif word == ">":
                next(rest, None)
                stream = 0
            else:
                plain.append(word)
        return plain, stream


def load(plan: RunPlan, directories: set[str]) -> Program:
    """The program a plan asks for. Raises ProgramNotStarted for what this sandbox does not have."""
    if plan.cwd not in directories:
        raise _not_started("cwd", plan.cwd, "a directory that exists in the sandbox")
    _check_user(plan.user)
    path = os.fsdecode(plan.argv[0])
    directory, _, name = path.rpartition("/")
    known = name in COMMANDS or name in SHELLS
    if not known or (directory and directory not in _SEARCHED):
        raise _not_started("command", path, "a program that exists in the sandbox and can be executed")
    shell = Shell(plan, directories)
    words = [os.fsdecode(word) for word in plan.argv]

    async def program(run: FakeRun) -> int:
        shell.stdin = run.input
        if name in SHELLS and words[1:2] == ["-c"]:
            return await shell.script(run, words[2])
        if name in SHELLS:
            return await shell.lines(run)
        return await _invoke(COMMANDS[name], shell, run, words, 1)

    return program


async def _invoke(command: Command, shell: Shell, run: FakeRun, words: list[str], stream: int) -> int:
    try:
        return await command(shell, run, words[1:], stream)
    except (ValueError, IndexError, KeyError) as error:  # bad arguments: said as a real tool would
        await run.write(2, f"{words[0]}: bad arguments: {error}\n".encode())
        return BAD_USAGE


def _check_user(user: str) -> None:
    for part in user.split(":"):
        if part not in USERS and not (part.isdigit() and int(part) <= UID_MAX):
            raise _not_started("user", user, "a user and group of the sandbox, or numbers")


def _not_started(field: str, value: str, allowed: str) -> ProgramNotStarted:
    detail = {"field": field, "allowed": allowed, "errno": errno.ENOENT}
    return ProgramNotStarted(f"{field}: no {value!r}; allowed: {allowed}", detail=detail)


def _commands(text: str) -> list[tuple[list[str], str]]:
    """A shell text as commands, each with the operator after it."""
    lexer = shlex.shlex(text.replace("\n", ";"), posix=True, punctuation_chars=";&|>")
    lexer.whitespace_split = True
    commands: list[tuple[list[str], str]] = []
    words: list[str] = []
    for token in lexer:
        if token in _OPERATORS:
            commands.append((words, token))
            words = []
        elif words and words[-1] == ">&":
            words[-1] += token
        else:
            words.append(token)
    commands.append((words, ";"))
    return commands


async def _emit(run: FakeRun, stream: int, data: bytes) -> int:
    if stream:
        await run.write(stream, data)
    return 0


async def _true(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    return 0


async def _false(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    return 1


async def _exit(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    raise _Exit(int(args[0]) if args else shell.status)


async def _echo(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    newline = b"\n"
    if args[:1] == ["-n"]:
        newline, args = b"", args[1:]
    return await _emit(run, stream, os.fsencode(" ".join(args)) + newline)


async def _printf(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    text = args[0].encode("latin-1", "backslashreplace").decode("unicode_escape") if args else ""
    return await _emit(run, stream, text.encode())


async def _cat(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    while shell.stdin is not None and (data := await shell.stdin.read()):
        await _emit(run, stream, data)
    return 0


async def _sleep(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    await run.sleep(float(args[0]))
    return 0


async def _yes(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    lines = (" ".join(args) or "y").encode() + b"\n"
    while True:
        await _emit(run, stream, lines * YES_LINES)
        await run.sleep(0)


async def _kill(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    flag, pid = args if len(args) == 2 else ("-15", args[0])
    number = int(flag[1:]) if flag[1:].isdigit() else signals.Signals["SIG" + flag[1:].removeprefix("SIG")]
    if int(pid) == run.pid and number not in run.ignored:
        raise Died("signalled", number)
    return 0 if int(pid) == run.pid else 1


async def _pwd(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    return await _emit(run, stream, shell.cwd.encode() + b"\n")


async def _cd(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    target = shell.path(args[0] if args else "/")
    if target not in shell.directories:
        await run.write(2, f"sh: cd: {target}: No such file or directory\n".encode())
        return 1
    shell.cwd = target
    return 0


async def _mkdir(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    shell.directories.update(map(shell.path, args))
    return 0


async def _env(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    return await _emit(run, stream, b"".join(os.fsencode(f"{k}={v}\n") for k, v in shell.env.items()))


async def _export(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    for arg in args:
        name, _, value = arg.partition("=")
        shell.env[name] = value
    return 0


async def _trap(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    for name in args[1:]:
        run.ignored.add(signals.Signals["SIG" + name.removeprefix("SIG")])
    return 0


async def _id(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    user, _, group = shell.plan.user.partition(":")
    uid = USERS.get(user, int(user) if user.isdigit() else 0)
    gid = USERS.get(group, int(group) if group.isdigit() else uid if user in USERS else 0)
    return await _emit(run, stream, f"{gid if '-g' in args else uid}\n".encode())


async def _hostname(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    return await _emit(run, stream, run.hostname.encode() + b"\n")


async def _alloc(shell: Shell, run: FakeRun, args: list[str], stream: int) -> int:
    run.allocate(int(args[0]))
    return 0


Command = Callable[[Shell, "FakeRun", list[str], int], Coroutine[None, None, int]]

COMMANDS: Final[Mapping[str, Command]] = {
    "true": _true,
    ":": _true,
    "false": _false,
    "exit": _exit,
    "echo": _echo,
    "printf": _printf,
    "cat": _cat,
    "sleep": _sleep,
    "yes": _yes,
    "kill": _kill,
    "pwd": _pwd,
    "cd": _cd,
    "mkdir": _mkdir,
    "env": _env,
    "export": _export,
    "trap": _trap,
    "id": _id,
    "hostname": _hostname,
    "alloc": _alloc,
}
