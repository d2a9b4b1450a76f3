"""What agents do to sandboxes and what sandboxes do to programs, one by one, over a real node."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import dsec
from tests.kit.home import BASE, Home

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20
COUNT = 1000


def test_without_dev_null_all_goes_on(sbx: dsec.Sandbox) -> None:
    sbx.run("rm /dev/null", check=True)
    assert sbx.run("echo hi; exit 3").exit_code == 3
    assert sbx.run("cat").stdout == ""
    program = sbx.spawn("cat")
    program.stdin.write("hi\n")
    program.stdin.close()
    assert program.wait().stdout == "hi\n"
    with sbx.spawn("tty", tty=True) as terminal:
        assert terminal.wait().stdout.startswith("/dev/pts/")
    sbx.files.write("/f", "hi")
    assert sbx.files.read_text("/f") == "hi"
    with sbx.session() as sh, pytest.raises(dsec.ProgramNotStarted, match="/dev/null"):
        sh.run("pwd")  # it says what it needs, and that nothing ran


def test_without_a_shell_a_list_still_runs(sbx: dsec.Sandbox) -> None:
    sbx.run("rm /bin/sh", check=True)
    assert sbx.run(["/bin/bash", "-c", "echo hi; exit 3"]).exit_code == 3
    with pytest.raises(dsec.ProgramNotStarted) as caught:
        sbx.run("echo hi")
    assert caught.value.exit_code == 127
    sbx.files.write("/f", "hi")
    assert sbx.run(["cat", "/f"]).stdout == "hi"
    # It can be mended from outside.
    sbx.run(["ln", "-s", "dash", "/bin/sh"], check=True)
    assert sbx.run("echo hi").stdout == "hi\n"


def test_an_interactive_shell_without_a_terminal(sbx: dsec.Sandbox) -> None:
    """It says that it has none, and does what it is asked to."""
    result = sbx.run(["bash", "-ic", "echo out; exit 3"])
    assert (result.exit_code, result.stdout) == (3, "out\n")
    assert "no job control" in result.stderr
    given = sbx.run(["bash", "-i"], stdin="echo out\nexit 4\n")
    assert (given.exit_code, given.stdout) == (4, "out\n")


def test_an_input_that_is_held_open_holds_no_program_up(sbx: dsec.Sandbox) -> None:
    for command in ("exit 3", "sleep 1000 & exit 3", "exec 0<&-; exit 3"):
        program = sbx.spawn(command)
        assert program.wait().exit_code == 3
        program.stdin.close()
    # One that nothing is held open for finds its end.
    assert sbx.run("cat; exit 3").exit_code == 3


def test_a_thousand_processes_of_one_run(home: Home) -> None:
    with home.client().create(base=BASE, pids=2048, memory_mib=1024) as sbx:
        script = f"for i in $(seq {COUNT}); do (read x </tmp/go; echo $i; exit 0) & done; echo up; wait; exit 3"
        sbx.run("mkfifo /tmp/go", check=True)
        program = sbx.spawn(script, stdin=False)
        assert next(program.stdout.follow()) == b"up\n"
        # Each has a line of its own to read, so all of them are there before the first goes.
        opened = sbx.run(f"exec 3<>/tmp/go; seq {COUNT} >&3; while [ $(pgrep -c -P {pid(sbx)}) -gt 0 ]; do :; done")
        assert opened.ok
        result = program.wait()
        assert (result.exit_code, result.limits_hit) == (3, ())
        assert sorted(map(int, result.stdout.split()[1:])) == list(range(1, COUNT + 1))
        killed = sbx.spawn(f"for i in $(seq {COUNT}); do sleep 1000 & done; echo up; wait", stdin=False)
        assert next(killed.stdout.follow()) == b"up\n"
        killed.kill()
        assert killed.wait().cause == "killed"
        assert sbx.run("ps -eo stat=,comm= | grep '^[^Z].*sleep'").stdout == ""


@pytest.mark.parametrize("directory", ["/ro\0ot", "/" + "x" * 5000, "/" + "x" * 200_000])
def test_what_is_no_home_is_no_reason_why_nothing_runs(sbx: dsec.Sandbox, directory: str) -> None:
    """The table of users is the sandbox's own to write."""
    sbx.files.write("/etc/passwd", f"root:x:0:0:root:{directory}:/bin/sh\n")
    assert sbx.run("echo $HOME").stdout == "/\n"
    with sbx.session() as shell:
        assert shell.run("echo $HOME").stdout == "/\n"


def pid(sbx: dsec.Sandbox) -> int:
    """Of the shell that all the others are children of."""
    listed = sbx.processes()
    parents = [process.ppid for process in listed]
    return max(set(parents), key=parents.count)


@pytest.mark.parametrize("streamed", [False, True])
def test_who_exits_with_output_in_flight_has_said_all_of_it(sbx: dsec.Sandbox, streamed: bool) -> None:
    """More than a pipe holds, on both, and the end right behind it; many at once."""
    size = 300_000

    def one(number: int) -> None:
        seen: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
        letter = "abcdefghij"[number % 10]
        command = (
            f"head -c {size} /dev/zero | tr '\\0' {letter}; head -c {size} /dev/zero | tr '\\0' {letter} >&2; exit 7"
        )
        sink = (lambda stream, data: seen[stream].extend(data)) if streamed else None
        result = sbx.run(command, on_output=sink)
        both = [bytes(seen[1]), bytes(seen[2])] if streamed else [result.stdout_bytes, result.stderr_bytes]
        assert result.exit_code == 7
        assert both == [letter.encode() * size] * 2

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(40)))


