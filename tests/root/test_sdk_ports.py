"""Ports of real sandboxes from outside: `expose`, by clients that know nothing of us."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest

import dsec
from tests.kit.home import Home

SERVER = r"""
import http.server, json, socketserver, sys
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = json.dumps({"path": self.path, "headers": {k.lower(): v for k, v in self.headers.items()}}).encode()
        self.answer(body)
    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["content-length"])))
    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *a): pass
class S(socketserver.ThreadingMixIn, http.server.HTTPServer):
    address_family = __import__("socket").AF_INET6 if sys.argv[2] == "::1" else __import__("socket").AF_INET
    daemon_threads = True
S((sys.argv[2], int(sys.argv[1])), H).serve_forever()
"""
READY = """until python3 -c 'import socket; socket.create_connection(("{}", {}))' 2>&-; do :; done"""


def listen(sbx: dsec.Sandbox, port: int, address: str = "127.0.0.1") -> dsec.Process:
    process = sbx.spawn(["python3", "-c", SERVER, str(port), address])
    sbx.run(READY.format(address, port), check=True, timeout_s=60)
    return process


def get(exposed: dsec.Exposed, path: str = "/", **headers: str) -> dict[str, dict[str, str]]:
    request = urllib.request.Request(exposed.origin + path, headers=exposed.headers | headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, dict[str, str]] = json.load(answer)
        return found


def status(url: str, headers: dict[str, str]) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_a_server_inside_is_reached_by_its_url(sbx: dsec.Sandbox) -> None:
    exposed = sbx.expose(8000)
    assert status(exposed.origin, exposed.headers) == 502  # nothing listens yet
    listen(sbx, 8000)
    seen = get(exposed, "/a?b=c", Authorization="Bearer of-the-program")
    assert seen["path"] == "/a?b=c"
    assert seen["headers"]["authorization"] == "Bearer of-the-program" and exposed.token not in str(seen)
    parts = urlsplit(exposed.url)
    assert (parts.username, parts.password) == ("dsec", exposed.token)
    basic = base64.b64encode(f"dsec:{exposed.token}".encode()).decode()
    assert status(exposed.origin, {"Authorization": f"Basic {basic}"}) == 200
    assert status(exposed.origin, {}) == status(exposed.origin, {"X-Dsec-Token": "x"}) == 401
    assert sbx.expose(8000) == exposed and sbx.exposed() == [exposed]


def test_large_bodies_and_many_at_once(sbx: dsec.Sandbox) -> None:
    listen(sbx, 8000)
    exposed = sbx.expose(8000)
    data = os.urandom(1 << 20) * 8

    def post(number: int) -> bool:
        link = http.client.HTTPConnection(urlsplit(exposed.origin).netloc, timeout=60)
        link.request("POST", f"/{number}", data, exposed.headers)
        return link.getresponse().read() == data

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(post, range(16)))


def test_what_listens_on_ipv6_alone(sbx: dsec.Sandbox) -> None:
    listen(sbx, 8000, "::1")
    assert get(sbx.expose(8000))["path"] == "/"


def test_raw_tcp_inside(sbx: dsec.Sandbox) -> None:
    script = "import socket\ns = socket.create_server(('127.0.0.1', 7))\nprint('up', flush=True)\nc, _ = s.accept()\n"
    script += "c.sendall(b'who? ')\nd = b''\nwhile x := c.recv(99): d += x\nc.sendall(d[::-1]); c.close()"
    assert sbx.spawn(["python3", "-c", script]).wait_for("up", 60) == "up"
    exposed = sbx.expose(7)
    host, port = urlsplit(exposed.origin).netloc.split(":")
    with socket.create_connection((host, int(port)), 60) as sock:
        sock.sendall(f"CONNECT sandbox:7 HTTP/1.1\r\nX-Dsec-Token: {exposed.token}\r\n\r\n".encode())
        got = b""
        while not got.endswith(b"who? "):
            got += sock.recv(99)
        sock.sendall(b"\0raw")
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(99) == b"war\0"


def test_each_sandbox_has_an_origin_of_its_own_and_nothing_else(home: Home, sbx: dsec.Sandbox) -> None:
    listen(sbx, 8000)
    listen(sbx, 8001)
    exposed = sbx.expose(8000)
    with home.client() as client, client.create(disk_mib=64) as other:
        theirs = other.expose(8000)
        assert urlsplit(theirs.origin).hostname != urlsplit(exposed.origin).hostname
        assert status(theirs.origin, exposed.headers) == 401 == status(exposed.origin, theirs.headers)
        assert status(theirs.origin, theirs.headers) == 502  # what listens is the other's
        # From inside nobody comes to any of them: its loopback is its own.
        inside = f"import socket; socket.create_connection({tuple(urlsplit(exposed.origin).netloc.split(':'))!r}, 2)"
        assert other.run(["python3", "-c", inside]).exit_code == 1
    assert status(exposed.origin, exposed.headers) == 200


def test_beside_a_policy_for_what_goes_out(home: Home) -> None:
    with home.client() as client, client.create(disk_mib=64, network={"pypi": True}) as made:
        listen(made, 8000)
        exposed = made.expose(8000)
        assert get(exposed)["path"] == "/"
        made.set_network({})
        assert get(exposed)["path"] == "/"


def test_a_policy_may_name_what_may_be_exposed(home: Home) -> None:
    policy = dsec.Policy(expose=(8000, 8001), phases={"agent": dsec.Part(expose=(8001,))})
    with home.client() as client, client.create(disk_mib=64, network=policy) as made:
        listen(made, 8000)
        listen(made, 8001)
        first, second = made.expose(8000), made.expose(8001)
        with pytest.raises(dsec.Denied, match="port 8002"):
            made.expose(8002)
        made.patch_network({"version": 1, "phase": "agent"})
        with pytest.raises(OSError, match="refused"):
            get(first)
        assert made.exposed() == [second] and get(second)["path"] == "/"
        with pytest.raises(dsec.Denied):
            made.expose(8000)
        os.kill(home.agent(), signal.SIGKILL)
        home.dsec("up")
        assert made.exposed() == [second] and get(second)["path"] == "/"
        made.set_network({})
        assert made.expose(8000).token != first.token


def test_closed_it_is_gone_with_its_connections(sbx: dsec.Sandbox) -> None:
    listen(sbx, 8000)
    exposed = sbx.expose(8000)
    host, port = urlsplit(exposed.origin).netloc.split(":")
    with socket.create_connection((host, int(port)), 60) as held:
        held.sendall(f"CONNECT x:8000 HTTP/1.1\r\nX-Dsec-Token: {exposed.token}\r\n\r\n".encode())
        assert held.recv(99).startswith(b"HTTP/1.1 200 ")
        sbx.unexpose(8000)
        with pytest.raises(ConnectionError):
            assert held.recv(99) == b""
            raise ConnectionResetError
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), 60)
    assert sbx.exposed() == []
    with pytest.raises(dsec.NotFound):
        sbx.unexpose(8000)
    again = sbx.expose(8000)
    assert again.token != exposed.token and status(again.origin, exposed.headers) == 401


def test_it_ends_with_its_sandbox(home: Home) -> None:
    with home.client() as client, client.create(disk_mib=64) as made:
        exposed = made.expose(8000)
        made.stop()
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(exposed.origin, timeout=60)
        with pytest.raises(dsec.SandboxLost):
            made.expose(8001)
        assert made.exposed() == []


def test_it_is_there_again_when_the_agent_is(home: Home, sbx: dsec.Sandbox) -> None:
    listen(sbx, 8000)
    exposed = sbx.expose(8000)
    os.kill(home.agent(), signal.SIGKILL)
    home.dsec("up")
    assert get(exposed)["path"] == "/"
    assert sbx.exposed() == [exposed]


def test_from_the_command_line(home: Home, sbx: dsec.Sandbox) -> None:
    url = home.dsec("expose", sbx.id, "8000").decode().strip()
    (exposed,) = sbx.exposed()
    assert url == exposed.url
    assert home.dsec("expose", sbx.id).decode().splitlines()[1].split() == ["8000", url]
    assert json.loads(home.dsec("expose", sbx.id, "8000", "--json"))["token"] == exposed.token
    home.dsec("expose", sbx.id, "8000", "--close")
    assert sbx.exposed() == []
    assert "is not exposed" in home.dsec_says("expose", sbx.id, "8000", "--close", code=1)


@pytest.mark.parametrize("port", [0, 65536, -1, True, "8000", 1.0, None])
def test_what_is_no_port(sbx: dsec.Sandbox, port: object) -> None:
    for call in (sbx.expose, sbx.unexpose):
        with pytest.raises(dsec.InvalidSpec, match="1 to 65535"):
            call(port)  # type: ignore[arg-type]  # what somebody may give


def test_no_more_than_so_many(sbx: dsec.Sandbox) -> None:
    for port in range(1, 65):
        sbx.expose(port)
    with pytest.raises(dsec.Exhausted):
        sbx.expose(65)
    sbx.unexpose(1)
    assert sbx.expose(65).port == 65
