"""The pieces of the vm lane that need no guest: archives, kernels, reports, recipes."""

from __future__ import annotations

import lzma
import shutil
import stat
import struct
import subprocess
from pathlib import Path

import pytest

from tests.kit.vm import image, kernel, lanes

ELF = kernel.ELF_MAGIC + b"a kernel" * 100


def bzimage(payload: bytes) -> bytes:
    sectors = 4
    offset = 32
    data = bytearray((sectors + 1) * 512 + offset)
    data[kernel.SETUP_SECTS] = sectors
    data[kernel.HEADER_MAGIC : kernel.HEADER_MAGIC + 4] = b"HdrS"
    struct.pack_into("<II", data, kernel.PAYLOAD_OFFSET, offset, len(payload))
    return bytes(data) + payload


def test_elf_comes_out_of_a_bzimage(tmp_path: Path) -> None:
    source, target = tmp_path / "vmlinuz", tmp_path / "vmlinux"
    source.write_bytes(bzimage(lzma.compress(ELF) + struct.pack("<I", len(ELF))))
    kernel.extract_elf(source, target, tmp_path)
    assert target.read_bytes() == ELF


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\0" * 4096, "not a bzImage"),
        (bzimage(b"unheard of"), "unknown magic"),
        (bzimage(lzma.compress(b"no kernel") + b"\0\0\0\0"), "no ELF"),
    ],
)
def test_what_is_no_kernel_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    source = tmp_path / "vmlinuz"
    source.write_bytes(content)
    with pytest.raises(kernel.KernelError, match=reason):
        kernel.extract_elf(source, tmp_path / "vmlinux", tmp_path)


def test_modules_come_after_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "modules.dep").write_text(
        "kernel/virtio_blk.ko.xz: kernel/virtio.ko.xz kernel/ring.ko.xz\n"
        "kernel/virtio-pci.ko.xz: kernel/ring.ko.xz kernel/virtio.ko.xz\n"
        "kernel/ring.ko.xz: kernel/virtio.ko.xz\nkernel/virtio.ko.xz:\nkernel/other.ko.xz:\n"
    )
    names = [path.name.partition(".")[0] for path in kernel.needed_modules(tmp_path)]
    assert names == ["virtio", "ring", "virtio-pci", "virtio_blk"]


@pytest.mark.skipif(shutil.which("cpio") is None, reason="cpio is not installed")
def test_archive_is_read_by_cpio(tmp_path: Path) -> None:
    archive = kernel.Cpio()
    archive.add("d", b"", stat.S_IFDIR | 0o755)
    archive.add("d/odd", b"12345", stat.S_IFREG | 0o640)
    subprocess.run(["cpio", "-i", "--quiet"], input=archive.finish(), cwd=tmp_path, check=True)
    made = tmp_path / "d/odd"
    assert (made.read_bytes(), stat.S_IMODE(made.stat().st_mode)) == (b"12345", 0o640)


REPORT = b"""<testsuites><testsuite>
<testcase classname="t" name="good"/>
<testcase classname="t" name="bad"><failure message="assert 1 == 2&#10;more"/></testcase>
<testcase classname="t" name="broken"><error message="setup"/></testcase>
<testcase classname="t" name="left"><skipped message="this kernel lacks x"/></testcase>
</testsuite></testsuites>"""


def test_report_is_counted() -> None:
    outcome = lanes.read_report("root", REPORT)
    assert (outcome.passed, len(outcome.failed), outcome.ok) == (1, 2, False)
    assert outcome.skipped == ["t::left: this kernel lacks x"]


def test_a_lane_in_which_nothing_passed_is_not_well() -> None:
    assert not lanes.read_report("root", b"<testsuites/>").ok


def test_requirements_leave_checkers_on_the_host() -> None:
    names = {image._distribution(item) for item in image.python_requirements()}
    assert {"msgspec", "pytest", "uvicorn"} <= names
    assert not names & {"ruff", "mypy", "maturin", "dsec"}
