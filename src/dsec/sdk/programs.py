"""Types of programs that are talked to, as the SDK gives and sends them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from dsec.model import limits
from dsec.model.convert import check_pair
from dsec.model.errors import Conflict, InputClosed, InvalidSpec, InvalidState
from dsec.model.processes import CommandSpec, InputState, Process, Program, Session, SessionSpec, SpawnSpec, Terminal
from dsec.model.specs import os_bytes
from dsec.model.states import RunResult
from dsec.sdk.codec import ErrorBody
from dsec.sdk.values import Command, Path, User, escaped, make_run, remote, user_text, variables

# In the SDK the handles are called Process and Session; what a node says of one is its info.
ProcessInfo = Process
SessionInfo = Session

TerminalSize = bool | tuple[int, int] | Terminal

# Of one call; more is several calls.
INPUT_BYTES: Final = 256 * limits.KIB


class ProcessList(msgspec.Struct, frozen=True, kw_only=True):
    """What runs in a sandbox. Iterating gives the processes alive.

    `programs`: those that calls have started, with those that ended not long ago. `more`: there are more processes than
    a list has room for.
    """

    programs: tuple[Program, ...] = ()
    processes: tuple[Process, ...] = ()
    more: bool = False

    def __iter__(self) -> Iterator[Process]:
        return iter(self.processes)

    def __len__(self) -> int:
        return len(self.processes)


class OutputItem(msgspec.Struct):
    """One item of an output stream; an item with nothing in it only says that the server is there."""

    stream: int | None = None
    offset: int = 0
    data: bytes = b""
    result: RunResult | None = None
    program: Program | None = None
    error: ErrorBody | None = None
    # Of a WebSocket only.
    started: str | None = None
    input: InputState | None = None
    own: int | None = None
    done: str | None = None

    @property
    def last(self) -> bool:
        """Whether nothing comes behind it."""
        ended = self.error is not None and self.done is None
        return ended or self.result is not None or self.program is not None


def make_spawn(
    command: Command,
    *,
    cwd: Path | None,
    env: Mapping[str, str] | None,
    user: User | None,
    stdin: bool,
    tty: TerminalSize,
    keepalive: bool,
    timeout_s: float | None,
    spool_bytes: int,
) -> SpawnSpec:
    """The checked SpawnSpec of a call. Raises InvalidSpec naming the argument that is wrong."""
    run = make_run(command, cwd=cwd, env=env, user=user, stdin=None, timeout_s=timeout_s)
    for name, value in (("stdin", stdin), ("keepalive", keepalive)):
        if not isinstance(value, bool):
            raise InvalidSpec.field(name, value, "True or False (input goes to the handle: p.stdin.write)")
    if isinstance(spool_bytes, bool) or not isinstance(spool_bytes, int):
        raise InvalidSpec.field("spool_bytes", spool_bytes, "a number of bytes")
    return SpawnSpec(
        command=run.command,
        argv=run.argv,
        cwd=run.cwd,
        env=run.env,
        user=run.user,
        timeout_s=timeout_s,
        stdin=stdin,
        tty=_terminal(tty),
        keepalive=keepalive,
        spool_bytes=spool_bytes,
    ).check()


def make_command(command: Command, *, stdin: str | bytes | None, timeout_s: float | None) -> CommandSpec:
    """The checked CommandSpec of a call. Raises InvalidSpec naming the argument that is wrong."""
    # A text is the shell's, however long; only the list of one program is bounded as the kernel bounds it.
    text = command if isinstance(command, str) else None
    run = make_run("" if text is not None else command, cwd=None, env=None, user=None, stdin=stdin, timeout_s=timeout_s)
    if text is None:
        spec = CommandSpec(command=run.command, argv=run.argv, stdin=run.stdin, timeout_s=timeout_s)
    elif escaped(text):
        # Bytes that are not UTF-8 cross the wire as such.
        words = [b"eval", os_bytes("command", text)]
        spec = CommandSpec(argv=words, stdin=run.stdin, timeout_s=timeout_s)
    else:
        spec = CommandSpec(command=text, stdin=run.stdin, timeout_s=timeout_s)
    return spec.check()


def make_session(
    *, shell: Path | None, cwd: Path | None, env: Mapping[str, str] | None, user: User | None, keepalive: bool
) -> SessionSpec:
    """The checked SessionSpec of a call. Raises InvalidSpec naming the argument that is wrong."""
    shell, cwd, given, who = remote(shell), remote(cwd), variables(env), user_text(user)
    for name, item in given.items():
        check_pair("env", name, item)
    for name, value, allowed in (
        ("shell", shell, "a str or a path"),
        ("cwd", cwd, "a str or a path"),
    ):
        if value is not None and not isinstance(value, str):
            raise InvalidSpec.field(name, value, allowed)
    return SessionSpec(shell=shell, cwd=cwd, env=given, user=who, keepalive=keepalive).check()


def _terminal(tty: TerminalSize) -> Terminal | None:
    if isinstance(tty, bool):
        return Terminal() if tty else None
    return tty.check() if isinstance(tty, Terminal) else size(*_pair(tty))


def _pair(tty: object) -> tuple[int, int]:
    if isinstance(tty, tuple | list) and len(tty) == 2:
        return tty[0], tty[1]
    raise InvalidSpec.field("tty", tty, "True, False, (rows, cols) or a dsec.Terminal")


def size(rows: int, cols: int) -> Terminal:
    """A checked Terminal. Raises InvalidSpec."""
    for name, value in (("rows", rows), ("cols", cols)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidSpec.field(name, value, "a number")
    return Terminal(rows=rows, cols=cols).check()


def another_wrote(size: int) -> Conflict:
    """The error for input whose place another writer has taken."""
    text = f"another writer has written to this input, which is at {size} now: what was on its way may be lost; ask"
    ways = "`process.stdin.locate()`, of an attachment its own `locate()`"
    return Conflict(f"{text} where it is ({ways}), then write again", detail={"input_size": size})


def nobody_reads(path: str, size: int | None = None) -> InputClosed:
    """The error for input that nobody takes; `path`: of the program."""
    id_ = path.rpartition("/")[2]
    text = f"nobody reads the input of {id_} any more: it has ended (`info()` says how), or its input is closed"
    return InputClosed(text, detail={"id": id_} if size is None else {"id": id_, "size": size})


def closed_here(path: str) -> InvalidState:
    """The error for input behind the end that this handle has given it; `path`: of the program."""
    id_ = path.rpartition("/")[2]
    return InvalidState(f"the input of {id_} was closed by this handle: nothing follows `close()`", detail={"id": id_})


def pair(offsets: object) -> tuple[int, int]:
    """An offset of each stream. Raises InvalidSpec."""
    if isinstance(offsets, tuple | list) and len(offsets) == 2 and all(map(_is_offset, offsets)):
        return offsets[0], offsets[1]
    allowed = "(0, 0): where to begin in stdout and in stderr (both come: `.stream` of a line says which, .stdout "
    raise InvalidSpec.field("offsets", offsets, f"{allowed}iterates one)")


def one_offset(offset: object) -> int:
    """An offset of a stream. Raises InvalidSpec."""
    if _is_offset(offset):
        assert isinstance(offset, int), "was looked at"
        return offset
    raise InvalidSpec.field("offset", offset, "a number of bytes, 0 or more; stream= says which stream")


def _is_offset(offset: object) -> bool:
    return isinstance(offset, int) and not isinstance(offset, bool) and offset >= 0


def stream_number(stream: object) -> int:
    """1 or 2, of a number or a name. Raises InvalidSpec."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if stream == name or (stream == number and type(stream) is int):
            return number
    raise InvalidSpec.field("stream", stream, '1 or "stdout", 2 or "stderr"')


# Of Linux, where the sandbox is; a caller's system may have other numbers. From 1 on.
SIGNALS: Final = (
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM",
    "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF",
    "WINCH", "IO", "PWR", "SYS"
)  # fmt: skip


def signal_number(number: object) -> int:
    """A signal as the node takes it, of a number or a name."""
    # One of `signal.Signals` is a number that has a name, too.
    name = number if isinstance(number, str) else getattr(number, "name", None)
    if isinstance(name, str) and (short := name.upper().removeprefix("SIG")) in SIGNALS:
        return SIGNALS.index(short) + 1
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidSpec.field("signal", number, 'a number, such as signal.SIGTERM, or a name, as "SIGTERM" or "TERM"')
    return int(number)


def input_bytes(data: object) -> bytes:
    """What is written to a program, as bytes."""
    if isinstance(data, str):
        return data.encode("utf-8", "surrogateescape")
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidSpec.field("data", data, "str or bytes")
    return bytes(data)
