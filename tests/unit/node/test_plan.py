"""From specs to plans: pure functions, tested with values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.model.specs import RunSpec, Spec
from dsec.model.states import LayerInfo
from dsec.node import plan as plans

LAYERS = [
    LayerInfo(digest="sha256:" + "a" * 64, env={"PATH": "/base", "A": "base"}, cwd="/b", user="base"),
    LayerInfo(digest="sha256:" + "b" * 64, env={"A": "work"}, cwd="/w"),
    LayerInfo(digest="sha256:" + "c" * 64),
]


def test_defaults_come_from_the_topmost_layer_that_sets_them():
    base = plans.defaults(Spec(), LAYERS)
    assert (base.cwd, base.user) == ("/w", "base")
    assert base.env == {"PATH": "/base", "A": "work"}
    own = plans.defaults(Spec(cwd="/s", user="root", env={"A": "spec", "HOME": "/h"}), LAYERS)
    assert (own.cwd, own.user, own.env["A"], own.env["HOME"]) == ("/s", "root", "spec", "/h")
    bare = plans.defaults(Spec(), [])
    assert (bare.cwd, bare.user, bare.env) == ("/", "root", {"PATH": plans.PATH_DEFAULT})


def test_a_plan_is_complete():
    spec = Spec(cpu=1.5, memory_mib=64, disk_mib=32, pids=10, qos="latency", no_new_privs=True, hostname="h.example")
    layers = [plans.Layer(info=layer, path=f"/l/{layer.digest[7]}") for layer in LAYERS]
    plan = plans.start_plan("sbx-n1-abcdefghijklm", spec, layers, [0, 1, 2, 3], 0)
    assert [(layer.digest, layer.path) for layer in plan.layers] == [(i.digest, f"/l/{i.digest[7]}") for i in LAYERS]
    assert (plan.memory_bytes, plan.disk_bytes, plan.pids) == (64 << 20, 32 << 20, 10)
    assert (plan.cpu, plan.cpus, plan.cpu_weight, plan.no_new_privs) == (1.5, (0, 1), 1000, True)
    assert plan.files["/etc/hostname"] == b"h.example\n" and b"h.example h\n" in plan.files["/etc/hosts"]
    assert plans.start_plan("sbx-n1-abcdefghijklm", Spec(), layers, [0], 0).hostname == "abcdefghijklm"


@pytest.mark.parametrize(("memory_mib", "shm_mib"), [(16, 8), (64, 32), (128, 64), (4096, 64)])
def test_shared_memory_cannot_fill_the_memory(memory_mib: int, shm_mib: int) -> None:
    plan = plans.start_plan("sbx-n1-abcdefghijklm", Spec(memory_mib=memory_mib), [], [0], 0)
    assert plan.shm_bytes == shm_mib << 20


@given(st.floats(0.01, 64), st.integers(1, 64), st.integers(0, 1000))
def test_a_sandbox_sees_as_many_cpus_as_its_limit_rounded_up(cpu, machine, turn):
    online = list(range(0, 2 * machine, 2))
    chosen = plans.choose_cpus(cpu, online, turn)
    assert set(chosen) <= set(online) and len(set(chosen)) == len(chosen)
    assert len(chosen) == min(len(online), -int(-cpu // 1))


def test_turns_spread_over_the_machine():
    used = [cpu for turn in range(8) for cpu in plans.choose_cpus(1, range(4), turn)]
    assert sorted(used) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_run_merges_over_the_sandbox():
    base = plans.defaults(Spec(env={"A": "1"}, cwd="/c", user="u"), [])
    plan = plans.run_plan("p", RunSpec(command="x", env={"A": "2", "B": "3"}), base)
    assert plan.argv == (b"/bin/sh", b"-c", b"x") and (plan.cwd, plan.user) == ("/c", "u")
    assert plan.env["A"] == "2" and plan.env["B"] == "3" and base.env["A"] == "1"
    other = plans.run_plan("p", RunSpec(argv=[b"\xff"], cwd="/d", user="v", stdin=b"s", timeout_s=3), base)
    assert (other.argv, other.cwd, other.user, other.stdin, other.timeout_s) == ((b"\xff",), "/d", "v", b"s", 3)


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        (RunSpec(command="echo hi"), "echo hi"),
        (RunSpec(command=["a", "b c"]), "a b c"),
        (RunSpec(argv=[b"a", b"\xff"]), "a \ufffd"),
        (RunSpec(command="x" * 1000), "x" * 253 + "..."),
    ],
)
def test_commands_are_shown_short(spec, shown):
    assert plans.shown_command(spec) == shown
