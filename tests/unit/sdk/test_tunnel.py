"""ssh:// URLs: the command line, failures, and the whole way through a real sshd where there is one."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import dsec
from dsec.sdk.target import parse
from dsec.sdk.tunnel import command
from tests.kit.scripted import Server
from tests.unit.sdk.conftest import INFO, PATIENT, Kit, get

Serve = Callable[..., Server]


def test_command_line() -> None:
    line = command(parse("ssh://me@host:2222/run/x.sock"), "/tmp/l.sock")
    assert line[:7] == ["ssh", "-N", "-T", "-L", "/tmp/l.sock:/run/x.sock", "-p", "2222"]
    assert line[-4:] == ["-l", "me", "--", "host"]
    assert "BatchMode=yes" in line
    assert command(parse("ssh://host"), "l")[4] == "l:/run/dsec/api.sock"


def fake_ssh(directory: Path, script: str) -> str:
    path = directory / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path.parent)


def test_no_ssh_is_refused(kit: Kit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    async def body() -> None:
        with pytest.raises(dsec.Unsupported, match="OpenSSH"):
            await get(kit.client("ssh://host").node())

    kit.run(body())


def test_what_ssh_says_is_passed_on(kit: Kit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{fake_ssh(tmp_path, 'echo Permission denied >&2; exit 255')}:{os.environ['PATH']}")

    async def body() -> None:
        with pytest.raises(dsec.NodeUnreachable, match="code 255: Permission denied"):
            await get(kit.client("ssh://host").node())

    kit.run(body())


def test_ssh_that_hangs_is_ended(kit: Kit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    monkeypatch.setenv("PATH", f"{fake_ssh(tmp_path, f'echo $$ >{note}; exec sleep 600')}:{os.environ['PATH']}")

    async def body() -> None:
        with pytest.raises(dsec.NodeUnreachable, match="no tunnel"):
            await get(kit.client("ssh://host", timing=replace(PATIENT, connect_s=1.0)).node())

    kit.run(body())
    assert not Path(f"/proc/{note.read_text().strip()}").exists()


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """An sshd of the test's own; gives its port."""
    binary = shutil.which("sshd") or "/usr/sbin/sshd"
    if not os.access(binary, os.X_OK) or shutil.which("ssh") is None:
        pytest.skip("no OpenSSH server and client on this machine")
    for name in ("host", "user"):
        line = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(line, check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    config = tmp_path / "sshd_config"
    config.write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/user.pub\n"
        f"StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\nPasswordAuthentication no\n"
    )
    # Debian's sshd wants this directory; under systemd the unit makes it.
    Path("/run/sshd").mkdir(exist_ok=True)
    options = f"-i {tmp_path}/user -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no -F none"
    real = shutil.which("ssh")
    wrapper = fake_ssh(tmp_path, f'exec {real} {options} "$@"')
    monkeypatch.setenv("PATH", f"{wrapper}:{os.environ['PATH']}")
    with subprocess.Popen([binary, "-D", "-e", "-f", str(config)], stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        yield port
        process.terminate()


def children() -> list[str]:
    done = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True, check=False
    )
    return [line for line in done.stdout.splitlines() if line.startswith("ssh ") or "/ssh " in line]


@pytest.mark.skipif(os.geteuid() != 0, reason="an sshd of one's own needs root (privilege separation)")
def test_through_a_real_sshd(kit: Kit, serve: Serve, sshd: int) -> None:
    server = serve(lambda request, wire: wire.answer(INFO))
    url = f"ssh://{getpass.getuser()}@127.0.0.1:{sshd}{server.path}"

    async def body() -> None:
        client = kit.client(url)
        assert (await get(client.get("x"))).id == INFO["id"]
        # The tunnel breaks: the next call makes another.
        client.transport._tunnel._process.kill()
        client.transport._tunnel._process.wait()
        assert (await get(client.get("x"))).id == INFO["id"]
        await get(client.close())

    kit.run(body())
    assert [request.path for request in server.requests] == ["/v1/sandboxes/x"] * 2
    assert children() == []
