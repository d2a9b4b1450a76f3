"""The boundary's values as the runtime's, and back. Pure."""

from __future__ import annotations

import os
from typing import Any, Final

from dsec.backends.base import Exit, Handle, Inside, ProcessInfo, ProgramStatus, RunPlan, StartPlan
from dsec.model.processes import InputState, OutputPiece, Process
from dsec.model.states import Capabilities, Capability, EndReason, Output, Pressure, RunOutcome, Usage
from dsec.wire import values as v

NS: Final = 1e9
US: Final = 1e6
# An inode of the writable part for each so many bytes, as mkfs.ext4 does: a limit of files, not of what is in them.
BYTES_PER_INODE: Final = 16_384
INODES_MIN: Final = 4096


def upper_spec(disk_bytes: int, best: str | None) -> v.UpperSpec:
    """The writable part. `best` is the kind the runtime's probe has first.

    btrfs is asked for by name where it is the best, without a limit of inodes: it makes them as it goes, out of the
    sandbox's own bytes, so that there is nothing of the node's to run out of. Asked for a limit the runtime would take
    the next kind, ext4 in a loop device of its own, which costs 6-9 ms of CPU more for each sandbox.
    """
    if best == "btrfs":
        return v.UpperSpec(bytes=disk_bytes, kind="btrfs")
    return v.UpperSpec(bytes=disk_bytes, inodes=max(INODES_MIN, disk_bytes // BYTES_PER_INODE))


def sandbox_plan(plan: StartPlan, best_upper: str | None = None) -> v.SandboxPlan:
    """What the runtime needs to make the sandbox. Its layers must be mounted."""
    return v.SandboxPlan(
        id=plan.id,
        hostname=plan.hostname,
        layers=tuple(layer.digest for layer in plan.layers),
        upper=upper_spec(plan.disk_bytes, best_upper),
        memory_bytes=plan.memory_bytes,
        cpu_milli=max(1, round(plan.cpu * 1000)),
        cpu_weight=plan.cpu_weight,
        cpus=plan.cpus,
        pids_max=plan.pids,
        nofile=plan.nofile,
        shm_bytes=plan.shm_bytes,
        pty_max=plan.pty_max,
        no_new_privs=plan.no_new_privs,
        files=plan.files,
        deadline_ms=round(plan.deadline_s * 1000),
    )


def run_start(sandbox_id: str, plan: RunPlan) -> v.RunStart:
    """What the runtime needs to start the program."""
    encode = os.fsencode
    talked_to: dict[str, Any] = {}
    kind = v.RunStart
    if plan.stdin_open or plan.tty or plan.control or plan.spool_bytes:
        kind = v.TalkStart
        talked_to = {
            "stdin_open": plan.stdin_open,
            "tty": None if plan.tty is None else v.TtySize(plan.tty.rows, plan.tty.cols),
            "control": plan.control,
            "spool_bytes": plan.spool_bytes,
        }
    return kind(
        **talked_to,
        sandbox=sandbox_id,
        run=plan.process_id,
        argv=plan.argv,
        env={encode(name): encode(value) for name, value in plan.env.items()},
        cwd=encode(plan.cwd),
        user=plan.user,
        stdin=plan.stdin,
        timeout_ms=0 if plan.timeout_s is None else max(1, round(plan.timeout_s * 1000)),
        head_bytes=plan.head_bytes,
        tail_bytes=plan.tail_bytes,
    )


def outcome(result: v.RunResult) -> RunOutcome:
    """How a program ended."""
    out, err = result.streams
    usage = result.usage
    code = result.exit_code
    if code is None:
        code = 128 + (result.signal or 0)
    return RunOutcome(
        exit_code=code,
        cause=result.cause,
        signal=result.signal,
        limits_hit=result.limits_hit,
        out=Output(head=out.head, tail=out.tail, total=out.total),
        err=Output(head=err.head, tail=err.tail, total=err.total),
        started_at=result.started_ns / NS,
        duration_s=result.duration_ns / NS,
        usage=Usage(
            cpu_user_s=usage.user_us / US,
            cpu_system_s=usage.system_us / US,
            memory_peak_bytes=usage.memory_peak_bytes or usage.max_rss_bytes,
        ),
    )


def handle(backend: str, status: v.SandboxStatus) -> Handle:
    """What finds the sandbox again: its id, and when it was started, so that another one is not taken for it."""
    data = {"started_ns": status.started_ns, "cgroup_id": status.cgroup_id, "init_pid": status.init_pid}
    return Handle(backend=backend, id=status.id, data=data)


def process(run: v.RunInfo) -> ProcessInfo:
    """A program in a list. Whatever the runtime calls it after its end, it has ended."""
    state = run.state if run.state in ("starting", "running") else "ended"
    return ProcessInfo(process_id=run.run, state=state, pid=(run.pid or None) if state == "running" else None)


def input_state(found: v.InputSize) -> InputState:
    """How much input was taken."""
    return InputState(size=found.size, closed=found.closed)


def piece(stream: int, found: v.Piece) -> OutputPiece:
    """Kept output."""
    ended = found.state not in ("launching", "running")
    return OutputPiece(stream=stream, offset=found.o, data=found.d, total=found.total, gap=found.gap, ended=ended)


def status(found: v.RunStatus) -> ProgramStatus:
    """A program as it is now."""
    used = found.usage
    return ProgramStatus(
        ended=found.state not in ("launching", "running"),
        usage=Usage(
            cpu_user_s=used.user_us / US,
            cpu_system_s=used.system_us / US,
            memory_peak_bytes=used.memory_peak_bytes or used.max_rss_bytes,
        ),
        limits_hit=found.limits_hit,
        met={"memory": found.met.memory, "pids": found.met.pids},
        totals=found.totals,
        input=None if found.input is None else input_state(found.input),
    )


def inside(table: v.ProcessTable) -> Inside:
    """Processes alive. The process of a run has entered from outside: its parent is none of them."""
    return Inside(
        processes=tuple(
            Process(
                pid=row.pid,
                ppid=row.ppid,
                id=row.run,
                main=row.run is not None and row.ppid == 0,
                argv=tuple(map(os.fsdecode, row.argv)),
                name=os.fsdecode(row.name),
                cwd=os.fsdecode(row.cwd),
                uid=row.uid,
                status=row.state,
                wait_channel=row.wchan,
                cpu_s=row.cpu_us / US,
                memory_bytes=row.rss_bytes,
                age_s=row.age_ms / 1000,
                threads=row.threads,
            )
            for row in table.processes
        ),
        more=table.more,
    )


def ending(status: v.SandboxStatus) -> Exit:
    """How a sandbox ended."""
    exit_ = status.exit
    if exit_ is None:
        return Exit(reason="lost", detail="the runtime has no record of how it ended")
    reasons: dict[str, EndReason] = {"stopped": "stopped", "init_died": "init_died", "disk_lost": "disk_lost"}
    reason = reasons.get(exit_.reason, "lost")
    if reason == "init_died" and exit_.oom:
        reason = "oom"
    how = ""
    if reason == "disk_lost":
        how = "the disk below its writable part failed or was full"
    elif reason != "stopped":
        how = f"its init was killed by signal {exit_.signal}" if exit_.signal else f"its init exited with {exit_.code}"
    return Exit(reason=reason, detail=how)


def usage(found: v.SandboxUsage) -> Usage:
    """What a sandbox uses."""
    user_us, system_us = found.user_us, found.system_us
    if not user_us and not system_us:
        user_us = found.cpu_us
    return Usage(
        cpu_user_s=user_us / US,
        cpu_system_s=system_us / US,
        memory_bytes=found.memory_bytes,
        memory_peak_bytes=found.memory_peak_bytes,
        disk_bytes=found.disk_bytes,
        pids=found.pids,
        cpu_throttled_s=found.throttled_us / US,
        memory_limit_hits=found.memory_max_events,
        pressure=Pressure(
            cpu_s=_seconds(found.pressure.cpu_us),
            memory_s=_seconds(found.pressure.memory_us),
            io_s=_seconds(found.pressure.io_us),
        ),
    )


def _seconds(us: int | None) -> float | None:
    return None if us is None else us / US


def capabilities(backend: str, probe: v.Probe) -> Capabilities:
    """What the kernel can do, in the words of features: the mechanism, or the reason why not."""
    controllers = set(probe.cgroup.controllers)

    def why(*names: str) -> str:
        return "; ".join(probe.reasons[name] for name in names if name in probe.reasons) or "the probe found no way"

    def feature(mechanism: str | None, *names: str) -> Capability:
        if mechanism:
            return Capability(available=True, mechanism=mechanism)
        return Capability(available=False, reason=why(*names))

    def limit(controller: str) -> Capability:
        mode = probe.cgroup.mode if controller in controllers else None
        return feature(mode and f"cgroup {mode}", f"cgroup.{controller}", "cgroup")

    features = {
        "layers": feature(probe.erofs and f"erofs over a {probe.erofs}", "erofs"),
        "overlay": feature(probe.overlay and f"overlayfs by {probe.overlay}", "overlay"),
        "idmap": feature("erofs" if probe.idmap.get("erofs") else None, "idmap", "idmap.erofs"),
        "disk_limit": feature(probe.upper[0] if probe.upper else None, "upper"),
        "memory_limit": limit("memory"),
        "cpu_limit": limit("cpu"),
        "pids_limit": limit("pids"),
        "loopback": Capability(available=True, mechanism="network namespace"),
        "network_names": feature(probe.network, "network"),
        "network_proxy": feature(probe.network, "network"),
        "network_routed": Capability(available=False, reason="no path for udp yet: what is reached is reached by tcp"),
        "network_expose": Capability(available=True, mechanism="a connection made in the sandbox's network"),
    }
    needed = ("layers", "overlay", "idmap", "disk_limit", "memory_limit", "cpu_limit", "pids_limit")
    missing = [f"{name}: {features[name].reason}" for name in needed if not features[name].available]
    return Capabilities(backend=backend, available=not missing, reason="; ".join(missing) or None, features=features)
