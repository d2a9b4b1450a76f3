"""What a run brings into a guest: the tree, the built binaries and what tests need, as one disk.

A disk, because it is there at once: 100 MB take half a second to pack, and a minute through the
control channel. ext4, because layers in it are mounted as files: over EROFS they would stack too deep
for an overlay.
"""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import py_compile
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kit.adapters import say_installed
from tests.kit.vm import cache
from tests.kit.vm.emulator import find
from tests.kit.vm.image import REPOSITORY, SITE, BuildError
from tests.kit.vm.machine import PAYLOAD_BYTES

TREE = ("src", "tests", "docs", "deploy", "pyproject.toml", "README.md", "scripts")
MOUNT = "/srv/dsec"
BIN = "native/bin"
# Puts what the native tests know by its path on the host where they look for it.
PREPARE = f"{BIN}/prepare"
PROGRAMS = f"{BIN}/programs"
# What a wheel of this tree would say of it.
INSTALLED = "installed"
CACHED = ("bin", "layers")
ENVIRONMENT = {
    "PYTHONPATH": f"{MOUNT}/src:{MOUNT}:/{SITE}",
    # What pytest finds installed it imports, whether a test wants it or not: half a minute under emulation.
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "pytest_timeout",
    "DSEC_RUNTIME_BIN": f"{MOUNT}/{BIN}/dsec-runtime",
    "DSEC_CACHE": "/var/cache/dsec",
    # Slow: what the kernel does not decide is left out.
    "DSEC_GUEST": "1",
    # A guest that cannot run a lane has failed it.
    "DSEC_REQUIRE": "contract,root,security",
    "PATH": f"{MOUNT}/{BIN}:/{SITE}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
CARGO_TIMEOUT_S = 1200


@dataclass(frozen=True)
class NativeTest:
    crate: str
    target: str
    executable: Path

    @property
    def name(self) -> str:
        return f"{self.crate}-{self.target}"


def _stage_cache(target: Path) -> None:
    """What set-up has made and a guest cannot make, without network and compilers: tools and base layers."""
    for name in CACHED:
        source = cache.root_dir() / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True)


def native_tests() -> tuple[list[NativeTest], list[Path]]:
    """The workspace's test executables and the programs they start, built now.

    They are static, so they run in the guest as here.
    """
    tests, programs = [], []
    for line in _cargo("test", "--no-run").splitlines():
        message = json.loads(line)
        if message.get("reason") != "compiler-artifact" or not message.get("executable"):
            continue
        executable = Path(message["executable"])
        if message["profile"]["test"]:
            crate = Path(message["manifest_path"]).parent.name
            tests.append(NativeTest(crate, message["target"]["name"], executable))
        else:
            programs.append(executable)
    return sorted(tests, key=lambda test: test.name), programs


def runtime_binary() -> Path:
    """The release build of the native part, made now if it is not up to date."""
    for line in _cargo("build", "--release", "--package", "dsec-runtime").splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message.get("executable"):
            return Path(message["executable"])
    raise BuildError("cargo built no dsec-runtime")


def _cargo(*arguments: str) -> str:
    done = subprocess.run(
        ["cargo", *arguments, "--quiet", "--message-format=json", "--manifest-path", "native/Cargo.toml"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=CARGO_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise BuildError(f"cargo {arguments[0]} failed:\n{done.stderr[-4000:]}")
    return done.stdout


@contextlib.contextmanager
def disk(*, native: bool = True) -> Iterator[Path]:
    """An ext4 image of the payload, readable for QEMU, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="dsec-payload-") as name:
        work = Path(name)
        work.chmod(0o755)
        _stage(work / "tree", native)
        image = work / "payload.ext4"
        with image.open("wb") as file:
            file.truncate(PAYLOAD_BYTES)
        mkfs = find("mkfs.ext4") or "mkfs.ext4"
        subprocess.run([mkfs, "-q", "-d", work / "tree", "-O", "^has_journal", "-m", "0", image], check=True)
        shutil.rmtree(work / "tree")
        image.chmod(0o644)
        yield image


def _compile(tree: Path) -> None:
    """Byte code for the guest's Python, made here: compiling takes a minute under emulation.

    Where this Python has another version it is of no use, and the guest compiles by itself.
    """
    compileall.compile_dir(
        tree, quiet=1, stripdir=os.fspath(tree), prependdir=MOUNT,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip


def _stage_tests(tree: Path) -> None:
    tests, programs = native_tests()
    for test in tests:
        shutil.copy2(test.executable, tree / BIN / "tests" / test.name)
    lines = ["#!/bin/sh", "set -e"]
    (tree / PROGRAMS).mkdir()
    for program in programs:
        shutil.copy2(program, tree / PROGRAMS / program.name)
        # cargo's directory for the files of tests: target/tmp, beside the profile's or above the target's.
        scratch = {program.parents[1] / "tmp", program.parents[2] / "tmp"}
        lines += [shlex.join(["mkdir", "-p", *map(os.fspath, [program.parent, *sorted(scratch)])])]
        lines += [shlex.join(["ln", "-sf", f"{MOUNT}/{PROGRAMS}/{program.name}", os.fspath(program)])]
    script = tree / PREPARE
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o755)


def _stage(tree: Path, native: bool) -> None:
    tree.mkdir()
    for name in TREE:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        elif source.exists():
            shutil.copy2(source, tree / name)
    _compile(tree)
    if native:
        (tree / BIN / "tests").mkdir(parents=True)
        shutil.copy2(runtime_binary(), tree / BIN / "dsec-runtime")
        _stage_tests(tree)
    _stage_cache(tree / "cache")
    say_installed(tree / INSTALLED)
    for path in os.environ.get("DSEC_GUEST_EXTRA", "").split(":"):
        if path:
            (tree / "extra").mkdir(exist_ok=True)
            shutil.copy2(path, tree / "extra" / Path(path).name)
