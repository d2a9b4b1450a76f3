"""The small root every peer runs in: the host's own `sh`, `true`, `sleep` and what they link to, in three layers.

A real, dynamically linked userland: a static `true` would flatter everybody, most of all whoever adds least to it.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("sh", "true", "sleep", "cat", "head", "stty")
MOUNT_POINTS = ("dev", "proc", "sys", "tmp", "etc", "root", "run", "var")


@dataclass(frozen=True)
class Root:
    """Where the same files are in each form a peer takes: one tree, one tar, three layer trees, three EROFS images."""

    tree: Path
    tar: Path
    layers: tuple[Path, ...]
    images: tuple[Path, ...]  # empty where mkfs.erofs is missing


def build(work: Path) -> Root:
    """Make all forms below `work`, which is new or empty."""
    layers = (_base(work / "base"), _extra(work / "workspace", "repo"), _extra(work / "toolkit", "opt/kit"))
    tree = work / "tree"
    for layer in layers:
        shutil.copytree(layer, tree, symlinks=True, dirs_exist_ok=True)
    tar = work / "root.tar"
    with tarfile.open(tar, "w") as archive:
        archive.add(tree, arcname=".")
    return Root(tree, tar, layers, _images(work, layers))


def _base(root: Path) -> Path:
    for name in (*MOUNT_POINTS, "usr/bin"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "bin").symlink_to("usr/bin")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    for name in PROGRAMS:
        found = shutil.which(name)
        if found is None:
            raise FileNotFoundError(f"the bench's root needs `{name}` of the host")
        shutil.copy2(Path(found).resolve(), root / "usr/bin" / name)
        for library in _libraries(Path(found)):
            target = root / library.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library.resolve(), target)
    return root


def _libraries(program: Path) -> list[Path]:
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    return [Path(word) for word in listed.split() if word.startswith("/")]


def _extra(root: Path, name: str) -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "README").write_text("a layer above the base\n")
    return root


def _images(work: Path, layers: tuple[Path, ...]) -> tuple[Path, ...]:
    if shutil.which("mkfs.erofs") is None:
        return ()
    made = []
    for layer in layers:
        image = work / f"{layer.name}.erofs"
        command = ["mkfs.erofs", "--all-root", "-T0", str(image), str(layer)]
        subprocess.run(command, check=True, capture_output=True)
        made.append(image)
    return tuple(made)
