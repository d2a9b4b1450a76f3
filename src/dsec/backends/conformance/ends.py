"""How programs end: exactly, and never later than they should."""

from __future__ import annotations

import asyncio

from dsec.backends.conformance.kit import FOREVER, Box, Subject, check, equal, expect, raises, sandbox, soon
from dsec.model.errors import NotFound, ProgramNotStarted
from dsec.model.states import RunOutcome

CODES = range(256)


def ending(outcome: RunOutcome) -> tuple[str, int, int | None]:
    return outcome.cause, outcome.exit_code, outcome.signal


@check()
async def every_exit_code_is_exact(subject: Subject) -> None:
    """0 to 255, sixteen at a time."""
    async with sandbox(subject) as box:
        gate = asyncio.Semaphore(16)

        async def one(code: int) -> None:
            async with gate:
                outcome = await box.sh(f"exit {code}")
            equal(ending(outcome), ("exited", code, None), f"exit {code}")

        await soon(asyncio.gather(*(one(code) for code in CODES)))


@check()
async def signals_are_exact(subject: Subject) -> None:
    """A program killed by a signal says which; the exit code is 128 + signal."""
    async with sandbox(subject) as box:
        for number in (1, 2, 6, 9, 11, 13, 14, 15):  # not 3: some shells ignore it
            outcome = await box.sh(f"kill -{number} $$; sleep {FOREVER}")
            equal(ending(outcome), ("signalled", 128 + number, number), f"signal {number}")


@check()
async def a_hundred_at_once(subject: Subject) -> None:
    """A hundred concurrent programs keep their own codes and output."""
    async with sandbox(subject) as box:

        async def one(number: int) -> None:
            outcome = await box.sh(f"echo out{number}; echo err{number} >&2; exit {number}")
            equal(outcome.exit_code, number, "the exit code")
            equal(outcome.out.head, f"out{number}\n".encode(), "standard output")
            equal(outcome.err.head, f"err{number}\n".encode(), "standard error")

        await soon(asyncio.gather(*(one(number) for number in range(100))))


@check()
async def a_timeout_kills_the_tree(subject: Subject) -> None:
    """A program over its time ends with cause timeout, children included."""
    async with sandbox(subject) as box:
        idle = await processes(box)
        outcome = await box.sh(f"echo begun; sleep {FOREVER} & sleep {FOREVER}", timeout_s=0.3)
        equal(ending(outcome), ("timeout", 137, 9), "the ending")
        equal(outcome.out.head, b"begun\n", "what it had said")
        expect(outcome.duration_s >= 0.3, f"it ended after {outcome.duration_s} s")
        await back_to(box, idle)


@check("posix")
async def a_timeout_kills_what_tries_to_escape(subject: Subject) -> None:
    """Sessions of their own, ignored signals and double forks do not help."""
    async with sandbox(subject) as box:
        idle = await processes(box)
        hide = f"""trap "" TERM HUP INT; setsid sh -c 'trap "" TERM HUP INT; sleep {FOREVER}; sleep {FOREVER}' &
            (setsid sleep {FOREVER} &) ; sleep {FOREVER}; sleep {FOREVER}"""
        outcome = await box.sh(hide, timeout_s=0.5)
        equal(ending(outcome), ("timeout", 137, 9), "the ending")
        await back_to(box, idle)


@check()
async def a_program_that_ends_in_time_has_no_timeout(subject: Subject) -> None:
    """A limit that is not reached changes nothing."""
    async with sandbox(subject) as box:
        equal(ending(await box.sh("exit 3", timeout_s=50)), ("exited", 3, None), "the ending")


@check()
async def kill_ends_the_tree(subject: Subject) -> None:
    """Kill without a signal cannot be ignored, says killed, and after the end does nothing."""
    async with sandbox(subject) as box:
        idle = await processes(box)
        spawned = await box.spawn(f'trap "" TERM; sleep {FOREVER} & sleep {FOREVER}; sleep {FOREVER}')
        await soon(box.guest.kill(spawned.process_id))
        equal(ending(await spawned.end()), ("killed", 137, 9), "the ending")
        await soon(box.guest.kill(spawned.process_id))
        await soon(box.guest.kill(spawned.process_id, 15))
        await back_to(box, idle)


