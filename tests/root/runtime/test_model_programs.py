"""Programs, their input or terminals, readers and ends against a model, with a runtime that dies now and then."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.kit.machines import run_machine
from tests.kit.progmodel import STREAMS, Ending, Program, Reader
from tests.kit.rtclient import Node, RuntimeFault, run_plan
from tests.kit.rtnode import create, needs, sh

# The first of several limits counts.
pytestmark = [pytest.mark.timeout(6 * 3600), *needs, pytest.mark.same_everywhere]

SIZES = (0, 1, 100, 4096, 65_536, 70_000, 300_000)
RANDOM = st.randoms(use_true_random=True)
CAPTURES = (0, 1, 1000, 65_536)
PROGRAMS_MAX = 5
READERS_MAX = 3
GIVEN_MAX = 100_000
NUMBERS = itertools.count(1)
# Only ends what would never end.
PATIENCE_S = 120.0
MEANT = (0, signal.SIGTERM, signal.SIGKILL)
HARMLESS = (signal.SIGWINCH, signal.SIGCONT, signal.SIGURG, signal.SIGCHLD)
# What busybox takes for impossible it shows as 24 and 80.
SIDES = (2, 24, 80, 20_000)
END_SIGNALS = (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGKILL)


def order(rnd: random.Random) -> bytes:
    """Something to do for a player."""
    match rnd.randrange(14):
        case 0:
            return b"x %d\n" % rnd.randrange(256)
        case 1:
            return b"k %d\n" % rnd.choice(END_SIGNALS)
        case 2 | 3 | 4:
            return b"n 1 1 " + b"." * rnd.choice((0, 10, 5000)) + b"\n"
        case 5:
            return b"b\n"
    return b"%s %d %d\n" % (rnd.choice((b"o", b"e")), rnd.choice((1000, 5000, 1_234_567)), rnd.choice(SIZES))


class ProgramsMachine(RuleBasedStateMachine):
    """One sandbox and the programs in it."""

    node: ClassVar[Node]
    done: ClassVar[Counter[str]]

    @initialize()
    def begin(self) -> None:
        self.programs: list[Program] = []
        self.box = f"m{next(NUMBERS)}"
        self.control = self.node.client()
        create(self.control, self.box)
        for terminal in (False, True):
            self.begin_one(random.Random(0), terminal)

    def teardown(self) -> None:
        if not hasattr(self, "control"):
            return
        try:
            for program in self.programs:
                if not program.ends:
                    self.control.call("run.kill", sandbox=self.box, run=program.run)
                    program.kills.append(Ending(signal=signal.SIGKILL, cause="killed"))
                self.finish(program)
            self.each_has_run_once()
        finally:
            self.control.close()
            with self.node.client() as c:
                c.call("sandbox.stop", id=self.box)

    def each_has_run_once(self) -> None:
        count = "for f in /ran-*; do echo $f $(wc -l <$f); done"
        told = self.control.call("run.start", **run_plan(self.box, "count", sh(count)))
        ran = {line.split()[0]: line.split()[1] for line in told["streams"][0]["head"].splitlines() if b"*" not in line}
        for program in self.programs:
            # One that was killed at once may have said nothing yet, also with the file made.
            wanted = (b"1", b"0", None) if program.kills else (b"1",)
            assert ran.get(b"/ran-" + program.run.encode()) in wanted, ran

    def some(self, rnd: random.Random, *, alive: bool = False) -> Program | None:
        found = [program for program in self.programs if not (alive and program.ends)]
        return rnd.choice(found) if found else None

    def call(self, op: str, program: Program, **args: Any) -> dict[str, Any]:
        return self.control.call(op, sandbox=self.box, run=program.run, **args)

    # What is done to programs

    @rule(rnd=RANDOM)
    def start(self, rnd: random.Random) -> None:
        if len(self.programs) < PROGRAMS_MAX:
            self.begin_one(rnd, rnd.random() < 0.5)

    def begin_one(self, rnd: random.Random, terminal: bool) -> None:
        name, over = f"p{next(NUMBERS)}", {"head_bytes": rnd.choice(CAPTURES), "tail_bytes": rnd.choice(CAPTURES)}
        over["spool_bytes"] = rnd.choice((0, 0, 100_000))
        if terminal:
            program = Program.with_terminal(self.box, name, (rnd.choice(SIDES), rnd.choice(SIDES)), **over)
        else:
            program = Program.of(self.box, name, stdin=order(rnd), **over)
        starter = self.node.client()
        starter.send("run.start", program.plan)
        if rnd.random() < 0.2:
            # Begun or not: sent again, it runs once.
            self.die()
            starter.close()
            starter = self.node.client()
            starter.send("run.start", program.plan)
        # Before that it may not have begun, and a runtime that dies knows nothing of it.
        frame = starter.recv()
        assert frame.get("ev") == "started", frame
        starter.close()  # stops nothing
        self.programs.append(program)
        self.done["started"] += 1
        if program.terminal:
            self.done["with a terminal"] += 1
            deadline = time.monotonic() + PATIENCE_S
            while not self.is_idle(program):
                assert time.monotonic() < deadline, f"{name} says nothing"
                time.sleep(0.01)

    @rule(rnd=RANDOM)
    def feed(self, rnd: random.Random) -> None:
        program = self.some(rnd, alive=True)
        if program is None or len(program.given) > GIVEN_MAX:
            return
        more = b"".join(order(rnd) for _ in range(rnd.randrange(3)))
        again, eof = rnd.choice((0, 0, 1, 7, 10_000)), rnd.random() < 0.25
        if program.terminal:
            more += b"s\n" * rnd.randrange(2)
            if eof:
                with pytest.raises(RuntimeFault, match="bad_request"):
                    self.call("run.stdin", program, offset=len(program.given), d=b"", eof=True)
            eof = False
        offset = max(len(program.given) - again, 0)
        sent = program.given[offset:] + more
        program.given += more
        program.closed |= eof
        told = self.call("run.stdin", program, offset=offset, d=sent, eof=eof)
        self.done["fed"] += 1
        # It may be over before it has read all of that; and an end that it has not come to yet closes nothing.
        assert program.ends or told == {"size": len(program.given), "closed": False}, (told, program.given)

    # Each rule is as likely as another.
    feed_more = rule(rnd=RANDOM)(lambda self, rnd: self.feed(rnd))
    feed_even_more = rule(rnd=RANDOM)(lambda self, rnd: self.feed(rnd))

    @rule(rnd=RANDOM)
    def feed_beyond(self, rnd: random.Random) -> None:
        program, beyond = self.some(rnd, alive=True), rnd.choice((1, 100, 1 << 40))
        if program is None:
            return
        with pytest.raises(RuntimeFault) as refused:
            self.call("run.stdin", program, offset=len(program.given) + beyond, d=b"x 1\n")
        wanted = {"field": "offset", "size": len(program.given)}
        assert (refused.value.code, refused.value.detail) == ("bad_request", wanted)

    @rule(rnd=RANDOM)
    def kill(self, rnd: random.Random) -> None:
        program, number = self.some(rnd), rnd.choice((0, *END_SIGNALS))
        cause = rnd.choice(("killed", "timeout"))
        if program is None or rnd.random() < 0.7:  # most live on
            return
        if number and program.ends:
            return  # nobody knows which was first
        # It may have ended before; and if not, of the first kill, or of one of those that came before it was dead.
        # What does not mean an end has no cause to name, but may be one.
        if number in MEANT:
            program.cause = program.cause or cause
        program.kills += [
            Ending(signal=number or signal.SIGKILL, cause=named) for named in {"killed", program.cause} - {""}
        ]
        self.call("run.kill", program, signal=number, cause=cause)
        self.done["killed"] += 1

    @rule(rnd=RANDOM)
    def tell(self, rnd: random.Random) -> None:
        """A signal that it does not mind."""
        if (program := self.some(rnd)) is not None:
            self.call("run.kill", program, signal=rnd.choice(HARMLESS), cause=rnd.choice(("killed", "timeout")))
            self.done["told"] += 1

    @rule(rnd=RANDOM)
    def fence(self, rnd: random.Random) -> None:
        """What it starts from now on can be killed by itself, and nothing else is then."""
        program = self.some(rnd, alive=True)
        if program is None or not self.is_idle(program):
            return
        numbers = [number for _, number, _ in program.fences]
        if program.fence and rnd.random() < 0.5:
            self.call("run.kill", program, signal=0, fence=program.fence)
            program.fences.append((len(program.given), program.fence, True))
            self.done["fence killed"] += 1
            return
        made = self.call("run.fence", program)["fence"]
        assert made == max(numbers, default=0) + 1, (made, program.fences)
        program.fences.append((len(program.given), made, False))
        assert self.call("run.status", program)["fence"] == made
        self.done["fence made"] += 1
        if numbers:
            with pytest.raises(RuntimeFault) as refused:
                self.call("run.kill", program, signal=0, fence=made - 1)
            assert (refused.value.code, refused.value.detail["fence"]) == ("conflict", made)

    fence_more = rule(rnd=RANDOM)(lambda self, rnd: self.fence(rnd))

    @rule(rnd=RANDOM)
    def resize(self, rnd: random.Random) -> None:
        if (program := self.some(rnd, alive=True)) is None:
            return
        rows, cols = rnd.choice(SIDES), rnd.choice(SIDES)
        if not program.terminal:
            with pytest.raises(RuntimeFault, match="conflict"):
                self.call("run.resize", program, rows=rows, cols=cols)
        elif self.is_idle(program):
            self.call("run.resize", program, rows=rows, cols=cols)
            program.sizes.append((len(program.given), (rows, cols)))
            self.done["resized"] += 1

    def is_idle(self, program: Program) -> bool:
        """Whether it has done all that it was given."""
        told = self.call("run.status", program)
        return bool(told["totals"][:2] == [len(said) for said in program.story()[0]])

    @rule(rnd=RANDOM)
    def forget(self, rnd: random.Random) -> None:
        if (program := self.some(rnd)) is None:
            return
        if not program.waited:
            if not program.ends:
                with pytest.raises(RuntimeFault, match="busy"):
                    self.call("run.forget", program)
            return
        self.call("run.forget", program)
        with pytest.raises(RuntimeFault, match="not_found"):
            self.call("run.status", program)
        with pytest.raises(RuntimeFault, match="not_found"):
            self.call("run.attach", program)
        self.close_readers(program)
        self.programs.remove(program)
        self.done["forgotten"] += 1

    # What is asked about them

    @rule(rnd=RANDOM)
    def read(self, rnd: random.Random) -> None:
        if (program := self.some(rnd)) is None:
            return
        stream, offset, most = rnd.choice(STREAMS), rnd.choice(SIZES), rnd.choice((0, 1, 5000, 1 << 20))
        kept = self.call("run.read", program, s=stream + 1, offset=offset, max=most)
        program.check_kept(stream, offset, kept)
        assert len(kept["d"]) <= most
        assert kept["state"] in ("launching", "running", "done")

    @rule(rnd=RANDOM)
    def status(self, rnd: random.Random) -> None:
        if (program := self.some(rnd)) is None:
            return
        told = self.call("run.status", program)
        if program.waited and program.result is not None:
            assert told["state"] == "done"
            assert told["totals"][:2] == [stream["total"] for stream in program.result["streams"]]
        elif not program.ends:
            assert told["state"] in ("launching", "running")
            assert told["input"] == {"size": len(program.given), "closed": False}
        assert all(total <= len(said) for total, said in zip(told["totals"], program.story()[0], strict=False))

    @rule(rnd=RANDOM)
    def attach(self, rnd: random.Random) -> None:
        program = self.some(rnd)
        if program is None or len(program.readers) == READERS_MAX:
            return
        begin = (rnd.choice((0, 0, 0, 10, 66_000)), rnd.choice((0, 0, 0, 10, 66_000)))
        window = rnd.choice((1, 1000, 65_536, 1 << 20))
        reader = Reader(self.node.socket, program, window=window, lossy=rnd.random() < 0.5, begin=begin)
        program.readers.append(reader)
        self.done["attached"] += 1

    @rule(rnd=RANDOM)
    def follow(self, rnd: random.Random) -> None:
        readers = [reader for program in self.programs for reader in program.readers]
        if not readers:
            return
        reader = rnd.choice(readers)
        reader.take()
        reader.give(rnd.choice((0.0, 0.5, 1.0, 1.0)))
        if rnd.random() < 0.3:
            reader.close()
            reader.program.readers.remove(reader)

    @rule(rnd=RANDOM)
    def wait(self, rnd: random.Random) -> None:
        ending = [program for program in self.programs if program.ends]
        if ending:
            self.finish(rnd.choice(ending))

    def finish(self, program: Program) -> None:
        """All readers read to the end, which is the same for each, and for who asks later."""
        deadline = time.monotonic() + PATIENCE_S
        for reader in program.readers:
            reader.hurry()
        while any(reader.result is None for reader in program.readers):
            assert time.monotonic() < deadline, f"{program.run} does not end"
            for reader in program.readers:
                reader.take(0.01)
                reader.give()
        program.check_result(self.call("run.attach", program))
        program.waited = True
        self.close_readers(program)
        self.done["waited for"] += 1

    @staticmethod
    def close_readers(program: Program) -> None:
        for reader in program.readers:
            reader.close()
        program.readers.clear()

    # Deaths

    @rule(seldom=st.integers(0, 3))
    def dies(self, seldom: int) -> None:
        """Whoever was connected comes again, and goes on where it was."""
        if seldom == 1:
            self.die()

    def die(self) -> None:
        os.kill(self.node.runtime_pid(), signal.SIGKILL)
        self.come_again(time.monotonic())

    @rule(rnd=RANDOM)
    def dies_while_fed(self, rnd: random.Random) -> None:
        program = self.some(rnd, alive=True)
        if program is None or len(program.given) > GIVEN_MAX:
            return
        offset, more = len(program.given), order(rnd)
        piece = {"sandbox": self.box, "run": program.run, "offset": offset, "d": more}
        self.control.send("run.stdin", piece)
        os.kill(self.control.hello["pid"], signal.SIGKILL)
        program.given += more
        self.come_again(time.monotonic())
        self.control.call("run.stdin", **piece)

    def come_again(self, died_at: float) -> None:
        self.control.close()
        self.control = self.node.client()
        for program in self.programs:
            for reader in program.readers:
                reader.come_again(died_at)
        self.done["deaths"] += 1


def test_programs_are_what_a_model_of_them_says(shared: Node) -> None:
    done: Counter[str] = Counter()
    machine = type("ProgramsMachine", (ProgramsMachine,), {"node": shared, "done": done})
    run_machine(machine, examples=12, steps=50)
    print(*(f"{count:7} {what}" for what, count in sorted(done.items())), sep="\n")
