"""What the runtime finds in each guest, by trying: what this host's kernel does not have, or has and they do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kit.vm import image, payload
from tests.kit.vm.machine import Guest

pytestmark = pytest.mark.timeout(600)

# Runs in the guest, where the runtime's client and the kit are the tree's.
ASK = """
import asyncio, msgspec, sys
from dsec.backends.container import ensure_runtime
from dsec.wire.runtime import RuntimeClient
from tests.kit.lanes import runtime_binary
from tests.kit.runtime import own_place

async def ask(place):
    await ensure_runtime(place, runtime_binary())
    client = RuntimeClient(place.socket, deadline_s=60)
    try:
        sys.stdout.buffer.write(msgspec.json.encode(await client.probe()))
    finally:
        await client.close()

with own_place() as place:
    asyncio.run(ask(place))
"""

# By kernel: EROFS by a file came with 6.12, simple quotas of btrfs with 6.7, idmapped tmpfs with 6.3.
EXPECTED: dict[str, dict[str, Any]] = {
    "6.1": {"erofs": "loop", "overlay": "path", "upper": ["prjquota", "ext4"]},
    "6.12": {"erofs": "file", "overlay": "path", "upper": ["prjquota", "btrfs", "ext4", "tmpfs"]},
}


@pytest.fixture(scope="module")
def found(guest: Guest) -> dict[str, Any]:
    done = guest.run(["python3", "-c", ASK], cwd=payload.MOUNT, env=payload.ENVIRONMENT)
    assert done.ok, done.tail
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def series(found: dict[str, Any]) -> str:
    return next(name for name in image.KERNELS if found["kernel"].startswith(f"{name}."))


def test_cgroups_are_v2_with_controllers(found: dict[str, Any]) -> None:
    assert found["cgroup"]["mode"] == "v2"
    assert {"cpu", "memory", "pids"} <= set(found["cgroup"]["controllers"])


@pytest.mark.parametrize("mechanism", ["erofs", "overlay", "upper"])
def test_mechanism_is_what_this_kernel_has(found: dict[str, Any], mechanism: str) -> None:
    assert found[mechanism] == EXPECTED[series(found)][mechanism]


def test_what_is_missing_has_a_reason(found: dict[str, Any]) -> None:
    wanted = {"6.1": {"erofs.file", "upper.btrfs", "idmap.tmpfs"}, "6.12": set()}
    assert wanted[series(found)] <= set(found["reasons"])
