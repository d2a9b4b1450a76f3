"""Programs that are talked to: what `spawn` and `session` take, what they and the process list give."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, Self

import msgspec

from dsec.model import limits
from dsec.model.errors import InvalidSpec
from dsec.model.specs import RunSpec, check_env, check_path, check_user, os_bytes
from dsec.model.states import RunResult

_SHELL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}\Z")

ProgramKind = Literal["run", "spawn", "session", "command"]
ProgramState = Literal["starting", "running", "ended"]


class Terminal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size of a terminal, in characters."""

    rows: int = 24
    cols: int = 80

    def check(self) -> Self:
        """The Terminal itself when both sizes are allowed. Raises InvalidSpec."""
        for field, value in (("rows", self.rows), ("cols", self.cols)):
            if not 1 <= value <= limits.TERMINAL_MAX:
                raise InvalidSpec.field(field, value, f"1 to {limits.TERMINAL_MAX}")
        return self


class SpawnSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One program to start and not wait for. `command`, `argv`, `cwd`, `env`, `user`, `timeout_s` as in a RunSpec.

    `stdin`: whether its standard input stays open (else it is empty). `tty`: it gets a terminal of this size for all
    three streams; then it has one output, stream 1. `keepalive`: whether the sandbox is not idle while it lives.
    `spool_bytes`: so much of the newest output of each stream stays readable.
    """

    command: str | list[str] | None = None
    argv: list[bytes] | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    timeout_s: float | None = None
    stdin: bool = True
    tty: Terminal | None = None
    keepalive: bool = True
    spool_bytes: int = limits.SPOOL_BYTES

    def check(self) -> Self:
        """The SpawnSpec itself when every field is allowed. Raises InvalidSpec naming the first that is not."""
        self.run_spec().check()
        if self.tty is not None:
            self.tty.check()
            if not self.stdin:
                raise InvalidSpec.field("stdin", False, "true with a tty: a terminal has an input")
        if not 0 <= self.spool_bytes <= limits.SPOOL_MAX_BYTES:
            raise InvalidSpec.field("spool_bytes", self.spool_bytes, f"0 to {limits.SPOOL_MAX_BYTES}")
        return self

    def run_spec(self) -> RunSpec:
        """What of it every program has."""
        return RunSpec(
            command=self.command,
            argv=self.argv,
            cwd=self.cwd,
            env=self.env,
            user=self.user,
            timeout_s=self.timeout_s,
        )


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A shell that lives on between commands.

    `shell`: its path inside, or a name in its PATH; None: bash where it is there, else sh.
    """

    shell: str | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    keepalive: bool = True

    def check(self) -> Self:
        """The SessionSpec itself when every field is allowed. Raises InvalidSpec naming the first that is not."""
        check_env(self.env)
        if self.shell is not None and "/" in self.shell:
            check_path("shell", self.shell)
        elif self.shell is not None and not _SHELL.match(self.shell):
            allowed = (
                "its shell's path inside, as /bin/bash, or its name, as bash (a name for the session itself is key=)"
            )
            raise InvalidSpec.field("shell", self.shell, allowed)
        if self.cwd is not None:
            check_path("cwd", self.cwd)
        if self.user is not None:
            check_user(self.user)
        return self


