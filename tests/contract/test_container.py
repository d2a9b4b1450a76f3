"""The conformance suite against containers, with a runtime of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.backends.conformance import Check, applicable, ends, kit, lifecycle, output, perform
from tests.kit import rootfs, runtime
from tests.kit.lanes import fewer, in_guest
from tests.kit.runtime import ContainerSubject

pytestmark = [pytest.mark.contract, pytest.mark.root]


# Nothing is judged by its speed; this only bounds how long a check that hangs is waited for.
GUEST_PATIENCE_S = 240.0
# Still more than is kept of a stream.
GUEST_LARGE = 3_000_000


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if in_guest():
            patch.setattr(kit, "PATIENCE_S", GUEST_PATIENCE_S)
            # What is done many times or with much.
            patch.setattr(ends, "CODES", (*range(0, 256, fewer(100)), 255))
            patch.setattr(output, "LARGE", GUEST_LARGE)
            patch.setattr(lifecycle, "CUTS", 8)
            patch.setattr(lifecycle, "CROWD", 12)
        yield


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerSubject]:
    if reason := runtime.missing() or rootfs.missing():
        pytest.skip(reason)
    layer = rootfs.busybox_layer(Path(tmp_path_factory.mktemp("rootfs")))
    with runtime.own_place() as place:
        made = ContainerSubject(place, (layer,))
        asyncio.run(_must_be_able(made))
        yield made


async def _must_be_able(subject: ContainerSubject) -> None:
    backend = subject.backend()
    try:
        found = await backend.probe()
    finally:
        await backend.close()
    if not found.available:
        pytest.skip(f"the container backend cannot work here: {found.reason}")


@pytest.mark.parametrize("check", applicable(ContainerSubject.has), ids=repr)
def test_container(check: Check, subject: ContainerSubject) -> None:
    asyncio.run(perform(check, subject))
