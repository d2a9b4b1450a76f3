"""QEMU as a process: what it is told, how it is confined, and its control socket (QMP)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.vm import emulator

TOOLS = (emulator.NAME, "qemu-img", "mkfs.ext4")
MEMORY_MIB = 1536
CPUS = 2
QMP_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
NOBODY = 65534

# Microseconds matter under emulation: no self-tests of ciphers, no audit, no mitigations. AppArmor and
# BPF are named because Debian's default list leaves BPF out. The console goes to a file of its own.
CMDLINE = (
    "console=ttyS0 quiet panic=-1 cryptomgr.notests audit=0 mitigations=off nokaslr no_timer_check "
    "lsm=landlock,yama,apparmor,bpf apparmor=1 systemd.show_status=0"
)
# By software: without what tells a kernel and the C library that `rep movsb` is fast. Emulated it goes byte by byte:
# 320 MiB set and copied took 4.4 s, and 1.0 s without.
CPU_MODEL = {"tcg": "max,erms=off,fsrm=off", "kvm": "host"}


class QemuError(RuntimeError):
    """QEMU could not be started or refused a command."""


def missing() -> str | None:
    """Why guests cannot run here; None when they can."""
    if platform.machine() != "x86_64":
        return f"the guests are x86_64 and this machine is {platform.machine()}"
    absent = [tool for tool in TOOLS if not emulator.find(tool)]
    return f"not installed: {', '.join(absent)}" if absent else None


def give(path: Path) -> None:
    """Hands a file over to the user QEMU runs as."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)


@functools.cache
def kvm_reason() -> str | None:
    """Why hardware acceleration is not tried. That /dev/kvm opens proves nothing: without vmx or svm it
    interprets ordinary guests an instruction at a time, until one it does not know."""
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/kvm: {error.strerror}"
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "").split()
    return None if {"vmx", "svm"} & set(flags) else "the processor shows neither vmx nor svm"


def _cpuinfo() -> list[str]:
    return Path("/proc/cpuinfo").read_text().splitlines()


def accelerators() -> list[str]:
    """What to try, best first. KVM counts as usable when a guest boots with it in time."""
    return ["tcg"] if kvm_reason() else ["kvm", "tcg"]


def host_key(accel: str) -> str:
    """What of this host a snapshot depends on besides its inputs."""
    model = next((line for line in _cpuinfo() if line.startswith("model name")), "") if accel == "kvm" else ""
    return f"{emulator.emulator().version} {accel} {model}"


@dataclass(frozen=True)
class Disk:
    path: Path
    read_only: bool = False
    format: str = "raw"


def command(
    accel: str, boot: Path, disks: Sequence[Disk], work: Path, *, incoming: bool, memory_mib: int = MEMORY_MIB
) -> list[str]:
    """The machine. A restored guest must get exactly the devices it was saved with."""
    argv = [
        *emulator.emulator().command, "-name", f"dsec-guest-{boot.name}",
        "-nodefaults", "-no-user-config", "-no-reboot",
        "-display", "none", "-machine", f"q35,accel={accel},hpet=off,i8042=off",
        "-cpu", CPU_MODEL[accel],
        "-smp", str(CPUS), "-m", f"{memory_mib}M",
        "-kernel", str(boot / "vmlinux"), "-initrd", str(boot / "initramfs"), "-append", CMDLINE,
        "-nic", "none", "-device", "virtio-rng-pci", "-device", "vmgenid,guid=auto",
        "-serial", f"file:{work / 'console.log'}",
        "-chardev", f"socket,id=control,path={work / 'control.sock'},server=on,wait=off",
        "-device", "virtio-serial-pci", "-device", "virtserialport,chardev=control,name=dsec.control",
        "-qmp", f"unix:{work / 'qmp.sock'},server=on,wait=off",
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    ]  # fmt: skip
    for number, disk in enumerate(disks):
        # Nothing on a guest's disk needs to survive a power cut of the host.
        options = f"driver={disk.format},node-name=disk{number},cache.no-flush=on,discard=unmap"
        options += f",read-only={'on' if disk.read_only else 'off'}"
        options += f",file.driver=file,file.filename={disk.path},file.cache.no-flush=on"
        argv += ["-blockdev", options, "-device", f"virtio-blk-pci,drive=disk{number}"]
    return argv + (["-incoming", "defer"] if incoming else [])


