"""What a caller asks for: `Spec` and `RunSpec`, checked before anything is made."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, Self

import msgspec

from dsec.model import ids, limits
from dsec.model.convert import Checked, convert
from dsec.model.errors import InvalidSpec
from dsec.model.network import Network, Policy, policy_of

Backend = Literal["container", "microvm", "vm", "fncall"]
OnIdle = Literal["stop", "pause"]
Qos = Literal["best_effort", "latency"]
IfExists = Literal["error", "get"]

BACKENDS = ("fncall", "container", "microvm", "vm")
DEFAULT_BASE = "debian:12"


class Spec(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    metaclass=Checked,
):
    """One sandbox to create. Sizes are MiB, times seconds, `cpu` is in cores.

    Exactly one of `image`, `base`, `environment`, `snapshot`; when none is given, the base is `debian:12`.
    `cpu`, `memory_mib`, `disk_mib` and `pids` are limits. A sandbox stops (or pauses, `on_idle`) after `idle_timeout_s`
    without a call, and always after `lifetime_s`. `network` maps names of mirrors to whether they may be reached,
    or is a whole policy (`dsec.Policy`, or as plain data); without one a sandbox has loopback only. `wait_s` is how
    long to wait for room on a full node.
    """

    backend: Backend = "container"
    image: str | None = None
    base: str | None = None
    environment: str | None = None
    snapshot: str | None = None
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    cpu: float = limits.CPU_DEFAULT
    memory_mib: int = limits.MEMORY_DEFAULT_MIB
    disk_mib: int = limits.DISK_DEFAULT_MIB
    pids: int = limits.PIDS_DEFAULT
    idle_timeout_s: float | None = limits.IDLE_TIMEOUT_DEFAULT_S
    lifetime_s: float | None = limits.LIFETIME_DEFAULT_S
    on_idle: OnIdle = "stop"
    network: Network = {}
    qos: Qos = "best_effort"
    env: dict[str, str] = {}
    cwd: str | None = None
    user: str | None = None
    hostname: str | None = None
    no_new_privs: bool = False
    job: str | None = None
    labels: dict[str, str] = {}
    name: str | None = None
    if_exists: IfExists = "error"
    wait_s: float = 0.0

    @classmethod
    def build(cls, **fields: Any) -> Self:
        """A checked Spec from keyword arguments. Raises InvalidSpec naming the field that is wrong."""
        if isinstance(network := fields.get("network"), Policy):
            fields["network"] = network.document()
        return convert(fields, cls).check()

    def check(self) -> Self:
        """The Spec itself when every field is allowed. Raises InvalidSpec naming the first that is not."""
        _check_source(self)
        _number("cpu", self.cpu, limits.CPU_MIN, limits.CPU_MAX)
        _number("memory_mib", self.memory_mib, limits.MEMORY_MIN_MIB, limits.MEMORY_MAX_MIB)
        _number("disk_mib", self.disk_mib, limits.DISK_MIN_MIB, limits.DISK_MAX_MIB)
        _number("pids", self.pids, limits.PIDS_MIN, limits.PIDS_MAX)
        if self.idle_timeout_s is not None:
            _number("idle_timeout_s", self.idle_timeout_s, 1, limits.LIFETIME_MAX_S)
        if self.lifetime_s is not None:
            _number("lifetime_s", self.lifetime_s, 1, limits.LIFETIME_MAX_S)
        _number("wait_s", self.wait_s, 0, limits.WAIT_MAX_S)
        check_env(self.env)
        check_labels(self.labels)
        policy_of(self.network)
        if self.cwd is not None:
            check_path("cwd", self.cwd)
        if self.user is not None:
            check_user(self.user)
        if self.name is not None:
            ids.check_name(self.name)
        if self.job is not None:
            ids.check_name(self.job, "job")
        if self.hostname is not None:
            check_hostname(self.hostname)
        return self


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One program to run. A str runs as `/bin/sh -c`, a list is argv and needs no shell.

    `argv` instead of `command` carries arguments that are not UTF-8.
    """

    command: str | list[str] | None = None
    argv: list[bytes] | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    stdin: bytes | None = None
    timeout_s: float | None = None

    def check(self) -> Self:
        """The RunSpec itself when every field is allowed. Raises InvalidSpec naming the first that is not."""
        self.arguments()
        check_env(self.env)
        if self.cwd is not None:
            check_path("cwd", self.cwd)
        if self.user is not None:
            check_user(self.user)
        if self.stdin is not None and len(self.stdin) > limits.STDIN_MAX_BYTES:
            raise InvalidSpec.field("stdin", f"{len(self.stdin)} bytes", f"at most {limits.STDIN_MAX_BYTES} bytes")
        if self.timeout_s is not None:
            _number("timeout_s", self.timeout_s, 0.001, limits.TIMEOUT_MAX_S)
        return self

    def arguments(self) -> list[bytes]:
        """The argument list as the kernel gets it. Raises InvalidSpec when it is empty, too long or has a NUL."""
        if (self.command is None) == (self.argv is None):
            raise InvalidSpec.field("command", self.command, "a shell text or a list (or argv in bytes, not both)")
        parts = self.argv
        if parts is None:
            words = ["/bin/sh", "-c", self.command] if isinstance(self.command, str) else self.command or []
            parts = [os_bytes("command", word) for word in words]
        if not parts or not parts[0]:
            raise InvalidSpec.field("command", self.command, "a shell text or a list that starts with a program")
        for part in parts:
            if b"\0" in part:
                raise InvalidSpec.field("command", part, "text without NUL bytes")
            if len(part) > limits.ARG_MAX_BYTES:
                allowed = f"at most {limits.ARG_MAX_BYTES} bytes an argument (the kernel's limit)"
                raise InvalidSpec.field("command", part, allowed)
        if sum(map(len, parts)) + 9 * len(parts) > limits.ARGS_MAX_BYTES:
            allowed = f"at most {limits.ARGS_MAX_BYTES} bytes in all (the kernel's limit)"
            raise InvalidSpec.field("command", parts[0], allowed)
        return parts


