"""Lanes of the test suite, run again inside a guest, and what came of them."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.kit.lanes import SHARE_ENV
from tests.kit.vm import frameworks, image, machine, payload
from tests.kit.vm.channel import GuestError, GuestTimeout
from tests.kit.vm.machine import Guest

# What a node's kernel decides runs again in every guest. Within these files, tests that are marked `same_everywhere`
# are left out, and those that are marked `one_guest` are dealt out among the guests.
LANES = ("native", "contract", "root", "security", "adapters")
INSIDE = {
    "contract": ("tests/contract/test_container.py",),
    "root": (
        "tests/root/runtime/test_answers.py", "tests/root/runtime/test_deaths.py", "tests/root/runtime/test_limits.py",
        "tests/root/runtime/test_lost_disk.py",
        "tests/root/runtime/test_refusals.py",
        "tests/root/runtime/test_stops.py", "tests/root/runtime/test_sweep.py",
        "tests/root/test_cgroup_claim.py", "tests/root/images/test_store.py", "tests/root/test_sdk.py",
        "tests/root/runtime/test_files.py", "tests/root/test_sdk_files.py",
        "tests/root/runtime/test_dial.py", "tests/root/runtime/test_fences.py", "tests/root/runtime/test_killing.py",
        "tests/root/test_network.py",
    ),
    "security": (
        "tests/security/test_container.py", "tests/security/test_file_helper.py", "tests/security/test_confinement.py",
        "tests/security/test_network.py",
    ),
    "adapters": (
        "tests/adapters/inspect_suite.py", "tests/adapters/mini_swe_agent_suite.py",
        "tests/adapters/swe_rex_terminals_suite.py", "tests/adapters/deepagents_suite.py",
        "tests/adapters/swe_rex_suite.py",
    ),
}  # fmt: skip
SLOW = "a guest has no time for it each time; passed on 6.12 by name"
# The rest, and why. A file of these lanes that stands in neither table fails a unit test.
LEFT_OUT = {
    "tests/contract/test_command_copies.py": "the command over the fake backend",
    "tests/contract/test_command_programs.py": "the command over the fake backend",
    "tests/contract/test_command_text.py": "the command over the fake backend",
    "tests/contract/test_fake.py": "no kernel is involved",
    "tests/contract/test_fuzz_http.py": "HTTP over the fake backend",
    "tests/contract/test_memory.py": "HTTP over the fake backend",
    "tests/contract/test_native_vectors.py": "no kernel is involved",
    "tests/contract/test_openapi.py": "HTTP over the fake backend",
    "tests/contract/test_policy_vectors.py": "no kernel is involved",
    "tests/contract/test_sdk_diff.py": "the SDK over the fake backend",
    "tests/contract/test_sdk_attach.py": "the SDK over the fake backend",
    "tests/contract/test_sdk_events.py": "the SDK over the fake backend",
    "tests/contract/test_sdk_files.py": "the SDK over the fake backend",
    "tests/contract/test_sdk_lines.py": "the SDK over the fake backend",
    "tests/contract/test_sdk_programs.py": "the SDK over the fake backend",
    "tests/contract/test_sdk_node.py": "the SDK over the fake backend",
    "tests/root/runtime/test_control.py": SLOW,
    "tests/root/runtime/test_fuzz.py": "bytes that no kernel looks at",
    "tests/root/runtime/test_fuzz_keeper.py": "bytes that no kernel looks at",
    "tests/root/runtime/test_input.py": SLOW,
    "tests/root/runtime/test_model_programs.py": "what of it a kernel decides is in runtime/test_input.py and the like",
    "tests/root/runtime/test_network.py": "passed on 6.12 by name; 6.1 uses no steered namespace again (known gaps)",
    "tests/root/runtime/test_processes.py": SLOW,
    "tests/root/runtime/test_terminals.py": "a guest has no time for it each time; passed on both by name",
    "tests/root/runtime/test_terminal_deaths.py": "a guest has no time for it each time; passed on both by name",
    "tests/root/test_file_deaths.py": "the SDK and the node over helpers that are killed; no kernel changes its answer",
    "tests/root/test_files_without_memory.py": "runtime/test_limits.py has the count of kills that it reads",
    "tests/root/test_inventory.py": "of the tests' own eyes; what they look at is the same on every kernel",
    "tests/root/test_model_files.py": "thousands of calls; what a kernel decides of them is in runtime/test_files.py",
    "tests/root/test_sdk_events.py": SLOW,
    "tests/root/test_sdk_lines.py": "of bytes that have come; what of them a kernel decides is in test_sdk_programs.py",
    "tests/root/runtime/test_spool.py": "a guest has no time for 36 MB of output a dozen times; passed on both by name",
    "tests/root/runtime/test_readers.py": "credit and offsets of readers: no kernel changes its answer",
    "tests/root/runtime/test_unkillable.py": "most of a minute is spent waiting for what cannot die; run on 6.18 only",
    "tests/root/test_clock_jumps.py": "the agent's clock; the runtime takes its times from the monotonic one",
    "tests/root/test_sdk_cases.py": "the SDK and the node; what a kernel decides is in runtime/",
    "tests/root/test_sdk_roots.py": "compiles its programs, and a guest has no compiler",
    "tests/root/test_sdk_unkillable.py": "needs the freezer of v1; runtime/test_unkillable.py has a frozen disk",
    "tests/root/test_sdk_diff.py": "a guest has no time for it each time; passed on 6.1 by name",
    "tests/root/test_sdk_attach.py": "the SDK and the node; runtime/test_input.py has what a kernel decides",
    "tests/root/test_sdk_sessions.py": "shells and the node; the fences and streams below are runtime/test_fences.py's",
    "tests/root/test_sdk_spool.py": "the SDK and the node; what a kernel decides is in runtime/test_spool.py",
    "tests/root/test_sdk_ports.py": "the SDK and the node; runtime/test_dial.py has what a kernel decides",
    "tests/root/test_sdk_programs.py": "the SDK and the node; runtime/test_input.py has what a kernel decides",
    "tests/root/test_sdk_terminals.py": "the SDK and the node; runtime/test_terminals.py has what a kernel decides",
    "tests/root/test_full_disk.py": "needs aiohttp, which a guest lacks; see runtime/test_lost_disk.py",
    "tests/root/test_bench.py": "compares with Docker, runc and a C program built on the spot; a guest has no network",
    "tests/adapters/examples_suite.py": "imports a framework for each; no kernel changes their answer",
    "tests/adapters/test_suites.py": "starts the suites where the frameworks are installed; a guest runs them itself",
    "tests/root/test_wheel.py": "builds with cargo and pip; a guest has neither compilers nor network",
}
NATIVE_LEFT_OUT = {
    "files-files": "220 s of emulation; root has the helper in a real sandbox (test_files.py)",
    "launch-container": "80 s of emulation; contract, root and security have a sandbox's parts by way of the runtime",
    "launch-fallbacks": "the ways that a switch forces; the guests' own are in launch-stores",
    "launch-golden": "compares with a file of the source tree; no kernel is involved",
    "launch-dsec-launch-debug": "has no tests",
}
# What one guest runs for both, since no two kernels differ in it: files whose tests share a whole node (half a minute
# until it is up), native executables, and tests of these.
IN_ONE = {
    "tests/root/test_sdk.py": "6.1",
    "tests/root/test_sdk_files.py": "6.1",
    "tests/adapters/deepagents_suite.py": "6.1",
    "tests/adapters/inspect_suite.py": "6.1",
    "tests/adapters/mini_swe_agent_suite.py": "6.1",
    "tests/adapters/swe_rex_suite.py": "6.1",
    "tests/adapters/swe_rex_terminals_suite.py": "6.1",
    "launch-undo": "6.1",
    "launch-stores::every_failpoint_leaves_nothing": "6.1",
    "launch-stores::a_hanging_create_is_ended_at_its_deadline": "6.12",
    "launch-stores::hundreds_of_sandboxes_leave_nothing": "6.12",
    "launch-stores::layers_are_mounted_once_under_a_race": "6.12",
}
# Both guests run side by side, and beside the other lanes. This only ends what hangs.
GUEST_BUDGET_S = 3600.0
TEST_TIMEOUT_S = 300
REPORT = "/var/tmp/report.xml"
TAIL_LINES = 60
# So many of a lane's tests are named with the time they took.
SLOWEST = int(os.environ.get("DSEC_GUEST_SLOWEST", "5"))


@dataclass
class Outcome:
    """One lane in one guest."""

    lane: str
    summary: str
    tail: str = ""
    lost: bool = False
    # What took longest.
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    passed: int = 0
    seconds: float = 0.0
    # Of QEMU: what tells a slow guest from a busy machine.
    cpu_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.failed and self.passed > 0


class GuestRun:
    """All lanes in one guest, in a thread: both guests work while the first test waits."""

    def __init__(self, series: str, disk: Path, lanes: Sequence[str]) -> None:
        self.series = series
        self.lanes = lanes
        self.outcomes: dict[str, Future[Outcome]] = {lane: Future() for lane in lanes}
        self._disk = disk
        self._over = threading.Event()
        self._guest: Guest | None = None
        self._thread = threading.Thread(target=self._work, name=f"guest-{series}")
        self._thread.start()

    def outcome(self, lane: str) -> Outcome:
        return self.outcomes[lane].result()

    def end(self) -> None:
        """For a run of the tests that is over, perhaps before its time: what is left is not done any more."""
        self._over.set()
        if (guest := self._guest) is not None:
            guest.machine.stop()
        self._thread.join()

    def _work(self) -> None:
        deadline = time.monotonic() + GUEST_BUDGET_S
        left = list(self.lanes)
        try:
            while left and not self._over.is_set():
                # One guest for all lanes, as one machine of a user has it; another only when it was lost.
                brought = frameworks.disk() if "adapters" in left else None
                with machine.restored(self.series, self._disk, brought) as guest:
                    self._guest, lost = guest, False
                    while left and not lost and not self._over.is_set():
                        outcome = run_lane(guest, left[0], deadline - time.monotonic())
                        self.outcomes[left.pop(0)].set_result(outcome)
                        lost = outcome.lost
        except BaseException as error:  # noqa: BLE001 - a thread's edge: the waiting tests get it
            for waiting in self.outcomes.values():
                if not waiting.done():
                    waiting.set_exception(error)


def run_lane(guest: Guest, lane: str, timeout_s: float) -> Outcome:
    began, used = time.monotonic(), guest.machine.cpu_seconds()
    if timeout_s <= 0:
        return Outcome(lane, "not run", failed=[f"the guest's {GUEST_BUDGET_S:.0f} s were used up before"])
    run = run_native if lane == "native" else run_pytest
    try:
        outcome = run(guest, lane, timeout_s)
    except GuestTimeout as error:
        outcome = Outcome(lane, "out of time", tail=str(error), failed=["the lane did not end in time"])
    except GuestError as error:
        outcome = Outcome(lane, "lost guest", f"{error}\n{guest.console_tail()}", lost=True, failed=[str(error)])
    outcome.seconds = time.monotonic() - began
    outcome.cpu_seconds = guest.machine.cpu_seconds() - used
    return outcome


def left_out(series: str, lane: str) -> dict[str, str]:
    """What of a lane a guest does not run, and why."""
    if lane == "native":
        out, names = NATIVE_LEFT_OUT, [name for name in IN_ONE if not name.startswith("tests/")]
    else:
        out = {name: reason for name, reason in LEFT_OUT.items() if name.startswith(f"tests/{lane}/")}
        names = [name for name in IN_ONE if name in INSIDE[lane]]
    return out | {name: f"the guest with {IN_ONE[name]} runs it" for name in names if IN_ONE[name] != series}


def files_of(series: str, lane: str) -> list[str]:
    return [path for path in INSIDE[lane] if path not in left_out(series, lane)]


def guests_of(lane: str) -> list[str]:
    """The guests that run something of a lane."""
    return [series for series in image.KERNELS if lane == "native" or files_of(series, lane)]


def share_of(series: str) -> dict[str, str]:
    """Which part of what is dealt out a guest runs."""
    return {SHARE_ENV: f"{image.KERNELS.index(series)}/{len(image.KERNELS)}"}


def run_pytest(guest: Guest, lane: str, timeout_s: float) -> Outcome:
    files, program, environment = files_of(guest.series, lane), ["python3", "-m", "pytest"], payload.ENVIRONMENT
    if lane == "adapters":
        frameworks.mount(guest)
        program, environment = frameworks.PROGRAM, frameworks.ENVIRONMENT
    argv = [
        *program, *files, "-p", "no:cacheprovider", "-q", "--tb=short",
        f"--timeout={TEST_TIMEOUT_S}", f"--junitxml={REPORT}",
    ]  # fmt: skip
    guest.run(["rm", "-f", REPORT])
    environment = environment | share_of(guest.series)
    done = guest.run(argv, cwd=payload.MOUNT, env=environment, timeout_s=timeout_s)
    tail = _tail(done.tail if len(done.tail) > len(done.text) else done.text + done.stderr.decode(errors="replace"))
    report = guest.run(["cat", REPORT])
    if not report.ok:
        return Outcome(lane, f"pytest ended with {done.exit_code}", tail, failed=["no report was written"])
    outcome = read_report(lane, report.stdout)
    outcome.tail = tail
    outcome.summary = _summary_line(done.text) or outcome.summary
    if lane == "adapters":
        outcome.failed += frameworks.too_few(report.stdout, files)
    if done.exit_code not in (0, 1) and not outcome.failed:
        outcome.failed.append(f"pytest ended with {done.exit_code}")
    return outcome


def read_report(lane: str, xml: bytes) -> Outcome:
    """The report is the guest's own: only names, numbers and messages are taken from it."""
    outcome = Outcome(lane, "")
    times: list[tuple[float, str]] = []
    for case in ElementTree.fromstring(xml).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        times.append((float(case.get("time") or 0), name))
        if (skip := case.find("skipped")) is not None:
            outcome.skipped.append(f"{name}: {skip.get('message')}")
        elif (bad := _first(case, "failure", "error")) is not None:
            outcome.failed.append(f"{name}: {(bad.get('message') or '').splitlines()[:1]}")
        else:
            outcome.passed += 1
    outcome.summary = f"{outcome.passed} passed, {len(outcome.failed)} failed, {len(outcome.skipped)} skipped"
    outcome.notes = slowest(times, "s")
    return outcome


