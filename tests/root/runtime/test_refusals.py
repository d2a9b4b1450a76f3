"""The native runtime: what it refuses, and clients that keep to nothing."""

from __future__ import annotations

import errno
import random
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtnode import BINARY, LAYERS, create, image, memory_kib, needs

pytestmark = [*needs, pytest.mark.one_guest]


@pytest.mark.same_everywhere
@pytest.mark.parametrize(
    ("over", "code", "field"),
    [
        ({"argv": []}, "bad_request", "argv"),
        ({"argv": [b""]}, "bad_request", "argv"),
        ({"argv": [b"a\0b"]}, "bad_request", "argv"),
        ({"cwd": b"x"}, "bad_request", "cwd"),
        ({"env": {b"A=B": b""}}, "bad_request", "env"),
        ({"head_bytes": 1 << 40}, "bad_request", "head_bytes"),
        ({"argv": [b"x" * 200_000]}, "too_long", None),
        ({"argv": [b"x" * 100_000] * 30}, "too_long", None),
        ({"run": "../x"}, "bad_request", "run"),
        ({"run": ""}, "bad_request", "run"),
        ({"run": "r" * 300}, "bad_request", "run"),
        ({"sandbox": "nobody"}, "not_found", None),
        ({"spool_bytes": 1 << 40}, "bad_request", "spool_bytes"),
        ({"argv": "x"}, "bad_request", "args"),
        ({"timeout_ms": -1}, "bad_request", "args"),
        ({"cwd": b"/" + b"a/" * 2040}, "no_cwd", None),
        ({"cwd": b"/" + b"\xff" * 4000}, "no_cwd", None),
        ({"cwd": b"/" + b"a" * 5000}, "bad_request", "cwd"),
        ({"argv": [b"x" * 5000]}, "no_program", None),
        ({"argv": [b"/" + b"\n" * 100_000]}, "no_program", None),
    ],
)
def test_bad_runs_are_refused_by_name(
    box: tuple[Client, str], over: dict[str, Any], code: str, field: str | None
) -> None:
    c, s = box
    with pytest.raises(RuntimeFault) as e:
        c.call("run.start", **(run_plan(s, "r", ["true"]) | over))
    assert e.value.code == code
    if field:
        assert e.value.detail["field"] == field
    assert c.call("run.list", sandbox=s)["runs"] == []


def test_a_loop_of_links_is_named(box: tuple[Client, str]) -> None:
    c, s = box
    c.call("run.start", **run_plan(s, "ln", ["ln", "-s", "/loop", "/loop"]))
    for over, code in (({"cwd": b"/loop"}, "no_cwd"), ({"argv": [b"/loop"]}, "no_program")):
        with pytest.raises(RuntimeFault) as e:
            c.call("run.start", **(run_plan(s, "r", ["true"]) | over))
        assert (e.value.code, e.value.detail["errno"]) == (code, errno.ELOOP)


@pytest.mark.same_everywhere
@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "x" * 300, "a\0", "-a", ".a"])
def test_bad_sandbox_ids(shared: Node, name: str) -> None:
    with shared.client() as c, pytest.raises(RuntimeFault) as e:
        create(c, name)
    assert (e.value.code, e.value.detail["field"]) == ("bad_request", "id")


@pytest.mark.same_everywhere
def test_an_id_exists_once(box: tuple[Client, str]) -> None:
    c, s = box
    with pytest.raises(RuntimeFault) as e:
        create(c, s)
    assert e.value.code == "exists"


@pytest.mark.same_everywhere
def test_hello_comes_first(shared: Node) -> None:
    with shared.client(hello=False) as c:
        with pytest.raises(RuntimeFault) as e:
            c.call("sandbox.list")
        assert e.value.code == "bad_request"
        with pytest.raises(RuntimeFault) as e:
            c.call("hello", protocol=99)
        assert e.value.code == "unsupported"


@pytest.mark.same_everywhere
def test_unknown_operation(shared: Node) -> None:
    with shared.client() as c, pytest.raises(RuntimeFault) as e:
        c.call("fly")
    assert e.value.code == "bad_request"


@pytest.mark.same_everywhere
def test_garbage_ends_only_its_own_connection(box: tuple[Client, str], shared: Node) -> None:
    c, s = box
    rnd = random.Random(7)
    for i in range(300):
        raw = socket.socket(socket.AF_UNIX)
        raw.settimeout(5)
        raw.connect(str(shared.socket))
        body = rnd.randbytes(rnd.randrange(0, 200))
        length = len(body) if i % 3 else rnd.randrange(1 << 32)
        try:
            raw.sendall(struct.pack(">I", length) + body)
            if i % 2:
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
        except (BrokenPipeError, ConnectionResetError):
            pass
        raw.close()
    assert c.call("run.start", **run_plan(s, "r", ["true"]))["exit_code"] == 0


@pytest.mark.same_everywhere
def test_a_client_that_does_not_read_hurts_only_itself(box: tuple[Client, str], shared: Node) -> None:
    c, s = box
    deaf = shared.client()
    for i in range(20):
        deaf.send("run.start", run_plan(s, f"d{i}", ["seq", "400000"], head_bytes=1 << 20, tail_bytes=1 << 20))
    for i in range(20):
        assert c.call("run.attach", sandbox=s, run=f"d{i}")["exit_code"] == 0
    assert c.call("run.start", **run_plan(s, "r", ["true"]))["exit_code"] == 0
    assert memory_kib(shared.runtime_pid()) < 60 << 10
    deaf.close()
    assert c.call("run.start", **run_plan(s, "q", ["true"]))["exit_code"] == 0


def test_a_chroot_is_named_where_no_layer_can_be_mounted(tmp_path: Path) -> None:
    assert BINARY is not None
    enter = f'mount --rbind / {tmp_path} && exec chroot {tmp_path} "$@"'
    node = Node(BINARY, before=("unshare", "-m", "--propagation", "private", "sh", "-c", enter, "sh"))
    try:
        with node.client() as c, pytest.raises(RuntimeFault, match="chroot") as caught:
            c.call("layer.mount", digest=LAYERS[0], path=str(image()))
        assert (caught.value.code, caught.value.detail["mechanism"]) == ("unsupported", "mount namespace")
    finally:
        node.stop()
