"""The guests' disk: a minimal Debian 12 with systemd, AppArmor and what the tests import.

One root file system carries the modules of both kernels, so it is built once for all guests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.kit.vm import agent, cache, kernel

REPOSITORY = Path(__file__).resolve().parents[3]
MIRROR = "http://deb.debian.org/debian"
SUITE = "bookworm"
# Cloud kernels: the file systems, BPF and security modules of the generic ones without their drivers.
KERNELS = ("6.1", "6.12")
DISK_BYTES = 12 << 30  # sparse
BUILD_TIMEOUT_S = 900

_PACKAGES = (
    "systemd systemd-sysv kmod apparmor procps iproute2 nftables python3 python3-venv busybox-static "
    "e2fsprogs btrfs-progs erofs-utils xfsprogs quota psmisc git zstd lz4 ca-certificates strace"
)
PACKAGES = tuple(_PACKAGES.split())
# Of the project's extras: what a test imports. Checkers and builders stay on the host.
DEV_REQUIREMENTS = ("pytest", "pytest-timeout", "hypothesis", "schemathesis")
SITE = "opt/dsec/site"

# Fetched with the new root's suites and keys, not the host's. The metapackage's versions name the current
# kernel of each suite.
FETCH_KERNELS = r"""#!/bin/sh
set -eu
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
cd "$1/var/cache"
mkdir -p dsec-kernels && cd dsec-kernels
for series in {series}; do
  package=$(apt-cache show linux-image-cloud-amd64 |
    sed -n 's/^Depends: \(linux-image-[^ ]*\).*/\1/p' | grep -F "linux-image-$series." | head -n 1)
  [ -n "$package" ] || { echo "no kernel $series in these suites" >&2; exit 1; }
  mkdir "$series" && (cd "$series" && apt-get -qq -o APT::Sandbox::User=root download "$package")
done
"""

AGENT_UNIT = """[Unit]
Description=Executes programs for the host
DefaultDependencies=no
After=sysinit.target apparmor.service systemd-modules-load.service
Wants=apparmor.service

[Service]
ExecStart=/usr/bin/python3 -S /opt/dsec/agent.py
Restart=always
# A test's own cgroups, processes and descriptors are its own affair.
Delegate=yes
KillMode=process
TasksMax=infinity
LimitNOFILE=524288
OOMPolicy=continue
Environment=LANG=C.UTF-8

[Install]
WantedBy=multi-user.target
"""

# virtio_console carries the control channel; the others would be loaded at their first use anyway,
# but a boot is paid once and a load under emulation with every restore.
MODULES = "virtio_console virtio_rng loop overlay erofs btrfs fuse veth quota_v2 zram nf_tables"
MASKED = (
    "apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer "
    "e2scrub_reap.service getty@.service getty-static.service serial-getty@.service "
    "systemd-timesyncd.service systemd-tmpfiles-clean.timer systemd-networkd.service"
)


class BuildError(RuntimeError):
    """The image could not be made; the message carries the tool's last lines."""


@dataclass(frozen=True)
class Image:
    path: Path

    @property
    def key(self) -> str:
        return self.path.name.partition("-")[2]

    @property
    def disk(self) -> Path:
        return self.path / "root.ext4"

    def boot(self, series: str) -> Path:
        """The directory with `vmlinux`, `initramfs`, `config` and `release` of a kernel."""
        return self.path / "boot" / series


def ensure() -> Image:
    requirements = python_requirements()
    sources = (Path(__file__).read_bytes(), _source(kernel.__file__), _source(agent.__file__))
    key = cache.key_of(*sources, *requirements)
    return Image(cache.entry("image", key, lambda work: _build(work, requirements)))


def _source(path: str) -> bytes:
    return Path(path).read_bytes()


