"""The boundary's values as the runtime's, and back."""

from __future__ import annotations

import pytest

from dsec.backends.base import LayerMount, RunPlan, StartPlan
from dsec.backends.container import plans
from dsec.model import limits
from dsec.wire import values as v

pytestmark = pytest.mark.unit

START = StartPlan(
    id="sbx-n1-abcdefghijklm",
    hostname="box",
    layers=(LayerMount(digest="sha256:aa", path="/l/aa"), LayerMount(digest="sha256:bb", path="/l/bb")),
    env={"A": "1"},
    cwd="/",
    user="root",
    cpu=0.015,
    cpu_weight=50,
    cpus=(1,),
    memory_bytes=1 << 28,
    disk_bytes=1 << 30,
    pids=99,
    deadline_s=2.5,
)


def test_a_sandbox() -> None:
    made = plans.sandbox_plan(START)
    assert made.layers == ("sha256:aa", "sha256:bb")  # base first, as given
    assert (made.cpu_milli, made.deadline_ms, made.pids_max, made.cpus) == (15, 2500, 99, (1,))
    assert made.upper == v.UpperSpec(bytes=1 << 30, kind="auto", inodes=65_536)
    assert made.network == "loopback"


def test_the_writable_part_is_of_a_kind_that_bounds_its_files() -> None:
    bounded = v.UpperSpec(bytes=1 << 30, kind="auto", inodes=65_536)
    assert plans.sandbox_plan(START, "ext4").upper == bounded
    assert plans.sandbox_plan(START, "prjquota").upper == bounded
    # Its files come out of its bytes: no number is asked for, so that the runtime need not take another kind.
    assert plans.sandbox_plan(START, "btrfs").upper == v.UpperSpec(bytes=1 << 30, kind="btrfs", inodes=0)


def test_a_limit_is_never_rounded_to_none() -> None:
    run = RunPlan(process_id="p-1", argv=(b"x",), env={}, cwd="/", user="root", timeout_s=0.0001)
    assert plans.run_start("s", run).timeout_ms == 1
    assert plans.run_start("s", RunPlan(process_id="p-1", argv=(b"x",), env={}, cwd="/", user="0")).timeout_ms == 0
    assert plans.sandbox_plan(START).cpu_milli >= 1


def test_text_that_is_no_utf8_stays_what_it_was() -> None:
    raw = b"/\xff\xfe".decode("utf-8", "surrogateescape")
    run = plans.run_start("s", RunPlan(process_id="p", argv=(b"x",), env={"K": raw}, cwd=raw, user="root"))
    assert (run.cwd, run.env) == (b"/\xff\xfe", {b"K": b"/\xff\xfe"})


def result(**fields: object) -> v.RunResult:
    stream = v.StreamResult(total=5, head=b"ab", tail=b"e", dropped=2)
    base: dict[str, object] = {"run": "p", "cause": "exited", "streams": (stream, v.StreamResult()), "exit_code": 0}
    return v.RunResult(**(base | fields))  # type: ignore[arg-type] # fields are the test's


def test_results() -> None:
    killed = plans.outcome(result(exit_code=None, signal=9, cause="oom", limits_hit=("memory",)))
    assert (killed.exit_code, killed.signal, killed.cause, killed.limits_hit) == (137, 9, "oom", ("memory",))
    fine = plans.outcome(result(exit_code=7, started_ns=2_500_000_000, duration_ns=500_000_000))
    assert (fine.exit_code, fine.started_at, fine.duration_s) == (7, 2.5, 0.5)
    assert (fine.out.total, fine.out.dropped_bytes) == (5, 2)


@pytest.mark.parametrize(
    ("exit_", "reason"),
    [
        (v.SandboxExit(reason="stopped"), "stopped"),
        (v.SandboxExit(reason="init_died", signal=9), "init_died"),
        (v.SandboxExit(reason="init_died", signal=9, oom=True), "oom"),
        (v.SandboxExit(reason="lost"), "lost"),
        (v.SandboxExit(reason="disk_lost", signal=9), "disk_lost"),
        (v.SandboxExit(reason="from_the_future"), "lost"),
        (None, "lost"),
    ],
)
def test_endings(exit_: v.SandboxExit | None, reason: str) -> None:
    assert plans.ending(v.SandboxStatus(id="s", state="ended", exit=exit_)).reason == reason


PROBE = v.Probe(
    kernel="6.12",
    cgroup=v.CgroupProbe(mode="v2", controllers=("cpu", "memory", "pids")),
    erofs="file",
    overlay="fd",
    idmap={"erofs": True},
    upper=("prjquota", "tmpfs"),
)


def test_capabilities_have_a_mechanism_or_a_reason() -> None:
    able = plans.capabilities("container", PROBE)
    assert able.available
    assert able.features["disk_limit"].mechanism == "prjquota"
    assert able.features["memory_limit"].mechanism == "cgroup v2"


@pytest.mark.parametrize(
    ("changes", "feature", "reason"),
    [
        ({"erofs": None, "reasons": {"erofs": "not built in"}}, "layers", "not built in"),
        ({"upper": ()}, "disk_limit", "the probe found no way"),
        ({"cgroup": v.CgroupProbe(mode="v2", controllers=("cpu",))}, "memory_limit", "the probe found no way"),
        ({"idmap": {}, "reasons": {"idmap.erofs": "EINVAL"}}, "idmap", "EINVAL"),
    ],
)
def test_what_is_missing_makes_it_unavailable(changes: dict[str, object], feature: str, reason: str) -> None:
    fields = {name: getattr(PROBE, name) for name in PROBE.__struct_fields__} | changes
    found = plans.capabilities("container", v.Probe(**fields))
    assert not found.available
    assert found.features[feature].reason == reason
    assert f"{feature}: {reason}" in (found.reason or "")


def test_limits_of_the_frame_hold_what_a_run_may_have() -> None:
    assert limits.STDIN_MAX_BYTES + limits.ARGS_MAX_BYTES < limits.FRAME_MAX_BYTES
    assert 2 * (limits.OUTPUT_HEAD_BYTES + limits.OUTPUT_TAIL_BYTES) < limits.FRAME_MAX_BYTES