def test_much_on_one_stream_and_then_on_the_other(sbx: dsec.Sandbox) -> None:
    """Nobody waits for the one that is not read first."""
    size = 10 * MIB
    seen = {1: 0, 2: 0}
    order: list[int] = []

    def sink(stream: int, data: bytes) -> None:
        seen[stream] += len(data)
        if order[-1:] != [stream]:
            order.append(stream)

    command = f"head -c {size} /dev/zero >&2; head -c {size} /dev/zero; exit 3"
    assert sbx.run(command, on_output=sink).exit_code == 3
    assert (seen, order[0]) == ({1: size, 2: size}, 2)
    captured = sbx.run(command)
    for stream in (captured.stdout_bytes, captured.stderr_bytes):
        assert 0 < len(stream) <= 2 * MIB
    assert len(captured.stdout_bytes) + len(captured.stderr_bytes) + captured.dropped_bytes == 2 * size
    assert (captured.truncated, captured.limits_hit) == (True, ("output",))


def test_a_long_text_of_a_script(sbx: dsec.Sandbox) -> None:
    """As one argument the kernel takes no more than 128 KiB, which is said; as input it has no bound."""
    text = f"x='{'a' * MIB}'; echo ${{#x}}; exit 3"
    with pytest.raises(dsec.InvalidSpec) as caught:
        sbx.run(text)
    assert "131" in str(caught.value) or "128" in str(caught.value)
    result = sbx.run(["sh"], stdin=text)
    assert (result.exit_code, result.stdout) == (3, f"{MIB}\n")
    sbx.files.write("/script", text)
    assert sbx.run(["sh", "/script"]).exit_code == 3


def test_blanks_are_kept(sbx: dsec.Sandbox) -> None:
    text = "\n\n  a  \n\t\n \r\n b \n\n"
    assert sbx.run(["cat"], stdin=text).stdout == text
    sbx.files.write("/f", text)
    assert sbx.files.read_text("/f") == text
    with sbx.session() as sh:
        assert sh.run("cat /f; cat /f >&2").stdout == text
    with sbx.spawn("stty -opost; cat /f", tty=True) as terminal:
        assert terminal.wait().stdout == text


def test_files_that_are_no_text_and_none(sbx: dsec.Sandbox) -> None:
    sbx.files.write("/empty", b"")
    assert (sbx.files.read("/empty"), sbx.files.read_text("/empty"), sbx.files.stat("/empty").size) == (b"", "", 0)
    every = bytes(range(256))
    sbx.files.write("/binary", every)
    assert sbx.files.read("/binary") == every
    assert sbx.run("cat /binary").stdout_bytes == every
    with pytest.raises(ValueError, match="utf-8"):
        sbx.files.read_text("/binary")


def test_a_file_in_the_place_of_a_directory(sbx: dsec.Sandbox) -> None:
    sbx.run("mkdir -p /full/x /none; echo hi > /f", check=True)
    with pytest.raises(dsec.IsADirectory):
        sbx.files.write("/full", "no")
    for replace in (False, True):
        for directory in ("/full", "/none"):
            with pytest.raises((dsec.FileExists, dsec.IsADirectory)):
                sbx.files.move("/f", directory, replace=replace)
    with pytest.raises(dsec.FileError):
        sbx.files.move("/none", "/full", replace=True)
    with pytest.raises(dsec.FileError):
        sbx.files.move("/full", "/full/x/below")
    assert sbx.run("cat /f; ls -d /full/x /none").stdout == "hi\n/full/x\n/none\n"


def test_a_file_on_a_full_disk_and_where_nothing_can_be_written(sbx: dsec.Sandbox) -> None:
    sbx.files.write("/f", "before")
    with pytest.raises(dsec.NoSpace):
        sbx.files.write("/f", bytes(100 * MIB))
    assert sbx.files.read_text("/f") == "before"
    sbx.run("head -c 100M /dev/urandom > /filler")
    with pytest.raises(dsec.NoSpace):
        sbx.files.write("/more", bytes(8 * MIB))
    assert not sbx.files.exists("/more")
    sbx.run("rm /filler", check=True)
    sbx.files.write("/more", bytes(MIB))
    with pytest.raises(dsec.FileError) as caught:
        sbx.files.write("/sys/new", "no")
    assert isinstance(caught.value, dsec.PermissionDenied) or "read-only" in str(caught.value).lower()


def test_many_uploads_to_one_path(sbx: dsec.Sandbox) -> None:
    """Each is whole, one of them is what stays, and nothing else does."""
    contents = [f"{number:02}".encode() * 100_000 for number in range(64)]
    failed: list[BaseException] = []

    def upload(data: bytes) -> None:
        try:
            sbx.files.write("/up/one", data, parents=True)
            assert sbx.files.read("/up/one") in contents
        except BaseException as error:  # noqa: BLE001 - a thread's edge: the test gets it
            failed.append(error)

    threads = [threading.Thread(target=upload, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sbx.files.read("/up/one") in contents
    assert sbx.run("ls -A /up").stdout == "one\n"
