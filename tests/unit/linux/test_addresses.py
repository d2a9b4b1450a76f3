"""Addresses of a machine, and where it asks for names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dsec.linux import addresses

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ()),
        ("search a.org\nnameserver 192.0.2.1\nnameserver 2001:db8::1\n", ("192.0.2.1:53", "[2001:db8::1]:53")),
        ("#nameserver 192.0.2.1\n  nameserver 192.0.2.2\nnameserver\t192.0.2.3 # ours\n", ("192.0.2.3:53",)),
        ("nameserver fe80::1%eth0\nnameserver name.example\nnameserver 192.0.2.4", ("192.0.2.4:53",)),
        ("".join(f"nameserver 192.0.2.{i}\n" for i in range(5)), ("192.0.2.0:53", "192.0.2.1:53", "192.0.2.2:53")),
    ],
)
def test_resolvers_are_those_of_the_file(tmp_path: Path, text: str, found: tuple[str, ...]) -> None:
    (tmp_path / "resolv.conf").write_text(text)
    assert addresses.resolvers(tmp_path / "resolv.conf") == found


def test_without_the_file_there_are_none(tmp_path: Path) -> None:
    assert addresses.resolvers(tmp_path / "none") == ()


def test_what_is_no_address_has_no_port() -> None:
    for text in ("name", "1.2.3", "fe80::1%eth0", ""):
        with pytest.raises(ValueError, match=r"."):
            addresses.with_port(text, 53)


def test_its_own_are_all_that_the_kernel_names() -> None:
    said = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    own = addresses.own()
    assert "127.0.0.1/32" in own
    assert {f"{one}/{128 if ':' in one else 32}" for one in said} <= set(own)