def os_bytes(field: str, text: str) -> bytes:
    """Text as the bytes a kernel takes; surrogate escapes stand for undecodable bytes, as in `os.fsencode`."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidSpec.field(field, text, "text that can be encoded as UTF-8") from error


def check_env(env: Mapping[str, str]) -> None:
    """Raises InvalidSpec unless every name and value can stand in an environment."""
    if len(env) > limits.ENV_MAX_ENTRIES:
        raise InvalidSpec.field("env", f"{len(env)} entries", f"at most {limits.ENV_MAX_ENTRIES}")
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise InvalidSpec.field("env", name, "names that are not empty, without = and NUL")
        if "\0" in value:
            raise InvalidSpec.field("env", f"{name}=...", "values without NUL")
        if len(os_bytes("env", name)) + len(os_bytes("env", value)) + 2 > limits.ARG_MAX_BYTES:
            raise InvalidSpec.field("env", f"{name}=...", f"at most {limits.ARG_MAX_BYTES} bytes an entry")


def check_labels(labels: Mapping[str, str]) -> None:
    """Raises InvalidSpec unless number, keys and values are within the limits."""
    if len(labels) > limits.LABELS_MAX:
        raise InvalidSpec.field("labels", f"{len(labels)} labels", f"at most {limits.LABELS_MAX}")
    for key, value in labels.items():
        ids.check_label_key(key)
        if len(value) > limits.LABEL_VALUE_MAX_CHARS or "\0" in value:
            raise InvalidSpec.field(
                "labels", f"{key}=...", f"values of at most {limits.LABEL_VALUE_MAX_CHARS} letters, no NUL"
            )


def check_path(field: str, path: str) -> None:
    """Raises InvalidSpec unless it is an absolute path the kernel can take."""
    if not path.startswith("/") or "\0" in path or len(os_bytes(field, path)) > limits.PATH_MAX_BYTES:
        raise InvalidSpec.field(field, path, f"an absolute path of at most {limits.PATH_MAX_BYTES} bytes, without NUL")


def check_user(user: str) -> None:
    """Raises InvalidSpec unless it has the form name, uid, name:group or uid:gid."""
    if not _USER.match(user):
        raise InvalidSpec.field("user", user, "name, uid, name:group or uid:gid")


def check_hostname(hostname: str) -> None:
    """Raises InvalidSpec unless it is one DNS label (or several) of at most 63 letters in all."""
    if not _HOSTNAME.match(hostname):
        raise InvalidSpec.field("hostname", hostname, "1 to 63 of A-Z a-z 0-9 - . , starting with a letter or digit")


def _number(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidSpec.field(field, value, f"{low} to {high}")


def _check_source(spec: Spec) -> None:
    sources = [name for name in ("image", "base", "environment", "snapshot") if getattr(spec, name) is not None]
    if len(sources) > 1:
        raise InvalidSpec.field(
            sources[1],
            getattr(spec, sources[1]),
            f"only one of image, base, environment, snapshot ({sources[0]} is given too)",
        )
    for field in ("base", "environment", "workspace"):
        ref = getattr(spec, field)
        if ref is not None:
            ids.check_layer_ref(ref, field)
    for field in ("image", "snapshot"):
        ref = getattr(spec, field)
        if ref is not None and not 0 < len(ref) <= limits.SOURCE_MAX_CHARS:
            raise InvalidSpec.field(field, ref, f"1 to {limits.SOURCE_MAX_CHARS} letters")
    if len(spec.toolkits) + 2 > limits.LAYERS_MAX:
        raise InvalidSpec.field("toolkits", f"{len(spec.toolkits)} toolkits", f"at most {limits.LAYERS_MAX - 2}")
    for ref in spec.toolkits:
        ids.check_layer_ref(ref, "toolkits")


_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?\Z")
_HOSTNAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}\Z")