def python_requirements() -> list[str]:
    """What the guest's Python needs, from pyproject.toml, so that the two cannot drift apart."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    dev = [item for item in extras["dev"] if _distribution(item) in DEV_REQUIREMENTS]
    missing = set(DEV_REQUIREMENTS) - {_distribution(item) for item in dev}
    if missing:
        raise BuildError(f"pyproject.toml no longer names {sorted(missing)}")
    return sorted({*project["dependencies"], *extras["node"], *dev})


def _distribution(requirement: str) -> str:
    for end, char in enumerate(requirement):
        if not (char.isalnum() or char in "-_."):
            return requirement[:end]
    return requirement


def _build(work: Path, requirements: Iterable[str]) -> None:
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        root, boot = Path(scratch) / "root", work / "boot"
        _debootstrap(root, Path(scratch))
        boot.mkdir()
        packages = root / "var/cache/dsec-kernels"
        for series in KERNELS:
            (boot / series).mkdir()
            (deb,) = (packages / series).glob("*.deb")
            kernel.unpack_package(deb, root, boot / series, Path(scratch))
        shutil.rmtree(packages)
        _install_python(root, requirements)
        _configure(root)
        _pack(root, work / "root.ext4")


def _debootstrap(root: Path, scratch: Path) -> None:
    hook = scratch / "fetch-kernels"
    hook.write_text(FETCH_KERNELS.replace("{series}", " ".join(KERNELS)))
    hook.chmod(0o755)
    sources = [f"deb {MIRROR} {suite} main" for suite in (SUITE, f"{SUITE}-updates", f"{SUITE}-backports")]
    _run(
        # In a mount namespace of its own: what it mounts is gone with it, however it ends. Else the next
        # builder, removing what an interrupted one left, would remove through a mounted /dev and /sys.
        "unshare", "--mount", "--", "mmdebstrap", "--variant=minbase", "--mode=auto", f"--include={','.join(PACKAGES)}",
        "--aptopt=Acquire::Retries 3", "--aptopt=APT::Install-Recommends false",
        "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*", f"--customize-hook={hook} \"$1\"",
        SUITE, str(root), *sources,
    )  # fmt: skip


def _install_python(root: Path, requirements: Iterable[str]) -> None:
    """Wheels for the guest's Python, unpacked from outside and compiled by the guest's own."""
    version = next(path.name for path in (root / "usr/bin").glob("python3.[0-9]*"))
    target = root / SITE
    target.mkdir(parents=True)
    _run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:",
        "--python-version", version.removeprefix("python"), "--target", str(target), *requirements,
    )  # fmt: skip
    _run("chroot", str(root), "python3", "-m", "compileall", "-q", "-j2", f"/{SITE}")


def _configure(root: Path) -> None:
    shutil.copy(agent.__file__, root / "opt/dsec/agent.py")
    units = root / "etc/systemd/system"
    (units / "dsec-agent.service").write_text(AGENT_UNIT)
    (units / "multi-user.target.wants").mkdir(exist_ok=True)
    (units / "multi-user.target.wants/dsec-agent.service").symlink_to("../dsec-agent.service")
    for unit in MASKED.split():
        (units / unit).unlink(missing_ok=True)
        (units / unit).symlink_to("/dev/null")
    (units / "default.target").unlink(missing_ok=True)
    (units / "default.target").symlink_to("/lib/systemd/system/multi-user.target")
    (root / "etc/modules-load.d/dsec.conf").write_text("\n".join(MODULES.split()) + "\n")
    (root / "etc/hostname").write_text("guest\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost guest\n::1 localhost\n")
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "etc/resolv.conf").write_text("")
    (root / "etc/machine-id").write_text("d5ec" * 8 + "\n")
    (root / "srv/dsec").mkdir()


def _pack(root: Path, disk: Path) -> None:
    """An ext4 with project quotas, which a node of production has and the tests may ask for."""
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    _run(
        "mkfs.ext4", "-q", "-d", str(root), "-O", "quota,project", "-E",
        "quotatype=usrquota:grpquota:prjquota,lazy_itable_init=1,lazy_journal_init=1", str(disk),
    )  # fmt: skip
    disk.chmod(0o644)


def _run(*argv: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["PATH"] = environment.get("PATH", "") + ":/usr/sbin:/sbin"
    environment["LC_ALL"] = "C.UTF-8"
    done = subprocess.run(
        argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=BUILD_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        tail = done.stdout.decode(errors="replace").splitlines()[-20:]
        raise BuildError(f"{argv[0]} ended with {done.returncode}:\n" + "\n".join(tail))
