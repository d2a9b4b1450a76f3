"""The file helper is inside: no path leads it to what the sandbox cannot reach, and it is who it was asked to be.

Each is tried with a helper that stays outside, too, as root of the machine, which only puts the way to the sandbox's
root before each path: there it succeeds, so it is the confinement that keeps it from succeeding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtfiles import Files
from tests.kit.rtnode import box_in, create, make_node, needs, sh

pytestmark = [pytest.mark.security, *needs]

ON = "confined"
NOBODY = "65534"
# Root of the machine may look at what we see.
MACHINE = f"/proc/{os.getpid()}/root"


@pytest.fixture(scope="module", params=[ON, "outside"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    made = make_node(env={} if request.param == ON else {"DSEC_NATIVE_DISABLE": "files.confined"})
    yield made
    made.stop()


@pytest.fixture
def box(node: Node) -> Iterator[tuple[Client, str]]:
    with box_in(node) as made:
        yield made


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the machine, which root there may read."""
    made = tmp_path / "secret"
    made.write_bytes(b"the machine's")
    made.chmod(0o600)
    return made


def confined(node: Node) -> bool:
    return "DSEC_NATIVE_DISABLE" not in node.env


def run(c: Client, box: str, script: str) -> None:
    result = c.call("run.start", **run_plan(box, f"r{os.urandom(4).hex()}", sh(script)))
    assert result["exit_code"] == 0, result


def refused(files: Files, path: bytes) -> None:
    with pytest.raises(RuntimeFault) as caught:
        files.read(path)
    assert caught.value.code in {"file_not_found", "permission_denied"}


def test_a_link_to_a_file_of_the_machine_is_not_followed(node: Node, box: tuple[Client, str], secret: Path) -> None:
    c, name = box
    run(c, name, f"ln -s {MACHINE}{secret} /out; ln -s {MACHINE}{secret.parent} /dir")
    with Files(node.socket, name) as files:
        for path in (b"/out", b"/dir/secret", f"/dir/../{secret.parent.name}/secret".encode()):
            if confined(node):
                refused(files, path)
            else:
                assert files.read(path) == b"the machine's"


def test_nothing_is_written_through_one(node: Node, box: tuple[Client, str], secret: Path) -> None:
    c, name = box
    run(c, name, f"ln -s {MACHINE}{secret} /out; ln -s {MACHINE}{secret.parent} /dir")
    with Files(node.socket, name) as files:
        if confined(node):
            for path in (b"/out", b"/dir/new"):
                with pytest.raises(RuntimeFault) as caught:
                    files.write(path, b"theirs")
                assert caught.value.code in {"file_not_found", "permission_denied"}
            assert secret.read_bytes() == b"the machine's"
            assert os.listdir(secret.parent) == ["secret"]
        else:
            files.write(b"/out", b"theirs")
            files.write(b"/dir/new", b"theirs")
            assert (secret.read_bytes(), (secret.parent / "new").read_bytes()) == (b"theirs", b"theirs")


def test_another_sandboxs_files_are_not_there(node: Node, box: tuple[Client, str]) -> None:
    c, name = box
    other = f"{name}-other"
    create(c, other)
    try:
        run(c, other, "echo -n theirs > /secret")
        init = c.call("sandbox.get", id=other)["init_pid"]
        run(c, name, f"ln -s /proc/{init}/root/secret /out")
        with Files(node.socket, name) as files:
            if confined(node):
                refused(files, b"/out")
            else:
                assert files.read(b"/out") == b"theirs"
    finally:
        c.call("sandbox.stop", id=other)


def test_devices_of_the_machine_are_not_there(node: Node, box: tuple[Client, str]) -> None:
    c, name = box
    run(c, name, f"ln -s {MACHINE}/dev/null /device")
    with Files(node.socket, name) as files:
        if confined(node):
            with pytest.raises(RuntimeFault) as caught:
                files.call("stat", path=b"/device", follow=True)
            assert caught.value.code in {"file_not_found", "permission_denied"}
        else:
            assert files.call("stat", path=b"/device", follow=True)


def test_it_is_the_user_it_was_asked_to_be(node: Node, box: tuple[Client, str]) -> None:
    c, name = box
    run(c, name, "echo -n roots > /root/f; chmod 600 /root/f; mkdir -m 1777 /all")
    with Files(node.socket, name, user=NOBODY) as files:
        if confined(node):
            refused(files, b"/root/f")
            files.write(b"/all/f", b"x")
            run(c, name, f"test $(stat -c %u /all/f) = {NOBODY}")
        else:
            assert files.read(b"/root/f") == b"roots"
