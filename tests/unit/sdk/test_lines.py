"""Lines of output, however its bytes come."""

from __future__ import annotations

import pickle
import random
import re

import pytest

import dsec
from dsec.model.limits import LINE_MAX_BYTES
from dsec.model.states import Output
from dsec.sdk.lines import Line, Pattern, Splitter, Wanted
from dsec.sdk.values import command_failed


def split(data: bytes, *sizes: int, offset: int = 0) -> list[Line]:
    splitter, at, found = Splitter((offset, 0)), 0, list[Line]()
    for size in (*sizes, len(data)):
        piece = data[at : at + size]
        at += len(piece)
        if piece:
            found.extend(splitter.feed(1, piece, offset + at))
    found.extend(splitter.rest({1: offset + at, 2: 0}))
    assert splitter.offsets == {1: offset + len(data), 2: 0}
    return found


def test_a_line_is_a_str_that_knows_its_bytes() -> None:
    lines = split("één\r\n\ntwo\xa0\n".encode() + b"\xff\nlast", offset=7)
    assert lines == ["één", "", "two\xa0", "\ufffd", "last"]
    assert [line.data for line in lines] == ["één\r\n".encode(), b"\n", "two\xa0\n".encode(), b"\xff\n", b"last"]
    assert [line.offset for line in lines] == [7, 14, 15, 21, 23] and lines[-1].end == 27
    assert [line.ending for line in lines] == ["newline"] * 4 + ["end"]
    again = pickle.loads(pickle.dumps(lines[3]))
    assert (again, again.data, again.offset, again.stream, again.ending) == ("\ufffd", b"\xff\n", 21, 1, "newline")


@pytest.mark.parametrize("seed", range(8))
def test_how_the_bytes_come_makes_no_difference(seed: int) -> None:
    chance = random.Random(seed)
    long = "ä€😀x" * (LINE_MAX_BYTES // 5)
    texts = ["", "short", "ö" * 40, long, long[1:], "\xff" * 10, "end"]
    data = "\n".join(chance.choices(texts, k=9)).encode()
    lines = split(data)
    assert b"".join(line.data for line in lines) == data
    assert "\ufffd" not in "".join(lines)
    assert max(len(line.data) for line in lines) <= LINE_MAX_BYTES + 1
    pieces = split(data, *(chance.choice((1, 3, 1000, 300_000)) for _ in range(1000)))
    assert [(line, line.offset, line.ending) for line in pieces] == [(line, line.offset, line.ending) for line in lines]


def test_a_line_of_the_bound_is_one_and_a_longer_one_is_cut() -> None:
    assert [line.ending for line in split(b"x" * LINE_MAX_BYTES + b"\n")] == ["newline"]
    cut = split(b"x" * LINE_MAX_BYTES + b"yz\n")
    assert [(line[-1], line.ending) for line in cut] == [("x", "cut"), ("z", "newline")]
    assert [len(line.data) for line in split(b"\x80" * (LINE_MAX_BYTES + 5))] == [LINE_MAX_BYTES, 5]


def test_where_bytes_are_missing_two_lines_are_not_made_one() -> None:
    splitter = Splitter()
    lines = [*splitter.feed(1, b"one\nhal", 7), *splitter.feed(2, b"other", 5), *splitter.feed(1, b"ves\nla", 106)]
    lines += splitter.rest({1: 120, 2: 5})
    assert [(line.stream, line, line.offset, line.ending) for line in lines] == [
        (1, "one", 0, "newline"),
        (1, "hal", 4, "gap"),
        (1, "ves", 100, "newline"),
        (1, "la", 104, "gap"),
        (2, "other", 0, "end"),
    ]


@pytest.mark.parametrize(
    ("pattern", "good"),
    [
        ("x\xe9", True),
        ("X", False),
        (b"\xc3\xa9\r\n", True),
        (re.compile("^a x.$"), True),
        (re.compile(b"\xa9$"), True),
    ],
)
def test_what_matches(pattern: str, good: bool) -> None:
    (line,) = split("a xé\r\n".encode())
    assert Wanted(pattern).found(line, whole=True) is good
    assert not Wanted(pattern).found(line, whole=False)


def test_what_is_no_pattern_is_said() -> None:
    for wrong in (None, 5, ["x"]):
        with pytest.raises(dsec.InvalidSpec, match=r"re\.compile"):
            Wanted(wrong)  # type: ignore[arg-type]  # as a caller without types may


def test_an_error_shows_the_last_lines_and_no_more() -> None:
    wanted = Wanted("none")
    for line in split(b"".join(b"line %d\n" % number for number in range(100_000))):
        assert not wanted.found(line, whole=True)
    wanted.found(Line("> "), whole=False)
    text = str(wanted.too_late("p-1", 3))
    assert "'none' within 3 s" in text and "line 99999\n" in text and "no line yet" in text and text.endswith("\n> ")
    assert "line 99980\n" in text and "line 99979\n" not in text
    for line in split(b"x" * 300 + b"\n" + b"y" * 1900 + b"\n"):
        wanted.found(line, whole=True)
    assert "xx" not in str(wanted.too_late("p-1", 3))


def test_the_error_of_a_failed_command_shows_its_last_lines() -> None:
    out = dsec.RunResult(process_id="p-1", exit_code=1, cause="exited", err=Output(head=b"y\n" * 900, total=1800))
    text = str(command_failed("yes", out, "sbx-1"))
    assert text.endswith("end of stderr:" + "\ny" * 20)


def test_an_error_says_which_lines_were_looked_at() -> None:
    behind = Line("ready on 8080", 1, b"ready on 8080\n")
    for text in (
        str(Wanted("ready", behind).too_late("p-1", 3)),
        str(Wanted("ready", behind).ended_first("p-1", None)),
    ):
        assert "no line of its output behind 'ready on 8080', which the last call returned, had 'ready'" in text
        assert "sbx.process(id).wait_for(...) looks from the first line on" in text
    assert "behind" not in str(Wanted("ready").too_late("p-1", 3))


@pytest.mark.parametrize(
    "pattern", ["port .*", r"port \d+", "^ready", "ready$", "[0-9]+", "(one|two)", "one|two", b"a.+"]
)
def test_a_text_that_looks_like_a_regular_expression_is_told_what_it_is(pattern: str | bytes) -> None:
    assert "a regular expression is re.compile(...)" in str(Wanted(pattern).too_late("p-1", 3))
    assert "a regular expression is re.compile(...)" in str(Wanted(pattern).ended_first("p-1", None))


@pytest.mark.parametrize(
    "pattern", ["ready.", "http://0.0.0.0:80/?a=b", "$ ", "[", "what?", re.compile("a.*"), "(x", "a*b"]
)
def test_a_plain_text_is_not(pattern: Pattern) -> None:
    assert "regular" not in str(Wanted(pattern).too_late("p-1", 3))


def test_where_nothing_has_come_the_reason_may_be_the_programs_buffer() -> None:
    assert "`stdbuf -oL COMMAND`" in str(Wanted("a").too_late("p-1", 3))
    for whole in (True, False):
        wanted = Wanted("a")
        wanted.found(Line("b"), whole=whole)
        assert "stdbuf" not in str(wanted.too_late("p-1", 3))
