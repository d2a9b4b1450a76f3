"""A node whose sandbox is this machine: real programs on real terminals behind a scripted server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from tests.kit.ptyuser import PtyUser
from tests.kit.scripted import Request, Server, Wire

COMMAND = [sys.executable, "-c", "import sys; from dsec.cli.main import main; sys.exit(main())"]
SANDBOX = "sbx-n1-aaaaaaaaaaaaa"
INFO = {"id": SANDBOX, "node": "n1", "state": "running", "backend": "container", "spec": {}}


# As a node sends it: in pieces, each far below the largest frame.
PIECE_BYTES = 256 << 10


class LocalProgram:
    """One program, on a terminal or on pipes."""

    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        self.id = name
        self.tty = spec.get("tty") is not None
        self.out: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
        self.taken = 0
        self.result: dict[str, object] | None = None
        self.changed = threading.Condition()
        command = spec.get("command")
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command or ())
        env = {"PATH": os.environ["PATH"], **spec.get("env", {})}
        self.input, outputs = self._start(argv, env, spec)
        readers = [threading.Thread(target=self._read, args=(s, fd), daemon=True) for s, fd in outputs.items()]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._reap, args=(readers,), daemon=True).start()

    def _start(self, argv: list[str], env: dict[str, str], spec: dict[str, Any]) -> tuple[int, dict[int, int]]:
        if self.tty:
            master, slave = os.openpty()
            _set_size(master, spec["tty"])
            actions = [(os.POSIX_SPAWN_DUP2, slave, fd) for fd in (0, 1, 2)] + [(os.POSIX_SPAWN_CLOSE, master)]
            # A session whose first open of a terminal makes that its own.
            setup = ["/usr/bin/setsid", "-c", *argv]
            self.pid = os.posix_spawnp(setup[0], setup, env, file_actions=actions)
            os.close(slave)
            return master, {1: master}
        pipes = [os.pipe() for _ in range(3)]
        inner, outer = [pipes[0][0], pipes[1][1], pipes[2][1]], [pipes[0][1], pipes[1][0], pipes[2][0]]
        actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(inner)]
        self.pid = os.posix_spawnp(argv[0], argv, env, file_actions=actions, setsid=True)
        for fd in inner:
            os.close(fd)
        return outer[0], {1: outer[1], 2: outer[2]}

    def _read(self, stream: int, fd: int) -> None:
        while True:
            try:
                data = os.read(fd, 65536)
            except OSError:
                data = b""
            if not data:
                return
            with self.changed:
                self.out[stream] += data
                self.changed.notify_all()

    def _reap(self, readers: list[threading.Thread]) -> None:
        _, status = os.waitpid(self.pid, 0)
        for reader in readers:
            reader.join()
        code = os.waitstatus_to_exitcode(status)
        with self.changed:
            self.result = {"process_id": self.id, "exit_code": code if code >= 0 else 128 - code}
            self.result |= {"cause": "exited"} if code >= 0 else {"cause": "signalled", "signal": -code}
            self.changed.notify_all()

    def value(self) -> dict[str, object]:
        """As the API shows it."""
        shown = {"id": self.id, "kind": "spawn", "state": "ended" if self.result else "running", "tty": self.tty}
        return shown | {"stdin": True} | ({"result": self.result} if self.result else {})

    def output(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        if "raw" in query:
            offset = int(query.get("offset", 0))
            data = bytes(self.out[int(query["raw"])][offset:])
            wire.answer(data, media="application/octet-stream", extra=f"X-Dsec-Offset: {offset}\r\n")
            return
        wire.stream()
        at = {1: int(query["stdout_offset"]), 2: int(query["stderr_offset"])}
        while not wire.closed.is_set():
            with self.changed:
                self.changed.wait_for(lambda: self.result or any(at[s] < len(self.out[s]) for s in at), 0.1)
                new = {s: bytes(self.out[s][at[s] : at[s] + PIECE_BYTES]) for s in at}
                over = self.result is not None and all(at[s] + len(new[s]) == len(self.out[s]) for s in at)
            for stream, data in new.items():
                if data:
                    wire.item({"stream": stream, "offset": at[stream], "data": data})
                    at[stream] += len(data)
            if over or (query["follow"] == "0" and not any(new.values())):
                wire.item({"result": self.result} if over else {"program": self.value()})
                wire.end()
                return
            if not any(new.values()):
                wire.item({})

    def stdin(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        new = request.body[max(self.taken - int(query["offset"]), 0) :]
        closed = self.result is not None
        try:
            while new:
                sent = os.write(self.input, new)
                self.taken += sent
                new = new[sent:]
        except OSError:
            closed = True
        if "eof" in query:
            with contextlib.suppress(OSError):
                os.close(self.input)
            closed = True
        wire.answer({"size": self.taken, "closed": closed})

    def attach(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        # As behind a proxy that lets no WebSocket through.
        wire.error("unsupported", "only with an Upgrade", 426, mechanism="WebSocket")

    def resize(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        _set_size(self.input, request.value())
        wire.answer({})

    def kill(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        self.signal(request.value().get("signal", signal.SIGKILL))
        wire.answer({})

    def wait(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.result is not None, float(query["timeout_s"]))
        wire.answer(self.value())

    def signal(self, number: int) -> None:
        """To it and what it has started."""
        if self.result is not None:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            # It has no group of its own yet: it was only just begun.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class PtyNode:
    """The script of a server with one sandbox, without events."""

    def __init__(self) -> None:
        self.programs: dict[str, LocalProgram] = {}
        self.specs: list[dict[str, Any]] = []

    def __call__(self, request: Request, wire: Wire) -> None:
        url = urlsplit(request.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        rest = url.path.partition(f"/{SANDBOX}/processes")[2].split("/")
        if url.path.endswith("/events"):
            wire.stream()
            wire.item({"done": True})
            wire.end()
        elif "/processes" not in url.path:
            wire.answer(INFO)
        elif len(rest) == 1 and request.method == "POST":
            self.specs.append(msgspec.msgpack.decode(request.body))
            made = LocalProgram(f"p-{len(self.specs)}", self.specs[-1])
            self.programs[made.id] = made
            wire.answer(made.value(), 201)
        elif len(rest) == 1:
            wire.answer({"programs": [program.value() for program in self.programs.values()]})
        elif rest[1] not in self.programs:
            wire.error("not_found", "no such program", 404)
        elif len(rest) == 2:
            wire.answer(self.programs[rest[1]].value())
        else:
            getattr(self.programs[rest[1]], rest[2])(request, wire, query)

    def close(self) -> None:
        """End what runs."""
        for program in self.programs.values():
            program.signal(signal.SIGKILL)
            while program.result is None:
                time.sleep(0.01)


class Place:
    """A node, and the command that knows it."""

    def __init__(self, server: Server, node: PtyNode) -> None:
        self.server = server
        self.node = node
        self.env = {**os.environ, "DSEC_URL": server.url, "TERM": "vt220"}

    def user(self, *args: str) -> PtyUser:
        """The command in a terminal."""
        return PtyUser([*COMMAND, *args], self.env)

    def dsec(self, *args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """The command between pipes."""
        return subprocess.run([*COMMAND, *args], env=self.env, input=stdin, capture_output=True, check=False)

    def asked(self, method: str) -> list[str]:
        """The paths that were asked for so."""
        return [request.path for request in self.server.requests if request.method == method]


def _set_size(fd: int, size: dict[str, int]) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", size["rows"], size["cols"], 0, 0))
