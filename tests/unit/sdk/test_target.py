"""URLs and keys."""

from __future__ import annotations

import pytest

import dsec
from dsec.sdk.target import default_url, parse


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("unix:///run/x.sock", ("unix", "", 0, "/run/x.sock", None, "")),
        ("http://host", ("http", "host", 80, "", None, "")),
        ("http://host:7700/a/b/", ("http", "host", 7700, "/a/b", None, "/a/b")),
        ("https://[::1]:1", ("https", "::1", 1, "", None, "")),
        ("ssh://me@host", ("ssh", "host", 22, "/run/dsec/api.sock", "me", "")),
        ("ssh://host:2222/x/y.sock", ("ssh", "host", 2222, "/x/y.sock", None, "")),
    ],
)
def test_good_urls(url: str, parts: tuple[object, ...]) -> None:
    found = parse(url)
    assert (found.scheme, found.host, found.port, found.path, found.user, found.prefix) == parts


@pytest.mark.parametrize(
    "url",
    [
        "host:7700",
        "ftp://host",
        "unix://relative",
        "unix:///" + "a" * 200,
        "unix:///a\0b",
        "http://",
        "http://host:99999",
        "http://host:x",
        "http://host/?q=1",
        "ssh://-oProxyCommand=x",
        "ssh://-l@host",
    ],
)
def test_bad_urls_are_refused(url: str) -> None:
    with pytest.raises(dsec.InvalidSpec) as caught:
        dsec.Client(url)
    assert caught.value.detail["field"] == "url"


@pytest.mark.parametrize("url", ["http://:s3cret@host", "https://s3cret@host", "ssh://me:s3cret@host"])
def test_a_key_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(dsec.InvalidSpec, match="DSEC_API_KEY") as caught:
        dsec.Client(url)
    assert "s3cret" not in str(caught.value)


def test_key_that_would_break_a_header_is_refused_and_not_shown() -> None:
    with pytest.raises(dsec.InvalidSpec) as caught:
        dsec.Client("http://host", api_key="s3cret\r\nX: y")
    assert "s3cret" not in str(caught.value)


def test_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSEC_URL", raising=False)
    monkeypatch.delenv("DSEC_RUN_DIR", raising=False)
    assert default_url() == "unix:///run/dsec/api.sock"
    monkeypatch.setenv("DSEC_RUN_DIR", "/tmp/x/")
    assert default_url() == "unix:///tmp/x/api.sock"
    monkeypatch.setenv("DSEC_URL", "http://host")
    assert default_url() == "http://host"
