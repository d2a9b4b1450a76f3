"""Bytes that are almost right, at the agent's socket: it lives, is never at fault, and serves the next one rightly.

For some seconds; `DSEC_FUZZ_S=3600` for an hour. A failure says the seed it can be repeated with.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

import dsec
from tests.kit import httpfuzz, mutations
from tests.kit.agent import Agent
from tests.kit.httpfuzz import Fuzzer

pytestmark = [pytest.mark.contract, pytest.mark.same_everywhere, pytest.mark.timeout(6 * 3600)]

# Of what is kept on purpose (results under their keys, events) there is a bounded amount.
RSS_MAX_BYTES = 400 << 20
DESCRIPTORS_MAX = 300
CHECKED_EVERY = 10
# Only ends what would never end.
PATIENCE_S = 60.0


def alive(path: Path, field: str) -> int:
    """A number of a process's status."""
    line = next(line for line in (path / "status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def fuzz(url: str, pid: int) -> None:
    """Throws bytes at an agent until the time is over."""
    seed = mutations.seed()
    rnd = random.Random(seed)
    path, process = url.removeprefix("unix://"), Path(f"/proc/{pid}")
    with dsec.Client(url) as client, client.create(disk_mib=64) as fuzzed, client.create(disk_mib=64) as beside:
        fuzzed.files.write("/tmp/a", "there")
        attached = fuzzed.spawn(["cat"], stdin=True)
        fuzzer = Fuzzer(rnd, fuzzed.id, attached.id)
        rounds = 0
        for _ in mutations.until_over(rnd):
            sent = fuzzer.sent()
            got = httpfuzz.exchange(path, *sent)
            fault = httpfuzz.fault_in(got)
            assert fault is None, f"seed {seed}: {sent!r} was answered with {fault!r}"
            assert process.exists(), f"seed {seed}: the agent died of {sent!r}"
            rounds += 1
            if rounds % CHECKED_EVERY == 0:
                beside.files.write("/tmp/own", str(rounds))
                assert beside.files.read_text("/tmp/own") == str(rounds), f"seed {seed}: {sent!r}"
                assert beside.run(["true"]).exit_code == 0, f"seed {seed}: {sent!r}"
        print(f"\nseed {seed}: {rounds} rounds")
        assert beside.info().state == "running"
    assert len(list((process / "fd").iterdir())) < DESCRIPTORS_MAX, f"seed {seed}: descriptors stay"
    assert alive(process, "VmRSS") << 10 < RSS_MAX_BYTES, f"seed {seed}: memory stays"


def whole_ones_are_done(url: str) -> None:
    """What is made almost right has to be right before: else all that is tried is how it is refused."""
    path = url.removeprefix("unix://")
    with dsec.Client(url) as client, client.create(disk_mib=64) as sbx:
        sbx.files.write("/tmp/a", "there")
        program = sbx.spawn(["cat"], stdin=True)
        for sent in Fuzzer(random.Random(0), sbx.id, program.id).whole():
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
                sock.sendall(sent)
                got = httpfuzz.answer(sock, b"\r\n\r\n", PATIENCE_S)
            status = got.split(b" ")[1:2]
            # There is no terminal to have another size.
            assert status in ([b"200"], [b"201"]) or b"/resize" in sent, (sent, got)
        hand, frames = httpfuzz.attached(sbx.id, program.id)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            sock.sendall(hand)
            assert httpfuzz.answer(sock, b"started", PATIENCE_S).startswith(b"HTTP/1.1 101 ")
            sock.sendall(frames[1])
            assert b'"done":"k"' in httpfuzz.answer(sock, b'"done":"k"', PATIENCE_S)


def test_requests_that_are_almost_right_hurt_nobody(agent: Agent) -> None:
    fuzz(agent.url, agent.pid)


def test_before_they_are_changed_they_are_right(agent: Agent) -> None:
    whole_ones_are_done(agent.url)
