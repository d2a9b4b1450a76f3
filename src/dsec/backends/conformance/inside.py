"""What a program finds: its environment, directory, user, name, files."""

from __future__ import annotations

from dsec.backends.conformance.kit import PATH, Subject, check, equal, expect, sandbox


@check()
async def the_environment_is_exact(subject: Subject) -> None:
    """Variables arrive byte for byte, and no others than HOME and USER are added."""
    given = {"PATH": PATH, "A": "1", "EMPTY": "", "SPACED": " a  b ", "EQ": "x=y=z", "UTF": "größe ✓"}
    async with sandbox(subject) as box:
        outcome = await box.run("env", env=given)
        lines = outcome.out.head.decode().splitlines()
        found = dict(line.split("=", 1) for line in lines)
        for name, value in given.items():
            equal(found.get(name), value, name)
        expect(set(found) - set(given) <= {"HOME", "USER"}, f"added: {set(found) - set(given)}")


@check()
async def the_directory_is_the_one_asked_for(subject: Subject) -> None:
    """A program starts in its cwd."""
    async with sandbox(subject) as box:
        for directory in ("/", "/tmp", "/usr/bin"):
            equal(await box.text("pwd", cwd=directory), directory, "the directory")


@check()
async def the_user_is_the_one_asked_for(subject: Subject) -> None:
    """By name, number, and with a group."""
    async with sandbox(subject) as box:
        for user, uid, gid in (
            ("root", "0", "0"),
            ("0", "0", "0"),
            ("1234", "1234", "0"),
            ("1234:1235", "1234", "1235"),
            ("root:4321", "0", "4321"),
        ):
            equal((await box.text("id -u", user=user), await box.text("id -g", user=user)), (uid, gid), user)


@check()
async def the_name_is_the_one_asked_for(subject: Subject) -> None:
    """The sandbox's name for itself."""
    async with sandbox(subject, hostname="some-name") as box:
        equal(await box.text("hostname"), "some-name", "the name")


@check()
async def arguments_are_exact(subject: Subject) -> None:
    """Spaces, newlines, empty arguments and UTF-8 are passed as they are."""
    async with sandbox(subject) as box:
        words = ["a b", "", "c\nd", "größe", "-n", "*"]
        outcome = await box.run("echo", *words)
        equal(outcome.out.head, " ".join(words).encode() + b"\n", "what echo said")


@check("posix")
async def arguments_that_are_no_text(subject: Subject) -> None:
    """Arguments are bytes."""
    async with sandbox(subject) as box:
        outcome = await box.run("printf", "%s", b"\xff\xfe\x80")
        equal(outcome.out.head, b"\xff\xfe\x80", "what printf said")


@check("posix")
async def planned_files_are_there(subject: Subject) -> None:
    """Files of the plan have their content, and belong to the sandbox."""
    async with sandbox(subject, files={"/etc/hosts": b"127.0.0.1 localhost planned\n"}) as box:
        equal(await box.text("cat /etc/hosts"), "127.0.0.1 localhost planned", "the content")
        equal(await box.text("echo more >> /etc/hosts; tail -n 1 /etc/hosts"), "more", "after writing to it")


@check("posix")
async def limits_of_the_plan_hold(subject: Subject) -> None:
    """Open files, shared memory, CPUs."""
    async with sandbox(subject, nofile=321, shm_bytes=1 << 20, cpus=(0,)) as box:
        equal(await box.text("ulimit -n"), "321", "open files")
        equal(await box.text("grep Cpus_allowed_list /proc/self/status | tr -d '[:space:]'"), "Cpus_allowed_list:0")
        full = await box.sh("head -c 3000000 /dev/zero > /dev/shm/x")
        expect(full.exit_code != 0, "more than its size fits into /dev/shm")


@check("posix")
async def new_privileges_can_be_forbidden(subject: Subject) -> None:
    """`no_new_privs` reaches the program."""
    read = "grep NoNewPrivs /proc/self/status | tr -d '[:space:]'"
    async with sandbox(subject, no_new_privs=True) as box:
        equal(await box.text(read), "NoNewPrivs:1", "asked for")
    async with sandbox(subject) as box:
        equal(await box.text(read), "NoNewPrivs:0", "not asked for")


@check("posix")
async def standard_streams_are_plain(subject: Subject) -> None:
    """A program has exactly three descriptors (and the one that `ls` reads them with)."""
    async with sandbox(subject) as box:
        outcome = await box.run("ls", "/proc/self/fd")
        equal(outcome.out.head.split(), [b"0", b"1", b"2", b"3"], "descriptors")
