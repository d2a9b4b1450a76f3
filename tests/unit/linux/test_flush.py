"""Flushing a file beside the event loop: by the kernel and by a thread alike."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.linux import flush
from dsec.linux.flush import Flusher, KernelFlusher, ThreadFlusher, flusher

KINDS = pytest.mark.parametrize("kind", [KernelFlusher, ThreadFlusher])


def made(kind: Callable[[int], Flusher], fd: int) -> Flusher:
    try:
        return kind(fd)
    except OSError as error:
        pytest.skip(f"no Linux AIO here: {error}")


@KINDS
def test_flushes_one_after_another_on_several_loops(tmp_path: Path, kind: Callable[[int], Flusher]):
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    made_flusher = made(kind, fd)

    async def main() -> None:
        for _ in range(3):
            os.write(fd, b"x" * 5000)
            done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
            made_flusher.start(done.set_result)
            assert not done.done()  # never from within the call
            async with asyncio.timeout(20):
                assert await done is None

    asyncio.run(main())
    asyncio.run(main())
    assert made_flusher.close() is None
    os.close(fd)


@KINDS
def test_closing_waits_and_then_nobody_is_called(tmp_path: Path, kind: Callable[[int], Flusher]):
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    made_flusher = made(kind, fd)
    called: list[OSError | None] = []

    async def main() -> None:
        os.write(fd, b"x")
        made_flusher.start(called.append)
        assert made_flusher.close() is None
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert called == []
    os.close(fd)


def test_what_cannot_be_flushed_is_an_error():
    reading, writing = os.pipe()
    with pytest.raises(OSError):
        KernelFlusher(writing)
    threaded = ThreadFlusher(writing)

    async def main() -> OSError | None:
        done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        threaded.start(done.set_result)
        return await done

    assert isinstance(asyncio.run(main()), OSError)
    assert isinstance(threaded.close(), OSError)
    os.close(reading)
    os.close(writing)


def test_without_the_kernels_help_a_thread_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flush, "_NUMBERS", {})
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    found = flusher(fd)
    assert isinstance(found, ThreadFlusher)
    found.close()
    os.close(fd)
