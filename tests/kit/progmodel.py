"""Programs that do what they are told by their input, what should come of them, and readers that hold them to it."""

from __future__ import annotations

import functools
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.kit.rtclient import Frame, run_plan

# One order a line: what to say on which stream, what to leave behind, how to end. Without an end of its own it ends
# with its input. The shell itself says the point: then nothing of the order is left that a kill could meet. What it
# leaves behind minds no hang-up: with a terminal that comes when the shell ends. Nobody else may send one.
PLAYER: Final = """
echo x >>/ran-$0
while read -r order a b rest; do
    case $order in
    o) seq $a 99999999 | head -c $b; printf .;;
    e) seq $a 99999999 | head -c $b >&2; printf . >&2;;
    b) trap '' HUP; sleep 100000 <&- >&- 2>&- & trap - HUP; printf .;;
    s) stty size;;
    x) exit $a;;
    k) kill -$a $$;;
    esac
done
exit 9
"""
# The terminal changes nothing of what comes and goes, and its first word says from when on.
TERMINAL_PLAYER: Final = f"stty raw -echo; printf .{PLAYER}"
END_OF_INPUT: Final = 9
STREAMS: Final = (0, 1)
# As long as a runtime that starts waits for those who followed a run, less what a busy machine takes to say so.
FOLLOWED_S: Final = 6.0


