"""What a program must not reach, and what its limits do to it and to others."""

from __future__ import annotations

import asyncio

from dsec.backends.conformance.kit import FOREVER, PATIENCE_S, Subject, check, equal, expect, raises, sandbox, soon
from dsec.model.errors import DsecError, ProgramNotStarted


@check("isolation")
async def only_its_own_processes_are_seen(subject: Subject) -> None:
    """The process namespace is its own."""
    async with sandbox(subject) as box:
        seen = (await box.text("ls -d /proc/[0-9]*")).split()
        expect(len(seen) < 10, f"{len(seen)} processes are seen")


@check("isolation")
async def there_is_no_network_but_loopback(subject: Subject) -> None:
    """One interface, lo, and it is up."""
    async with sandbox(subject) as box:
        names = await box.text("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '")
        equal(names, "lo", "interfaces")
        expect("127.0.0.0" in await box.text("cat /proc/net/fib_trie"), "lo is not up")


@check("isolation")
async def root_is_nobody_outside(subject: Subject) -> None:
    """User ids are mapped to a range that has no rights."""
    async with sandbox(subject) as box:
        inside, outside, count = (await box.text("cat /proc/self/uid_map")).split()
        equal(inside, "0", "the first id inside")
        expect(int(outside) >= 65_536 and int(count) <= 1 << 24, f"mapped to {outside} + {count}")


@check("isolation")
async def the_kernel_cannot_be_changed(subject: Subject) -> None:
    """Root inside cannot write kernel settings, read its memory, mount a disk or change the clock."""
    async with sandbox(subject) as box:
        for text in (
            "echo x > /proc/sys/kernel/core_pattern",
            "echo b > /proc/sysrq-trigger",
            "head -c 1 /proc/kcore | grep -q .",
            "mknod /tmp/sda b 8 0 && head -c 1 /tmp/sda",
            "echo 1 > /sys/kernel/mm/transparent_hugepage/enabled",
            "date -s 2001-01-01; test $(date +%Y) = 2001",
        ):
            outcome = await box.sh(text)
            expect(outcome.exit_code != 0, f"{text!r} worked: {outcome.out.head!r}")


@check("isolation")
async def sandboxes_do_not_see_each_other(subject: Subject) -> None:
    """Files, shared memory and processes of one are not there in another over the same layers."""
    async with sandbox(subject) as one, sandbox(subject) as two:
        await one.text("echo secret > /secret; echo secret > /dev/shm/secret; echo secret > /tmp/secret")
        spawned = await one.spawn(f"sleep {FOREVER}")
        outcome = await two.sh("cat /secret /dev/shm/secret /tmp/secret")
        equal((outcome.out.total, outcome.exit_code != 0), (0, True), "what the other one reads")
        expect("sleep" not in await two.text("cat /proc/[0-9]*/comm"), "a process of the other one is seen")
        await one.guest.kill(spawned.process_id)
        await spawned.end()


@check("posix")
async def a_sandbox_that_destroys_itself_can_be_stopped(subject: Subject) -> None:
    """`rm -rf /` hurts nobody else; calls get typed errors; stopping works."""
    async with sandbox(subject) as healthy, sandbox(subject) as box:
        await box.sh("rm -rf /bin /sbin /usr /etc /lib /lib64 /tmp 2>/dev/null")
        gone = box.command("cat", "/etc/passwd", user="0")  # by number: the list of users is gone too
        error = await raises(ProgramNotStarted, box.guest.run(gone), "a program that is gone")
        equal(error.detail.get("field"), "command", "the field")
        equal((await soon(box.runtime.stop())).reason, "stopped", "the end")
        equal((await healthy.run("true")).exit_code, 0, "the other one")


@check("memory")
async def out_of_memory_is_attributed(subject: Subject) -> None:
    """The run that used too much is ended with cause oom; the sandbox can still be used."""
    async with sandbox(subject, memory_bytes=64 << 20) as box:
        outcome = await box.sh(subject.memory_hog.format(mib=256))
        expect("memory" in outcome.limits_hit, f"limits_hit {outcome.limits_hit}, ended {outcome.exit_code}")
        equal((outcome.cause, outcome.exit_code), ("oom", 137), "the ending")
        fine = await box.run("true")
        equal((fine.exit_code, fine.limits_hit), (0, ()), "the next run")


