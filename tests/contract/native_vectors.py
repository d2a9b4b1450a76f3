"""Values of the native protocol and their bytes, for both sides: `vectors/native.txt` has them as `name hex`.

`native/launch/tests/golden.rs` reads the same file. After a change of the contract
`python -m tests.contract.native_vectors` writes it again; the difference shows what older peers will see.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.wire import values as v

FILE: Final = Path(__file__).parent / "vectors/native.txt"

# What Python sends.
SENT: Final[dict[str, Any]] = {
    "sandbox_plan": v.SandboxPlan(
        id="sbx-n1-abcdefghijklm",
        hostname="box",
        layers=("sha256:aa", "sha256:bb"),
        upper=v.UpperSpec(bytes=1 << 30, kind="auto", inodes=65536),
        memory_bytes=512 << 20,
        cpu_milli=1500,
        cpu_weight=200,
        cpus=(0, 3),
        pids_max=4096,
        nofile=65536,
        shm_bytes=64 << 20,
        pty_max=256,
        deadline_ms=30_000,
        files={"/etc/hosts": b"127.0.0.1 localhost\n\xff"},
        no_new_privs=True,
        seccomp=v.SeccompSpec(deny=("mount",), ioctl_deny=(0x5412,)),
    ),
    "sandbox_plan_small": v.SandboxPlan(
        id="a",
        hostname="b",
        layers=(),
        upper=v.UpperSpec(bytes=1),
        memory_bytes=0,
        pids_max=4,
        nofile=16,
        shm_bytes=0,
        pty_max=1,
        deadline_ms=1,
    ),
    "run_start": v.RunStart(
        sandbox="sbx-n1-abcdefghijklm",
        run="p-1",
        argv=(b"/bin/sh", b"-c", b"echo \xff"),
        env={b"PATH": b"/bin", b"X": b"\xfe"},
        cwd=b"/tmp/\xfd",
        user="1000:1000",
        stdin=b"in\x00put",
        timeout_ms=60_000,
        head_bytes=1 << 20,
        tail_bytes=1 << 20,
        stream=True,
        window=1 << 20,
    ),
}

# What Python receives, as maps in the order in which the runtime writes them.
RECEIVED: Final[dict[str, tuple[type, dict[str, Any]]]] = {
    "probe": (
        v.Probe,
        {
            "kernel": "6.12.0",
            "cgroup": {"mode": "hybrid", "controllers": ["memory", "cpu", "pids"]},
            "erofs": "file",
            "overlay": None,
            "idmap": {"erofs": True, "ext4": True, "tmpfs": False, "btrfs": False},
            "upper": ["btrfs", "tmpfs"],
            "network": "sk_lookup",
            "reasons": {"overlay": "no"},
        },
    ),
    "usage": (
        v.SandboxUsage,
        {
            "memory_bytes": 1 << 33,
            "memory_peak_bytes": 2,
            "swap_bytes": 3,
            "cpu_us": 4,
            "user_us": 5,
            "system_us": 6,
            "pids": 7,
            "oom_kills": 8,
            "pids_max_events": 9,
            "throttled_us": 12,
            "memory_max_events": 13,
            "pressure": {"cpu_us": 14, "memory_us": 0, "io_us": None},
            "disk_bytes": 10,
            "disk_inodes": 11,
        },
    ),
    "error": (
        v.WireError,
        {"code": "no_program", "message": "/bin/x: none", "detail": {"errno": 2, "step": "exec"}},
    ),
}


def encoded() -> dict[str, bytes]:
    """Every vector as bytes."""
    sent = {name: msgspec.msgpack.encode(value) for name, value in SENT.items()}
    return sent | {name: msgspec.msgpack.encode(value) for name, (_, value) in RECEIVED.items()}


def stored() -> dict[str, bytes]:
    """What the file has."""
    lines = (line.split() for line in FILE.read_text().splitlines() if line and not line.startswith("#"))
    return {name: bytes.fromhex(text) for name, text in lines}


if __name__ == "__main__":
    text = "".join(f"{name} {data.hex()}\n" for name, data in encoded().items())
    FILE.write_text("# Written by tests/contract/native_vectors.py; read by both sides' tests.\n" + text)
