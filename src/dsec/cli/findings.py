"""Why a sandbox is slow, stuck or gone: what its numbers say, in sentences."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from dsec.model.errors import DsecError, FileNotFound

if TYPE_CHECKING:
    from dsec.model.events import Event
    from dsec.model.states import SandboxInfo, Usage
    from dsec.sdk._sync.files import Files
    from dsec.sdk.programs import ProcessInfo

MIB: Final = 1 << 20
# Below it a wait is what any program has on any machine.
SHARE_WORTH_A_WORD: Final = 0.05
WAIT_WORTH_A_WORD_S: Final = 1.0
# Where the kernel says a process is that writes to a full pipe or terminal.
FULL_OUTPUT: Final = ("pipe_write", "anon_pipe_write", "fifo_pipe_write", "n_tty_write", "tty_write_lock")
NEARLY_FULL: Final = 0.95
NAMED_MAX: Final = 3
DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
ENDINGS: Final = {
    "stopped": "it was stopped",
    "idle": "nothing went on in it for its idle_timeout_s",
    "lifetime": "its lifetime_s was over",
    "init_died": "its first process was ended from inside or outside",
    "oom": "the machine was out of memory, and the kernel ended its first process",
    "lost": "its node came back without it",
    "disk_lost": "the disk below its writable part failed or was full",
    "reboot": "its machine was started anew",
    "create_failed": "its creation failed",
}


def of_ended(info: SandboxInfo, events: Sequence[Event]) -> list[str]:
    """How it ended, and what of its last programs met a limit."""
    how = ENDINGS.get(info.end_reason or "", f"it ended: {info.end_reason}")
    found = [f"{how} ({info.ended_by})" if info.ended_by else how]
    for event in events:
        cause = event.detail.get("cause")
        if cause in ("oom", "timeout", "policy"):
            found.append(f"{event.process_id or event.kind} ended by {cause}{_peak(event)}")
    return found


def _peak(event: Event) -> str:
    peak, limit = event.detail.get("memory_peak_bytes"), event.detail.get("memory_limit_bytes")
    return f" (peak {peak // MIB} of {limit // MIB} MiB)" if peak and limit else ""


def of_running(info: SandboxInfo, usage: Usage, processes: Sequence[ProcessInfo]) -> list[str]:
    """What holds it up now, or has; empty when nothing does."""
    age_s = max(time.time() - (info.started_at or info.created_at), 1e-3)
    return [*_waits(info, usage, age_s), *_limits(info, usage), *_stuck(processes), *_held_back(processes)]


def of_programs(info: SandboxInfo, events: Sequence[Event]) -> list[str]:
    """What programs that have ended say of limits that the numbers of now do not tell."""
    refused = [event for event in events if "pids" in event.detail.get("limits_hit", ())]
    if not refused:
        return []
    last = refused[-1].process_id or refused[-1].kind
    return [
        f"pids: the limit of {info.spec.pids} processes and threads was met by {len(refused)} programs, last {last}"
    ]


def of_devices(files: Files) -> list[str]:
    """Which of the devices that programs count on are not there any more: whoever may remove them is root inside.

    What then fails are the programs, in words of theirs; and a redirection to /dev/null fills a file.
    """
    gone = [path for path in DEVICES if not _is_device(files, path)]
    names, are = ", ".join(gone), "is no device" if len(gone) == 1 else "are no devices"
    return [f"broken: {names} {are} any more, and cannot be made anew inside: create a new sandbox"] if gone else []


def _is_device(files: Files, path: str) -> bool:
    try:
        return files.stat(path, follow=False).type == "char"
    except FileNotFound:
        return False
    except DsecError:
        return True  # nothing is known


def _waits(info: SandboxInfo, usage: Usage, age_s: float) -> Iterator[str]:
    used_s = usage.cpu_user_s + usage.cpu_system_s
    throttled_s = usage.cpu_throttled_s or 0.0
    if throttled_s > SHARE_WORTH_A_WORD * (used_s + throttled_s):
        yield f"slow: its quota of {info.spec.cpu:g} CPUs held it back for {throttled_s:.1f} s (it used {used_s:.1f} s)"
    pressure = usage.pressure
    if pressure is None:
        return
    # Waiting for the quota counts as waiting for a CPU.
    others_s = (pressure.cpu_s or 0.0) - throttled_s
    if others_s > max(SHARE_WORTH_A_WORD * age_s, WAIT_WORTH_A_WORD_S):
        yield f"slow: its programs waited {others_s:.1f} of {age_s:.1f} s for a CPU that others had"
    if (pressure.memory_s or 0.0) > SHARE_WORTH_A_WORD * age_s:
        yield f"slow: its programs waited {pressure.memory_s:.1f} of {age_s:.1f} s for memory to be found"
    if (pressure.io_s or 0.0) > SHARE_WORTH_A_WORD * age_s:
        yield f"slow: its programs waited {pressure.io_s:.1f} of {age_s:.1f} s for the disk"


def _limits(info: SandboxInfo, usage: Usage) -> Iterator[str]:
    if usage.memory_limit_hits:
        peak = f", peak {usage.memory_peak_bytes // MIB} MiB" if usage.memory_peak_bytes else ""
        yield f"memory: the limit of {info.spec.memory_mib} MiB was met {usage.memory_limit_hits} times{peak}"
    if (usage.disk_bytes or 0) > NEARLY_FULL * info.spec.disk_mib * MIB:
        yield f"disk: {(usage.disk_bytes or 0) // MIB} of {info.spec.disk_mib} MiB are used"
    if (usage.pids or 0) > NEARLY_FULL * info.spec.pids:
        yield f"pids: {usage.pids} of {info.spec.pids} processes and threads"


def _held_back(processes: Sequence[ProcessInfo]) -> Iterator[str]:
    those = [process for process in processes if process.wait_channel in FULL_OUTPUT]
    for process in those[:NAMED_MAX]:
        of = f" of {process.id}" if process.id else ""
        yield (
            f"held back: process {process.pid} ({process.name}){of} waits until its output is read: who iterates or "
            "follows it has stopped reading, or the program behind its pipe has"
        )


def _stuck(processes: Sequence[ProcessInfo]) -> Iterator[str]:
    for status, words in (("D", "cannot be interrupted"), ("T", "is stopped"), ("t", "is held by a tracer")):
        those = [process for process in processes if process.status == status]
        for process in those[:NAMED_MAX]:
            where = f" in {process.wait_channel}" if process.wait_channel else ""
            yield f"stuck: process {process.pid} ({process.name}) {words}{where}"
        if len(those) > NAMED_MAX:
            yield f"stuck: {len(those) - NAMED_MAX} more like the last"