@check("memory", "posix")
async def a_child_out_of_memory_shows(subject: Subject) -> None:
    """A program that survives the death of its child by the memory limit exits by itself, and says memory."""
    async with sandbox(subject, memory_bytes=64 << 20) as box:
        outcome = await box.sh(f"sh -c '{subject.memory_hog.format(mib=256)}; true'; exit 3")
        equal((outcome.cause, outcome.exit_code), ("exited", 3), "the ending")
        expect("memory" in outcome.limits_hit, f"limits_hit {outcome.limits_hit}")


@check("pids")
async def the_process_limit_holds(subject: Subject) -> None:
    """A fork bomb meets the limit; killed, it leaves a sandbox that works."""
    async with sandbox(subject, pids=24) as box:
        met = asyncio.Event()

        async def told(stream: int, offset: int, data: bytes) -> None:
            met.set()

        # The inner shell has asked for more than there may be when it ends; the outer one needs no fork to say so.
        bomb = await box.spawn(
            f"sh -c 'for i in 1 2 3 4 5 6 7 8 9; do for j in 1 2 3 4 5; do sleep {FOREVER} & done; done' 2>/dev/null; "
            f"echo met; exec sleep {FOREVER}",
            sink=told,
        )
        async with asyncio.timeout(PATIENCE_S):
            while not met.is_set():
                usage = await box.runtime.usage()
                expect((usage.pids or 0) <= 24, f"{usage.pids} processes")
        await soon(box.guest.kill(bomb.process_id))
        try:
            outcome = await bomb.end()
            expect("pids" in outcome.limits_hit, f"limits_hit {outcome.limits_hit}")
        except DsecError as error:
            raise AssertionError(f"the bomb has no result: {error!r}") from error
        equal((await box.run("true")).exit_code, 0, "the next run")


@check("pids", "posix")
async def a_full_sandbox_can_be_entered(subject: Subject) -> None:
    """Where the process limit is reached a program still runs, cannot fork, and can end the others."""
    async with sandbox(subject, pids=8) as box:
        there = [await box.spawn(f"exec sleep {FOREVER}") for _ in range(8)]
        entered = await box.run("true")
        equal((entered.exit_code, entered.limits_hit), (0, ()), "a program in the full sandbox")
        forking = await box.sh("(exit 0); exit 0")
        expect(forking.exit_code != 0, "a fork beyond the limit worked")
        expect("pids" in forking.limits_hit, f"limits_hit {forking.limits_hit}")
        equal((await box.sh("kill -9 -1")).exit_code, 0, "ending the others")
        for spawned in there:
            equal((await spawned.end()).signal, 9, "the signal")
        again = await box.sh("(exit 0); exit 0")
        equal((again.exit_code, again.limits_hit), (0, ()), "a fork below the limit")


@check("disk")
async def the_disk_limit_is_exact(subject: Subject) -> None:
    """More than its disk does not fit; what was written stays readable; after deleting there is room again."""
    async with sandbox(subject, disk_bytes=32 << 20) as box:
        await box.text("echo kept > /kept")
        full = await box.sh("head -c 60000000 /dev/zero > /big")
        expect(full.exit_code != 0, "60 MB fit on a disk of 32 MiB")
        expect("disk" in full.limits_hit or full.err.head, f"nothing says why: {full}")
        equal(await box.text("cat /kept"), "kept", "what was written before")
        equal((await box.sh("rm /big")).exit_code, 0, "deleting")

        async def room() -> None:
            # Whoever is writing it all out at that moment holds a deleted file, and its room, until that is done.
            while True:
                if (await box.sh("head -c 1000000 /dev/zero > /small")).exit_code == 0:
                    return
                await asyncio.sleep(0.05)

        await soon(room(), "room after deleting")


@check("disk")
async def one_full_disk_does_not_fill_another(subject: Subject) -> None:
    """The limit is each sandbox's own."""
    async with sandbox(subject, disk_bytes=32 << 20) as one, sandbox(subject, disk_bytes=32 << 20) as two:
        await one.sh("head -c 60000000 /dev/zero > /big")
        equal((await two.sh("head -c 10000000 /dev/zero > /fits")).exit_code, 0, "writing in the other one")
