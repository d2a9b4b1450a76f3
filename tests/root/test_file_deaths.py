"""A file helper that is killed at each step of a call: what only looks is exact, a change is told, nothing is half."""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dsec
from tests.kit.home import Home
from tests.root.test_sdk_files import of_host

pytestmark = pytest.mark.same_everywhere

PIDFD_GETFD = 438
TRIES = 20
# Only ends what would never end.
PATIENCE_S = 60.0
LIBC = ctypes.CDLL(None, use_errno=True)
BIG = os.urandom(1 << 20) * 16


def waiting_bytes(pid: int) -> int:
    """What a process has been sent on its sockets and has not read; 0 for one that has gone."""
    total = 0
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            for number in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{number}").startswith("socket:"):
                    copy = LIBC.syscall(PIDFD_GETFD, process, int(number), 0)
                    assert copy >= 0, os.strerror(ctypes.get_errno())
                    with socket.socket(fileno=copy) as held:
                        size = array.array("i", [0])
                        fcntl.ioctl(held, termios.FIONREAD, size)
                        total += size[0]
        finally:
            os.close(process)
    return total


def killed_when_asked(sbx: dsec.Sandbox, call: Callable[[], Any]) -> Any:
    """What a call gives, or raises, whose helper had its request, had done nothing of it, and was killed."""
    for _ in range(TRIES):
        warm_up(sbx, call)
        helpers = of_host(sbx)
        for pid in helpers:
            os.kill(pid, signal.SIGSTOP)
        got: list[Any] = []
        asking = threading.Thread(target=ask, args=(call, got))
        asking.start()
        held = until_asked(helpers, asking)
        for pid in helpers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        asking.join(PATIENCE_S)
        assert not asking.is_alive(), "nobody answers"
        if held:
            return got[0]
    pytest.fail("each time the idle helpers had been let go before they were asked")


def warm_up(sbx: dsec.Sandbox, call: Callable[[], Any]) -> None:
    """A helper waits for the call: one for diffs is of its own kind."""
    if call is diff_of(sbx):
        diff_of(sbx)()
    assert sbx.files.exists("/")


def diff_of(sbx: dsec.Sandbox) -> Callable[[], Any]:
    return DIFFS.setdefault(sbx.id, lambda: [(change.path, change.kind) for change in sbx.diff("/srv")])


DIFFS: dict[str, Callable[[], Any]] = {}


def ask(call: Callable[[], Any], got: list[Any]) -> None:
    got.append(outcome(call))


def until_asked(helpers: list[int], asking: threading.Thread) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while asking.is_alive():
        if any(map(waiting_bytes, helpers)):
            return True
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return False


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except dsec.DsecError as error:
        return error


def test_what_only_looks_is_asked_of_another(sbx: dsec.Sandbox, tmp_path: Path) -> None:
    files = sbx.files
    files.write("/srv/d/f", "content")

    def downloaded(source: str) -> Any:
        to = tmp_path / source.replace("/", "-")
        files.download(source, to)
        return to.read_text() if to.is_file() else (to / "f").read_text()

    wanted: list[tuple[Callable[[], Any], Any]] = [
        (lambda: files.read("/srv/d/f"), b"content"),
        (lambda: files.read("/srv/d/f", offset=3), b"tent"),
        (lambda: files.read_text("/srv/d/f"), "content"),
        (lambda: [entry.name for entry in files.list("/srv/d")], ["f"]),
        (lambda: files.stat("/srv/d/f").size, 7),
        (lambda: files.exists("/srv/d/f"), True),
        (lambda: files.exists("/srv/none"), False),
        (lambda: downloaded("/srv/d/f"), "content"),
        (lambda: downloaded("/srv/d"), "content"),
        (diff_of(sbx), [("/srv/d", "added"), ("/srv/d/f", "added")]),
    ]
    for number, (call, exact) in enumerate(wanted):
        assert killed_when_asked(sbx, call) == exact, number


def test_what_changes_is_told_and_was_not_done(sbx: dsec.Sandbox, tmp_path: Path) -> None:
    files = sbx.files
    files.write("/srv/f", "old")
    files.mkdir("/srv/d")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/f").write_text("new")
    calls: list[Callable[[], Any]] = [
        lambda: files.write("/srv/f", "new"),
        lambda: files.write("/srv/new", "new", exclusive=True),
        lambda: files.append("/srv/f", "new"),
        lambda: files.mkdir("/srv/new"),
        lambda: files.move("/srv/f", "/srv/new"),
        lambda: files.chmod("/srv/f", 0o600),
        lambda: files.remove("/srv/d"),
        lambda: files.upload(tmp_path / "tree/f", "/srv/f"),
        lambda: files.upload(tmp_path / "tree", "/srv/new"),
    ]
    before = {entry.name: entry for entry in files.list("/srv")}
    for number, call in enumerate(calls):
        got = killed_when_asked(sbx, call)
        # By its name: what comes over the wire is an error of the SDK's.
        assert (type(got), got.code, got.retry) == (dsec.Unknown, "unknown", "never"), (number, got)
        assert {entry.name: entry for entry in files.list("/srv")} == before, number
        assert files.read("/srv/f") == b"old", number
        assert call() is not Ellipsis, "asked again, it is done"
        sbx.run("rm -rf /srv/new /srv/d; mkdir /srv/d; printf old > /srv/f; chmod 644 /srv/f", check=True)
        before = {entry.name: entry for entry in files.list("/srv")}


