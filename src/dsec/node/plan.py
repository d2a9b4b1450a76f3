"""From what was asked to what is carried out: pure functions from values to plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from dsec.backends.base import LayerMount, RunPlan, StartPlan
from dsec.model import limits
from dsec.model.errors import Unsupported
from dsec.model.limits import MIB
from dsec.model.processes import How
from dsec.model.specs import RunSpec, Spec
from dsec.model.states import LayerInfo, LayerRef

PATH_DEFAULT: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENV_DEFAULT: Final = {"PATH": PATH_DEFAULT}
CPU_WEIGHT: Final = {"best_effort": 100, "latency": 1000}


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What every program of a sandbox starts with unless its run says otherwise."""

    env: dict[str, str]
    cwd: str
    user: str


# As `run` starts a program.
RUN: Final = How()
# Kinds whose program lives beyond the call that started it.
TALKED_TO: Final = frozenset({"spawn", "session"})
PAGE_BYTES: Final = 4096

# What rows of schema 1 are read with: they did not keep it.
BARE: Final = Defaults(env=dict(ENV_DEFAULT), cwd="/", user="root")


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved layer and where it lies."""

    info: LayerInfo
    path: str


def refuse_unsupported(spec: Spec) -> None:
    """Raises Unsupported, naming the mechanism, for what no backend of this node can do yet."""
    if spec.image is not None:
        raise Unsupported.lacks(
            f"image {spec.image}",
            "OCI import",
            "no image is pulled; base= (--base) names a layer of the node, and `docker export` with `dsec layer import "
            "tar:ROOT.tar NAME` makes one of an image",
        )
    if spec.environment is not None:
        raise Unsupported.lacks(f"environment {spec.environment}", "environments", "name base, workspace and toolkits")
    if spec.snapshot is not None:
        raise Unsupported.lacks(f"snapshot {spec.snapshot}", "snapshots", "this node makes and restores none")
    if spec.on_idle == "pause":
        raise Unsupported.lacks("on_idle='pause'", "pause", "this node can stop an idle sandbox, not pause it")


def defaults(spec: Spec, layers: Sequence[LayerInfo]) -> Defaults:
    """Environment, directory and user: the spec's, else those of the topmost layer that sets them."""
    env = dict(ENV_DEFAULT)
    cwd, user = "/", "root"
    for layer in layers:
        env.update(layer.env)
        cwd = layer.cwd or cwd
        user = layer.user or user
    env.update(spec.env)
    user = spec.user or user
    # HOME is that of whoever a program runs as, found inside, unless somebody has set it.
    return Defaults(env=env, cwd=spec.cwd or cwd, user=user)


def settings_from(layers: Sequence[LayerInfo], refs: Sequence[LayerRef]) -> dict[str, LayerRef]:
    """Which layer the directory and the user come from, by `cwd` and `user`; those that every sandbox has are left out.

    The node looks for them when a sandbox is created, which costs one entry: the usual base need not pay for it.
    """
    found: dict[str, LayerRef] = {}
    for layer, ref in zip(layers, refs, strict=True):
        for field, value, everywhere in (("cwd", layer.cwd, BARE.cwd), ("user", layer.user, BARE.user)):
            if value == everywhere:
                found.pop(field, None)
            elif value:
                found[field] = ref
    return found


def choose_cpus(cpu: float, online: Sequence[int], turn: int) -> tuple[int, ...]:
    """The CPUs a sandbox sees: as many as its limit, rounded up, spread over the machine by `turn`.

    Programs size their thread pools by the affinity mask; with all CPUs of a big host in it they would thrash against
    their quota.
    """
    count = max(1, math.ceil(cpu))
    if count >= len(online):
        return tuple(online)
    start = turn * count % len(online)
    return tuple(sorted(online[(start + i) % len(online)] for i in range(count)))


def hosts_file(hostname: str) -> bytes:
    """/etc/hosts: loopback names, and the sandbox's own name at its constant address."""
    short = hostname.partition(".")[0]
    names = hostname if short == hostname else f"{hostname} {short}"
    return (f"127.0.0.1\tlocalhost\n127.0.1.1\t{names}\n::1\tlocalhost ip6-localhost ip6-loopback\n").encode()


