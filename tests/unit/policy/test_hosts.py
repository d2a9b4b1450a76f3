"""Names of hosts: one form, and what is none."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.model.errors import InvalidSpec
from dsec.policy import hosts
from tests.unit.policy import CALM

LONGEST = ".".join(["a" * 63] * 3 + ["b" * 61])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("example.org", "example.org"),
        ("EXAMPLE.Org.", "example.org"),
        ("*.Example.org", "*.example.org"),
        ("*.a.b.example.org.", "*.a.b.example.org"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("bu\u0308cher.example", "xn--bcher-kva.example"),  # u and two dots, composed
        ("*.bücher.example", "*.xn--bcher-kva.example"),
        ("XN--Bcher-KVA.example", "xn--bcher-kva.example"),
        ("faß.example", "xn--fa-hia.example"),  # not fass, as the older rules have it
        ("例え。テスト", "xn--r8jz45g.xn--zckzah"),
        ("ｅｘａｍｐｌｅ.org", "example.org"),
        ("r3---sn-x.example.org", "r3---sn-x.example.org"),
        ("_acme.my_bucket.example.org", "_acme.my_bucket.example.org"),
        ("1.2.3.example", "1.2.3.example"),
        ("0x7f.example", "0x7f.example"),
        (LONGEST, LONGEST),
        (f"*.{LONGEST[:251]}", f"*.{LONGEST[:251]}"),
    ],
)
def test_one_form(written: str, meant: str) -> None:
    assert hosts.pattern(written, "f") == meant
    assert hosts.pattern(meant, "f") == meant


@pytest.mark.parametrize(
    "written",
    [
        "",
        ".",
        "..",
        "org",
        "*",
        "*.",
        "*.*",
        "*.org",
        "*.*.example.org",
        "a*.example.org",
        "www.*.org",
        "**.example.org",
        "＊.example.org",
        "localhost",
        "a.localhost",
        "LOCALHOST.",
        ".example.org",
        "example..org",
        "example.org..",
        "example。。org",
        "-a.example.org",
        "a-.example.org",
        f"{'a' * 64}.example.org",
        f"a{LONGEST}",
        f"*.{LONGEST}x",
        "exa mple.org",
        " example.org",
        "example.org\n",
        "example\0.org",
        "exam\u200bple.org",  # seen by nobody
        "exam\u00adple.org",
        "exam\u202eple.org",
        "a\u00a0b.example.org",
        "exam\u3000ple.org",
        "a\u200db.example.org",  # a joiner where none may be
        "\udcff.example.org",
        "http://example.org",
        "example.org:443",
        "example.org/",
        "user@example.org",
        "ex%61mple.org",
        "a\uff0fb.example.org",  # a slash by its full width
        "xn--a.example",  # no letters behind it
        "xn--example-.org",
        "xn--.org",
        "xn--i-7iq.ws",  # a picture
        # Addresses, however they are written.
        "127.0.0.1",
        "127.1",
        "127.0.0.1.",
        "2130706433",
        "0x7f.1",
        "0x7f000001",
        "0177.0.0.1",
        "1.2.3.0x",
        "example.123",
        "*.1.2.3",
        "*.example.0xa",
        "１２７.0.0.1",
        "①②⑦.0.0.①",
        "127。0。0。1",
        "[::1]",
        "::1",
        "[::ffff:127.0.0.1]",
        "2001:db8::1",
    ],
)
def test_no_name_of_a_host(written: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        hosts.pattern(written, "network.rules[0].domain")
    assert caught.value.detail["field"] == "network.rules[0].domain"
    assert "a host's name" in caught.value.detail["allowed"]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("Example.ORG", "example.org"),
        ("example.org.", "example.org"),
        ("localhost", "localhost"),
        ("_x.-y-.example.org", "_x.-y-.example.org"),
        ("127.0.0.1", "127.0.0.1"),  # a name no rule can be about
        (LONGEST + ".", LONGEST),
        ("", None),
        (".", None),
        ("example.org..", None),
        (".example.org", None),
        ("a..b", None),
        ("bücher.example", None),
        ("İstanbul.example", None),
        ("\u212aelvin.example", None),  # a sign whose lower case is k
        ("a b.org", None),
        ("a\0.example.org", None),
        ("example.org\n", None),
        ("*.example.org", None),
        ("example.org:443", None),
        ("[::1]", None),
        ("a" * 64 + ".org", None),
        (LONGEST + "x", None),
    ],
)
def test_what_a_program_said(said: str, meant: str | None) -> None:
    assert hosts.said(said) == meant


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("example.org", "example.org", True),
        ("example.org", "www.example.org", False),
        ("example.org", "xexample.org", False),
        ("example.org", "example.org.evil.net", False),
        ("*.example.org", "www.example.org", True),
        ("*.example.org", "a.b.c.example.org", True),
        ("*.example.org", "example.org", False),
        ("*.example.org", "xexample.org", False),
        ("*.example.org", "www.example.org.evil.net", False),
        ("*.example.org", "example.org.", False),
    ],
)
def test_a_name_itself_and_those_below_it(pattern: str, name: str, fits: bool) -> None:
    assert hosts.fits(pattern, name) is fits


@CALM
@given(st.text(max_size=300))
def test_whatever_is_written_has_one_form_or_none(text: str) -> None:
    try:
        made = hosts.pattern(text, "f")
    except InvalidSpec:
        return
    assert hosts.pattern(made, "f") == made
    assert hosts.said(made.removeprefix("*.")) == made.removeprefix("*.")


NAMES = st.from_regex(r"[a-z0-9_][a-z0-9]{0,5}(\.[a-z][a-z0-9]{1,5}){1,3}", fullmatch=True)


@CALM
@given(NAMES, st.data())
def test_case_and_final_dot_make_no_difference(name: str, data: st.DataObject) -> None:
    cases = data.draw(st.lists(st.booleans(), min_size=len(name), max_size=len(name)))
    written = "".join(char.upper() if up else char for char, up in zip(name, cases, strict=True)) + data.draw(
        st.sampled_from(["", "."])
    )
    assert hosts.pattern(written, "f") == hosts.said(written) == name


@CALM
@given(st.text(alphabet="aB0-_.*x\u00fc ", max_size=80))
def test_said_is_the_same_twice(text: str) -> None:
    name = hosts.said(text)
    if name is not None:
        assert hosts.said(name) == name
        assert re.fullmatch(r"[a-z0-9_.-]+", name)