class Qemu:
    """One running QEMU. It ends with `stop`, and with the thread that started it, however that ends."""

    def __init__(self, argv: Sequence[str], work: Path) -> None:
        self.work = work
        # By setpriv: the signal has to be asked for after the ids were changed, which takes it back.
        wrapper = ["setpriv", "--pdeathsig", "KILL"]
        if os.geteuid() == 0:
            wrapper += ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
            give(work)
        self._log = (work / "qemu.log").open("wb")
        self.process = subprocess.Popen(
            [*wrapper, "--", *argv], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, cwd=work, umask=0o077
        )
        (work / "pid").write_text(f"{self.process.pid}\n")
        try:
            self.qmp = Qmp(self._connected("qmp.sock"))
        except BaseException:  # also interrupted: no emulator stays behind
            self.stop()
            raise

    def _connected(self, name: str) -> socket.socket:
        deadline = time.monotonic() + QMP_TIMEOUT_S
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(os.fspath(self.work / name))
                return connection
            except OSError as error:
                connection.close()
                if self.process.poll() is not None:
                    raise QemuError(f"QEMU ended: {self.log_tail()}") from error
                if time.monotonic() > deadline:
                    raise QemuError(f"QEMU does not listen on {name}: {error}") from error
                time.sleep(0.01)

    def log_tail(self) -> str:
        return (self.work / "qemu.log").read_text(errors="replace")[-2000:].strip()

    def save(self, path: Path) -> None:
        """Stops the guest and writes its state. It goes through a descriptor: QEMU may open no file of ours."""
        self.qmp.execute("stop")
        with path.open("wb") as file:
            self.qmp.send_fd("state", file.fileno())
            self._migrate("migrate", "fd:state")

    def load(self, path: Path) -> None:
        with path.open("rb") as file:
            self.qmp.send_fd("state", file.fileno())
            self._migrate("migrate-incoming", "fd:state")
        self.qmp.execute("cont")

    def _migrate(self, verb: str, uri: str) -> None:
        if verb == "migrate":  # the default limit is that of a network
            self.qmp.execute("migrate-set-parameters", {"max-bandwidth": 1 << 40})
        self.qmp.execute(verb, {"uri": uri})
        deadline = time.monotonic() + QMP_TIMEOUT_S
        while (status := self.qmp.execute("query-migrate").get("status")) != "completed":
            if status in ("failed", "cancelled") or time.monotonic() > deadline:
                raise QemuError(f"{verb}: {status}; {self.log_tail()}")
            time.sleep(0.01)

    def cpu_seconds(self) -> float:
        """What this QEMU has used; nothing when it has ended."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def quit(self) -> None:
        """Ends QEMU in order, so that its disks are complete."""
        self.qmp.execute("quit")
        self.process.wait(STOP_TIMEOUT_S)
        self.stop()

    def stop(self) -> None:
        """Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)
        if hasattr(self, "qmp"):
            self.qmp.close()
        self._log.close()


class Qmp:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(QMP_TIMEOUT_S)
        self._stream = connection.makefile("rb")
        self._receive()  # the greeting
        self.execute("qmp_capabilities")

    def execute(self, command: str, arguments: dict[str, Any] | None = None) -> Any:
        self._socket.sendall(_request(command, arguments))
        return self._answer(command)

    def send_fd(self, name: str, fd: int) -> None:
        socket.send_fds(self._socket, [_request("getfd", {"fdname": name})], [fd])
        self._answer("getfd")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
        self._socket.close()

    def _answer(self, command: str) -> Any:
        while True:
            message = self._receive()
            if "error" in message:
                raise QemuError(f"{command}: {message['error'].get('desc')}")
            if "return" in message:
                return message["return"]  # anything else is an event

    def _receive(self) -> dict[str, Any]:
        line = self._stream.readline()
        if not line:
            raise QemuError("QEMU closed its control socket")
        message: dict[str, Any] = json.loads(line)
        return message


def _request(command: str, arguments: dict[str, Any] | None) -> bytes:
    message: dict[str, Any] = {"execute": command}
    if arguments is not None:
        message["arguments"] = arguments
    return json.dumps(message).encode() + b"\n"
