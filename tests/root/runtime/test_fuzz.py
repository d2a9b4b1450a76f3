"""Bytes that are almost right, at the runtime's socket and at a file helper's.

Each for some seconds; `DSEC_FUZZ_S=3600` for an hour. A failure says the seed it can be repeated with.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.model.errors import DsecError
from dsec.model.files import FileChange
from dsec.wire.files import FileClient
from tests.kit import mutations
from tests.kit.rtclient import Client, Node, run_plan
from tests.kit.rtfiles import DATA, Files
from tests.kit.rtnode import create, needs, sh

# The length is for the one that asks for hours. It stands first: the first of several counts.
pytestmark = [pytest.mark.timeout(6 * 3600), *needs, pytest.mark.same_everywhere]
ANSWER_S = 0.3


def of_a_runtime(box: str) -> list[dict[str, Any]]:
    """Requests that all can be done; none makes or ends a sandbox."""
    plan = run_plan(box, "f1", sh("cat; echo done"), stdin=b"some", timeout_ms=500, spool_bytes=4096)
    asked: list[tuple[str, dict[str, Any]]] = [
        ("hello", {"protocol": 1}),
        ("run.start", plan),
        ("run.start", plan | {"run": "f2", "stdin_open": True, "memory_cgroup": True, "follow": True}),
        ("run.start", plan | {"run": "f3", "tty": {"rows": 10, "cols": 20}, "stdin_open": True, "stdin": b""}),
        ("run.start", plan | {"run": "f4", "stream": True, "window": 10, "offsets": [0, 0, 0], "lossy": True}),
        ("run.stdin", {"sandbox": box, "run": "f2", "offset": 4, "d": b"x" * 100, "eof": False}),
        ("run.stdin", {"sandbox": box, "run": "f3", "offset": 0, "d": b"typed\n\x04", "eof": False}),
        ("run.attach", {"sandbox": box, "run": "f1", "stream": True, "window": 1, "offsets": [0, 2], "lossy": True}),
        ("run.ack", {"request": 1, "bytes": 100}),
        ("run.read", {"sandbox": box, "run": "f1", "s": 1, "offset": 0, "max": 100}),
        ("run.status", {"sandbox": box, "run": "f1"}),
        ("run.list", {"sandbox": box}),
        ("run.resize", {"sandbox": box, "run": "f3", "rows": 3, "cols": 7}),
        ("run.fence", {"sandbox": box, "run": "f2"}),
        ("run.kill", {"sandbox": box, "run": "f2", "fence": 1, "signal": 0}),
        ("run.kill", {"sandbox": box, "run": "f2", "signal": 28, "cause": "killed"}),
        ("run.kill", {"sandbox": box, "run": "f3", "signal": 0, "cause": "timeout"}),
        ("run.forget", {"sandbox": box, "run": "f1"}),
        ("process.list", {"sandbox": box}),
        ("sandbox.get", {"id": box}),
        ("sandbox.list", {}),
        ("sandbox.usage", {"id": box}),
        ("layer.list", {}),
        ("probe", {}),
        # The last: it wants a connection with nothing else on it.
        ("files", {"sandbox": box, "user": "root", "cwd": b"/", "diff": False}),
    ]
    return [{"op": op, "args": args} for op, args in asked]


def of_a_helper() -> list[dict[str, Any]]:
    """Requests of every kind, below /tmp of the sandbox."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("stat", {"path": b"/tmp/a", "follow": True}),
        ("read", {"path": b"/etc/passwd", "offset": 0, "len": None}),
        ("write", {"path": b"/tmp/d/a", "parents": True, "data": b"content"}),
        ("write", {"path": b"/tmp/b", "mode": 0o600}),
        ("append", {"path": b"/tmp/a", "data": b"more"}),
        ("hash", {"path": b"/tmp/a"}),
        ("list", {"path": b"/etc", "cursor": None, "limit": 10}),
        ("mkdir", {"path": b"/tmp/d/e", "parents": True}),
        ("remove", {"path": b"/tmp/d", "recursive": True}),
        ("move", {"source": b"/tmp/a", "target": b"/tmp/c", "replace": True}),
        ("chmod", {"path": b"/tmp/c", "mode": 0o777}),
        ("chown", {"path": b"/tmp/c", "uid": 1, "gid": None, "follow": False}),
        ("symlink", {"path": b"/tmp/l", "target": b"../etc"}),
        ("readlink", {"path": b"/tmp/l"}),
        ("tree.out", {"path": b"/etc"}),
        ("tree.in", {"path": b"/tmp", "parents": True, "owners": False}),
        ("watch", {"path": b"/tmp", "recursive": True, "settle_ms": 1}),
        ("diff", {"path": b"/", "limit": 1000}),
        ("cancel", {}),
    ]
    return [{"op": op, "args": args} for op, args in asked]


