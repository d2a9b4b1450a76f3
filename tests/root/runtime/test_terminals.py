"""Terminals: what is said and typed arrives whole and in order; keys, sizes and refusals are a terminal's."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtnode import WINDOW, needs, sh, until_known

pytestmark = needs

SIZE = {"rows": 30, "cols": 100}
PATIENCE_S = 60


class Screen:
    """A run with a terminal, its keys and what it shows. Each request has its own connection."""

    def __init__(self, node: Node, box: str, argv: list[str | bytes], *, run: str = "t", **over: Any) -> None:
        self.node, self.box, self.run = node, box, run
        self.reader, self.writer = node.client(), node.client()
        self.shown = bytearray()
        self.got = 0
        self.typed = 0
        self.result: Any = None
        self.known = False
        plan = run_plan(box, run, argv, tty=SIZE, stream=True, window=WINDOW) | over
        self.number = self.reader.send("run.start", plan)

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *exc: object) -> None:
        self.reader.close()
        self.writer.close()

    def take(self) -> bool:
        """One frame. False: it was the result."""
        frame = self.reader.recv()
        if "err" in frame:
            raise RuntimeFault(frame["err"])
        if frame["id"] == self.number and "ok" in frame:
            self.result = frame["ok"]
            return False
        if frame.get("ev") == "out":
            assert (frame["s"], frame["o"]) == (1, self.got), "bytes are missing or came twice"
            self.got += len(frame["d"])
            self.shown += frame["d"]
            self.reader.send("run.ack", {"request": self.number, "bytes": len(frame["d"])})
        return True

    def until(self, text: bytes) -> bytes:
        """Up to and with `text`, from behind what was waited for before."""
        while text not in self.shown:
            assert self.take(), f"it ended without {text!r}: {bytes(self.shown[-2000:])!r} {self.result}"
        end = self.shown.index(text) + len(text)
        seen = bytes(self.shown[:end])
        del self.shown[:end]
        return seen

    def end(self) -> Any:
        while self.take():
            pass
        return self.result

    def until_known(self) -> None:
        if not self.known:
            until_known(self.writer, self.box, self.run)
            self.known = True

    def type(self, keys: bytes) -> None:
        self.until_known()
        answer = self.writer.call("run.stdin", sandbox=self.box, run=self.run, offset=self.typed, d=keys)
        self.typed += len(keys)
        assert answer["size"] == self.typed

    def resize(self, rows: int, cols: int) -> None:
        self.until_known()
        self.writer.call("run.resize", sandbox=self.box, run=self.run, rows=rows, cols=cols)

    def back(self, window: int = WINDOW) -> None:
        """A new connection to whichever runtime is there now."""
        self.reader.close()
        self.writer.close()
        self.reader, self.writer = self.node.client(), self.node.client()
        attach = {"sandbox": self.box, "run": self.run, "stream": True, "window": window, "offsets": [self.got, 0]}
        self.number = self.reader.send("run.attach", attach)


def test_a_program_has_a_terminal_of_its_size_for_all_it_has(shared: Node, box: tuple[Client, str]) -> None:
    script = (
        "for n in 0 1 2; do test -t $n && echo is $n; done; tty; stty size; echo to the other >&2;"
        " echo by name >/dev/tty; readlink /proc/self/fd/0; echo $(ls /proc/self/fd); exit 3"
    )
    with Screen(shared, box[1], sh(script)) as screen:
        result = screen.end()
        lines = bytes(screen.shown).decode().split("\r\n")
    assert lines[:3] == ["is 0", "is 1", "is 2"]
    assert lines[3] == lines[7] and lines[3].startswith("/dev/pts/")
    assert lines[4:7] == ["30 100", "to the other", "by name"]
    assert lines[8] == "0 1 2 3"  # and the one that `ls` reads
    assert (result["exit_code"], result["cause"]) == (3, "exited")
    assert [s["total"] for s in result["streams"]] == [len(screen.shown), 0]


def test_not_a_byte_of_much_output_is_lost_or_moved(shared: Node, box: tuple[Client, str]) -> None:
    with Screen(shared, box[1], sh("stty -onlcr; seq 1 200000; exit 3")) as screen:
        result = screen.end()
        assert bytes(screen.shown) == b"".join(b"%d\n" % n for n in range(1, 200_001))
    assert result["exit_code"] == 3


@pytest.mark.same_everywhere
def test_without_a_reader_head_and_tail_are_kept(box: tuple[Client, str]) -> None:
    c, name = box
    r = c.call(
        "run.start", **run_plan(name, "t", sh("seq 1 100000; printf end"), tty=SIZE, head_bytes=10, tail_bytes=7)
    )
    out = r["streams"][0]
    assert (out["head"], out["tail"]) == (b"1\r\n2\r\n3\r\n4", b"00\r\nend")
    assert out["total"] == sum(len(str(n)) + 2 for n in range(1, 100_001)) + 3


def test_what_is_typed_is_read_and_seen(shared: Node, box: tuple[Client, str]) -> None:
    with Screen(shared, box[1], sh("read line; echo got $line; read more; echo and $more"), stdin=b"first\n") as screen:
        screen.until(b"got first\r\n")
        screen.typed = len(b"first\n")
        screen.type(b"secand\x7f\x7f\x7fond\n")
        screen.until(b"and second\r\n")
        assert screen.end()["exit_code"] == 0


def test_another_size_is_told(shared: Node, box: tuple[Client, str]) -> None:
    script = "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.05; done"
    with Screen(shared, box[1], sh(script)) as screen:
        screen.until(b"ready\r\n")
        screen.resize(50, 132)
        screen.until(b"50 132\r\n")
        assert screen.end()["exit_code"] == 0
        # Nothing happens after its end.
        screen.resize(10, 10)


@pytest.mark.same_everywhere
def test_refusals(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    for over, field in (
        ({"tty": SIZE, "control": True}, "control"),
        ({"tty": {"rows": 0, "cols": 80}}, "rows"),
        ({"tty": {"rows": 24, "cols": 65_536}}, "args"),
        ({"tty": {"rows": 24}}, "args"),
    ):
        with pytest.raises(RuntimeFault) as refused:
            c.call("run.start", **run_plan(name, "no", ["true"], **over))
        assert (refused.value.code, refused.value.detail["field"]) == ("bad_request", field)
    with Screen(shared, name, sh("read line; echo $line")) as screen:
        with pytest.raises(RuntimeFault) as end:
            screen.writer.call("run.stdin", sandbox=name, run="t", offset=0, d=b"x\n", eof=True)
        assert (end.value.code, end.value.detail["field"]) == ("bad_request", "eof")
        with pytest.raises(RuntimeFault) as size:
            screen.resize(0, 80)
        assert (size.value.code, size.value.detail["field"]) == ("bad_request", "rows")
        # Nothing of the refused piece was typed.
        screen.type(b"y\n")
        assert screen.end()["streams"][0]["head"].endswith(b"y\r\n")
        assert b"x" not in screen.result["streams"][0]["head"]
    with pytest.raises(RuntimeFault) as none:
        c.call("run.start", **run_plan(name, "none", ["/no/such"], tty=SIZE))
    assert none.value.code == "no_program"
    c.call("run.start", **run_plan(name, "plain", ["true"]))
    with pytest.raises(RuntimeFault) as plain:
        c.call("run.resize", sandbox=name, run="plain", rows=1, cols=1)
    assert plain.value.code == "conflict"
    with pytest.raises(RuntimeFault) as unknown:
        c.call("run.resize", sandbox=name, run="unknown", rows=1, cols=1)
    assert unknown.value.code == "not_found"


def test_keys_are_the_terminals(shared: Node, box: tuple[Client, str]) -> None:
    with Screen(shared, box[1], sh("echo ready; sleep 1000")) as screen:
        screen.until(b"ready\r\n")
        screen.type(b"\x03")
        screen.until(b"^C")
        assert screen.end()["exit_code"] == 130 or screen.result["signal"] == signal.SIGINT
    with Screen(shared, box[1], sh("trap 'echo quit' QUIT; cat; echo end of input"), run="d") as screen:
        screen.type(b"abc\n\x04")
        screen.until(b"abc\r\nabc\r\n")
        screen.until(b"end of input\r\n")
        assert screen.end()["exit_code"] == 0


def test_jobs_are_stopped_and_continued(shared: Node, box: tuple[Client, str]) -> None:
    with Screen(shared, box[1], ["sh", "-i"], env={b"PATH": b"/bin", b"PS1": b"> "}) as screen:
        screen.until(b"> ")
        screen.type(b"sh -c 'echo on; exec sleep 1000'\n")
        screen.until(b"\r\non\r\n")
        screen.type(b"\x1a")
        screen.until(b"Stopped")
        screen.type(b"jobs; echo $((6 * 7))\n")
        screen.until(b"\r\n42\r\n")
        screen.type(b"fg\n")
        screen.until(b"sleep 1000")
        # It is in front again once the shell has given it the terminal.
        until(lambda: foreground(shared, screen) == "sleep")
        screen.type(b"\x03")
        screen.until(b"> ")
        screen.type(b"exit 5\n")
        assert screen.end()["exit_code"] == 5


def until(there: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


def foreground(node: Node, screen: Screen) -> str:
    """The name of what has the terminal of the run's session."""
    with node.client() as c:
        runs = c.call("run.list", sandbox=screen.box)["runs"]
    pid = next(r["pid"] for r in runs if r["run"] == screen.run)
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return Path(f"/proc/{fields[5]}/comm").read_text().strip() if fields[5] != "-1" else ""