def shm_bytes(memory_bytes: int) -> int:
    """How much /dev/shm takes. What lies in it belongs to no process, so the end of a program does not free it:
    with all of the memory in it nothing could run any more, and the kernel's last resort would be the sandbox's init.
    """
    return min(limits.SHM_DEFAULT_BYTES, memory_bytes // 2)


def resolv_conf(nameserver: str | None) -> bytes:
    """/etc/resolv.conf. Where nothing may be reached, a nameserver is not reached either."""
    return f"nameserver {nameserver}\n".encode() if nameserver else b"# No network: names are not resolved.\n"


def start_plan(
    sandbox_id: str,
    spec: Spec,
    layers: Sequence[Layer],
    online: Sequence[int],
    turn: int,
    *,
    nameserver: str | None = None,
) -> StartPlan:
    """Everything a backend needs to start one sandbox."""
    hostname = spec.hostname or sandbox_id.rpartition("-")[2]
    base = defaults(spec, [layer.info for layer in layers])
    return StartPlan(
        id=sandbox_id,
        hostname=hostname,
        layers=tuple(LayerMount(digest=layer.info.digest, path=layer.path) for layer in layers),
        env=base.env,
        cwd=base.cwd,
        user=base.user,
        cpu=spec.cpu,
        cpu_weight=CPU_WEIGHT[spec.qos],
        cpus=choose_cpus(spec.cpu, online, turn),
        memory_bytes=spec.memory_mib * MIB,
        disk_bytes=spec.disk_mib * MIB,
        pids=spec.pids,
        shm_bytes=shm_bytes(spec.memory_mib * MIB),
        no_new_privs=spec.no_new_privs,
        files={
            "/etc/hosts": hosts_file(hostname),
            "/etc/hostname": f"{hostname}\n".encode(),
            "/etc/resolv.conf": resolv_conf(nameserver),
        },
    )


def run_plan(process_id: str, spec: RunSpec, base: Defaults, how: How = RUN) -> RunPlan:
    """One program, complete. A relative directory cannot occur: `RunSpec.check` refuses it."""
    return RunPlan(
        stdin_open=how.stdin,
        tty=how.tty,
        control=how.control,
        spool_bytes=0 if how.kind == "run" else how.spool_bytes,
        process_id=process_id,
        argv=tuple(spec.arguments()),
        env=_terminal_env(how) | base.env | spec.env,
        cwd=spec.cwd or base.cwd,
        user=spec.user or base.user,
        stdin=spec.stdin or b"",
        timeout_s=spec.timeout_s,
    )


def _terminal_env(how: How) -> dict[str, str]:
    """What a program with a terminal draws for, unless it is told: what every terminal program of today can show."""
    return {} if how.tty is None else {"TERM": "xterm-256color"}


# What the runtime needs of the disk for one output beside what it keeps: a step of what is moved there.
SPOOL_STEP_BYTES: Final = 256 * limits.KIB


def spool_mib(how: How) -> float:
    """What the output of a program may take of the node's disk at most."""
    if how.kind not in TALKED_TO or not how.spool_bytes:
        return 0.0
    outputs = 1 if how.tty is not None else 3 if how.control else 2
    pages = -(-max(how.spool_bytes, limits.OUTPUT_TAIL_BYTES) // PAGE_BYTES) * PAGE_BYTES
    return outputs * (limits.OUTPUT_HEAD_BYTES + pages + SPOOL_STEP_BYTES) / MIB


COMMAND_SHOWN_CHARS: Final = 256


def shown_command(spec: RunSpec) -> str:
    """A command as lists show it: shortened, never with its standard input or environment."""
    if isinstance(spec.command, str):
        text = spec.command
    elif spec.command is not None:
        text = " ".join(spec.command)
    else:
        text = b" ".join(spec.argv or []).decode("utf-8", "replace")
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= COMMAND_SHOWN_CHARS else text[: COMMAND_SHOWN_CHARS - 3] + "..."
