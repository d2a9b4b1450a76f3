"""What may reach a terminal."""

from __future__ import annotations

import io
import json
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.cli import terminal

BIDI = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
BLANK_LETTERS = "\u115f\u1160\u3164\uffa0"  # fillers of Hangul
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


VISIBLE = set(range(0xFE00, 0xFE10)) | set(range(0xE0100, 0xE01F0))  # variation selectors


def test_what_unicode_calls_a_control_a_format_or_a_separator_is_escaped() -> None:
    """Of all there is, by the interpreter's own tables; and what is text is let through."""
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        kind = unicodedata.category(char)
        one = terminal.safe(char) == char
        stream = terminal._UNSAFE_STREAM.sub(terminal._escape, char) == char
        hidden = kind in ("Cc", "Cf", "Cs", "Zl", "Zp") or unicodedata.bidirectional(char) in BIDI
        if hidden:
            assert not one and (not stream or char in "\n\t\r"), hex(code)
        elif (kind[0] in "LNPSZ" and char not in BLANK_LETTERS) or code in VISIBLE:
            assert one and stream, hex(code)


def test_what_is_escaped_can_be_told_from_what_follows() -> None:
    assert terminal.safe("a\u061cb\U000e0041c") == "a\\u061cb\\U000e0041c"
    assert through("a\u061cb\U000e0041c\u00ad\ufe0f".encode()) == "a\\u061cb\\U000e0041c\\xad\ufe0f"


def test_a_terminal_of_another_encoding_gets_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """UTF-8 of a letter has bytes that are controls there."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    out = Tty()
    sink = terminal.Sink(out)
    sink.write("\u00db\u65e5\n".encode())
    sink.close()
    assert out.getvalue() == b"\xdb\\u65e5\n"


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


def test_lines_of_json_are_ascii_and_exact(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": EVIL + "\x85\u061cü😀"}
    terminal.show_json_line(value)
    text = capsys.readouterr().out
    assert text[-1] == "\n" and all(" " <= char <= "~" for char in text[:-1])
    assert json.loads(text) == value


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0s"), (59, "59s"), (60, "1m"), (7200, "2h"), (200_000, "2d")])
def test_age(seconds: float, text: str) -> None:
    assert terminal.age(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (2048, "2.0 KiB"), (5 << 40, "5120.0 GiB")])
def test_size(count: int, text: str) -> None:
    assert terminal.size(count) == text
