"""The order of the rounds, and each in words."""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers.base import Peer, Sample


def interleaved(peers: Sequence[Peer], rounds: int) -> list[tuple[int, Peer]]:
    """The order: all peers in each round, rotated by one from round to round."""
    order = []
    for number in range(rounds):
        shift = number % max(1, len(peers))
        order += [(number, peer) for peer in (*peers[shift:], *peers[:shift])]
    return order


def line(number: int, scenario: str, peer: str, sample: Sample) -> str:
    """A round in words."""
    parts = "".join(f"  {name} {cpu_s * 1000 / max(1, sample.count):.2f}" for name, cpu_s in sample.parts.items())
    return (
        f"  round {number + 1} {scenario:12} {peer:16} {sample.rate:8.1f}/s  "
        f"server {sample.server_ms:7.2f} ms  client {sample.client_ms:6.2f} ms{parts}"
    )
