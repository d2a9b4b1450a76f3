"""What passes through: output that streams, keys that come back, and many runs in one sandbox at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bench.peers.base import Peer
from bench.rounds import interleaved, line

if TYPE_CHECKING:
    from bench.scenarios import Options, Results, Say

WARM_MIB = 16
WARM_ECHOES = 20


def stream(peers: Sequence[Peer], options: Options, results: Results, say: Say) -> None:
    """Output of one program, read to its end: an operation is one MiB."""
    _passed("stream", peers, options, results, say)


def echo(peers: Sequence[Peer], options: Options, results: Results, say: Say) -> None:
    """A key typed to `cat` on a terminal, and back."""
    _passed("echo", peers, options, results, say)


def _passed(op: str, peers: Sequence[Peer], options: Options, results: Results, say: Say) -> None:
    warm, count = (WARM_MIB, options.stream_mib) if op == "stream" else (WARM_ECHOES, options.echoes)
    able = [peer for peer in peers if op in peer.ops]
    with_one(able)
    for peer in able:
        peer.perform(op, warm)
    for number, peer in interleaved(able, options.rounds):
        sample = peer.measure(op, 1, count)
        results.add(op, peer.name, sample)
        say(line(number, op, peer.name, sample))
    without(able)


def crowd(peers: Sequence[Peer], options: Options, results: Results, say: Say) -> None:
    """run(true) in one sandbox: one at a time, and many."""
    able = [peer for peer in peers if {"run", "create"} <= set(peer.ops)]
    with_one(able)
    for peer in able:
        peer.perform("run", min(0.5, options.seconds), options.crowd)
    for number, peer in interleaved(able, options.rounds):
        for scenario, jobs in (("crowd-1", 1), ("crowd", options.crowd)):
            sample = peer.measure("run", jobs, options.seconds, jobs)
            results.add(scenario, peer.name, sample)
            say(line(number, scenario, peer.name, sample))
    without(able)


def with_one(peers: Sequence[Peer]) -> None:
    """One sandbox each, where they have any."""
    for peer in peers:
        if "create" in peer.ops:
            peer.perform("create", 1, 1)


def without(peers: Sequence[Peer]) -> None:
    """And none."""
    for peer in peers:
        if "stop" in peer.ops:
            peer.perform("stop", 1)


FLOWS: dict[str, Callable[[Sequence[Peer], Options, Results, Say], None]] = {
    "stream": stream,
    "echo": echo,
    "crowd": crowd,
}
