from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from dsec.linux import cgroups, doctor, proc

pytestmark = pytest.mark.unit


def fake_proc(root: Path, **changes: str) -> Path:
    files = {
        "sys/kernel/core_pattern": "core\n",
        "sys/kernel/pid_max": "4194304\n",
        "sys/kernel/threads-max": "100000\n",
        "sys/kernel/pty/max": "4096\n",
        "sys/fs/file-max": "2466186\n",
        "meminfo": "MemTotal:  1000 kB\nMemAvailable: 400 kB\nHugePages_Total: 3\nSwapTotal: 8 kB\nSwapFree: 4 kB\n",
    } | changes
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_numbers(tmp_path: Path) -> None:
    root = fake_proc(tmp_path, loadavg="0.1 0.2 0.3 2/345 6789\n")
    assert proc.memory(root) == proc.Memory(1_024_000, 409_600, 8192, 4096)
    assert proc.pid_max(root) == 100_000
    assert proc.pty_max(root) == 4096
    assert proc.processes(root) == 345


def test_this_machine() -> None:
    found = proc.memory()
    assert 0 < found.available < found.total
    assert proc.disk(Path("/nonexistent/below/nothing")) == proc.disk(Path("/")) or proc.disk(Path("/")).total > 0
    assert proc.boot_id() == proc.boot_id() != ""
    assert proc.cpus() == tuple(sorted(os.sched_getaffinity(0)))


def test_a_process_is_named_by_its_start_time(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(["S", *(str(n) for n in range(4, 60))])
    (tmp_path / "7/stat").write_text(f"7 (evil) name (x) {fields}\n")
    assert proc.start_time(7, tmp_path) == 22
    assert proc.start_time(8, tmp_path) is None
    assert proc.start_time(os.getpid()) == proc.start_time(os.getpid())


def mountinfo(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_cgroup_modes(tmp_path: Path) -> None:
    v2 = tmp_path / "v2"
    v2.mkdir()
    controllers = v2 / "cgroup.controllers"
    line2 = f"30 20 0:26 / {v2} rw,nosuid shared:4 - cgroup2 cgroup2 rw"
    v1 = [
        f"3{n} 20 0:3{n} / /c/{name} rw - cgroup cgroup rw,{name}" for n, name in enumerate(("cpu", "memory", "pids"))
    ]

    controllers.write_text("cpuset cpu io memory pids\n")
    assert cgroups.detect(mountinfo(tmp_path, line2)).mode == "v2"
    assert not cgroups.detect(mountinfo(tmp_path, line2)).missing

    controllers.write_text("\n")
    hybrid = cgroups.detect(mountinfo(tmp_path, *v1, line2))
    assert (hybrid.mode, hybrid.missing) == ("hybrid", frozenset())
    bare = cgroups.detect(mountinfo(tmp_path, line2))
    assert (bare.mode, bare.missing) == ("v2", cgroups.WANTED)
    assert cgroups.detect(mountinfo(tmp_path, *v1)).mode == "none"


def test_the_doctor_says_what_to_do(tmp_path: Path) -> None:
    healthy = {f.name: f for f in doctor.examine(tmp_path, fake_proc(tmp_path / "a"))}
    assert healthy["core_pattern"].level == "ok"
    assert healthy["processes"].level == "ok"
    pipe = {"sys/kernel/core_pattern": "|/usr/share/apport/apport %p\n", "sys/kernel/pid_max": "1000\n"}
    ill = {f.name: f for f in doctor.examine(tmp_path, fake_proc(tmp_path / "b", **pipe))}
    assert ill["core_pattern"].level == "warning"
    assert "as root on the host" in ill["core_pattern"].advice
    assert ill["processes"].level == "warning"
    assert healthy["terminals"].level == "ok"
    # Memory for 48 sandboxes: 48 * 4096 processes and 48 * 256 terminals are promised, and more than there are.
    big = "MemTotal: 25165824 kB\nMemAvailable: 400 kB\n"
    large = {f.name: f for f in doctor.examine(tmp_path, fake_proc(tmp_path / "c", meminfo=big))}
    assert (large["processes"].level, large["terminals"].level) == ("warning", "warning")
    # One sandbox of 700 MiB could have all of them.
    assert (healthy["open files"].level, large["open files"].level) == ("ok", "warning")
    assert "fs.file-max=9223372036854775807" in large["open files"].advice
    assert "kernel.pty.max=13312" in large["terminals"].advice
    raised = {"meminfo": big, "sys/kernel/threads-max": "4194304\n", "sys/kernel/pty/max": "13312\n"}
    enough = {f.name: f for f in doctor.examine(tmp_path, fake_proc(tmp_path / "d", **raised))}
    assert (enough["processes"].level, enough["terminals"].level) == ("ok", "ok")
    assert all(f.advice for f in ill.values() if f.level != "ok")


@pytest.mark.parametrize(("caps", "expected"), [("000001ffffffffff", 1_048_576), ("000001fffeffffff", None)])
def test_who_may_raise_its_limit_has_all_the_kernel_gives(tmp_path: Path, caps: str, expected: int | None) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text(f"Name:\tx\nCapPrm:\t0\nCapEff:\t{caps}\nCapBnd:\t0\n")
    (tmp_path / "sys/fs").mkdir(parents=True)
    (tmp_path / "sys/fs/nr_open").write_text("1048576\n")
    assert proc.descriptors_max(tmp_path) == (expected or resource.getrlimit(resource.RLIMIT_NOFILE)[1])
