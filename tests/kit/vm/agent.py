"""Runs in the guest: executes programs for the host over a virtio-serial port.

A frame is a header (payload length, channel, kind) and a payload. The host opens a channel with EXEC;
its standard input, output and end travel under the same number, so several programs run at once.
Only the standard library, one thread: it is part of the snapshot, and its start is paid once.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import struct
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PORT_NAME = "dsec.control"
HEADER = struct.Struct(">IHB")
MAX_PAYLOAD = 1 << 20
READ_SIZE = 1 << 16
# Input waiting for a slow program; beyond it the port is not read, which stops the host.
MAX_PENDING = 4 << 20

EXEC, STDIN, SIGNAL, PING, WAKE = 1, 2, 3, 4, 5
PONG, STDOUT, STDERR, EXIT, ERROR = 16, 17, 18, 19, 20


@dataclass
class Program:
    channel: int
    proc: subprocess.Popen[bytes]
    pidfd: int
    outputs: dict[int, int]  # descriptor -> STDOUT or STDERR
    pending: bytearray = field(default_factory=bytearray)
    stdin_closed: bool = False


class Agent:
    def __init__(self, port: int) -> None:
        self.port = port
        self.buffer = bytearray()
        self.programs: dict[int, Program] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(port, selectors.EVENT_READ, ("port", None))
        self.reading = True

    def serve(self) -> None:
        self.send(0, PONG, hello())
        while True:
            for key, _events in self.selector.select():
                what, program = key.data
                if what == "port":
                    self.on_port()
                elif what == "out":
                    self.on_output(program, key.fd)
                elif what == "in":
                    self.on_writable(program)
                else:
                    self.on_exit(program)

    # -- the port

    def send(self, channel: int, kind: int, payload: bytes | dict[str, Any]) -> None:
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        view = memoryview(HEADER.pack(len(data), channel, kind) + data)
        while view:
            try:
                view = view[os.write(self.port, view) :]
            except BlockingIOError:
                waiter = selectors.DefaultSelector()
                with waiter:
                    waiter.register(self.port, selectors.EVENT_WRITE)
                    waiter.select()

    def on_port(self) -> None:
        try:
            data = os.read(self.port, READ_SIZE)
        except BlockingIOError:
            return
        if not data:  # the host is not connected: a hang-up would make select() spin
            time.sleep(0.05)
            self.buffer.clear()
            return
        self.buffer += data
        while len(self.buffer) >= HEADER.size:
            length, channel, kind = HEADER.unpack_from(self.buffer)
            if length > MAX_PAYLOAD:
                raise SystemExit(f"frame of {length} bytes: the stream is out of step")
            if len(self.buffer) < HEADER.size + length:
                return
            payload = bytes(self.buffer[HEADER.size : HEADER.size + length])
            del self.buffer[: HEADER.size + length]
            self.on_frame(channel, kind, payload)

    def on_frame(self, channel: int, kind: int, payload: bytes) -> None:
        if kind == PING:
            self.send(channel, PONG, hello())
        elif kind == WAKE:
            wake(json.loads(payload))
            self.send(channel, PONG, hello())
        elif kind == EXEC:
            self.start(channel, json.loads(payload))
        elif program := self.programs.get(channel):  # else: it has ended meanwhile
            if kind == STDIN:
                self.feed(program, payload)
            elif kind == SIGNAL:
                os.killpg(program.proc.pid, int(payload))  # not reaped yet, so the group is its own

    # -- programs

    def start(self, channel: int, request: dict[str, Any]) -> None:
        try:
            proc = subprocess.Popen(
                request["argv"],
                env=request["env"],
                cwd=request["cwd"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self.send(channel, ERROR, {"message": f"{request['argv'][0]}: {error}"})
            return
        assert proc.stdin and proc.stdout and proc.stderr
        pidfd = os.pidfd_open(proc.pid)
        outputs = {proc.stdout.fileno(): STDOUT, proc.stderr.fileno(): STDERR}
        program = Program(channel, proc, pidfd, outputs)
        self.programs[channel] = program
        os.set_blocking(proc.stdin.fileno(), False)
        for fd in outputs:
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ, ("out", program))
        self.selector.register(pidfd, selectors.EVENT_READ, ("exit", program))

    def feed(self, program: Program, data: bytes) -> None:
        if not data:
            program.stdin_closed = True
        program.pending += data
        self.on_writable(program)

    def on_writable(self, program: Program) -> None:
        stdin = program.proc.stdin
        if stdin is None or stdin.closed:
            return
        try:
            while program.pending:
                del program.pending[: os.write(stdin.fileno(), program.pending)]
        except BlockingIOError:
            self.watch(stdin.fileno(), program)
            self.throttle()
            return
        except BrokenPipeError:
            program.pending.clear()
            program.stdin_closed = True
        self.unwatch(stdin.fileno())
        if program.stdin_closed:
            stdin.close()
        self.throttle()

    def watch(self, fd: int, program: Program) -> None:
        if fd not in self.selector.get_map():
            self.selector.register(fd, selectors.EVENT_WRITE, ("in", program))

    def unwatch(self, fd: int) -> None:
        if fd in self.selector.get_map():
            self.selector.unregister(fd)

    def throttle(self) -> None:
        """Leaves the port unread while too much input waits for programs."""
        want = sum(len(p.pending) for p in self.programs.values()) < MAX_PENDING
        if want != self.reading:
            self.reading = want
            if want:
                self.selector.register(self.port, selectors.EVENT_READ, ("port", None))
            else:
                self.selector.unregister(self.port)

    def on_output(self, program: Program, fd: int) -> bool:
        """Passes on what is there; False at the end of the stream or when nothing is left."""
        if fd not in program.outputs:
            return False
        try:
            data = os.read(fd, READ_SIZE)
        except BlockingIOError:
            return False
        if data:
            self.send(program.channel, program.outputs[fd], data)
            return True
        self.selector.unregister(fd)
        del program.outputs[fd]
        return False

    def on_exit(self, program: Program) -> None:
        """A program ends when its own process ends, even if a child of it holds the pipes."""
        code = program.proc.wait()
        for fd in list(program.outputs):
            while self.on_output(program, fd):
                pass
        for fd in program.outputs:
            self.selector.unregister(fd)
        program.outputs = {}  # events of this round that name the old descriptors are ignored
        self.selector.unregister(program.pidfd)
        os.close(program.pidfd)
        stdin = program.proc.stdin
        if stdin and not stdin.closed:
            self.unwatch(stdin.fileno())
            stdin.close()
        for stream in (program.proc.stdout, program.proc.stderr):
            if stream:
                stream.close()
        del self.programs[program.channel]
        self.throttle()
        self.send(program.channel, EXIT, {"code": code})


def hello() -> dict[str, Any]:
    return {"kernel": os.uname().release, "time": time.time()}


def wake(request: dict[str, Any]) -> None:
    """After a restore: the clock stands where the snapshot was made, and so does the random state."""
    time.clock_settime(time.CLOCK_REALTIME, request["time"])
    Path("/dev/urandom").write_bytes(bytes.fromhex(request["seed"]))


def open_port() -> int:
    """The port by its name; without udev there is no link in /dev/virtio-ports."""
    while True:
        for name in Path("/sys/class/virtio-ports").glob("*/name"):
            if name.read_text().strip() == PORT_NAME:
                return os.open(f"/dev/{name.parent.name}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        time.sleep(0.1)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Agent(open_port()).serve()