class How(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a program is started beside what a RunSpec says. Kept with its step: a restarted node goes on by it.

    `writer`: who gave the newest bytes of its input, and from which offset on it is all theirs.
    """

    kind: ProgramKind = "run"
    stdin: bool = False
    tty: Terminal | None = None
    control: bool = False
    keepalive: bool = True
    spool_bytes: int = limits.SPOOL_BYTES
    writer: tuple[str, int] = ("", 0)


class CommandSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One command for a session. A str is text for its shell, a list is one program with its arguments.

    `argv` instead of `command` carries what is not UTF-8; `stdin`: what the command reads (nothing: it reads nothing).
    """

    command: str | list[str] | None = None
    argv: list[bytes] | None = None
    stdin: bytes | None = None
    timeout_s: float | None = None

    def check(self) -> Self:
        """The CommandSpec itself when every field is allowed. Raises InvalidSpec naming the first that is not."""
        self.text()
        RunSpec(argv=[b"sh"], stdin=self.stdin, timeout_s=self.timeout_s).check()
        return self

    def text(self) -> bytes:
        """The command as shell text. Raises InvalidSpec."""
        if (self.command is None) == (self.argv is None):
            raise InvalidSpec.field("command", self.command, "a shell text or a list (or argv in bytes, not both)")
        if isinstance(self.command, str):
            text = os_bytes("command", self.command)
        else:
            words = self.argv or [os_bytes("command", word) for word in self.command or []]
            if not words or not words[0]:
                raise InvalidSpec.field("command", self.command, "a shell text or a list that starts with a program")
            text = b" ".join(map(quoted, words))
        if b"\0" in text:
            raise InvalidSpec.field("command", text[:64], "text without NUL bytes")
        if len(text) > limits.COMMAND_TEXT_MAX_BYTES:
            allowed = f"at most {limits.COMMAND_TEXT_MAX_BYTES} bytes"
            raise InvalidSpec.field("command", f"{len(text)} bytes", allowed)
        return text


def quoted(word: bytes) -> bytes:
    """A word as any shell reads it back."""
    return b"'" + word.replace(b"'", b"'\\''") + b"'"


class Program(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A program that a call has started. `result`: once it has ended. Times are seconds since the epoch."""

    id: str
    kind: ProgramKind
    state: ProgramState
    step: int = 0
    command: str = ""
    started_at: float = 0.0
    tty: bool = False
    stdin: bool = False
    keepalive: bool = True
    result: RunResult | None = None


class Process(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process alive in a sandbox, as its kernel sees it.

    `id`: the program (a call's) it belongs to; None: the init, and what belongs to none that is known. `main`: it is
    that program itself, not a child. `argv`, `name`, `cwd` are what the process says of itself (cut when long; bytes
    that are no UTF-8 are surrogate escapes). `uid` None: nobody's inside. `status` is the kernel's letter (R S D T Z),
    `wait_channel` the kernel function it sleeps in, where the kernel tells.
    """

    pid: int
    ppid: int
    id: str | None = None
    main: bool = False
    argv: tuple[str, ...] = ()
    name: str = ""
    cwd: str = ""
    uid: int | None = None
    status: str = ""
    wait_channel: str = ""
    cpu_s: float = 0.0
    memory_bytes: int = 0
    age_s: float = 0.0
    threads: int = 1


class OutputPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Kept output of one stream. `offset` of its first byte, which is later than asked for where that is not kept.

    `gap`: where what is kept from there on ends, if it is interrupted; None: the newest byte belongs to it.
    """

    stream: int
    offset: int
    data: bytes
    total: int  # bytes there were so far
    gap: int | None = None
    ended: bool = False  # the program has ended: there will be no more

    @classmethod
    def first_of(cls, stream: int, kept: Iterable[tuple[int, bytes]], total: int, *, ended: bool) -> Self:
        """The first of the pieces (offset, bytes) that are kept; an empty one at the end, where none is."""
        pieces = iter(kept)
        at, data = next(pieces, (total, b""))
        end = at + len(data)
        follows, _ = next(pieces, (total, b""))
        return cls(stream=stream, offset=at, data=data, total=total, gap=end if end < follows else None, ended=ended)


class InputState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`size`: bytes of input taken so far. `closed`: nobody reads it any more."""

    size: int
    closed: bool = False


class Session(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A session. `program`: its shell, as a program; `commands`: how many it was given."""

    id: str
    program: str
    shell: str
    state: Literal["running", "ended"]
    commands: int = 0
    busy: bool = False
    started_at: float = 0.0
    exit_code: int | None = None