def slowest(times: list[tuple[float, str]], unit: str) -> list[str]:
    return [f"{amount:.0f} {unit} {name}" for amount, name in sorted(times, reverse=True)[:SLOWEST]]


def _first(case: ElementTree.Element, *names: str) -> ElementTree.Element | None:
    return next((found for name in names if (found := case.find(name)) is not None), None)


def run_native(guest: Guest, lane: str, timeout_s: float) -> Outcome:
    """The native workspace's own test executables; static, so what was built here runs there."""
    outcome = Outcome(lane, "")
    prepared = guest.run([f"{payload.MOUNT}/{payload.PREPARE}"])
    if not prepared.ok:
        return Outcome(lane, "not run", failed=[prepared.tail])
    listing = guest.run(f"ls {payload.MOUNT}/{payload.BIN}/tests").text.split()
    out = left_out(guest.series, lane)
    listing = [name for name in listing if name not in out]
    elsewhere = [name.partition("::") for name in out if "::" in name]
    deadline = time.monotonic() + timeout_s
    tails = []
    used: list[tuple[float, str]] = []
    for name in listing:
        argv = [f"{payload.MOUNT}/{payload.BIN}/tests/{name}", "--test-threads=2", "--exact"]
        argv += [f"--skip={test}" for where, _, test in elsewhere if where == name]
        before = guest.machine.cpu_seconds()
        done = guest.run(argv, cwd="/var/tmp", env=payload.ENVIRONMENT, timeout_s=deadline - time.monotonic())
        used.append((guest.machine.cpu_seconds() - before, name))
        counts = re.search(r"(\d+) passed; (\d+) failed; (\d+) ignored", done.text)
        outcome.passed += int(counts.group(1)) if counts else 0
        outcome.failed += [f"{name}::{test}" for test in re.findall(r"^test (.+) \.\.\. FAILED", done.text, re.M)]
        if not done.ok:
            tails.append(f"--- {name}\n{_tail(done.text + done.stderr.decode(errors='replace'))}")
            if not counts or counts.group(2) == "0":
                outcome.failed.append(f"{name} ended with {done.exit_code}")
    outcome.tail = "\n".join(tails)
    outcome.notes = slowest(used, "s of CPU")
    outcome.summary = f"{outcome.passed} passed, {len(outcome.failed)} failed in {len(listing)} executables"
    return outcome


def _summary_line(text: str) -> str:
    lines = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    return lines[-1].strip(" =") if lines else ""


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-TAIL_LINES:])