class Killer:
    """Kills the helpers when the first bytes have gone."""

    def __init__(self, sbx: dsec.Sandbox) -> None:
        self._sbx = sbx
        self.killed: list[int] = []

    def __call__(self, done: int, total: int | None) -> None:
        if not self.killed:
            self.killed = of_host(self._sbx)
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)


def test_a_download_that_is_cut_begins_again(sbx: dsec.Sandbox, tmp_path: Path) -> None:
    sbx.files.write("/srv/big", BIG)
    killer = Killer(sbx)
    sbx.files.download("/srv/big", tmp_path / "big", on_progress=killer)
    assert killer.killed
    assert (tmp_path / "big").read_bytes() == BIG


def test_of_a_tree_that_is_cut_nothing_is_half(sbx: dsec.Sandbox, tmp_path: Path) -> None:
    for name in "abc":
        sbx.files.write(f"/srv/t/{name}", BIG)
    killer = Killer(sbx)
    got = outcome(lambda: sbx.files.download("/srv/t", tmp_path / "t", on_progress=killer))
    assert killer.killed
    assert isinstance(got, dsec.Unavailable), got
    assert all(path.read_bytes() == BIG for path in (tmp_path / "t").glob("*"))
    sbx.files.download("/srv/t", tmp_path / "t")
    assert [path.read_bytes() == BIG for path in sorted((tmp_path / "t").iterdir())] == [True] * 3


@pytest.mark.parametrize("old", [None, b"old"])
def test_an_upload_that_is_cut_has_changed_nothing(sbx: dsec.Sandbox, tmp_path: Path, old: bytes | None) -> None:
    (tmp_path / "big").write_bytes(BIG)
    if old is not None:
        sbx.files.write("/srv/big", old)
    killer = Killer(sbx)
    got = outcome(lambda: sbx.files.upload(tmp_path / "big", "/srv/big", on_progress=killer))
    if not killer.killed:
        pytest.fail("the helper was not there yet when the first bytes had gone")
    assert isinstance(got, dsec.Unavailable | dsec.Unknown), got
    assert (sbx.files.read("/srv/big") if sbx.files.exists("/srv/big") else None) == old
    assert [entry.name for entry in sbx.files.list("/srv")] == ([] if old is None else ["big"])
    sbx.files.upload(tmp_path / "big", "/srv/big")
    assert sbx.files.read("/srv/big") == BIG


def test_a_watch_goes_on_and_says_what_it_may_have_missed(sbx: dsec.Sandbox) -> None:
    sbx.files.mkdir("/srv/w")
    with sbx.files.watch("/srv/w") as watch:
        events = iter(watch)
        for number in range(3):
            for pid in of_host(sbx):
                os.kill(pid, signal.SIGKILL)
            assert next(events).kind == "overflow"
            sbx.files.write(f"/srv/w/{number}", "x")
            event = next(events)
            while event.path != f"/srv/w/{number}":
                event = next(events)
            assert event.kind in ("created", "modified")


def test_a_watch_whose_directory_goes_while_the_agent_is_dead_ends(home: Home, sbx: dsec.Sandbox) -> None:
    sbx.files.mkdir("/srv/w")
    with sbx.files.watch("/srv/w") as watch:
        sbx.spawn("sleep 0.5; rm -r /srv/w", stdin=False)
        os.kill(home.agent(), signal.SIGKILL)
        time.sleep(1)
        home.dsec("up")
        assert {event.kind for event in watch} <= {"overflow"}
        with pytest.raises(dsec.InvalidState):
            watch.next(timeout_s=60)


def test_a_watch_whose_directory_has_gone_meanwhile_ends(sbx: dsec.Sandbox) -> None:
    sbx.files.mkdir("/srv/w")
    with sbx.files.watch("/srv/w") as watch:
        helpers = of_host(sbx)
        for pid in helpers:
            os.kill(pid, signal.SIGSTOP)
        sbx.run("rmdir /srv/w", check=True)
        for pid in helpers:
            os.kill(pid, signal.SIGKILL)
        assert list(watch) == []
