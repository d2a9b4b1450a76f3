"""Guests: booted once, snapshotted, and from then on restored in a second."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kit.vm import cache, image, qemu
from tests.kit.vm.channel import Channel, GuestError
from tests.kit.vm.image import Image

# A boot under software emulation takes 10 to 20 s on a quiet machine; this one may share two cores.
BOOT_TIMEOUT_S = {"tcg": 240.0, "kvm": 30.0}
RESTORE_TIMEOUT_S = 60.0
# Seconds on a quiet machine; on a busy one the emulated disk is what waits longest.
COPY_TIMEOUT_S = 600.0
SNAPSHOT_FORMAT = "3"
# Read and run once before the snapshot, so that a restored guest has them in its page cache.
WARM = (
    "for tool in mount tar mkfs.erofs mkfs.ext4 mkfs.btrfs busybox losetup; do $tool --help; done; "
    "python3 -m pytest --version && python3 -c "
    "'import asyncio, sqlite3, ssl, xml.etree.ElementTree, msgspec, uvloop, uvicorn, httptools, starlette'"
)
# The second disk carries what a run brings along, the third the frameworks of the lane `adapters`. Their size is fixed,
# because the saved machine knows it; the files are sparse.
PAYLOAD_BYTES = 4 << 30


@dataclass(frozen=True)
class Snapshot:
    path: Path
    accel: str
    boot: Path

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def disk(self) -> Path:
        return self.path / "disk.qcow2"


class Guest:
    """A running guest. `run` executes a program in it; the guest ends with `stop`."""

    def __init__(self, machine: qemu.Qemu, series: str, work: Path, started: float) -> None:
        self.machine = machine
        self.series = series
        self.work = work
        self.started = started
        self.channel = Channel(work / "control.sock")
        self.run = self.channel.run

    def stop(self) -> None:
        self.channel.close()
        self.machine.stop()
        shutil.rmtree(self.work, ignore_errors=True)

    def console_tail(self) -> str:
        return (self.work / "console.log").read_text(errors="replace")[-3000:]

    def mount_payload(self) -> None:
        """The kernel has cached the first blocks of the disk that was there at the snapshot."""
        self._must("blockdev --flushbufs /dev/vdb && mount -t ext4 -o ro,noload /dev/vdb /srv/dsec")
        # Copied, because a store is written to, and its layers are mounted as files of the disk below.
        self._must("[ ! -d /srv/dsec/cache ] || cp -r /srv/dsec/cache /var/cache/dsec")

    def _must(self, command: str) -> None:
        done = self.run(command, timeout_s=COPY_TIMEOUT_S)
        if not done.ok:
            raise GuestError(f"{command}: {done.tail}")


def snapshot(series: str) -> Snapshot:
    """The saved guest with this kernel; made now if this machine has none that works."""
    made = image.ensure()
    failures = []
    for accel in qemu.accelerators():
        key = _snapshot_key(made, series, accel)
        try:
            path = cache.entry(f"snapshot-{series}", key, functools.partial(_boot, made, series, accel))
        except (qemu.QemuError, GuestError) as error:
            failures.append(f"{accel}: {error}")
            continue
        return Snapshot(path, accel, made.boot(series))
    raise GuestError(f"no guest {series} boots here: {'; '.join(failures)}")


def _snapshot_key(made: Image, series: str, accel: str) -> str:
    machine = qemu.command(accel, made.boot(series), [], Path("work"), incoming=True)
    sizes = (str(PAYLOAD_BYTES), SNAPSHOT_FORMAT)
    return cache.key_of(made.key, qemu.host_key(accel), *machine, *sizes)


def _boot(made: Image, series: str, accel: str, target: Path) -> None:
    """Boots, waits until systemd is done, saves memory and disk into `target`."""
    disk = target / "disk.qcow2"
    with _workspace() as work:
        _overlay(made.disk, disk)
        disks = _disks(disk, [None, None], work)
        guest = _start(qemu.command(accel, made.boot(series), disks, work, incoming=False), series, work)
        try:
            guest.channel.wait_hello(BOOT_TIMEOUT_S[accel])
            _settle(guest)
            guest.machine.save(target / "state")
            guest.machine.quit()
        except (GuestError, qemu.QemuError) as error:
            raise GuestError(f"{error}; console:\n{guest.console_tail()}") from error
        finally:
            guest.stop()
    for path in target.iterdir():
        os.chown(path, os.geteuid(), os.getegid())
        path.chmod(0o644)
    cache.prune(keep={made.path})


def _settle(guest: Guest) -> None:
    """A snapshot of a system that is still starting would finish its start in every run."""
    # "degraded" is for a test of its own to judge; here the start only has to be over.
    state = guest.run("systemctl is-system-running --wait", timeout_s=BOOT_TIMEOUT_S["tcg"]).text.strip()
    if state not in ("running", "degraded"):
        raise GuestError(f"systemd reports {state!r}")
    guest.run("sync; echo 3 > /proc/sys/vm/drop_caches")
    warm = guest.run(f"({WARM}) 2>&1", env={"PYTHONPATH": f"/{image.SITE}"})
    if not warm.ok:
        raise GuestError(f"programs of every run: {warm.tail}")


@contextlib.contextmanager
def restored(series: str, payload: Path | None = None, frameworks: Path | None = None) -> Iterator[Guest]:
    """A guest as it was after its boot, with `payload` (an ext4 image) mounted on /srv/dsec.

    `frameworks` (another) is there as well, to be mounted by who wants it.
    """
    saved = snapshot(series)
    for attempt in ("restore", "boot"):
        with contextlib.ExitStack() as stack:
            work = stack.enter_context(_workspace())
            try:
                guest = _restore(saved, work, [payload, frameworks])
            except (qemu.QemuError, GuestError):
                if attempt == "boot":
                    raise
                # For example a QEMU that was updated under the same version: made afresh, once.
                cache.discard(saved.path)
                saved = snapshot(series)
                continue
            stack.callback(guest.stop)
            if payload:
                guest.mount_payload()
            yield guest
            return


def _restore(saved: Snapshot, work: Path, brought: list[Path | None]) -> Guest:
    disk = work / "disk.qcow2"
    _overlay(saved.disk, disk, "qcow2")
    argv = qemu.command(saved.accel, saved.boot, _disks(disk, brought, work), work, incoming=True)
    guest = _start(argv, saved.boot.name, work)
    try:
        guest.machine.load(saved.state)
        guest.channel.wake(RESTORE_TIMEOUT_S)
    except BaseException:  # also interrupted: no emulator stays behind
        guest.stop()
        raise
    return guest


def _start(argv: list[str], series: str, work: Path) -> Guest:
    started = time.monotonic()
    machine = qemu.Qemu(argv, work)
    try:
        return Guest(machine, series, work, started)
    except BaseException:  # also interrupted: no emulator stays behind
        machine.stop()
        raise


def _disks(disk: Path, brought: list[Path | None], work: Path) -> list[qemu.Disk]:
    """A guest always has as many: an empty one stands for what is not brought."""
    empty = work / "empty"
    _sparse(empty)
    return [qemu.Disk(disk, format="qcow2"), *(qemu.Disk(path or empty, read_only=True) for path in brought)]


def _overlay(backing: Path, target: Path, backing_format: str = "raw") -> None:
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", backing, "-F", backing_format, target], check=True)
    qemu.give(target)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(PAYLOAD_BYTES)
    path.chmod(0o644)


@contextlib.contextmanager
def _workspace() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dsec-guest-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
