"""Addresses and ranges: one form, what is closed, and what is left of a range without that."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.model.errors import InvalidSpec
from dsec.policy import addresses
from dsec.policy.addresses import address, cidr, closed, why_closed, within, without
from tests.unit.policy import CALM


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("8.8.8.8", "8.8.8.8"),
        ("::ffff:8.8.8.8", "8.8.8.8"),
        ("::FFFF:808:808", "8.8.8.8"),
        ("0:0:0:0:0:ffff:0a00:0001", "10.0.0.1"),
        ("2A00:0::1", "2a00::1"),
        ("64:ff9b::8.8.8.8", "64:ff9b::808:808"),
    ],
)
def test_one_form_of_an_address(written: str, meant: str) -> None:
    assert str(address(written)) == meant


@pytest.mark.parametrize(
    "written",
    ["", "1", "127.1", "0x7f.0.0.1", "010.0.0.1", "1.2.3.256", "1.2.3.4 ", "[::1]", "fe80::1%eth0", "::1%",
     "1.2.3.4/32", "：：1", "１.2.3.4", "::1.2.3", "1:2:3:4:5:6:7:8:9", "\0"],
)  # fmt: skip
def test_no_address(written: str) -> None:
    assert address(written) is None


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.1.2.3", "10.1.2.3/32"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("2A00::/16", "2a00::/16"),
        ("::/0", "::/0"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("::ffff:0:0/96", "0.0.0.0/0"),
        ("::ffff:1.2.3.4", "1.2.3.4/32"),
    ],
)
def test_one_form_of_a_range(written: str, meant: str) -> None:
    assert str(cidr(written, "f")) == meant
    assert str(cidr(meant, "f")) == meant


@pytest.mark.parametrize(
    "written",
    ["", "/", "/8", "10.0.0.0/", "10.0.0.1/8", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0.0/+8", "10.0.0.0/255.0.0.0",
     "10.0.0.0/0.255.255.255", "10.0.0.0/8/8", "10/8", "::/129", "fe80::%1/64", "2a00::1/16",
     "example.org", "10.0.0.0/８",     "10.0.0.0 /8", "10.0.0.0/8\n"],
)  # fmt: skip
def test_no_range(written: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        cidr(written, "network.rules[3].cidr")
    assert caught.value.detail["field"] == "network.rules[3].cidr"


@pytest.mark.parametrize(
    ("at", "why"),
    [
        ("0.0.0.0", "this network"),
        ("10.255.255.255", "private"),
        ("100.64.0.1", "shared by a provider (CGNAT)"),
        ("100.100.100.200", "metadata of a cloud"),
        ("127.0.0.1", "loopback"),
        ("127.255.255.255", "loopback"),
        ("168.63.129.16", "metadata of a cloud"),
        ("169.254.0.1", "link-local"),
        ("169.254.169.254", "metadata of a cloud"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.0.2.1", "documentation"),
        ("192.168.1.1", "private"),
        ("198.19.0.1", "benchmarks"),
        ("224.0.0.251", "multicast"),
        ("255.255.255.255", "reserved"),
        ("::ffff:169.254.169.254", "metadata of a cloud"),
        ("64:ff9b::169.254.169.254", "metadata of a cloud"),
        ("64:ff9b::10.0.0.1", "private"),
        ("64:ff9b::8.8.8.8", "NAT64"),
        ("2002:a9fe:a9fe::1", "metadata of a cloud"),
        ("2002:0a00:0001::", "private"),
        ("2002:0808:0808::1", "6to4"),
        ("::", "not public"),
        ("::1", "loopback"),
        ("::10.0.0.1", "not public"),
        ("::ffff:0:10.0.0.1", "not public"),
        ("64:ff9b:1::1", "not public"),
        ("2001:0:53aa::1", "protocols"),
        ("2001:db8::1", "documentation"),
        ("3fff:fff::1", "documentation"),
        ("4000::1", "not public"),
        ("fd00:ec2::254", "metadata of a cloud"),
        ("fd00::1", "private"),
        ("fe80::1", "link-local"),
        ("fec0::1", "not public"),
        ("ff02::fb", "multicast"),
        ("1.1.1.1", None),
        ("9.255.255.255", None),
        ("11.0.0.0", None),
        ("100.63.255.255", None),
        ("100.128.0.0", None),
        ("168.63.129.17", None),
        ("172.15.255.255", None),
        ("172.32.0.0", None),
        ("223.255.255.255", None),
        ("2000::1", None),
        ("2001:200::1", None),
        ("2001:db9::1", None),
        ("2003::1", None),
        ("2606:4700::1111", None),
        ("3ffe:ffff::1", None),
        ("3fff:1000::1", None),
    ],
)
def test_what_is_closed(at: str, why: str | None) -> None:
    made = address(at)
    assert made is not None
    assert why_closed(made, closed()) == why


def test_a_nodes_own_addresses_are_closed() -> None:
    own = closed((cidr("1.1.1.1", "node"), cidr("2a00::1", "node")))
    for at in ("1.1.1.1", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1", "2002:101:101::7", "2a00::1"):
        made = address(at)
        assert made is not None
        assert why_closed(made, own) == "the node's own"
    for at in ("1.1.1.2", "2a00::2"):
        made = address(at)
        assert made is not None
        assert why_closed(made, own) is None


def test_everything_that_python_knows_to_be_private_is_closed() -> None:
    """Its tables are of the same registry and made by others."""
    shut = closed()
    for high in range(1 << 12):
        for at in (IPv4Address(high << 20), IPv6Address(high << 116), IPv6Address(0x2001 << 112 | high << 100)):
            if at.is_private or at.is_multicast or at.is_reserved or at.is_link_local or at.is_unspecified:
                assert why_closed(at, shut) is not None, at


def _range(kind: type[IPv4Network] | type[IPv6Network], bits: int) -> st.SearchStrategy[addresses.Range]:
    numbers, lengths = st.integers(0, 2**bits - 1), st.integers(0, bits)
    return st.builds(lambda n, length: kind((n & -(1 << (bits - length)), length)), numbers, lengths)


RANGES = st.one_of(
    _range(IPv4Network, 32),
    _range(IPv6Network, 128),
    st.sampled_from([net for net, _ in closed()]),
    st.sampled_from([net.supernet(new_prefix=net.prefixlen // 2) for net, _ in closed()]),
)


@CALM
@given(RANGES, st.data())
def test_a_range_without_what_is_closed_in_it(made: addresses.Range, data: st.DataObject) -> None:
    shut = closed((cidr("1.1.1.1", "node"),))
    left = without(made, shut)
    smaller = [net for net, _ in shut if net != made and within(net, made)]
    edges = [made.network_address, made.broadcast_address]
    edges += [edge for net in smaller for edge in (net.network_address, net.broadcast_address)]
    around = [int(edge) + step for edge in edges for step in (-1, 0, 1)]
    around.append(data.draw(st.integers(int(made.network_address), int(made.broadcast_address))))
    kind = type(made.network_address)
    for number in around:
        if not 0 <= number < 2**made.max_prefixlen:
            continue
        at = kind(number)
        expected = at in made and not any(at in net for net in smaller)
        assert sum(at in net for net in left) == expected, (at, made)


@CALM
@given(st.integers(0, 2**32 - 1), st.integers(0, 32))
def test_images_are_where_ipv4_stands_in_ipv6(number: int, length: int) -> None:
    made = IPv4Network((number & -(1 << (32 - length)), length))
    nat64, six = addresses.images(made)
    assert IPv6Address(f"64:ff9b::{made.broadcast_address}") in nat64
    assert nat64.prefixlen == 96 + length
    assert six.prefixlen == 16 + length
    assert IPv6Address(six.network_address).sixtofour == made.network_address


def test_images_of_ipv6_there_are_none() -> None:
    assert addresses.images(IPv6Network("2a00::/16")) == []
