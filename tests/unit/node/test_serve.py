"""The process: flags, lock, signals, TCP with keys."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

import dsec
from dsec.model.errors import InvalidSpec
from dsec.node.config import parse

SOURCE = Path(__file__).resolve().parents[3] / "src"


@pytest.mark.parametrize(
    "flags",
    [
        ["--listen", "0.0.0.0:7700"],
        ["--listen", "localhost:7700"],
        ["--listen", "[::]:7700"],
        ["--tls-cert", "/x"],
        ["--tls-cert", "/no/such/file", "--tls-key", "/no/such/file"],
        ["--node", "No_Good"],
        ["--origin", "ui.example"],
        ["--origin", "https://ui.example/"],
        ["--origin", "null"],
        ["--origin", "https://ui.example:99999"],
        ["--origin", "https://*.example"],
        ["--overcommit", "gold=2"],
        ["--overcommit", "memory_mib=0"],
        ["--overcommit", "memory_mib=nan"],
    ],
)
def test_what_is_not_allowed_is_refused(flags):
    with pytest.raises(InvalidSpec):
        parse(flags)


def test_flags_and_environment(monkeypatch):
    monkeypatch.setenv("DSEC_RUN_DIR", "/r")
    monkeypatch.setenv("DSEC_STATE_DIR", "/s")
    monkeypatch.setenv("DSEC_CGROUP", "c")
    monkeypatch.setenv("DSEC_NODE", "n7")
    config = parse(["--listen", "[::1]:80", "--overcommit", "memory_mib=4"])
    assert (str(config.run_dir), str(config.state_dir), config.cgroup, config.node) == ("/r", "/s", "c", "n7")
    assert (config.listen, config.overcommit, config.backends) == (("::1", 80), {"memory_mib": 4.0}, ("container",))
    assert parse(["--run-dir", "/q"]).socket == Path("/q/api.sock")
    assert parse(["--origin", "HTTPS://ui.example:8443", "--origin", "http://[::1]:80"]).origins == (
        "https://ui.example:8443",
        "http://[::1]",
    )
    # As a browser writes it.
    assert parse(["--origin", "https://ui:443", "--origin", "http://ui:443"]).origins == ("https://ui", "http://ui:443")


async def start(directory: Path, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "dsec.node", "--backend", "fake", "--node", "n1"),
        *("--run-dir", str(directory / "run"), "--state-dir", str(directory / "state")),
        *flags,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stderr=asyncio.subprocess.PIPE,
    )


async def answers(path: Path) -> None:
    """Wait until somebody listens: the file is there a moment earlier."""
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_unix_connection(str(path))
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return


def test_one_agent_at_a_time_and_sigterm_ends_it_cleanly(tmp_path):
    async def main() -> None:
        first = await start(tmp_path)
        path = tmp_path / "run" / "api.sock"
        await answers(path)
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http:
            async with http.get("http://node/v1/health") as answer:
                assert (await answer.json())["status"] == "ok"
            second = await start(tmp_path)
            _, said = await second.communicate()
            assert second.returncode == 1 and b"locked" in said and str(first.pid).encode() in said
            async with http.get("http://node/v1/node") as answer:
                assert answer.status == 200
        first.send_signal(signal.SIGTERM)
        _, said = await first.communicate()
        assert first.returncode == 0 and not path.exists(), said
        assert b'node n1 stops; it has no sandboxes"' in said
        third = await start(tmp_path)  # what the first one left lies in nobody's way
        await answers(path)
        third.kill()
        await third.wait()

    asyncio.run(main())


def test_a_key_is_made_for_tcp(tmp_path):
    async def main() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = await start(tmp_path, "--listen", f"127.0.0.1:{port}")
        key_file = tmp_path / "state" / "api-key"
        await answers(tmp_path / "run" / "api.sock")
        assert key_file.stat().st_mode & 0o777 == 0o600
        headers = {"Authorization": f"Bearer {key_file.read_text().strip()}"}
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/v1/node", headers=headers) as answer:
                assert answer.status == 200
            async with http.get(f"http://127.0.0.1:{port}/v1/node") as answer:
                assert answer.status == 401
        process.terminate()
        await process.communicate()
        assert process.returncode == 0

    asyncio.run(main())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls_opens_other_addresses(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    subprocess.run([*made, *subject, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)

    async def main() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = await start(tmp_path, "--listen", f"0.0.0.0:{port}", "--tls-cert", str(cert), "--tls-key", str(key))
        await answers(tmp_path / "run" / "api.sock")
        context = ssl.create_default_context(cafile=str(cert))
        async with aiohttp.ClientSession() as http:
            async with http.get(f"https://127.0.0.1:{port}/v1/health", ssl=context) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientError):
                await http.get(f"http://127.0.0.1:{port}/v1/health")
        # Nobody knows who signed it: both clients say what to do.
        async with dsec.AsyncClient(f"https://127.0.0.1:{port}") as client:
            with pytest.raises(dsec.NodeUnreachable, match="SSL_CERT_FILE names"):
                await client.node()
        blocking = dsec.Client(f"https://127.0.0.1:{port}")
        with pytest.raises(dsec.NodeUnreachable, match="SSL_CERT_FILE names"):
            await asyncio.to_thread(blocking.node)
        blocking.close()
        process.terminate()
        await process.communicate()

    asyncio.run(main())