@functools.lru_cache(maxsize=256)
def spoken(first: int, size: int) -> bytes:
    """What `seq FIRST 99999999 | head -c SIZE` prints."""
    return ("\n".join(map(str, range(first, first + size // 4 + 2))) + "\n").encode()[:size]


@dataclass
class Ending:
    """How a program ends: of itself when nobody has killed it."""

    exit_code: int | None = None
    signal: int | None = None
    cause: str = "exited"

    def is_of(self, result: Frame) -> bool:
        return (self.exit_code, self.signal, self.cause) == (result["exit_code"], result["signal"], result["cause"])


@dataclass
class Program:
    """A run as it should be."""

    run: str
    plan: dict[str, Any]
    given: bytes = b""
    closed: bool = False
    # Killed from outside: it may have said less than it was told to.
    kills: list[Ending] = field(default_factory=list)
    # Of the first kill that was meant as one.
    cause: str = ""
    result: Frame | None = None
    waited: bool = False
    readers: list[Reader] = field(default_factory=list)
    # How much it had been given, all of which it had done, when a fence was made or killed.
    fences: list[tuple[int, int, bool]] = field(default_factory=list)
    # Of its terminal: how much it had been given, all of which it had done, and rows and columns from then on.
    sizes: list[tuple[int, tuple[int, int]]] = field(default_factory=list)

    @classmethod
    def of(cls, box: str, run: str, **over: Any) -> Program:
        plan = run_plan(box, run, ["sh", "-c", PLAYER, run], stdin_open=True, **over)
        return cls(run, plan, given=plan["stdin"])

    @classmethod
    def with_terminal(cls, box: str, run: str, size: tuple[int, int], **over: Any) -> Program:
        """It must have said its first word before it is given anything."""
        tty = {"rows": size[0], "cols": size[1]}
        plan = run_plan(box, run, ["sh", "-c", TERMINAL_PLAYER, run], tty=tty, **over)
        return cls(run, plan, sizes=[(0, size)])

    @property
    def terminal(self) -> bool:
        return bool(self.sizes)

    def story(self) -> tuple[list[bytes], Ending | None]:
        """What it says in all on each stream, and its end if its orders have one."""
        said: list[list[bytes]] = [[b"."] if self.terminal else [], []]
        end: Ending | None = None
        done = 0
        lines = self.given.split(b"\n")
        for line in lines if self.closed else lines[:-1]:
            order, *numbers = line.split()[:3] or [b""]
            if order in (b"o", b"e"):
                stream = order == b"e" and not self.terminal
                said[stream].append(spoken(int(numbers[0]), int(numbers[1])) + b".")
            elif order == b"b":
                said[0].append(b".")
            elif order == b"s":
                said[0].append(b"%d %d\n" % next(size for given, size in reversed(self.sizes) if given <= done))
            elif order == b"x":
                end = Ending(exit_code=int(numbers[0]))
            elif order == b"k":
                end = Ending(signal=int(numbers[0]), cause="signalled")
            if end is not None:
                break
            done += len(line) + 1
        if end is None and self.closed:
            end = Ending(exit_code=END_OF_INPUT)
        return [b"".join(parts) for parts in said], end

    @property
    def fence(self) -> int:
        """The newest one, 0 for none, and for one that was killed."""
        return 0 if not self.fences or self.fences[-1][2] else self.fences[-1][1]

    def behind(self) -> int:
        """How many it has started that go on without it."""
        living: Counter[int] = Counter()
        inside, given, fences = 0, 0, list(self.fences)
        for line in [*self.given.split(b"\n")[:-1], b"x"]:
            while fences and fences[0][0] <= given:
                _, number, killed = fences.pop(0)
                if killed:
                    del living[number]
                inside = 0 if killed else number
            if line[:1] in (b"x", b"k"):
                break
            living[inside] += line[:1] == b"b"
            given += len(line) + 1
        return living.total()

    @property
    def ends(self) -> bool:
        """Whether it is over as soon as nobody holds it back."""
        return bool(self.kills) or self.story()[1] is not None

    def kept(self) -> int:
        """So many of the newest bytes of each stream stay readable."""
        return max(int(self.plan["tail_bytes"]), int(self.plan.get("spool_bytes", 0)))

    def check_result(self, result: Frame) -> None:
        said, end = self.story()
        endings = [*self.kills, *([end] if end else [])]
        assert any(ending.is_of(result) for ending in endings), (endings, result)
        assert self.kills or result["leftover"] == self.behind(), (self.behind(), self.fences, result)
        for stream in STREAMS:
            told = result["streams"][stream]
            total = told["total"]
            if not self.kills:
                assert total == len(said[stream]), (self.run, stream, total, len(said[stream]))
            assert total <= len(said[stream])
            whole, head, tail = said[stream][:total], told["head"], told["tail"]
            assert whole.startswith(head)
            assert whole.endswith(tail)
            assert len(head) + told["dropped"] + len(tail) == total
            assert len(head) == min(total, self.plan["head_bytes"])
            assert len(tail) == min(total - len(head), self.plan["tail_bytes"])
        if self.result is not None:
            assert self.result == result, "an end that was told is another now"
        self.result = result

    def check_kept(self, stream: int, asked: int, kept: Frame) -> None:
        """An answer of `run.read`."""
        said = self.story()[0][stream]
        offset, data, total = kept["o"], kept["d"], kept["total"]
        assert total <= len(said)
        assert offset >= asked or not data
        assert said[offset : offset + len(data)] == data, (stream, asked, offset)
        if offset > asked and data:
            self.check_gap(asked, offset, total)

    def check_gap(self, begin: int, end: int, total: int) -> None:
        """What is not kept is neither of the head nor of the end."""
        assert begin >= self.plan["head_bytes"], (begin, end, "in the head")
        assert end <= max(total - self.kept(), begin), (begin, end, total, "in what is kept of the end")


class Wire:
    """A connection that takes what is there without waiting for a frame."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(path))
        self._buffer = bytearray()
        self._next = 0
        self.send("hello", {"protocol": 1})
        next(self.frames(60))

    def send(self, op: str, args: dict[str, Any]) -> int:
        self._next += 1
        body = msgspec.msgpack.encode({"id": self._next, "op": op, "args": args})
        self.sock.sendall(struct.pack(">I", len(body)) + body)
        return self._next

    def frames(self, wait_s: float) -> Iterator[Frame]:
        """What has come, after waiting so long for the first of it. ConnectionError."""
        while True:
            while len(self._buffer) >= 4:
                length = int.from_bytes(self._buffer[:4], "big")
                if len(self._buffer) < 4 + length:
                    break
                body = bytes(self._buffer[4 : 4 + length])
                del self._buffer[: 4 + length]
                wait_s = 0
                yield msgspec.msgpack.decode(body)
            if not select.select([self.sock], [], [], wait_s)[0]:
                return
            data = self.sock.recv(1 << 18)
            if not data:
                raise ConnectionError("the runtime closed the connection")
            self._buffer += data

    def close(self) -> None:
        self.sock.close()


class Reader:
    """Who follows a program, at its own pace."""

    def __init__(self, path: Path, program: Program, *, window: int, lossy: bool, begin: tuple[int, int]) -> None:
        self._path = path
        self.program = program
        self._window = window
        self.lossy = lossy
        self.at = list(begin)
        self.owed = 0
        self.result: Frame | None = None
        self._before = self._said()
        self._connect()

    def _said(self) -> list[int]:
        """As much may have been said before it comes, and what of that is not kept is gone."""
        return [len(said) for said in self.program.story()[0]]

    def _connect(self) -> None:
        self._wire = Wire(self._path)
        args = {"sandbox": self.program.plan["sandbox"], "run": self.program.run, "lossy": self.lossy}
        follow = {"stream": True, "window": self._window, "offsets": self.at}
        self.number = self._wire.send("run.attach", args | follow)
        self.owed = 0

    def come_again(self, died_at: float) -> None:
        """After the runtime has died. Who comes soon finds all that it has not had."""
        if self.result is not None:
            return
        self._wire.close()
        self._connect()
        if time.monotonic() - died_at > FOLLOWED_S:
            self._before = self._said()

    def take(self, wait_s: float = 0.0) -> None:
        """What has come."""
        for frame in self._wire.frames(wait_s) if self.result is None else ():
            assert frame.get("err", {}).get("code") in (None, "not_found"), frame
            if frame["id"] != self.number:
                continue
            assert "err" not in frame, (frame, self.program.run)
            if "ok" in frame:
                self._over(frame["ok"])
                return
            if frame["ev"] == "out":
                self._heard(frame["s"] - 1, frame["o"], frame["d"])

    def _heard(self, stream: int, offset: int, data: bytes) -> None:
        said, at = self.program.story()[0][stream], self.at[stream]
        assert offset >= at, "bytes came twice"
        assert said[offset : offset + len(data)] == data, (self.program.run, stream, offset, len(data))
        if offset > at and not self.lossy:
            self.program.check_gap(at, offset, self._before[stream])
        self.at[stream] = offset + len(data)
        self.owed += len(data)

    def _over(self, result: Frame) -> None:
        self.program.check_result(result)
        for stream in STREAMS:
            total = result["streams"][stream]["total"]
            # The end is always there, however much a lossy one has missed.
            assert self.at[stream] == max(total, self.at[stream]), (self.program.run, stream, self.at, total)
        self.result = result

    def hurry(self) -> None:
        """More credit than it was given before: byte by byte the rest would take hours."""
        if self.result is None:
            self._wire.send("run.ack", {"request": self.number, "bytes": 1 << 20})

    def give(self, part: float = 1.0) -> None:
        """Credit for a part of what has come."""
        amount = int(self.owed * part)
        if self.result is None and amount:
            self.owed -= amount
            self._wire.send("run.ack", {"request": self.number, "bytes": amount})

    def close(self) -> None:
        self._wire.close()
