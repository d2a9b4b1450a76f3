"""The host's end of the control channel: programs in the guest, over a Unix socket to its serial port."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.vm.agent import (
    ERROR,
    EXEC,
    EXIT,
    HEADER,
    MAX_PAYLOAD,
    PING,
    PONG,
    SIGNAL,
    STDERR,
    STDIN,
    STDOUT,
    WAKE,
)

# What is kept of a program's output; a test that wants more reads it as it comes.
CAPTURE_BYTES = 64 << 20
STDIN_CHUNK = 1 << 16
DEFAULT_TIMEOUT_S = 120.0
MAX_CHANNEL = 0xFFFF
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASE_ENV = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root"}


class GuestError(RuntimeError):
    """The guest or its channel failed: never the outcome of a program in it."""


class GuestTimeout(GuestError):
    """A program in the guest was killed because it did not end in time."""


@dataclass(frozen=True)
class Result:
    exit_code: int  # 128 + signal for what was killed
    stdout: bytes
    stderr: bytes

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace")

    @property
    def tail(self) -> str:
        """The last lines of both streams, for the message of a failure."""
        return "\n".join((self.stdout + self.stderr).decode(errors="replace").splitlines()[-40:])


Frame = tuple[int, bytes]
OnOutput = Callable[[bytes], None]


class Channel:
    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(os.fspath(path))
        self._write = threading.Lock()
        self._numbers = itertools.count(1)
        self._queues: dict[int, queue.Queue[Frame | None]] = {0: queue.Queue()}
        self._closed = threading.Event()
        threading.Thread(target=self._read_loop, name="guest-channel", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # -- requests

    def wait_hello(self, timeout_s: float) -> dict[str, Any]:
        """The agent's own first frame, after a boot."""
        return self._pong(0, timeout_s)

    def ping(self, timeout_s: float) -> dict[str, Any]:
        with self._opened() as number:
            self._send(number, PING, b"")
            return self._pong(number, timeout_s)

    def wake(self, timeout_s: float) -> dict[str, Any]:
        """Gives a restored guest the time and randomness of its own."""
        request = {"time": time.time(), "seed": os.urandom(64).hex()}
        with self._opened() as number:
            self._send(number, WAKE, json.dumps(request).encode())
            return self._pong(number, timeout_s)

    def run(
        self,
        argv: Sequence[str] | str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        stdin: bytes = b"",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        on_output: OnOutput | None = None,
    ) -> Result:
        """Runs a program to its end. A str is a shell command; on timeout the program's session is killed."""
        command = ["/bin/sh", "-c", argv] if isinstance(argv, str) else list(argv)
        request = {"argv": command, "env": {**BASE_ENV, **(env or {})}, "cwd": cwd}
        with self._opened() as number:
            self._send(number, EXEC, json.dumps(request).encode())
            for at in range(0, len(stdin), STDIN_CHUNK):
                self._send(number, STDIN, stdin[at : at + STDIN_CHUNK])
            self._send(number, STDIN, b"")
            return self._collect(number, command, timeout_s, on_output)

    def _collect(self, number: int, command: Sequence[str], timeout_s: float, on_output: OnOutput | None) -> Result:
        kept = {STDOUT: bytearray(), STDERR: bytearray()}
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                kind, payload = self._next(number, deadline - time.monotonic())
            except GuestTimeout:
                self._send(number, SIGNAL, b"9")
                tail = bytes(kept[STDOUT] + kept[STDERR])[-4000:].decode(errors="replace")
                raise GuestTimeout(f"{command} did not end in {timeout_s:.0f} s; so far:\n{tail}") from None
            if kind == ERROR:
                raise GuestError(json.loads(payload)["message"])
            if kind == EXIT:
                code = json.loads(payload)["code"]
                return Result(code if code >= 0 else 128 - code, bytes(kept[STDOUT]), bytes(kept[STDERR]))
            if on_output:
                on_output(payload)
            kept[kind] += payload
            del kept[kind][:-CAPTURE_BYTES]

    # -- frames

    @contextlib.contextmanager
    def _opened(self) -> Any:
        number = next(self._numbers) % MAX_CHANNEL + 1
        self._queues[number] = queue.Queue()
        try:
            yield number
        finally:
            del self._queues[number]

    def _pong(self, number: int, timeout_s: float) -> dict[str, Any]:
        kind, payload = self._next(number, timeout_s)
        if kind != PONG:
            raise GuestError(f"expected an answer to a ping, got frame kind {kind}")
        answer: dict[str, Any] = json.loads(payload)
        return answer

    def _next(self, number: int, timeout_s: float) -> Frame:
        try:
            frame = self._queues[number].get(timeout=max(timeout_s, 0))
        except queue.Empty:
            raise GuestTimeout(f"the guest's agent said nothing for {timeout_s:.1f} s") from None
        if frame is None:
            self._queues[number].put(None)
            raise GuestError("the guest is gone: its control channel was closed")
        return frame

    def _send(self, number: int, kind: int, payload: bytes) -> None:
        try:
            with self._write:
                self._socket.sendall(HEADER.pack(len(payload), number, kind) + payload)
        except OSError as error:
            raise GuestError(f"the guest is gone: {error}") from error

    def _read_loop(self) -> None:
        stream = self._socket.makefile("rb", buffering=1 << 16)
        try:
            while header := stream.read(HEADER.size):
                length, number, kind = HEADER.unpack(header)
                if length > MAX_PAYLOAD:
                    break
                payload = stream.read(length)
                # A channel that was given up after a timeout may still get its late output.
                if target := self._queues.get(number):
                    target.put((kind, payload))
        except (OSError, ValueError):
            pass  # closed while reading; the waiters are told below
        for waiting in list(self._queues.values()):
            waiting.put(None)