def throw(sock: socket.socket, sent: bytes) -> None:
    """Sends all of it, whatever is answered, and takes what is answered for a moment."""

    def take() -> None:
        with contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                pass

    sock.settimeout(ANSWER_S)
    taker = threading.Thread(target=take)
    taker.start()
    with contextlib.suppress(OSError):
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
    taker.join()


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def rss_bytes(pid: int) -> int:
    line = next(one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def test_requests_that_are_almost_right_hurt_nobody(shared: Node, tmp_path: Path) -> None:
    seed = mutations.seed()
    rnd = random.Random(seed)
    with shared.client() as c:
        create(c, "fuzzed", pids_max=200)
        create(c, "beside")
    requests, pid = of_a_runtime("fuzzed"), shared.runtime_pid()
    for _ in mutations.until_over(rnd):
        sent = mutations.stream(rnd, requests)
        (tmp_path / "last").write_bytes(sent)
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(shared.socket))
        if rnd.random() < 0.9:
            sent = mutations.framed(mutations.ENCODE({"id": 0, "op": "hello", "args": {"protocol": 1}})) + sent
        throw(sock, sent)
        sock.close()
        assert shared.runtime_pid() == pid, f"seed {seed}: the runtime died of {sent!r}"
        with shared.client(timeout_s=30) as other:
            told = other.call("run.start", **run_plan("beside", "r", sh("echo right; exit 3"), timeout_ms=20_000))
            assert (told["exit_code"], told["streams"][0]["head"]) == (3, b"right\n"), f"seed {seed}: {sent!r}"
    with shared.client() as c:
        c.call("sandbox.stop", id="fuzzed")
        assert c.call("sandbox.get", id="beside")["state"] == "running"
        c.call("sandbox.stop", id="beside")
    assert descriptors(pid) < 200, f"seed {seed}: descriptors stay"
    assert rss_bytes(pid) < 200 << 20, f"seed {seed}: memory stays"


def test_a_helper_that_is_asked_strange_things_serves_the_next(shared: Node, box: tuple[Client, str]) -> None:
    seed = mutations.seed()
    rnd = random.Random(seed)
    _, name = box
    requests = of_a_helper()
    outside = Path("/etc/passwd").read_bytes()
    for _ in mutations.until_over(rnd):
        sent = mutations.stream(rnd, requests, DATA)
        with Files(shared.socket, name, diff=True, timeout_s=30) as asked:
            throw(asked.sock, sent)
        with Files(shared.socket, name, timeout_s=30) as files:
            assert files.write(b"/root/own", b"kept")["bytes"] == 4, f"seed {seed}: {sent!r}"
            assert files.read(b"/root/own") == b"kept", f"seed {seed}: {sent!r}"
    assert Path("/etc/passwd").read_bytes() == outside


def test_before_they_are_changed_they_are_right(shared: Node, box: tuple[Client, str]) -> None:
    """Else all that is tried is how they are refused."""
    _, name = box
    with shared.client() as c:
        asked = of_a_runtime(name)
        open_ended = [one for one in asked if one["args"].get("stdin_open")]
        for request in asked[1:-1]:
            number = c.send(request["op"], request["args"])
            frame = c.recv()
            while frame["id"] != number:
                frame = c.recv()
            while request not in open_ended and "ev" in frame:
                frame = c.recv()
            # It may have ended by then; it is there, and so is the operation with its arguments.
            assert frame.get("err", {}).get("code") in (None, "conflict", "busy"), (request, frame)
    with Files(shared.socket, name, diff=True) as files:
        for request in of_a_helper():
            if request["op"] in ("cancel", "watch"):
                continue
            number = files.send(request["op"], request["args"])
            if request["op"] in ("write", "append") and "data" not in request["args"]:
                files.data(b"")
            if request["op"] == "tree.in":
                files.data(bytes(1024))
                files.data(b"")
            code = last_of(files, number).get("err", {}).get("code")
            assert code in (None, "file_not_found", "file_exists"), (request, code)


