"""Requests of the HTTP API that are almost right, as bytes, WebSocket frames among them."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import socket
import tarfile
from typing import Any, Final

import msgspec

from dsec.wire import websocket
from tests.kit import mutations

ANSWER_S: Final = 0.3
KEPT_BYTES: Final = 1 << 20
# A fault of the node's own, however it is told: as an answer, in a stream, as the end of a WebSocket.
FAULTS: Final = (
    re.compile(rb"^HTTP/1\.1 500 ", re.M),
    re.compile(rb'"code": ?"internal"'),
    re.compile(rb"\xa4code\xa8internal"),
    # With its reason: the code alone is what a client has said, and is told back.
    re.compile(rb"\x88[\x02-\x7d]\x03\xf3the node failed"),
)


def request(method: str, path: str, body: bytes = b"", *headers: str, chunked: bool = False) -> bytes:
    """One request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: node", *headers]
    if chunked:
        lines.append("Transfer-Encoding: chunked")
        half = len(body) // 2
        body = (
            b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]) if part) + b"0\r\n\r\n"
        )
    elif body or method in ("POST", "PUT"):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def archive() -> bytes:
    """A small tree."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in (("d/a", b"content"), ("x" * 120, b"long")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


# Method, path below the sandbox, what its body holds.
Asked = tuple[str, str, Any]


def asked(process: str) -> list[Asked]:
    """Calls that all can be done; none makes or ends a sandbox."""
    run = {"command": "echo out; echo err >&2", "env": {"A": "1"}, "cwd": "/", "timeout_s": 5}
    return [
        ("GET", "", None),
        ("GET", "/usage", None),
        ("GET", "/events?since=0", None),
        ("GET", "/diff?path=/tmp&limit=10", None),
        ("POST", "/run", run),
        ("POST", "/run?stream=1", run),
        ("POST", "/processes", {"command": ["true"], "stdin": False}),
        ("GET", "/processes", None),
        ("GET", f"/processes/{process}", None),
        ("GET", f"/processes/{process}/output?stdout_offset=0&follow=0&lossy=1", None),
        ("GET", f"/processes/{process}/output?raw=1&offset=0", None),
        ("POST", f"/processes/{process}/stdin?offset=0", b"input\n"),
        ("POST", f"/processes/{process}/wait?timeout_s=0", None),
        ("POST", f"/processes/{process}/kill", {"signal": 28}),
        ("POST", f"/processes/{process}/resize", {"rows": 10, "cols": 20}),
        ("GET", "/sessions", None),
        ("POST", "/extend", {"seconds": 1.5}),
        ("PUT", "/labels", {"labels": {"a": "b"}}),
        ("PUT", "/network", {"pypi": False}),
        ("GET", "/files?path=/tmp/a&offset=0&length=10", None),
        ("PUT", "/files?path=/tmp/a&mode=644&parents=1", b"content"),
        ("POST", "/files:append?path=/tmp/b", b"more"),
        ("GET", "/files:stat?path=/tmp&follow=1", None),
        ("GET", "/files:list?path=/tmp&limit=3", None),
        ("POST", "/files:mkdir?path=/tmp/d/e&parents=1&mode=755", None),
        ("POST", "/files:remove?path=/tmp/d&recursive=1", None),
        ("POST", "/files:move?source=/tmp/a&target=/tmp/c&replace=1", None),
        ("POST", "/files:chmod?path=/tmp/c&mode=600", None),
        ("GET", "/files:tree?path=/tmp", None),
        ("PUT", "/files:tree?path=/tmp/t&parents=1", archive()),
        ("GET", "/files:watch?path=/tmp", None),
    ]


def attached(sandbox: str, process: str) -> tuple[bytes, list[bytes]]:
    """A handshake, and frames that may follow it."""
    hand = request(
        "GET",
        f"/v1/sandboxes/{sandbox}/processes/{process}/attach?stdout_offset=0&lossy=1",
        b"",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {websocket.new_key().decode()}",
        "Sec-WebSocket-Protocol: dsec.v1",
    )
    controls = ({"locate": True}, {"signal": 28, "key": "k"}, {"resize": {"rows": 5, "cols": 6}}, {"eof": 1 << 40})
    said = [b"\x03" + json.dumps(control).encode() for control in controls]
    said += [b"\0" + (0).to_bytes(8, "big") + b"input", b"\0" + (5).to_bytes(8, "big")]
    frames = [websocket.masked(websocket.BINARY, word) for word in said]
    frames += [websocket.masked(websocket.PING, b"?"), websocket.masked(websocket.PONG, b"")]
    return hand, [*frames, websocket.masked(websocket.CLOSE, websocket.closing(1000))]


class Fuzzer:
    """Makes up what is sent of calls on one sandbox."""

    def __init__(self, rnd: random.Random, sandbox: str, process: str) -> None:
        self._rnd = rnd
        self._sandbox = sandbox
        self._process = process
        self._calls = asked(process)

    def whole(self) -> list[bytes]:
        """Each call as it should be."""
        return [self._call(one, spoil=False) for one in self._calls]

    def sent(self) -> tuple[bytes, bytes]:
        """Some bytes, and those that are sent once the first are answered."""
        rnd = self._rnd
        if rnd.random() < 0.3:
            hand, frames = self._attached()
            if rnd.random() < 0.1:  # not as it ought to be: all at once
                return hand + frames, b""
            return (mutations.raw(rnd, hand), frames) if rnd.random() < 0.2 else (hand, self._spoiled(frames))
        return self._spoiled(
            b"".join(self._call(rnd.choice(self._calls), spoil=True) for _ in range(rnd.randrange(1, 4)))
        ), b""

    def _spoiled(self, sent: bytes) -> bytes:
        rnd = self._rnd
        if rnd.random() < 0.3:
            sent = mutations.raw(rnd, sent)
        return sent[: rnd.randrange(len(sent) + 1)] if rnd.random() < 0.2 else sent

    def _call(self, one: Asked, *, spoil: bool) -> bytes:
        method, path, body = one
        rnd = self._rnd
        kind = rnd.randrange(6) if spoil else 5
        headers = []
        if isinstance(body, dict):
            if kind < 3:
                body = mutations.value(rnd, body)
            packed = spoil and rnd.random() < 0.5
            headers.append(f"Content-Type: application/{'msgpack' if packed else 'json'}")
            body = msgspec.msgpack.encode(body) if packed else json.dumps(body, default=repr).encode()
            if kind == 3:
                body = mutations.raw(rnd, body)
        if spoil and rnd.random() < 0.3:
            headers.append(f"Accept: application/{rnd.choice(('msgpack', 'json', 'x-ndjson', 'vnd.dsec.msgpack-seq'))}")
        if spoil and rnd.random() < 0.3:
            headers.append(f"Idempotency-Key: {rnd.choice(('k', '', 'x' * 129, 'a b', str(rnd.random())))}")
        whole = f"/v1/sandboxes/{self._sandbox}{path}"
        if kind == 4:
            at = rnd.randrange(len(whole))
            whole = (
                whole[:at] + rnd.choice(("%00", "%ff", "/", "..", "?", "&", "=", "9" * 30, "-1", "")) + whole[at + 1 :]
            )
        if not spoil:
            headers.append("Connection: close")
        return request(method, whole, body or b"", *headers, chunked=spoil and rnd.random() < 0.2)

    def _attached(self) -> tuple[bytes, bytes]:
        rnd = self._rnd
        hand, frames = attached(self._sandbox, self._process)
        said = [rnd.choice(frames) for _ in range(rnd.randrange(8))]
        return hand, b"".join(mutations.raw(rnd, frame) if rnd.random() < 0.2 else frame for frame in said)


def exchange(path: str, first: bytes, then: bytes = b"") -> bytes:
    """What comes for some bytes, until nothing does for a moment."""
    sock = socket.socket(socket.AF_UNIX)
    with sock, contextlib.suppress(OSError):
        sock.connect(path)
        sock.sendall(first)
        got = answer(sock, b"\r\n\r\n", ANSWER_S) if then else b""
        with contextlib.suppress(OSError):
            sock.sendall(then)
            sock.shutdown(socket.SHUT_WR)
        return got + answer(sock, None, ANSWER_S)
    return b""


def answer(sock: socket.socket, until: bytes | None, patience_s: float) -> bytes:
    """What comes on a connection, until something is in it or nothing comes."""
    sock.settimeout(patience_s)
    got = bytearray()
    with contextlib.suppress(OSError):
        while (until is None or until not in got) and (data := sock.recv(1 << 16)):
            got += data[: KEPT_BYTES - len(got)]
    return bytes(got)


def fault_in(got: bytes) -> bytes | None:
    """The place in an answer that says that the node is at fault."""
    for fault in FAULTS:
        if found := fault.search(got):
            return got[max(found.start() - 200, 0) : found.end() + 600]
    return None
