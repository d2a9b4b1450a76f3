"""A table, a JSON document, a plot."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.marks import MARKS
from bench.peers.base import Sample
from bench.scenarios import Options, Results
from bench.stats import Spread, percentile

VERSION = 1
METHOD = (
    "Every figure is the median over the rounds with the least and the most of any round in brackets; ratios are "
    "of the same round. Rounds are interleaved between the peers. Loads are closed loops: each job begins its "
    "next operation when the last has ended. CPU is what the cgroup of the server side (daemon, launchers, "
    "sandboxes, their ended children) and that of the client used from the begin to the end of an operation; "
    "`kernel` is all kernel threads of the machine, which do what is deferred, and means something only when "
    "nothing else runs. Memory is the fall of MemAvailable. All peers run the same small root and ask for the "
    "same limits of memory, CPU and pids, except bwrap, which has none. The reference leaves out what a product "
    "adds (seccomp, masked paths, capabilities, /sys, devpts, an exact disk limit, durability, a protocol)."
)


def _spread(values: list[float], digits: int = 2) -> str:
    spread = Spread.of(values)
    return f"{spread.median:.{digits}f} [{spread.low:.{digits}f} {spread.high:.{digits}f}]"


def _part(samples: list[Sample], name: str) -> list[float]:
    return [sample.parts[name] * 1000 / max(1, sample.count) for sample in samples]


def _row(peer: str, samples: list[Sample]) -> list[str]:
    return [
        peer,
        str(samples[0].jobs),
        _spread([sample.rate for sample in samples], 1),
        _spread([percentile(sample.latencies_us, 0.5) / 1000 for sample in samples]),
        _spread([percentile(sample.latencies_us, 0.99) / 1000 for sample in samples]),
        _spread([sample.server_ms for sample in samples]),
        _spread([sample.client_ms for sample in samples]),
        _spread([sample.kernel_cpu_s * 1000 / max(1, sample.count) for sample in samples]),
        " ".join(f"{name} {_spread(_part(samples, name))}" for name in samples[0].parts),
    ]


HEAD = [
    "peer",
    "jobs",
    "per second",
    "p50 ms",
    "p99 ms",
    "server ms/op",
    "client ms/op",
    "kernel ms/op",
    "of the server",
]


def grid(rows: list[list[str]]) -> str:
    """Columns as wide as their widest cell, as Markdown."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def marks_table(results: Results) -> str:
    """Each mark: promised, measured, met or not."""
    rows = [["mark", "what", "promised", "measured", "met"]]
    for mark in MARKS:
        found, met = mark.verdict(results)
        promised = f"{mark.relation} {mark.limit:g} {mark.unit}" if mark.limit is not None else "(shown)"
        measured = (
            "not measured" if found is None else f"{found.median:.2f} [{found.low:.2f} {found.high:.2f}] {mark.unit}"
        )
        rows.append([mark.name, mark.text, promised, measured, {True: "yes", False: "NO", None: "-"}[met]])
    return grid(rows)


def text(machine: dict[str, Any], results: Results, absent: dict[str, str]) -> str:
    """The whole report as Markdown."""
    parts = ["# Benchmark", *(f"- {key}: {value}" for key, value in machine.items()), "", METHOD]
    for scenario, by_peer in results.rounds.items():
        parts += ["", f"## {scenario}", "", grid([HEAD, *(_row(peer, samples) for peer, samples in by_peer.items())])]
    if results.idle:
        head = [
            "peer",
            "alive",
            "MiB each",
            "MiB each given back",
            "creation slower",
            "run slower",
            "creations/s",
            "runs/s",
        ]
        rows = [
            [
                peer,
                str(one.count),
                f"{one.mib_each:.3f}",
                f"{one.risen_bytes / one.count / 2**20:.3f}",
                f"{one.create_slowdown:.2f}x",
                f"{one.run_slowdown:.2f}x",
                f"{one.create_full.rate:.0f}",
                f"{one.run_full.rate:.0f}",
            ]
            for peer, found in results.idle.items()
            for one in found
        ]
        parts += ["", "## idle", "", grid([head, *rows])]
    parts += ["", "## Marks", "", marks_table(results)]
    parts += [f"\nNot here: {peer}: {reason}" for peer, reason in absent.items()]
    return "\n".join(parts) + "\n"


def document(machine: dict[str, Any], options: Options, results: Results, absent: dict[str, str]) -> dict[str, Any]:
    """The same with every sample; latencies as percentiles, since they are many."""

    def slim(sample: Sample) -> dict[str, Any]:
        values = asdict(sample)
        latencies = values.pop("latencies_us")
        points = {f"p{share * 100:g}_us": percentile(latencies, share) for share in (0.5, 0.9, 0.99)}
        return {**values, **points, "rate": sample.rate}

    def idle(found: Any) -> dict[str, Any]:
        values = {key: value for key, value in vars(found).items() if not isinstance(value, Sample)}
        return {**values, **{key: slim(value) for key, value in vars(found).items() if isinstance(value, Sample)}}

    verdicts = {mark.name: mark.verdict(results) for mark in MARKS}
    return {
        "version": VERSION,
        "method": METHOD,
        "machine": machine,
        "options": asdict(options),
        "absent": absent,
        "rounds": {
            s: {p: [slim(one) for one in many] for p, many in peers.items()} for s, peers in results.rounds.items()
        },
        "idle": {peer: [idle(one) for one in found] for peer, found in results.idle.items()},
        "marks": {
            name: {"measured": asdict(found) if found else None, "met": met} for name, (found, met) in verdicts.items()
        },
    }


def save(directory: Path, document: dict[str, Any], words: str) -> list[Path]:
    """Write all forms into a directory; the plot only where matplotlib is installed. Says what was written."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
    (directory / "bench.md").write_text(words)
    written = [directory / "bench.json", directory / "bench.md"]
    if _plot(directory / "bench.png", document):
        written.append(directory / "bench.png")
    return written


def _plot(path: Path, document: dict[str, Any]) -> bool:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    scenarios = document["rounds"]
    if not scenarios:
        return False
    figure = Figure(figsize=(4.5 * len(scenarios), 4.2), layout="constrained")
    axes = figure.subplots(1, len(scenarios), squeeze=False)[0]
    for axis, (scenario, peers) in zip(axes, scenarios.items(), strict=True):
        spreads = [Spread.of([one["rate"] for one in samples]) for samples in peers.values()]
        errors = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
        axis.bar(list(peers), [s.median for s in spreads], yerr=errors, capsize=4)
        axis.set_title(f"{scenario}: operations a second")
        axis.set_yscale("log")
        axis.set_ylim(bottom=1)
        axis.tick_params(axis="x", rotation=30)
    figure.savefig(path, dpi=120)
    return True
