"""The pure part of the bench: order, spreads, ratios, verdicts, the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench import report
from bench.marks import MARKS, Mark
from bench.peers.base import Sample
from bench.rounds import interleaved, line
from bench.scenarios import Idle, Options, Results
from bench.stats import Spread, percentile, ratios

pytestmark = pytest.mark.unit


def sample(rate: float = 100.0, server_ms: float = 2.0, p50_ms: float = 1.0) -> Sample:
    count = 100
    return Sample("cycle", 2, count, count / rate, [p50_ms * 1000] * count, server_ms * count / 1000, 0.1, 0.0)


def mark(name: str) -> Mark:
    return next(one for one in MARKS if one.name == name)


def test_percentile_takes_a_value_that_occurred() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert percentile(values, 0.5) == 51
    assert percentile(values, 0.99) == 100
    assert percentile([7.0], 0.99) == 7
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)


def test_ratios_pair_the_rounds() -> None:
    # One slow round slows both sides: paired, the ratio stays 2; of the medians it would too, of shuffled rounds not.
    assert ratios([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == Spread(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        ratios([1.0], [1.0, 2.0])


def test_rounds_are_interleaved_and_rotate() -> None:
    peers: list[Any] = ["a", "b", "c"]
    order: list[Any] = [peer for _, peer in interleaved(peers, 3)]
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert interleaved([], 2) == []


def test_a_mark_is_judged_by_the_median_and_not_at_all_when_not_measured() -> None:
    results = Results()
    assert mark("cycle-rate").verdict(results) == (None, None)
    for rate in (150.0, 250.0, 260.0):
        results.add("cycle", "dsec", sample(rate))
    found, met = mark("cycle-rate").verdict(results)
    assert found is not None
    assert (round(found.median), met) == (250, True)
    results.rounds["cycle"]["dsec"] = [sample(199.0)]
    assert mark("cycle-rate").verdict(results)[1] is False


def test_the_cpu_mark_compares_with_the_reference() -> None:
    results = Results()
    results.add("cycle", "dsec", sample(server_ms=5.0))
    assert mark("cycle-cpu").verdict(results) == (None, None)
    results.add("cycle", "reference", sample(server_ms=4.0))
    assert mark("cycle-cpu").verdict(results) == (None, None)  # the costlier reference does not judge
    results.add("cycle", "reference-tmpfs", sample(server_ms=2.0))
    found, met = mark("cycle-cpu").verdict(results)
    assert found is not None
    assert (found.median, met) == (2.5, False)


def test_idle_figures() -> None:
    one = Idle(1024, 100, 512 * 2**20, 512 * 2**20, sample(400), sample(100), sample(1000), sample(800))
    results = Results(idle={"dsec": [one]})
    assert (one.mib_each, one.create_slowdown) == (0.5, 4.0)
    assert mark("idle-memory").verdict(results)[1] is True
    assert mark("idle-create").verdict(results)[1] is False
    assert mark("idle-run").verdict(results)[1] is True


def test_the_report_says_what_was_not_measured_and_keeps_every_round() -> None:
    results = Results()
    results.add("run", "dsec", sample())
    results.add("run", "dsec", sample(90))
    words = report.text({"kernel": "x"}, results, {"docker": "not installed"})
    assert "not measured" in words
    assert "Not here: docker: not installed" in words
    document = report.document({}, Options(), results, {})
    assert [one["rate"] for one in document["rounds"]["run"]["dsec"]] == [100.0, pytest.approx(90.0)]
    assert document["marks"]["idle-memory"] == {"measured": None, "met": None}


def test_what_streams_is_counted_in_mib_and_judged_in_megabytes() -> None:
    results = Results()
    for rate, server_ms in ((286.0, 4.0), (287.0, 4.0)):  # MiB: 299.9 and 300.9 MB
        results.rounds["stream"] = {"dsec": [sample(rate, server_ms)], "raw": [sample(900.0, 1.0)]}
        assert mark("stream-rate").verdict(results)[1] is (rate == 287.0)
    assert mark("raw-stream-cpu").verdict(results) == (Spread(4.0, 4.0, 4.0), None)


def test_a_run_in_a_crowd_is_compared_with_one_alone() -> None:
    results = Results()
    assert mark("crowd-cpu").verdict(results) == (None, None)
    results.add("crowd-1", "dsec", sample(server_ms=4.0))
    assert mark("crowd-cpu").verdict(results) == (None, None)
    results.add("crowd", "dsec", sample(server_ms=5.0))
    assert mark("crowd-cpu").verdict(results) == (Spread(1.25, 1.25, 1.25), False)


def test_parts_of_the_server_are_told() -> None:
    one = replace(sample(), parts={"agent": 0.05, "runtime": 0.02})
    results = Results()
    results.add("stream", "dsec", one)
    assert "agent 0.50  runtime 0.20" in line(0, "stream", "dsec", one)
    assert "agent 0.50 [0.50 0.50] runtime 0.20 [0.20 0.20]" in report.text({}, results, {})
