"""A very small root file system for sandboxes: a static busybox in an EROFS image, made in a second."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from dsec.backends.base import LayerMount
from dsec.images import tools
from dsec.model.errors import Unsupported

DIRECTORIES: Final = ("bin", "dev", "etc", "home", "proc", "root", "run", "sbin", "sys", "tmp", "usr/bin", "var/tmp")
PASSWD: Final = (
    "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\nagent:x:1000:1000::/home/agent:/bin/sh\n"
)
GROUP: Final = "root:x:0:\nnogroup:x:65534:\nagent:x:1000:\nextra:x:2000:agent\n"


def missing() -> str | None:
    """Why it cannot be made here."""
    try:
        tools.mkfs_erofs()
    except Unsupported as error:
        return str(error)
    return None if _busybox() else "no static busybox (Debian: busybox-static)"


def busybox_layer(directory: Path) -> LayerMount:
    """The image, in this directory."""
    tree = directory / "busybox"
    for name in DIRECTORIES:
        (tree / name).mkdir(parents=True)
    (tree / "tmp").chmod(0o1777)
    (tree / "var/tmp").chmod(0o1777)
    (tree / "etc/passwd").write_text(PASSWD)
    (tree / "etc/group").write_text(GROUP)
    busybox = _busybox()
    assert busybox is not None
    shutil.copy(busybox, tree / "bin/busybox")
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in applets:
        if applet != "busybox":
            (tree / "bin" / applet).symlink_to("busybox")
    return image(tree, directory / "busybox.erofs")


def image(tree: Path, path: Path) -> LayerMount:
    """A directory as a layer."""
    subprocess.run([tools.mkfs_erofs(), "-x-1", str(path), str(tree)], capture_output=True, check=True)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return LayerMount(digest=f"sha256:{digest}", path=str(path))


def _busybox() -> str | None:
    for path in ("/bin/busybox", "/usr/bin/busybox"):
        if os.access(path, os.X_OK) and Path(path).read_bytes()[:4] == b"\x7fELF" and not _dynamic(path):
            return path
    return None


def _dynamic(path: str) -> bool:
    """Whether it needs a loader, which an empty root does not have."""
    return b"/ld-linux" in Path(path).read_bytes()[:65536]
