"""File helpers: the operation `files` hands a connection to a process inside the sandbox."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import struct
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtfiles import Files
from tests.kit.rtnode import create, frozen_file, make_node, needs, sh

pytestmark = [*needs, pytest.mark.one_guest]


def payload(node: Node, sandbox: str) -> Path:
    return frozen_file(node, sandbox).parent


def groups(node: Node, sandbox: str) -> list[Path]:
    """The cgroups of a sandbox's file helpers."""
    return sorted(payload(node, sandbox).glob("files-*"))


def helpers(node: Node, sandbox: str) -> list[int]:
    found = []
    for group in groups(node, sandbox):
        with contextlib.suppress(OSError):  # it has gone since
            found += [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    return found


def until(what: Callable[[], object], *, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


def run(c: Client, box: str, script: str, name: str = "r", **over: Any) -> str:
    r = c.call("run.start", **run_plan(box, name, sh(script), **over))
    assert r["exit_code"] == 0, r
    out: bytes = r["streams"][0]["head"]
    return out.decode().strip()


def tar_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def test_a_helper_reads_writes_and_ends_with_its_connection(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    data = os.urandom(3 << 20)
    with Files(shared.socket, name, cwd=b"/tmp") as files:
        assert files.write(b"new", data, mode=0o640)["created"]
        assert run(c, name, "stat -c '%s %a' /tmp/new", "stat") == f"{len(data)} 640"
        run(c, name, "echo -n inside > /tmp/theirs", "echo")
        assert files.read(b"theirs") == b"inside"
        assert files.read(b"/tmp/new") == data
        tree = tar_of({"a/one": b"1", "a/two": b"2" * 10_000})
        assert files.upload("tree.in", [tree], path=b"/srv", parents=True)["entries"] >= 2
        assert run(c, name, "cat /srv/a/one; wc -c < /srv/a/two", "tree") == "110000"
        stream, done = files.download("tree.out", path=b"/srv")
        assert done["entries"] >= 4
        with tarfile.open(fileobj=io.BytesIO(stream)) as tar:
            assert "a/two" in tar.getnames()
        with pytest.raises(RuntimeFault) as none:
            files.read(b"/nothing")
        assert none.value.code == "file_not_found"
        assert len(groups(shared, name)) == 1
    until(lambda: not groups(shared, name))


def test_it_has_the_rights_of_its_user_and_the_limits_of_a_run(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    run(c, name, "mkdir -m 700 /mine; echo secret > /mine/x; mkdir -m 777 /all")
    with Files(shared.socket, name, user="1000:1000") as files:
        with pytest.raises(RuntimeFault) as denied:
            files.read(b"/mine/x")
        assert denied.value.code == "permission_denied"
        files.write(b"/all/his", b"1")
        assert run(c, name, "stat -c '%u:%g %a' /all/his", "stat") == "1000:1000 644"
        (pid,) = helpers(shared, name)
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )
        assert status["Name"] == "dsec-files"
        assert status["CapEff"] == status["CapPrm"] == "0" * 16
        assert (status["Seccomp"], status["Umask"]) == ("2", "0022")
        assert sorted(os.listdir(f"/proc/{pid}/fd"), key=int)[:3] == ["0", "1", "2"]
        opened = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert sum(target.startswith("socket:") for target in opened) == 1
        assert len(opened) == 5, opened  # and its own /proc/PID/fd, to name files that have none
    with Files(shared.socket, name) as files:
        assert files.read(b"/mine/x") == b"secret\n"
        (pid,) = helpers(shared, name)
        own = Path(f"/proc/{pid}/status").read_text()
        inside = run(c, name, "cat /proc/self/status", "caps")
        for field in ("CapBnd", "CapEff", "NoNewPrivs", "Seccomp_filters"):
            of = [line for text in (own, inside) for line in text.splitlines() if line.startswith(f"{field}:")]
            assert len(of) == 2
            assert of[0] == of[1]


@pytest.mark.parametrize(
    ("over", "code"),
    [
        ({"user": "nobody-here"}, "no_user"),
        ({"user": ""}, "bad_request"),
        ({"cwd": b"relative"}, "bad_request"),
        ({"cwd": b"/a\0b"}, "bad_request"),
        ({"sandbox": "none"}, "not_found"),
        ({"sandbox": "../x"}, "bad_request"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    shared: Node, box: tuple[Client, str], over: dict[str, Any], code: str
) -> None:
    with pytest.raises(RuntimeFault) as refused:
        Files(shared.socket, **({"sandbox": box[1]} | over))
    assert refused.value.code == code
    until(lambda: not groups(shared, box[1]))


def test_only_a_connection_with_nothing_else_on_it_is_handed_over(shared: Node, box: tuple[Client, str]) -> None:
    _, name = box
    with shared.client() as c:
        waits = c.send("sandbox.wait", {"id": name})
        number = c.send("files", {"sandbox": name})
        with pytest.raises(RuntimeFault) as busy:
            c.wait(number)
        assert (busy.value.code, busy.value.detail["field"]) == ("bad_request", "op")
        assert waits != number
    with shared.client(hello=False) as c:
        c.send("files", {"sandbox": name})
        frame = c.recv()
        assert frame["err"]["code"] == "bad_request"


def test_a_client_that_goes_leaves_no_process_and_no_group(shared: Node, box: tuple[Client, str]) -> None:
    _, name = box
    for _ in range(20):
        c = shared.client()
        c.send("files", {"sandbox": name})
        c.close()
    files = Files(shared.socket, name)
    files.send("write", {"path": b"/half"})
    files.data(b"x" * 100_000)
    until(lambda: helpers(shared, name))
    files.close()
    until(lambda: not groups(shared, name))
    with Files(shared.socket, name) as again, pytest.raises(RuntimeFault) as none:
        again.read(b"/half")
    assert none.value.code == "file_not_found"


def test_as_many_as_are_allowed_and_no_more(shared: Node, box: tuple[Client, str]) -> None:
    _, name = box
    all_of_them: list[Files] = []
    try:
        all_of_them += [Files(shared.socket, name) for _ in range(64)]
        with pytest.raises(RuntimeFault) as full:
            Files(shared.socket, name)
        assert (full.value.code, full.value.detail) == ("limit", {"resource": "helpers", "limit": 64})
        for n, files in enumerate(all_of_them):
            files.write(b"/tmp/%d" % n, b"%d" % n)
        all_of_them.pop().close()
        until(lambda: len(groups(shared, name)) == 63)
        all_of_them.append(Files(shared.socket, name))
        assert all_of_them[-1].read(b"/tmp/5") == b"5"
    finally:
        for files in all_of_them:
            files.close()
    until(lambda: not groups(shared, name))


def test_a_helper_is_nothing_that_a_run_left_over(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    with Files(shared.socket, name):
        r = c.call("run.start", **run_plan(name, "r", sh("true")))
        assert r["leftover"] == 0
        assert c.call("sandbox.get", id=name)["runs"] == 0


@pytest.mark.parametrize("grace_ms", [0, 20_000])
def test_a_stop_during_an_upload_does_not_wait_for_it(node: Node, grace_ms: int) -> None:
    with node.client() as c:
        create(c, "a")
        files = Files(node.socket, "a")
        files.send("write", {"path": b"/big"})
        files.data(b"x" * 100_000)
        (pid,) = helpers(node, "a")
        before = time.monotonic()
        assert c.call("sandbox.stop", id="a", grace_ms=grace_ms)["state"] == "ended"
        # Not the grace: no run is there to be waited for.
        assert time.monotonic() - before < 15
        with pytest.raises((ConnectionError, BrokenPipeError)):
            while True:
                files.data(b"x" * 100_000)
        files.close()
        until(lambda: not Path(f"/proc/{pid}").exists())
        with pytest.raises(RuntimeFault) as gone:
            Files(node.socket, "a")
        assert gone.value.code == "gone"


def test_a_helper_outlives_the_runtime(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
    files = Files(node.socket, "a")
    number = files.send("write", {"path": b"/big"})
    files.data(b"x" * 100_000)
    (pid,) = helpers(node, "a")
    node.kill_runtime()
    until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[3] == str(node.keeper_pid()))
    files.data(b"y" * 100_000)
    files.data(b"")
    assert files.wait(number)["bytes"] == 200_000
    with node.client() as c:
        assert run(c, "a", "wc -c < /big") == "200000"
        # Known to the new runtime, and of those that are counted.
        others = [Files(node.socket, "a") for _ in range(63)]
        with pytest.raises(RuntimeFault) as full:
            Files(node.socket, "a")
        assert full.value.code == "limit"
        for other in others:
            other.close()
        until(lambda: helpers(node, "a") == [pid])
        files.close()
        until(lambda: not groups(node, "a"))
        until(lambda: not Path(f"/proc/{pid}").exists())
        # Nothing of it keeps the sandbox from ending.
        last = Files(node.socket, "a")
        node.kill_runtime()
    with node.client() as c:
        assert c.call("sandbox.stop", id="a")["state"] == "ended"
        with pytest.raises((ConnectionError, BrokenPipeError)):
            last.read(b"/big")
        last.close()


def test_a_frozen_sandbox_is_answered(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        freeze = frozen_file(node, "a")
        freeze.write_text("1")
        begun = time.monotonic()
        with pytest.raises(RuntimeFault) as late:
            Files(node.socket, "a")
        assert late.value.code == "deadline"
        assert time.monotonic() - begun > 5
        until(lambda: not groups(node, "a"))
        freeze.write_text("0")
        with Files(node.socket, "a") as files:
            files.write(b"/x", b"1")


def test_a_helper_that_is_frozen_goes_when_it_comes_back(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
    files = Files(node.socket, "a")
    freeze = frozen_file(node, "a")
    freeze.write_text("1")
    until(lambda: "frozen 1" in (freeze.parent / "cgroup.events").read_text())
    files.send("write", {"path": b"/x"})
    files.close()
    freeze.write_text("0")
    until(lambda: not groups(node, "a"))
    with Files(node.socket, "a") as again, pytest.raises(RuntimeFault):
        again.read(b"/x")
    with node.client() as c:
        last = Files(node.socket, "a")
        freeze.write_text("1")
        assert c.call("sandbox.stop", id="a")["state"] == "ended"
        last.close()


def test_a_sandbox_full_of_processes_has_room_for_a_helper(node: Node) -> None:
    with node.client() as c:
        create(c, "a", pids_max=12)
        # A shell that cannot fork ends, so it is one by one until the sandbox says that it was refused.
        script = "for i in $(seq 40); do sh -c 'sleep 1000 & exec sleep 1000' & done; exec sleep 1000"
        c.send("run.start", run_plan("a", "full", sh(script)))
        with node.client() as other:
            until(lambda: other.call("sandbox.usage", id="a")["pids_max_events"] > 0)
        with Files(node.socket, "a") as files:
            files.write(b"/x", b"1")
            assert files.read(b"/x") == b"1"
            (pid,) = helpers(node, "a")
            assert pid in map(int, (groups(node, "a")[0] / "cgroup.procs").read_text().split())


def test_an_init_that_dies_takes_its_helpers_along(node: Node) -> None:
    with node.client() as c:
        status = create(c, "a")
        files = Files(node.socket, "a")
        os.kill(status["init_pid"], signal.SIGKILL)
        assert c.call("sandbox.wait", id="a")["state"] == "ended"
        with pytest.raises((ConnectionError, BrokenPipeError)):
            files.read(b"/x")
        files.close()
        with pytest.raises(RuntimeFault) as gone:
            Files(node.socket, "a")
        assert gone.value.code == "gone"


# Counted in each process: it happens to every helper, and to every launcher that is made anew.
@pytest.mark.parametrize(
    "point",
    [
        "enter.confined:1:kill",  # as one that is killed for want of memory
        "enter.entered:1:error",
        "enter.cloned:1:error",
        "enter.cloned:1:kill",
        "views.copies:1:error",
        "views.made:1:error",
        "views.made:1:kill",
    ],
)
def test_a_start_that_goes_wrong_is_an_error_and_leaves_nothing(point: str) -> None:
    node = make_node(env={"DSEC_NATIVE_FAILPOINTS": point})
    try:
        with node.client() as c:
            create(c, "a")
        for _ in range(2):
            with pytest.raises(RuntimeFault) as died:
                Files(node.socket, "a", diff=point.startswith("views."))
            assert died.value.code == "launch"
            until(lambda: not groups(node, "a"))
            own = [p.parent.name for p in Path("/proc").glob("[0-9]*/comm") if named_helper(p, node)]
            assert own == []
    finally:
        node.stop()


def named_helper(comm: Path, node: Node) -> bool:
    """Whether it is a process of this node's cgroup with a helper's group."""
    with contextlib.suppress(OSError):
        return f"/{node.cgroup}/a/payload/files-" in (comm.parent / "cgroup").read_text()
    return False


LOOKED_AT = ("mem", "maps", "environ", "exe", "root", "cwd", "fd", "auxv", "ns/pid")


@pytest.mark.parametrize("diff", [False, True])
@pytest.mark.parametrize("hidden", [True, False])
def test_nothing_inside_sees_a_helper_or_could_read_it(hidden: bool, diff: bool) -> None:
    """Without the first of the two guards the second still holds; one that compares has layers and upper in hand."""
    node = make_node(env={} if hidden else {"DSEC_NATIVE_DISABLE": "files.hidden"})
    try:
        with node.client() as c:
            create(c, "a", caps=["KILL", "SYS_PTRACE", "DAC_OVERRIDE", "SETUID", "SETGID"])
            with Files(node.socket, "a", diff=diff) as files:
                (pid,) = helpers(node, "a")
                names = Path(f"/proc/{pid}/status").read_text()
                inside = next(line for line in names.splitlines() if line.startswith("NSpid:")).split()[1:]
                seen = run(c, "a", "cd /proc; for p in [0-9]*; do cat $p/comm; done", "ps").split()
                assert ("dsec-files" in seen) is not hidden
                assert len(inside) == (1 if hidden else 2)
                script = "cd /proc/$P && for f in %s; do head -c 1 $f || ls $f/; readlink $f; done 2>/dev/null; true"
                over = {"env": {b"P": inside[-1].encode(), b"PATH": b"/bin"}}
                looked = run(c, "a", script % " ".join(LOOKED_AT), "look", **over)
                assert looked == ""
                # By its number first: what everybody's kill has reached may be gone by then.
                kill = "kill -9 $P; code=$?; kill -9 -1; exit $code"
                killed = c.call("run.start", **run_plan("a", "kill", sh(kill), **over))
                assert (killed["exit_code"] == 0) is not hidden
                if hidden:
                    assert files.write(b"/x", b"alive")["created"]
                else:
                    with pytest.raises((ConnectionError, BrokenPipeError)):
                        files.write(b"/x", b"dead")
    finally:
        node.stop()


READ_ONLY = os.ST_RDONLY | os.ST_NODEV | os.ST_NOSUID | os.ST_NOEXEC


def test_what_a_helper_compares_it_can_only_read(shared: Node, box: tuple[Client, str]) -> None:
    _, name = box
    with Files(shared.socket, name, diff=True) as files:
        files.write(b"/new", b"x")
        (pid,) = helpers(shared, name)
        opened = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_dir() and os.readlink(fd) == "/"]
        now, before, touched = sorted(opened, key=lambda fd: (not (fd / "bin").exists(), not (fd / "new").exists()))
        assert [(fd / "new").exists() for fd in (now, before, touched)] == [True, False, True]
        assert os.listdir(touched) == ["new"]
        for fd in (before, touched):
            assert os.statvfs(fd).f_flag & READ_ONLY == READ_ONLY
            assert os.path.samestat(os.stat(fd), os.stat(fd / ".."))  # there is nothing above
            with pytest.raises(OSError) as refused:
                os.mkdir(fd / "x")
            assert refused.value.errno == errno.EROFS
    with Files(shared.socket, name) as files, pytest.raises(RuntimeFault) as plain:
        files.call("diff", path=b"/")
    assert plain.value.code == "bad_request"


def test_garbage_hurts_nobody_else(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    with Files(shared.socket, name) as files:
        files.sock.sendall(struct.pack(">I", 1 << 30) + b"x" * 1000)
        assert files.recv()["err"]["code"] == "bad_request"
        with pytest.raises(ConnectionError):
            files.recv()
    until(lambda: not groups(shared, name))
    assert c.call("sandbox.get", id=name)["state"] == "running"
