"""The marks: what is promised, what was measured, met or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bench.scenarios import Idle, Results
from bench.stats import Spread, percentile, ratios

OURS = "dsec"


@dataclass(frozen=True)
class Mark:
    """One promise. Without a limit it is a comparison that is shown and not judged."""

    name: str
    text: str
    measure: Callable[[Results], Spread | None]
    unit: str
    relation: Literal["at least", "at most", "shown"]
    limit: float | None = None

    def verdict(self, results: Results) -> tuple[Spread | None, bool | None]:
        """The figure and whether its median meets the limit; None where it was not measured or is only shown."""
        found = self.measure(results)
        if found is None or self.limit is None:
            return found, None
        return found, found.median >= self.limit if self.relation == "at least" else found.median <= self.limit


def _rate(scenario: str, peer: str = OURS) -> Callable[[Results], Spread | None]:
    def measure(results: Results) -> Spread | None:
        samples = results.rounds.get(scenario, {}).get(peer)
        return Spread.of([sample.rate for sample in samples]) if samples else None

    return measure


def _mb_s(peer: str = OURS) -> Callable[[Results], Spread | None]:
    def measure(results: Results) -> Spread | None:
        samples = results.rounds.get("stream", {}).get(peer)
        return Spread.of([sample.rate * 2**20 / 1e6 for sample in samples]) if samples else None

    return measure


def _crowd_cpu(results: Results) -> Spread | None:
    many, one = (results.rounds.get(scenario, {}).get(OURS) for scenario in ("crowd", "crowd-1"))
    return ratios([s.server_ms for s in many], [s.server_ms for s in one]) if many and one else None


def _p50_ms(scenario: str, peer: str = OURS) -> Callable[[Results], Spread | None]:
    def measure(results: Results) -> Spread | None:
        samples = results.rounds.get(scenario, {}).get(peer)
        return Spread.of([percentile(sample.latencies_us, 0.5) / 1000 for sample in samples]) if samples else None

    return measure


def _cpu_ratio(scenario: str, peer: str) -> Callable[[Results], Spread | None]:
    def measure(results: Results) -> Spread | None:
        by_peer = results.rounds.get(scenario, {})
        ours, theirs = by_peer.get(OURS), by_peer.get(peer)
        if not ours or not theirs:
            return None
        return ratios([sample.server_ms for sample in ours], [sample.server_ms for sample in theirs])

    return measure


def _times_faster(scenario: str, peer: str) -> Callable[[Results], Spread | None]:
    def measure(results: Results) -> Spread | None:
        by_peer = results.rounds.get(scenario, {})
        ours, theirs = by_peer.get(OURS), by_peer.get(peer)
        return ratios([s.rate for s in ours], [s.rate for s in theirs]) if ours and theirs else None

    return measure


def _idle(figure: Callable[[Idle], float], peer: str = OURS) -> Callable[[Results], Spread | None]:
    def measure(results: Results) -> Spread | None:
        found = results.idle.get(peer)
        return Spread.of([figure(one) for one in found]) if found else None

    return measure


MARKS = (
    Mark("cycle-rate", "create + run(true) + stop through the SDK, warm", _rate("cycle"), "/s", "at least", 200),
    # Judged by the cheaper reference. With the upper on ext4, a tenth of the time goes into the search for a free inode
    # (a profile showed), which depends on the state of that file system and would count in our favour.
    Mark(
        "cycle-cpu",
        "its server CPU beside the C reference's",
        _cpu_ratio("cycle", "reference-tmpfs"),
        "x",
        "at most",
        2,
    ),
    Mark("many-rate", "create_many", _rate("many"), "/s", "at least", 300),
    Mark("run-p50", "run(true), median latency", _p50_ms("run"), "ms", "at most", 2),
    Mark("run-rate", "run(true), several at once", _rate("run-parallel"), "/s", "at least", 700),
    Mark(
        "idle-memory", "an idle sandbox among thousands, in all", _idle(lambda one: one.mib_each), "MiB", "at most", 1
    ),
    Mark("idle-create", "creation beside thousands", _idle(lambda one: one.create_slowdown), "x slower", "at most", 2),
    Mark("idle-run", "run beside thousands", _idle(lambda one: one.run_slowdown), "x slower", "at most", 2),
    Mark("stream-rate", "output of one program, through the SDK", _mb_s(), "MB/s", "at least", 300),
    Mark("echo-p50", "a key to a terminal and back, median", _p50_ms("echo"), "ms", "at most", 3),
    Mark(
        "crowd-cpu", "a run among many in one sandbox, its server CPU beside one alone", _crowd_cpu, "x", "at most", 1
    ),
    Mark("raw-stream", "the same output through a pipe to `cat`", _mb_s("raw"), "MB/s", "shown"),
    Mark("raw-stream-cpu", "its server CPU beside that pipe's", _cpu_ratio("stream", "raw"), "x", "shown"),
    Mark("raw-echo", "the same key without a sandbox", _p50_ms("echo", "raw"), "ms", "shown"),
    Mark(
        "cycle-cpu-dir",
        "and beside the reference with its upper on disk",
        _cpu_ratio("cycle", "reference"),
        "x",
        "shown",
    ),
    Mark("docker-cycle", "cycles beside `docker run --rm`", _times_faster("cycle", "docker-cli"), "x", "shown"),
    Mark("docker-api-cycle", "cycles beside docker's API", _times_faster("cycle", "docker"), "x", "shown"),
    Mark("docker-exec", "runs beside `docker exec`", _times_faster("run-parallel", "docker-cli"), "x", "shown"),
    Mark("docker-api-exec", "runs beside docker's API", _times_faster("run-parallel", "docker"), "x", "shown"),
    Mark("docker-memory", "an idle docker container", _idle(lambda one: one.mib_each, "docker"), "MiB", "shown"),
)
