"""What may reach a terminal."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.cli import terminal

EVIL = "\x1b]0;title\x07\x1b[2J\x08\x7f\x9b\u202e\u200b\r\n"


class Tty(io.BytesIO):
    def isatty(self) -> bool:
        return True


def test_one_line_stays_one_line_without_controls() -> None:
    shown = terminal.safe(EVIL)
    assert shown == "\\x1b]0;title\\x07\\x1b[2J\\x08\\x7f\\x9b\\u202e\\u200b\\x0d\\x0a"
    assert terminal.safe("grüße 日本") == "grüße 日本"


@settings(deadline=None)
@given(st.text())
def test_nothing_unprintable_gets_through(text: str) -> None:
    shown = terminal.safe(text)
    assert not any(ord(char) < 0x20 or 0x7F <= ord(char) <= 0x9F for char in shown)


def through(*pieces: bytes) -> str:
    out = Tty()
    sink = terminal.Sink(out)
    for piece in pieces:
        sink.write(piece)
    sink.close()
    return out.getvalue().decode()


def test_colours_pass_and_are_ended_others_do_not() -> None:
    assert through(b"\x1b[31mred\x1b[0m\n") == "\x1b[31mred\x1b[0m\n\x1b[0m"
    assert through(b"\x1b[2J\x1b]52;c;eA==\x07") == "\\x1b[2J\\x1b]52;c;eA==\\x07"


def test_sequences_cut_anywhere() -> None:
    whole = "a\x1b[31mü\x1b[2Jz\n".encode()
    expected = through(whole)
    for cut in range(len(whole)):
        assert through(whole[:cut], whole[cut:]) == expected
    assert through(*(bytes([byte]) for byte in whole)) == expected


@settings(deadline=None)
@given(st.lists(st.binary()))
def test_any_bytes_are_safe(pieces: list[bytes]) -> None:
    shown = through(*pieces).replace("\n", "").replace("\t", "").replace("\r", "")
    plain = terminal._UNSAFE_STREAM.sub(lambda match: "" if len(match.group()) > 1 else match.group(), shown)
    assert not any(ord(char) < 0x20 or 0x7F <= ord(char) <= 0x9F for char in plain)


def test_files_get_the_exact_bytes() -> None:
    out = io.BytesIO()
    sink = terminal.Sink(out)
    sink.write(b"\xff\x1b]0;x\x07")
    sink.close()
    assert out.getvalue() == b"\xff\x1b]0;x\x07"
    tty = Tty()
    terminal.Sink(tty, raw=True).write(b"\x1b[2J")
    assert tty.getvalue() == b"\x1b[2J"


def test_table_columns_and_cells() -> None:
    assert terminal.table(("A", "B"), [("x\n", "1"), ("", "22")]) == "A      B\nx\\x0a  1\n       22"


def test_json_is_ascii_and_exact(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": EVIL + "ü😀"}
    terminal.show_json(value)
    text = capsys.readouterr().out
    assert all(char == "\n" or " " <= char <= "~" for char in text)
    assert json.loads(text) == value


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0s"), (59, "59s"), (60, "1m"), (7200, "2h"), (200_000, "2d")])
def test_age(seconds: float, text: str) -> None:
    assert terminal.age(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (2048, "2.0 KiB"), (5 << 40, "5120.0 GiB")])
def test_size(count: int, text: str) -> None:
    assert terminal.size(count) == text
