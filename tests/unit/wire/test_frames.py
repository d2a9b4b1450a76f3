from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.model import limits
from dsec.model.errors import InvalidSpec
from dsec.wire import frames
from dsec.wire.frames import FrameError, Splitter

pytestmark = pytest.mark.unit


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    bodies, splitter, start = [], Splitter(), 0
    for cut in [*sorted(cuts), len(data)]:
        splitter.feed(data[start:cut])
        start = max(start, cut)
        while (body := splitter.next()) is not None:
            bodies.append(bytes(body))
    assert not splitter.partial
    return bodies


@given(st.lists(st.binary(max_size=2000), max_size=8), st.lists(st.integers(0, 16_000), max_size=12))
def test_frames_come_back_however_the_bytes_arrive(values: list[bytes], cuts: list[int]) -> None:
    data = b"".join(bytes(frames.encode(value)) for value in values)
    bodies = split(data, [min(cut, len(data)) for cut in cuts])
    assert [msgspec.msgpack.decode(body) for body in bodies] == values


def test_a_frame_may_be_as_big_as_the_limit_and_no_bigger() -> None:
    value = b"x" * (limits.FRAME_MAX_BYTES - 5)  # bin32: five bytes of its own
    frame = bytes(frames.encode(value))
    assert split(frame, [3, 70_000, 300_000]) == [frame[4:]]
    with pytest.raises(InvalidSpec, match=str(limits.FRAME_MAX_BYTES)):
        frames.encode(value + b"x")


def test_many_frames_fed_at_once_and_read_later() -> None:
    frame = bytes(frames.encode(b"y" * 100_000))
    splitter = Splitter()
    splitter.feed(frame * 20)
    count = 0
    while splitter.next() is not None:
        count += 1
    assert count == 20


@pytest.mark.parametrize("header", [b"\xff\xff\xff\xff", (limits.FRAME_MAX_BYTES + 1).to_bytes(4, "big")])
def test_a_length_over_the_limit_is_refused_before_anything_is_allocated(header: bytes) -> None:
    splitter = Splitter()
    splitter.feed(header)
    with pytest.raises(FrameError, match="at most"):
        splitter.next()


def test_the_buffer_shrinks_again_after_a_big_frame() -> None:
    splitter = Splitter()
    splitter.feed(bytes(frames.encode(b"z" * 4_000_000)))
    assert splitter.next() is not None
    assert splitter.next() is None
    assert len(splitter._buffer) == frames.BUFFER_BYTES