@check()
async def runs_after_one_that_was_killed_are_not(subject: Subject) -> None:
    """What ends one run's tree, a timeout or a kill, never reaches the runs that come after it."""
    async with sandbox(subject) as box:
        for _ in range(5):
            equal(ending(await box.sh(f"sleep {FOREVER}", timeout_s=0.1)), ("timeout", 137, 9), "the ending")
            equal(ending(await box.sh("exit 3")), ("exited", 3, None), "the run after a timeout")
            spawned = await box.spawn(f"sleep {FOREVER}")
            await soon(box.guest.kill(spawned.process_id))
            equal(ending(await spawned.end()), ("killed", 137, 9), "the ending")
            equal(ending(await box.sh("exit 3")), ("exited", 3, None), "the run after a kill")


@check()
async def a_signal_is_delivered(subject: Subject) -> None:
    """A signal reaches the program, which may ignore it."""
    async with sandbox(subject) as box:
        spawned = await box.spawn_plan(box.command("sleep", FOREVER))
        await soon(box.guest.kill(spawned.process_id, 15))
        outcome = await spawned.end()
        equal((outcome.exit_code, outcome.signal), (143, 15), "the ending")
        deaf = await box.spawn('trap "" TERM; echo ready; sleep 0.5; echo alive')
        await asyncio.sleep(0.1)
        await soon(box.guest.kill(deaf.process_id, 15))
        equal((await deaf.end()).exit_code in (0, 143), True, "a program that ignores it")
        await raises(NotFound, box.guest.kill("p-never"), "killing what was never started")


@check()
async def a_child_that_holds_the_pipe_does_not_delay_the_end(subject: Subject) -> None:
    """A run ends when its own process ends; what it left behind lives on until it is killed."""
    async with sandbox(subject) as box:
        outcome = await box.sh(f"sleep {FOREVER} & echo hi; exit 5")
        equal((outcome.exit_code, outcome.out.head), (5, b"hi\n"), "the ending")
        equal((await box.run("true")).exit_code, 0, "the sandbox afterwards")


@check()
async def what_is_wrong_inside_names_the_field(subject: Subject) -> None:
    """No such program, user or directory: ProgramNotStarted with the field, and the sandbox is as before."""
    async with sandbox(subject) as box:
        wrong = (
            ("command", box.command("no-such-program")),
            ("command", box.command("/no/such/program")),
            ("user", box.command("true", user="no-such-user")),
            ("cwd", box.command("true", cwd="/no/such/directory")),
        )
        for field, plan in wrong:
            error = await raises(ProgramNotStarted, box.guest.run(plan), f"a wrong {field}")
            equal(error.detail.get("field"), field, "the field")
            code = error.exit_code if isinstance(error, ProgramNotStarted) else None
            equal(code, 127 if field == "command" else 126, "what a shell would return")
        equal((await box.run("true")).exit_code, 0, "the sandbox afterwards")


@check("posix")
async def what_cannot_be_executed_names_the_command(subject: Subject) -> None:
    """ProgramNotStarted: a directory or a file without permission (command), a file as directory (cwd)."""
    async with sandbox(subject) as box:
        await box.text("echo hello > /tmp/plain; chmod 644 /tmp/plain")
        for path in ("/tmp/plain", "/tmp"):
            error = await raises(ProgramNotStarted, box.guest.run(box.command(path)), path)
            equal(error.detail.get("field"), "command", "the field")
        error = await raises(
            ProgramNotStarted, box.guest.run(box.command("true", cwd="/tmp/plain")), "a file as directory"
        )
        equal(error.detail.get("field"), "cwd", "the field")


@check()
async def times_and_use_are_reported(subject: Subject) -> None:
    """A result says when it began, how long it took and what it used."""
    async with sandbox(subject) as box:
        outcome = await box.sh("sleep 0.2")
        expect(0.2 <= outcome.duration_s < 60, f"duration {outcome.duration_s}")
        expect(outcome.started_at > 1e9, f"started at {outcome.started_at}")
        expect(outcome.usage.cpu_user_s + outcome.usage.cpu_system_s > 0, f"usage {outcome.usage}")


async def processes(box: Box) -> int:
    """How many processes the sandbox has."""
    return (await soon(box.runtime.usage())).pids or 0


async def back_to(box: Box, count: int) -> None:
    """Wait until no more processes are left than this."""
    now = -1
    for _ in range(200):
        now = await processes(box)
        if now <= count:
            return
        await asyncio.sleep(0.02)
    equal(now, count, "processes left")
