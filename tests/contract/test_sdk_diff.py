"""`sbx.diff()` against a real node agent over the fake backend. Other lanes take the same cases to real containers."""

from __future__ import annotations

import asyncio
import json

import pytest

import dsec
from dsec.cli.main import main
from tests.kit.agent import Agent

pytestmark = pytest.mark.contract


def told(sbx: dsec.Sandbox, path: str | bytes = "/") -> dict[str, tuple[str, tuple[str, ...]]]:
    """Kind and differences of each path; none is told twice."""
    changes = list(sbx.diff(path))
    found = {change.path: (change.kind, change.what) for change in changes}
    assert len(found) == len(changes)
    return found


def test_a_new_sandbox_has_none(sbx: dsec.Sandbox) -> None:
    changes = sbx.diff()
    assert list(changes) == []
    assert changes.report is not None
    assert (changes.report.added, changes.report.changed, changes.report.deleted) == (0, 0, 0)


def test_what_was_added_changed_and_deleted(sbx: dsec.Sandbox) -> None:
    sbx.files.write("/home/task/new", "12345", mode=0o640)
    sbx.files.chmod("/tmp", 0o700)
    sbx.files.remove("/usr/bin", recursive=True)
    changes = {change.path: change for change in sbx.diff()}
    assert changes["/home/task"].kind == "added"
    new = changes["/home/task/new"]
    assert (new.kind, new.type, new.size, new.before, new.what) == ("added", "file", 5, None, ())
    assert new.now is not None
    assert (new.now.mode, new.now.uid) == (0o640, 0)
    assert (changes["/tmp"].kind, changes["/tmp"].what) == ("changed", ("mode",))
    gone = changes["/usr/bin"]
    assert (gone.kind, gone.type, gone.now) == ("deleted", "directory", None)
    assert gone.before is not None
    assert gone.before.mode == 0o755
    assert "/home" not in changes  # a name in it is no change of its own


def test_what_was_undone_is_none(sbx: dsec.Sandbox) -> None:
    sbx.files.write("/home/made/and/removed", "x")
    sbx.files.remove("/home/made", recursive=True)
    mode = sbx.files.stat("/tmp").mode
    sbx.files.chmod("/tmp", 0o700)
    sbx.files.chmod("/tmp", mode)
    sbx.files.mkdir("/tmp/a")
    sbx.files.move("/tmp/a", "/tmp/b")
    sbx.files.remove("/tmp/b")
    assert told(sbx) == {}


def test_another_kind_of_file_in_its_place(sbx: dsec.Sandbox) -> None:
    sbx.files.remove("/home", recursive=True)
    sbx.files.write("/home", "a file")
    (change,) = sbx.diff("/home")
    assert (change.kind, change.what, change.type, change.size) == ("changed", ("type",), "file", 6)
    assert change.before is not None
    assert change.before.type == "directory"


def test_below_a_path(sbx: dsec.Sandbox) -> None:
    sbx.files.write("/home/a/b/c", "1")
    sbx.files.write("/tmp/x", "1")
    assert set(told(sbx, "/home")) == {"/home/a", "/home/a/b", "/home/a/b/c"}
    assert set(told(sbx, "/home/a/b/")) == {"/home/a/b", "/home/a/b/c"}
    assert set(told(sbx, "/home/./a//b/c")) == {"/home/a/b/c"}
    assert told(sbx, "/usr") == {}
    sbx.files.remove("/etc/../home/a", recursive=True)
    with pytest.raises(dsec.FileNotFound) as missing:
        list(sbx.diff("/home/a"))
    assert missing.value.detail["errno"] == "ENOENT"
    for path in ("/home/../tmp", b"", b"a\0b"):
        with pytest.raises(dsec.InvalidSpec, match="path"):
            list(sbx.diff(path))
    with pytest.raises(dsec.FileError) as mounted:
        list(sbx.diff("/proc"))
    assert mounted.value.detail["errno"] == "EXDEV"


@pytest.mark.same_everywhere
def test_names_are_bytes(sbx: dsec.Sandbox) -> None:
    names = [b"/home/\xff\xfe", b"/home/line\nbreak", "/home/日本".encode(), b"/home/" + b"n" * 255]
    for name in names:
        sbx.files.write(name, "x")
    found = {change.path.encode("utf-8", "surrogateescape"): change for change in sbx.diff("/home")}
    assert set(found) == set(names)
    (one,) = sbx.diff(b"/home/\xff\xfe")
    assert one.raw_path == b"/home/\xff\xfe"
    assert sbx.files.read(one.path) == b"x"


@pytest.mark.same_everywhere
def test_a_limit_is_said(sbx: dsec.Sandbox) -> None:
    for number in range(5):
        sbx.files.write(f"/home/{number}", "x")
    some = sbx.diff("/home", limit=3)
    assert len(list(some)) == 3
    assert some.report is not None
    assert (some.report.added, some.report.more) == (3, True)
    exact = sbx.diff("/home", limit=5)
    assert len(list(exact)) == 5
    assert exact.report is not None
    assert not exact.report.more
    for limit in (0, -1, 1_000_001):
        with pytest.raises(dsec.InvalidSpec, match="limit"):
            list(sbx.diff(limit=limit))


@pytest.mark.same_everywhere
def test_many_are_streamed(sbx: dsec.Sandbox) -> None:
    script = sbx.diff("/home")
    for number in range(40):
        sbx.files.write(f"/home/{number:03}/{'n' * 200}", "x")
    assert len(list(script)) == 80
    seen = iter(sbx.diff("/home"))
    assert next(seen).kind == "added"
    del seen  # an iteration that is left lets go of its connection
    assert len(list(script)) == 80  # and the same can be asked again


@pytest.mark.same_everywhere
def test_an_ended_sandbox_is_said(sbx: dsec.Sandbox) -> None:
    sbx.stop(grace_s=0)
    with pytest.raises(dsec.SandboxLost):
        list(sbx.diff())


@pytest.mark.same_everywhere
def test_the_async_twin(agent: Agent) -> None:
    async def work() -> None:
        async with dsec.AsyncClient(agent.url) as client, await client.create(disk_mib=64) as box:
            await box.files.write("/home/x", "1")
            assert [change.path async for change in box.diff("/home")] == ["/home/x"]
            changes = box.diff()
            assert len([change async for change in changes]) == 1
            assert changes.report is not None
            assert changes.report.added == 1

    asyncio.run(work())


@pytest.mark.same_everywhere
def test_the_command(agent: Agent, sbx: dsec.Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    sbx.files.write(b"/home/\xff\x1b[31m", "abc")
    sbx.files.chmod("/tmp", 0o700)
    assert main(["diff", sbx.id, "--url", agent.url]) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines[0].split()[:3] == ["A", "file", "3"]
    assert "\x1b" not in lines[0]
    assert lines[1].split() == ["C", "directory", lines[1].split()[2], "/tmp", "(mode)"]
    assert main(["diff", sbx.id, "/home", "--json", "--url", agent.url]) == 0
    (one,) = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert (one["kind"], one["now"]["size"]) == ("added", 3)
    assert main(["diff", sbx.id, "/nothing", "--url", agent.url]) == 1
    assert "ENOENT" in capsys.readouterr().err
