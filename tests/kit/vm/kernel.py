"""What QEMU boots: the ELF kernel out of a Debian package, and a small initramfs.

The ELF boots by PVH, without BIOS and decompressor: a second less under software emulation.
"""

from __future__ import annotations

import gzip
import io
import lzma
import re
import shutil
import stat
import struct
import subprocess
from pathlib import Path

# Offsets of the boot protocol's header in a bzImage (Documentation/arch/x86/boot.rst).
SETUP_SECTS, HEADER_MAGIC, PAYLOAD_OFFSET, PAYLOAD_LENGTH = 0x1F1, 0x202, 0x248, 0x24C
ELF_MAGIC = b"\x7fELF"
LZ4_LEGACY, ZSTD, XZ, GZIP = b"\x02\x21\x4c\x18", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"\x1f\x8b"
# What the kernel needs before it sees its root; built in or not, by kernel.
ROOT_MODULES = ("virtio_pci", "virtio_blk", "ext4", "quota_v2")

INIT = """#!/busybox sh
/busybox mkdir -p /proc /sys /dev /root
/busybox mount -t proc proc /proc
/busybox mount -t sysfs sysfs /sys
/busybox mount -t devtmpfs dev /dev
for module in $(/busybox cat /modules/order); do /busybox insmod /modules/$module; done
tries=0
until [ -b /dev/vda ] || [ $tries = 100 ]; do /busybox sleep 0.05; tries=$((tries + 1)); done
/busybox mount -t ext4 -o prjquota /dev/vda /root || exec /busybox poweroff -f
/busybox mount --move /dev /root/dev
/busybox umount /sys /proc
exec /busybox switch_root /root /lib/systemd/systemd
"""


class KernelError(RuntimeError):
    """A kernel package that does not look as expected."""


def extract_elf(bzimage: Path, target: Path, root: Path) -> None:
    image = bzimage.read_bytes()
    if image[HEADER_MAGIC : HEADER_MAGIC + 4] != b"HdrS":
        raise KernelError(f"{bzimage} is not a bzImage")
    # The payload's offset counts from the protected-mode code, after the real-mode sectors.
    base = (image[SETUP_SECTS] + 1) * 512
    offset, length = (struct.unpack_from("<I", image, at)[0] for at in (PAYLOAD_OFFSET, PAYLOAD_LENGTH))
    payload = image[base + offset : base + offset + length]
    elf = _decompress(payload, root)
    if not elf.startswith(ELF_MAGIC):
        raise KernelError(f"no ELF in the payload of {bzimage}")
    target.write_bytes(elf)


def _decompress(payload: bytes, root: Path) -> bytes:
    # The build appends the unpacked size (4 bytes) to the stream; the tools would complain about it.
    if payload.startswith(XZ):
        return lzma.LZMADecompressor().decompress(payload)
    if payload.startswith(GZIP):
        return gzip.decompress(payload[:-4])
    for magic, tool in ((LZ4_LEGACY, "lz4"), (ZSTD, "zstd")):
        if payload.startswith(magic):
            argv = ["chroot", str(root), tool, "-dc"]  # the new root has the tools; the host may not
            done = subprocess.run(argv, input=payload[:-4], capture_output=True, check=False)
            if done.returncode != 0:
                raise KernelError(f"{tool}: {done.stderr.decode(errors='replace').strip()}")
            return done.stdout
    raise KernelError(f"payload with unknown magic {payload[:6].hex()}")


def needed_modules(modules: Path) -> list[Path]:
    """The files of ROOT_MODULES and what they depend on, in the order to insert them."""
    depends: dict[str, list[str]] = {}
    path_of: dict[str, str] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        name, _, rest = line.partition(":")
        depends[name] = rest.split()
        path_of[_module_name(name)] = name
    order: list[str] = []

    def add(name: str) -> None:
        for other in depends[name]:
            if other not in order:
                add(other)
        if name not in order:
            order.append(name)

    for module in ROOT_MODULES:
        if module in path_of:  # else it is built in
            add(path_of[module])
    return [modules / name for name in order]


def _module_name(path: str) -> str:
    return re.sub(r"\.ko(\.xz|\.zst|\.gz)?$", "", path.rsplit("/", 1)[-1]).replace("-", "_")


def make_initramfs(root: Path, release: str, target: Path) -> None:
    archive = Cpio()
    archive.add("busybox", (root / "bin/busybox").read_bytes(), stat.S_IFREG | 0o755)
    archive.add("init", INIT.encode(), stat.S_IFREG | 0o755)
    for name in ("dev", "modules"):
        archive.add(name, b"", stat.S_IFDIR | 0o755)
    archive.add("dev/console", b"", stat.S_IFCHR | 0o600, device=(5, 1))
    names = []
    for path in needed_modules(root / "usr/lib/modules" / release):
        data = path.read_bytes()
        if data.startswith(XZ):
            data = lzma.decompress(data)
        name = f"{_module_name(path.name)}.ko"
        archive.add(f"modules/{name}", data, stat.S_IFREG | 0o644)
        names.append(name)
    archive.add("modules/order", "\n".join(names).encode(), stat.S_IFREG | 0o644)
    target.write_bytes(archive.finish())


class Cpio:
    """An archive in the "newc" format, which the kernel unpacks."""

    def __init__(self) -> None:
        self.out = io.BytesIO()
        self.inode = 0

    def add(self, name: str, data: bytes, mode: int, device: tuple[int, int] = (0, 0)) -> None:
        self.inode += 1
        path = name.encode() + b"\0"
        fields = (self.inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
        self.out.write(b"070701" + b"".join(b"%08x" % value for value in fields) + path)
        self._align()
        self.out.write(data)
        self._align()

    def finish(self) -> bytes:
        self.inode = 0
        self.add("TRAILER!!!", b"", 0)
        return self.out.getvalue()

    def _align(self) -> None:
        self.out.write(b"\0" * (-self.out.tell() % 4))


def unpack_package(deb: Path, root: Path, boot: Path, work: Path) -> str:
    """Puts a kernel's modules into `root` and its ELF into `boot`; returns its release.

    Unpacked beside and moved: unpacking over the root would replace its /lib link with a directory.
    """
    tree = work / deb.stem
    subprocess.run(["dpkg-deb", "-x", deb, tree], check=True)
    (release,) = (path.name for path in (tree / "lib/modules").iterdir())
    modules = root / "usr/lib/modules"
    modules.mkdir(exist_ok=True)
    shutil.move(tree / "lib/modules" / release, modules / release)
    subprocess.run(["chroot", root, "depmod", release], check=True)
    extract_elf(tree / "boot" / f"vmlinuz-{release}", boot / "vmlinux", root)
    make_initramfs(root, release, boot / "initramfs")
    shutil.copy(tree / "boot" / f"config-{release}", boot / "config")
    (boot / "release").write_text(release)
    for path in boot.iterdir():
        path.chmod(0o644)
    shutil.rmtree(tree)
    return release
