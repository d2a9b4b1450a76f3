"""The frameworks of the lane `adapters` in a guest: their environment as a disk of its own.

Beside the payload, because it is a gigabyte that changes only with the versions: kept by its content, and read by who
asks for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

from tests.kit import adapters
from tests.kit.lanes import adapters_python
from tests.kit.vm import cache, payload
from tests.kit.vm.channel import GuestError
from tests.kit.vm.emulator import find
from tests.kit.vm.machine import PAYLOAD_BYTES, Guest

MOUNT = "/srv/frameworks"
# The one after the payload's.
DEVICE = "/dev/vdc"
# Of Debian 12. Wheels with native code are for one version.
PYTHON = "3.11"
SITE = f"lib/python{PYTHON}/site-packages"
# No suite needs them. Inspect imports the clients of vendors where they are installed, which is half a minute under
# emulation, and does without where they are not.
UNUSED = ("anthropic", "openai", "debugpy", "pip", "pyarrow", "setuptools")
FORMAT = "1"
HOME = "/var/tmp/frameworks"
MOUNT_TIMEOUT_S = 120.0
PROGRAM = [f"{MOUNT}/bin/python", "-m", "pytest", *adapters.OPTIONS]
ENVIRONMENT = payload.ENVIRONMENT | {
    # Without the guest's own packages: a framework may want other versions of them.
    "PYTHONPATH": f"{payload.MOUNT}/src:{payload.MOUNT}:{payload.MOUNT}/{payload.INSTALLED}",
    "PYTEST_PLUGINS": "pytest_timeout,pytest_asyncio.plugin",
    "DSEC_ADAPTERS_VENV": MOUNT,
    "DSEC_REQUIRE": "adapters",
    "HOME": HOME,  # frameworks keep things there
    "NO_COLOR": "1",
}


def missing() -> str | None:
    """Why no guest can run the frameworks; None when one can."""
    python = adapters_python()
    if python is None:
        return "the frameworks are not installed (scripts/setup --for test)"
    if not (python.parent.parent / SITE).is_dir():
        return f"the frameworks are not for Python {PYTHON}, which the guests have"
    return None


def disk() -> Path:
    """The environment as an ext4 image, made now if it is not there."""
    python = adapters_python()
    if (reason := missing()) is not None or python is None:
        raise GuestError(reason)
    site = python.parent.parent.resolve() / SITE
    # Names and versions: what was installed, whatever was asked for.
    there = sorted(path.name for path in site.glob("*.dist-info"))
    key = cache.key_of(str(PAYLOAD_BYTES), FORMAT, *UNUSED, *there)
    return cache.entry("frameworks", key, lambda work: _build(work, site)) / "frameworks.ext4"


def _build(work: Path, site: Path) -> None:
    """With the guest's own interpreter in place of this machine's."""
    tree, image = work / "tree", work / "frameworks.ext4"
    shutil.copytree(site, tree / SITE, symlinks=True, ignore=lambda at, _: UNUSED if at == os.fspath(site) else ())
    (tree / "bin").mkdir()
    for name in ("python", "python3", f"python{PYTHON}"):
        (tree / "bin" / name).symlink_to(f"/usr/bin/python{PYTHON}")
    (tree / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {PYTHON}\n")
    with image.open("wb") as file:
        file.truncate(PAYLOAD_BYTES)
    mkfs = find("mkfs.ext4") or "mkfs.ext4"
    subprocess.run([mkfs, "-q", "-d", tree, "-O", "^has_journal", "-m", "0", image], check=True)
    shutil.rmtree(tree)
    image.chmod(0o644)


def mount(guest: Guest) -> None:
    """In a guest that was restored with the disk. Raises GuestError."""
    done = guest.run(
        f"mkdir -p {HOME} {MOUNT} && {{ mountpoint -q {MOUNT} || "
        f"{{ blockdev --flushbufs {DEVICE} && mount -t ext4 -o ro,noload {DEVICE} {MOUNT}; }}; }}",
        timeout_s=MOUNT_TIMEOUT_S,
    )
    if not done.ok:
        raise GuestError(f"the frameworks are not mounted: {done.tail}")


def too_few(report: bytes, files: list[str]) -> list[str]:
    """Of suites, those that were not collected whole, by pytest's report."""
    passed: dict[str, int] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        module = next((part for part in (case.get("classname") or "").split(".") if part.endswith("_suite")), "")
        if not len(case):
            name = module.removesuffix("_suite")
            passed[name] = passed.get(name, 0) + 1
    return adapters.too_few(passed, [Path(path).stem.removesuffix("_suite") for path in files])
