"""What is measured. Rounds are interleaved: each peer once per round, starting with another one each time, so that
whatever slows the machine for a while slows all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench import machine
from bench.flows import FLOWS
from bench.peers.base import Peer, Sample
from bench.rounds import interleaved, line

KEPT_FOR_RUNS = 8
PROBE_CREATES = 50

Rounds = dict[str, dict[str, list[Sample]]]  # scenario -> peer -> one sample a round
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How much to measure."""

    rounds: int = 5
    seconds: float = 2.0
    jobs: int = 4
    many: int = 1000
    idle: int = 3200
    idle_base: int = 100
    idle_docker: int = 50
    stream_mib: int = 1024
    echoes: int = 400
    crowd: int = 64


@dataclass(frozen=True)
class Idle:
    """Many sandboxes alive at once, none doing anything."""

    count: int
    base: int
    fallen_bytes: int  # MemAvailable, from none to `count` alive
    risen_bytes: int  # and back, after all were stopped
    create_base: Sample
    create_full: Sample
    run_base: Sample
    run_full: Sample

    @property
    def mib_each(self) -> float:
        """Of the whole machine's memory, for one sandbox."""
        return self.fallen_bytes / self.count / 2**20

    @property
    def create_slowdown(self) -> float:
        """How much slower creation is with all alive than with the base number."""
        return self.create_base.rate / self.create_full.rate

    @property
    def run_slowdown(self) -> float:
        """How much slower a run is."""
        return self.run_base.rate / self.run_full.rate


@dataclass
class Results:
    """Everything measured so far."""

    rounds: Rounds = field(default_factory=dict)
    idle: dict[str, list[Idle]] = field(default_factory=dict)

    def add(self, scenario: str, peer: str, sample: Sample) -> None:
        """One more round."""
        self.rounds.setdefault(scenario, {}).setdefault(peer, []).append(sample)


def cycle(peers: Sequence[Peer], options: Options, results: Results, say: Say) -> None:
    """Create + run(true) + stop."""
    able = [peer for peer in peers if "cycle" in peer.ops]
    for peer in able:  # warm: the first one loads programs and fills caches
        peer.perform("cycle", min(0.5, options.seconds), 1)
    for number, peer in interleaved(able, options.rounds):
        sample = peer.measure("cycle", options.jobs, options.seconds, options.jobs)
        results.add("cycle", peer.name, sample)
        say(line(number, "cycle", peer.name, sample))


def run(peers: Sequence[Peer], options: Options, results: Results, say: Say) -> None:
    """run(true) in living sandboxes: one at a time for the latency, several for the rate."""
    able = [peer for peer in peers if "run" in peer.ops]
    for peer in able:
        if "create" in peer.ops:
            peer.perform("create", KEPT_FOR_RUNS, 2)
        peer.perform("run", min(0.5, options.seconds), 1)
    for number, peer in interleaved(able, options.rounds):
        for scenario, jobs in (("run", 1), ("run-parallel", options.jobs)):
            sample = peer.measure("run", jobs, options.seconds, jobs)
            results.add(scenario, peer.name, sample)
            say(line(number, scenario, peer.name, sample))
    for peer in able:
        if "stop" in peer.ops:
            peer.perform("stop", options.jobs)


def many(peers: Sequence[Peer], options: Options, results: Results, say: Say) -> None:
    """A burst: in one call where the peer has such a call, else from several threads."""
    able = [peer for peer in peers if "create" in peer.ops]
    for number, peer in interleaved(able, options.rounds):
        count = options.idle_docker if peer.name == "docker" else options.many
        if "many" in peer.ops:
            sample = peer.measure("many", 1, count)
        else:
            sample = peer.measure("create", options.jobs, count, options.jobs)
        results.add("many", peer.name, sample)
        say(line(number, "many", peer.name, sample))
        peer.perform("stop", options.jobs)


def idle(peers: Sequence[Peer], options: Options, results: Results, say: Say) -> None:
    """Thousands alive: their memory, and whether creation and runs stay as fast."""
    for peer in peers:
        if "create" not in peer.ops:
            continue
        count = options.idle_docker if peer.name == "docker" else options.idle
        one = _idle(peer, count, min(options.idle_base, count // 2), options)
        results.idle.setdefault(peer.name, []).append(one)
        say(
            f"  idle {peer.name:16} {one.count} alive: {one.mib_each:.3f} MiB each; slower than at {one.base}: "
            f"creation {one.create_slowdown:.2f}x, run {one.run_slowdown:.2f}x"
        )


def _idle(peer: Peer, count: int, base: int, options: Options) -> Idle:
    def speed() -> tuple[Sample, Sample]:
        created = peer.measure("create", options.jobs, min(PROBE_CREATES, base), options.jobs)
        return created, peer.measure("run", options.jobs, options.seconds, options.jobs)

    # Once before anything is counted: what a server allocates the first time is not an idle sandbox's.
    peer.perform("create", base, options.jobs)
    peer.perform("stop", options.jobs)
    empty = machine.available_bytes()
    peer.perform("create", base, options.jobs)
    create_base, run_base = speed()
    rest = count - base - create_base.count
    if rest > 0:
        peer.perform("create", rest, options.jobs)
    full = machine.available_bytes()
    create_full, run_full = speed()
    peer.perform("stop", options.jobs)
    after = machine.available_bytes()
    alive = base + create_base.count + max(0, rest)
    return Idle(alive, base, empty - full, after - full, create_base, create_full, run_base, run_full)


ALL: dict[str, Callable[[Sequence[Peer], Options, Results, Say], None]] = {
    "cycle": cycle,
    "run": run,
    "many": many,
    "idle": idle,
    **FLOWS,
}