def last_of(files: Files, number: int) -> dict[str, Any]:
    """The answer to a request, after its events and data."""
    while True:
        head = int.from_bytes(files._exactly(4), "big")
        body = files._exactly(head & ~DATA)
        if head & DATA:
            continue
        frame: dict[str, Any] = msgspec.msgpack.decode(body)
        assert frame["id"] == number
        if "ev" not in frame:
            return frame


STATE = {"type": "file", "size": 3, "mode": 0o644, "uid": 0, "gid": 0, "mtime_ns": 5, "target": None}
ANSWERS: list[dict[str, Any]] = [
    {"id": 3, "ok": {}},
    {"id": 3, "ok": {"entry": {"name": b"a", "path": b"/a", "type": "file", "size": 3, "mode": 0o644, "uid": 0,
                               "gid": 0, "mtime_ns": 5, "target": None}, "bytes": 3, "created": True, "atomic": True}},
    {"id": 3, "ok": {"entries": [], "cursor": b"next"}},
    {"id": 3, "ok": {"entries": 3, "bytes": 4, "skipped": {"count": 1, "named": [{"path": b"x", "why": "mount"}]},
                     "changed": {"count": 0, "named": []}}},
    {"id": 3, "err": {"code": "no_space", "message": "full", "detail": {"path": b"\xff", "errno": "ENOSPC"}}},
    {"id": 3, "ev": "file", "entry": {"name": b"a", "path": b"/a", "type": "file", "size": 3}},
    {"id": 3, "ev": "changes", "changes": [{"path": b"/a", "kind": "created"}]},
    {"id": 3, "ev": "changes", "changes": [
        {"path": b"/\xff", "kind": "changed", "before": STATE, "now": STATE, "what": ["content"], "unsure": "EIO"},
        {"path": b"/l", "kind": "deleted", "before": {**STATE, "type": "symlink", "target": b"\xfe"}, "now": None},
    ]},
    {"id": 3, "ok": {"added": 0, "changed": 1, "deleted": 1, "skipped": {"count": 0, "named": []}, "more": False}},
    {"id": 3, "ev": "watching", "directories": 1, "skipped": 0},
]  # fmt: skip


def test_a_helper_that_lies_is_a_typed_error() -> None:
    """What a program of a sandbox that took a helper over may send: the agent gets an answer, or says what it is."""
    seed = mutations.seed()
    asyncio.run(_hear_lies(random.Random(seed), seed))


async def _hear_lies(rnd: random.Random, seed: int) -> None:
    for _ in mutations.until_over(rnd):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        sent = mutations.stream(rnd, ANSWERS, DATA)
        client = FileClient(ours, "sbx-1")
        with contextlib.suppress(OSError):
            theirs.settimeout(1)
            theirs.sendall(sent)
            theirs.shutdown(socket.SHUT_WR)
        try:
            async with asyncio.timeout(20):
                await rnd.choice((_stat, _read, _list, _tree, _write, _diff))(client)
        except DsecError:
            pass
        except Exception as error:  # whatever else it is, it is a fault, and told with what was sent
            raise AssertionError(f"seed {seed}: {error!r} of {sent!r}") from error
        finally:
            client.close()
            theirs.close()


async def _nothing(_: object) -> None:
    return None


async def _stat(client: FileClient) -> None:
    msgspec.json.encode(await client.stat(b"/a"))


async def _read(client: FileClient) -> None:
    await client.read(b"/a", offset=0, length=None, opened=_nothing, sink=_nothing)


async def _list(client: FileClient) -> None:
    msgspec.json.encode(await client.list(b"/"))


async def _tree(client: FileClient) -> None:
    msgspec.json.encode(await client.tree_out(b"/", _nothing))


async def _diff(client: FileClient) -> None:
    async def sink(changes: tuple[FileChange, ...]) -> None:
        msgspec.json.encode(changes)

    msgspec.json.encode(await client.diff(b"/", limit=None, sink=sink))


async def _write(client: FileClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"abc"

    await client.write(b"/a", pieces(), mode=None, parents=False, exclusive=False)
