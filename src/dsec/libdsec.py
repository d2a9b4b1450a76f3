"""The names of the DSec report's SDK, on top of ours.

    client = DSecClient()
    container = client.run_container(DSecContainerRunArgs(container_image="debian:12", memory_limit_mb=2048,
                                                          cpu_cores_limit=2, ttl_running_stop=600,
                                                          network_rules={"npm": False}, init_user="root"))
    print(container.run_shell("echo hello").stdout)
    container.stop()

It unifies access, not semantics: what a backend cannot do is refused (`Unsupported`, naming the mechanism).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from dsec.model import limits
from dsec.model.states import RunResult
from dsec.sdk._sync.client import Client
from dsec.sdk._sync.sandbox import Sandbox
from dsec.sdk.values import SpecFields

__all__ = ["DSecClient", "DSecContainer", "DSecContainerRunArgs"]


@dataclass(frozen=True, kw_only=True)
class DSecContainerRunArgs:
    """A container to run.

    `container_image` is a layer of the store (`debian:12`) or, with a scheme (`docker://python:3.12`), an image to
    import. `ttl_running_stop` is in seconds without any activity. `network_rules` maps names of mirrors to whether
    they may be reached. `init_user` is who programs run as.
    """

    container_image: str
    memory_limit_mb: int = limits.MEMORY_DEFAULT_MIB
    cpu_cores_limit: float = limits.CPU_DEFAULT
    ttl_running_stop: float | None = limits.IDLE_TIMEOUT_DEFAULT_S
    network_rules: Mapping[str, bool] = field(default_factory=dict)
    init_user: str | None = None

    def fields(self) -> SpecFields:
        """The same as fields of `dsec.Spec`."""
        fields = SpecFields(
            backend="container",
            memory_mib=self.memory_limit_mb,
            cpu=self.cpu_cores_limit,
            idle_timeout_s=self.ttl_running_stop,
            network=dict(self.network_rules),
            user=self.init_user,
        )
        if "://" in self.container_image:
            fields["image"] = self.container_image
        else:
            fields["base"] = self.container_image
        return fields


class DSecContainer:
    """A running container. As a context manager it is stopped at the end."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    @property
    def id(self) -> str:
        """The sandbox's id."""
        return self.sandbox.id

    def run_shell(self, command: str, *, timeout_s: float | None = None) -> RunResult:
        """Run a shell command to its end; nothing it does raises."""
        return self.sandbox.run(command, timeout_s=timeout_s)

    def stop(self) -> None:
        """Stop it for good; can be repeated."""
        self.sandbox.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sandbox.__exit__(kind, error, trace)


class DSecClient:
    """A connection to a node or gateway: URL and key as for `dsec.Client`."""

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        self.client = Client(url, api_key)

    def run_container(self, args: DSecContainerRunArgs) -> DSecContainer:
        """Create a container and wait until it runs."""
        return DSecContainer(self.client.create(**args.fields()))

    def close(self) -> None:
        """Let go of connections; containers live on."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
