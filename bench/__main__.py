"""`python -m bench`: measure, print a table, write JSON and a plot."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
from pathlib import Path

from bench import machine, marks, report, scenarios
from bench.peers.base import Failed
from bench.session import PEERS, environment, started

MARK_PEERS = ("dsec", "reference", "reference-tmpfs", "docker", "docker-cli", "raw")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    defaults = scenarios.Options()
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument(
        "what",
        nargs="*",
        default=["marks"],
        metavar="WHAT",
        help=f"scenarios: {' '.join(scenarios.ALL)}; or `marks` (the default): all of them, and only the verdicts",
    )
    names = [kind.name for kind in PEERS]
    parser.add_argument("--peers", default=None, help=f"comma-separated, of {','.join(names)}; all but for marks")
    parser.add_argument("--rounds", type=int, default=defaults.rounds)
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="of each peer in each round")
    parser.add_argument("--jobs", type=int, default=defaults.jobs, help="operations in flight")
    parser.add_argument("--many", type=int, default=defaults.many, help="sandboxes in a burst")
    parser.add_argument("--idle", type=int, default=defaults.idle, help="sandboxes alive at once")
    parser.add_argument(
        "--idle-docker", type=int, default=defaults.idle_docker, help="the same for docker, which is slow"
    )
    parser.add_argument("--stream-mib", type=int, default=defaults.stream_mib, help="of output, to be read at once")
    parser.add_argument("--echoes", type=int, default=defaults.echoes, help="keys typed")
    parser.add_argument("--crowd", type=int, default=defaults.crowd, help="runs in flight in one sandbox")
    parser.add_argument("--work", type=Path, default=None, help="where to work: a directory on a real disk, not tmpfs")
    parser.add_argument("--out", type=Path, default=None, help="a directory for bench.json, bench.md, bench.png")
    parser.add_argument("--require-marks", action="store_true", help="return 1 unless every mark is measured and met")
    args = parser.parse_args(argv)
    unknown = [word for word in args.what if word not in {*scenarios.ALL, "marks"}]
    wanted = args.peers.split(",") if args.peers else (MARK_PEERS if args.what == ["marks"] else names)
    unknown += [name for name in wanted if name not in names]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    args.wanted = tuple(wanted)
    return args


def main(argv: list[str] | None = None) -> int:
    """Returns 0; 1 when a peer failed or a required mark is not met; 2 when it cannot run."""
    args = parse(argv)
    # `timeout`, a cancelled job: what was started is removed.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    if os.geteuid() != 0:
        print("bench: root is needed: it starts daemons and makes namespaces", file=sys.stderr)
        return 2
    options = scenarios.Options(
        rounds=args.rounds,
        seconds=args.seconds,
        jobs=args.jobs,
        many=args.many,
        idle=args.idle,
        idle_docker=args.idle_docker,
        stream_mib=args.stream_mib,
        echoes=args.echoes,
        crowd=args.crowd,
    )
    # Thousands of sandboxes take thousands of descriptors, here and in every process started from here.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    everything = "marks" in args.what
    results = scenarios.Results()
    about = machine.describe()
    with environment(args.work) as env, started(env, args.wanted) as (peers, absent):
        for name, measure in scenarios.ALL.items():
            if everything or name in args.what:
                measure(peers, options, results, lambda line: print(line, file=sys.stderr, flush=True))
    about["load_after"] = Path("/proc/loadavg").read_text().split()[:3]
    words = report.text(about, results, absent)
    print(report.marks_table(results) if args.what == ["marks"] else words)
    for name, reason in absent.items():
        print(f"not here: {name}: {reason}", file=sys.stderr)
    if args.out is not None:
        for path in report.save(args.out, report.document(about, options, results, absent), words):
            print(f"wrote {path}", file=sys.stderr)
    unmet = [mark.name for mark in marks.MARKS if mark.limit is not None and mark.verdict(results)[1] is not True]
    return 1 if args.require_marks and unmet else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(1)
