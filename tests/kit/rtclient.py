"""A small synchronous client of the native runtime, and a node of keeper and runtime for tests."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import msgspec

from dsec.images.tools import mkfs_erofs

Frame = dict[str, Any]
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(dict[str, Any]).decode


class RuntimeFault(Exception):
    """The runtime answered with an error."""

    def __init__(self, err: dict[str, Any]) -> None:
        super().__init__(f"{err['code']}: {err['message']} {err['detail']}")
        self.code: str = err["code"]
        self.detail: dict[str, Any] = err["detail"]


class Client:
    """One connection. `send` and `recv` for pipelining, `call` for one request at a time."""

    def __init__(self, path: Path, *, hello: bool = True, timeout_s: float = 60) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(timeout_s)
        self.sock.connect(str(path))
        self._next = 0
        self._file = self.sock.makefile("rb")
        self.hello: Frame = {}
        self.hello = self.call("hello", protocol=1) if hello else {}

    def send(self, op: str, args: dict[str, Any]) -> int:
        self._next += 1
        body = _ENCODE({"id": self._next, "op": op, "args": args})
        self.sock.sendall(struct.pack(">I", len(body)) + body)
        return self._next

    def recv(self) -> Frame:
        head = self._file.read(4)
        if len(head) < 4:
            raise ConnectionError("the runtime closed the connection")
        (length,) = struct.unpack(">I", head)
        body = self._file.read(length)
        if len(body) < length:
            raise ConnectionError("the runtime closed the connection")
        return _DECODE(body)

    def wait(self, number: int, events: list[Frame] | None = None) -> Frame:
        """The answer to one request; frames of other requests must not come in between."""
        while True:
            frame = self.recv()
            if frame["id"] != number:
                raise AssertionError(f"unexpected frame {frame}")
            if "ok" in frame:
                ok: Frame = frame["ok"]
                return ok
            if "err" in frame:
                raise RuntimeFault(frame["err"])
            if events is not None:
                events.append(frame)

    def call(self, op: str, **args: Any) -> Frame:
        return self.wait(self.send(op, args))

    def close(self) -> None:
        self._file.close()
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def run_plan(sandbox: str, run: str, argv: list[str | bytes], **over: Any) -> dict[str, Any]:
    """A complete plan of a run."""
    plan: dict[str, Any] = {
        "sandbox": sandbox,
        "run": run,
        "argv": [a.encode() if isinstance(a, str) else a for a in argv],
        "env": {b"PATH": b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        "cwd": b"/",
        "user": "root",
        "stdin": b"",
        "timeout_ms": 0,
        "head_bytes": 1 << 16,
        "tail_bytes": 1 << 16,
        "memory_cgroup": False,
        "nice": 0,
    }
    return plan | over


def sandbox_plan(sandbox: str, layers: list[str], **over: Any) -> dict[str, Any]:
    """A complete plan of a sandbox."""
    plan: dict[str, Any] = {
        "id": sandbox,
        "hostname": "box",
        "layers": layers,
        "upper": {"kind": "auto", "bytes": 64 << 20, "inodes": 0},
        "memory_bytes": 512 << 20,
        "pids_max": 4096,
        "nofile": 4096,
        "shm_bytes": 16 << 20,
    }
    return plan | over


def busybox_image(directory: Path) -> Path:
    """An EROFS image with a static busybox under its many names."""
    root = directory / "root"
    for name in ("bin", "etc", "proc", "sys", "dev", "tmp", "root"):
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox is None:
        raise FileNotFoundError("busybox (Debian's busybox-static)")
    shutil.copy(busybox, root / "bin/busybox")
    names = subprocess.run([busybox, "--list"], stdout=subprocess.PIPE, check=True, text=True).stdout.split()
    for name in names:
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    image = directory / "base.erofs"
    subprocess.run([mkfs_erofs(), image, root], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return image


@functools.cache
def _copy_of(binary: Path) -> Path:
    """Each node has a name of its own for it, which a test may give to another file. Not a file of its own: an
    emulated processor translates what is in another file anew."""
    directory = Path(tempfile.mkdtemp(prefix="runtime-binary-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(shutil.copy2(binary, directory))


class Node:
    """Keeper and runtime in directories of their own."""

    def __init__(
        self,
        binary: Path,
        *,
        cgroup: str = "dsec-runtime-test",
        env: dict[str, str] | None = None,
        nofile: int | None = None,
        pass_fds: tuple[int, ...] = (),
        state_dir: Path | None = None,
        before: tuple[str, ...] = (),
    ) -> None:
        self.before = before  # words of a command that starts the keeper
        self.dir = Path(tempfile.mkdtemp(prefix="runtime-"))
        self.binary = self.dir / "dsec-runtime"
        os.link(_copy_of(binary), self.binary)
        self.run_dir = self.dir / "run"
        self.state_dir = state_dir or self.dir / "state"
        self.state_dir.mkdir(exist_ok=True)
        self.cgroup = f"{cgroup}-{self.dir.name.removeprefix('runtime-')}"
        self.env = os.environ | (env or {})
        self.nofile = nofile
        self.pass_fds = pass_fds
        self.start()

    @property
    def socket(self) -> Path:
        return self.run_dir / "runtime.sock"

    def start(self) -> None:
        options = {"--run-dir": self.run_dir, "--state-dir": self.state_dir, "--cgroup": self.cgroup}
        command = [*self.before, str(self.binary), "keeper", *(f"{name}={value}" for name, value in options.items())]
        if self.nofile is not None:
            command = ["prlimit", f"--nofile={self.nofile}", *command]
        subprocess.run(
            command,
            check=True,
            env=self.env,
            timeout=60,
            pass_fds=self.pass_fds,
        )

    def client(self, **kwargs: Any) -> Client:
        return Client(self.socket, **kwargs)

    def keeper_pid(self) -> int:
        return int((self.run_dir / "keeper.pid").read_text().split()[0])

    def runtime_pid(self) -> int:
        with self.client() as c:
            return int(c.hello["pid"])

    def kill_runtime(self) -> None:
        os.kill(self.runtime_pid(), signal.SIGKILL)

    def kill_keeper(self) -> None:
        pid = self.keeper_pid()
        os.kill(pid, signal.SIGKILL)
        # Gone at any moment, also between opening the file and reading it.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while "(dsec-runtime) Z" not in Path(f"/proc/{pid}/stat").read_text():
                time.sleep(0.01)

    def log(self) -> str:
        return (self.run_dir / "runtime.log").read_text(errors="replace")

    def stop(self) -> None:
        """Ends every sandbox and the keeper, and removes the directories."""
        keeper = self.keeper_pid()
        with self.client() as c:
            for s in c.call("sandbox.list")["sandboxes"]:
                c.call("sandbox.stop", id=s["id"])
            c.call("stop_keeper")
        deadline = time.monotonic() + 30
        while Path(f"/proc/{keeper}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        shutil.rmtree(self.dir, ignore_errors=True)
