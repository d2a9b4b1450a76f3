"""The wheel on a bare Debian 12: no compiler is used, no network, only what pip finds in a directory."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from dsec.images import LayerStore
from dsec.images.tools import cache_dir
from tests.kit.erofs import mounted
from tests.kit.lanes import TESTS

ROOT: Final = TESTS.parent
BUILD_TIMEOUT_S: Final = 900
BASE: Final = "debian:12"
PYTHON: Final = "3.11"  # Debian 12's
# Its C library is 2.36; wheels for older ones do too.
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")

pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one wheel, as a release would have it."""
    out = tmp_path_factory.mktemp("dist")
    command = [str(Path(sys.executable).parent / "maturin"), "build", "--release", "--locked", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    [built] = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheelhouse(wheel: Path) -> Path:
    """The wheels `dsec[node]` needs, fetched once and kept by what is asked for."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()[:16]
    kept = cache_dir() / "wheelhouse" / wanted
    if not kept.is_dir():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as fresh:
            command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--python-version", PYTHON]
            command += [word for platform in PLATFORMS for word in ("--platform", platform)]
            subprocess.run([*command, "-d", f"{fresh}/w", f"{wheel}[node]"], check=True)
            for own in Path(fresh, "w").glob("dsec-*"):
                own.unlink()
            Path(fresh, "w").rename(kept)
    return kept


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Path]:
    """The root of a Debian 12, writable, with /dev, /proc and /sys."""
    store = LayerStore(cache_dir())
    if store.get(BASE) is None:
        pytest.skip(f"no layer {BASE} in {cache_dir()} (scripts/setup makes it)")
    with mounted(store.path(store.resolve(BASE).digest)) as lower, Root(tmp_path, lower) as root:
        yield root


class Root:
    """An overlay over the base; everything is unmounted in the opposite order."""

    def __init__(self, directory: Path, lower: Path) -> None:
        self._directory = directory
        self._lower = lower
        self._points: list[Path] = []

    def __enter__(self) -> Path:
        writable, root = self._directory / "writable", self._directory / "root"
        for path in (writable, root):
            path.mkdir()
        self._mount("-t", "tmpfs", "-o", "size=1g", "tmpfs", point=writable)
        for name in ("upper", "work"):
            (writable / name).mkdir()
        options = f"lowerdir={self._lower},upperdir={writable}/upper,workdir={writable}/work"
        self._mount("-t", "overlay", "-o", options, "overlay", point=root)
        self._mount("-t", "proc", "proc", point=root / "proc")
        self._mount("--rbind", "/dev", point=root / "dev")
        self._mount("--rbind", "/sys", point=root / "sys")
        for name in ("dev", "sys"):  # unmounting must not reach the host
            subprocess.run(["mount", "--make-rslave", str(root / name)], check=True)
        return root

    def __exit__(self, *_: object) -> None:
        for point in reversed(self._points):
            subprocess.run(["umount", "--recursive", "--lazy", str(point)], check=True)

    def _mount(self, *options: str, point: Path) -> None:
        subprocess.run(["mount", *options, str(point)], check=True)
        self._points.append(point)


def inside(root: Path, script: str) -> str:
    """A shell script in the root, with nothing of our environment."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    environment = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8"}
    done = subprocess.run(
        ["chroot", str(root), "/bin/sh", "-euc", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_one_wheel_with_the_static_binary(wheel: Path, tmp_path: Path) -> None:
    assert wheel.name.startswith("dsec-") and "py3-none-" in wheel.name
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path)], check=True)
    [binary] = tmp_path.glob("*.data/scripts/dsec-runtime")
    headers = subprocess.run(["readelf", "-l", str(binary)], capture_output=True, text=True, check=True).stdout
    assert "INTERP" not in headers, "it needs no dynamic linker"
    assert list(tmp_path.glob("*.data/scripts/dsec"))
    assert (tmp_path / "dsec/py.typed").exists()
    [entries] = tmp_path.glob("*.dist-info/entry_points.txt")
    assert entries.read_text().split() == ["[inspect_ai]", "dsec=dsec.adapters.inspect"]


def test_it_installs_and_runs_on_a_bare_debian(bare: Path, wheel: Path, wheelhouse: Path) -> None:
    (bare / "wheels").mkdir()
    for path in (wheel, *wheelhouse.iterdir()):
        shutil.copy(path, bare / "wheels")
    inside(bare, "python3 -m venv /opt/dsec; /opt/dsec/bin/pip install -q --no-index --find-links /wheels 'dsec[node]'")
    assert inside(bare, "/opt/dsec/bin/dsec --version").startswith("dsec ")
    node = "/opt/dsec/bin/dsec {} --run-dir /run/dsec-wheel --state-dir /var/lib/dsec-wheel"
    up = node.format("up") + " -- --cgroup dsec-wheel-$$"
    said = inside(bare, f"{up}; {node.format('down')} --stop-all")
    assert "is up" in said and "has stopped" in said
