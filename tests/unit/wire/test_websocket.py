"""WebSocket frames: whatever is said comes through however it is cut, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.wire import websocket
from dsec.wire.websocket import Messages, ProtocolError

LIMIT = 1 << 17
SIZES = st.one_of(st.integers(0, 300), st.sampled_from([125, 126, 127, 65_535, 65_536, 70_000]))


def taken(messages: Messages, data: bytes, cuts: list[int]) -> list[tuple[int, bytes]]:
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        messages.feed(data[start:end])
        while (message := messages.take()) is not None:
            found.append((message.opcode, bytes(message.data)))
    return found


@given(st.lists(SIZES, max_size=6), st.booleans(), st.data())
def test_any_cut_of_the_bytes_gives_the_same_messages(sizes: list[int], plain: bool, data: st.DataObject) -> None:
    said = [bytes(i % 251 for i in range(at, at + size)) for at, size in enumerate(sizes)]
    client = b"".join(websocket.masked(websocket.BINARY, word, plain=plain) for word in said)
    server = b"".join(websocket.head(websocket.BINARY, len(word)) + word for word in said)
    for sent, from_client in ((client, True), (server, False)):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
        messages = Messages(from_client=from_client, max_bytes=LIMIT)
        assert taken(messages, sent, cuts) == [(websocket.BINARY, word) for word in said]
        assert not messages.partial


def test_a_mask_is_taken_off_and_never_shown() -> None:
    word = b"a word that a proxy must not see"
    frame = websocket.masked(websocket.BINARY, word)
    assert word not in frame
    assert websocket.exclusive_or(word, b"\0\1\2\3") == bytes(b ^ (i % 4) for i, b in enumerate(word))


def test_a_message_in_pieces_with_a_ping_between_them() -> None:
    frames = [b"\x02\x02ab", websocket.head(websocket.PING, 1) + b"!", b"\x00\x01c", b"\x80\x02de"]
    messages = Messages(from_client=False, max_bytes=5)
    assert taken(messages, b"".join(frames), [1, 2, 5, 9]) == [(websocket.PING, b"!"), (websocket.BINARY, b"abcde")]
    with pytest.raises(ProtocolError) as caught:
        taken(messages, b"\x02\x03abc\x80\x03def", [])
    assert caught.value.code == websocket.TOO_BIG


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\xc2\x80\0\0\0\0", websocket.PROTOCOL_ERROR),  # a reserved bit
        (b"\x82\x01a", websocket.PROTOCOL_ERROR),  # no mask
        (b"\x83\x80\0\0\0\0", websocket.PROTOCOL_ERROR),  # no such opcode
        (b"\x8b\x80\0\0\0\0", websocket.PROTOCOL_ERROR),  # no such control frame
        (b"\x09\x80\0\0\0\0", websocket.PROTOCOL_ERROR),  # a ping in pieces
        (b"\x89\xfe\0\x7e\0\0\0\0", websocket.PROTOCOL_ERROR),  # a ping of 126 bytes
        (b"\x80\x80\0\0\0\0", websocket.PROTOCOL_ERROR),  # the rest of nothing
        (b"\x02\x80\0\0\0\0\x82\x80\0\0\0\0", websocket.PROTOCOL_ERROR),  # a message within a message
        (b"\x82\xff" + (LIMIT + 1).to_bytes(8, "big") + bytes(4), websocket.TOO_BIG),
        (b"\x82\xff" + b"\xff" * 8 + bytes(4), websocket.TOO_BIG),
    ],
)
def test_what_breaks_the_rules_is_refused_at_its_head(frame: bytes, code: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        taken(Messages(from_client=True, max_bytes=LIMIT), frame, [])
    assert caught.value.code == code


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_give_messages_or_a_protocol_error(data: bytes) -> None:
    messages = Messages(from_client=True, max_bytes=64)
    try:
        found = taken(messages, data, list(range(len(data))))
    except ProtocolError:
        return
    assert sum(len(word) for _, word in found) <= len(data)


def test_handshake_and_close() -> None:
    # The example of RFC 6455.
    assert websocket.accept_key(b"dGhlIHNhbXBsZSBub25jZQ==") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert websocket.is_key(websocket.new_key())
    assert not any(map(websocket.is_key, (b"", b"abc", b"AAAA", b"\xff" * 24)))
    assert websocket.closed(memoryview(websocket.closing(4410, "sandbox_lost"))) == (4410, "sandbox_lost")
    assert websocket.closed(memoryview(b"")) == (websocket.NO_CODE, "")
    for payload in (b"\x03", b"\0\0", b"\x03\xed", b"\x03\xee", b"\xff\xff", b"\x03\xe8\xff\xfe"):
        with pytest.raises(websocket.ProtocolError):
            websocket.closed(memoryview(payload))
    long = websocket.closing(1000, "ä" * 100)
    assert len(long) <= 125
    assert websocket.closed(memoryview(long))[1] == "ä" * 61
