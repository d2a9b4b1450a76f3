"""How a node is set up: flags, environment, defaults."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from dsec.linux.addresses import with_port
from dsec.model import ids
from dsec.model.errors import InvalidSpec
from dsec.model.network import PORT_MAX
from dsec.node.admission import RESOURCES
from dsec.node.capacity import OVERCOMMIT

RUN_DIR: Final = Path("/run/dsec")
STATE_DIR: Final = Path("/var/lib/dsec")
CGROUP: Final = "dsec"
NODE: Final = "local"
BACKENDS: Final = ("container", "fake")
# As a browser writes it: no path, and a port only where it is not the scheme's.
_ORIGIN: Final = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?")
# Which a browser leaves out.
_USUAL: Final = {"http": ":80", "https": ":443"}


@dataclass(frozen=True)
class NodeConfig:
    """One node of this machine. Several may share it when run and state directory and cgroup differ."""

    run_dir: Path = RUN_DIR
    state_dir: Path = STATE_DIR
    cgroup: str = CGROUP
    node: str = NODE
    backends: tuple[str, ...] = ("container",)
    listen: tuple[str, int] | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    origins: tuple[str, ...] = ()
    overcommit: dict[str, float] = field(default_factory=dict)
    log_level: str = "INFO"
    network_policy: Path | None = None
    resolvers: tuple[str, ...] = ()

    @property
    def socket(self) -> Path:
        """Where the API listens."""
        return self.run_dir / "api.sock"

    @property
    def pid_file(self) -> Path:
        """Locked while the agent lives."""
        return self.run_dir / "agent.pid"

    @property
    def token_file(self) -> Path:
        """Hashes of the keys that TCP takes."""
        return self.state_dir / "tokens"

    def check(self) -> NodeConfig:
        """Itself when it is allowed. Raises InvalidSpec."""
        ids.check_node(self.node)
        for name in self.backends:
            if name not in BACKENDS:
                raise InvalidSpec.field("--backend", name, ", ".join(BACKENDS))
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidSpec.field("--tls-cert", self.tls_cert, "both --tls-cert and --tls-key, or neither")
        for name, path in (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key)):
            if path is not None and not path.is_file():
                raise InvalidSpec(f"{name}: no such file: {path}", detail={"field": name})
        if self.listen is not None and self.tls_cert is None and not is_loopback(self.listen[0]):
            raise InvalidSpec.field(
                "--listen", self.listen[0], "a loopback address, unless --tls-cert and --tls-key are given"
            )
        for origin in self.origins:
            found = _ORIGIN.fullmatch(origin)
            port = found and found["port"]
            if found is None or (port is not None and int(port) > PORT_MAX):
                raise InvalidSpec.field("--origin", origin, "scheme, host and port: https://sandboxes.example:8443")
        for name, factor in self.overcommit.items():
            if name not in RESOURCES or not factor > 0:
                raise InvalidSpec.field("--overcommit", f"{name}={factor}", f"{'|'.join(RESOURCES)}=FACTOR above 0")
        return self

    def tls(self) -> ssl.SSLContext | None:
        """TLS for the TCP listener."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.tls_cert, self.tls_key)
        return context


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own; names are not resolved, so they are not."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def default_name() -> str:
    """A node's name from the host's."""
    return re.sub(r"[^a-z0-9]", "", os.uname().nodename.lower())[:24] or NODE


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: HOST:PORT, for example 127.0.0.1:7700")
    return host.strip("[]"), int(port)


def _resolver(text: str) -> str:
    """As the process for connections reads it: an address and a port."""
    host, _, port = text.rpartition(":") if text.count(":") == 1 or "]:" in text else (text, "", "53")
    try:
        if not 0 < int(port) <= PORT_MAX:
            raise ValueError(port)
        return with_port(host.strip("[]"), int(port))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: ADDRESS[:PORT], for example 192.0.2.53") from error


def _factor(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: RESOURCE=FACTOR, for example memory_mib=4") from error


def default_cgroup(run_dir: Path) -> str:
    """The cgroup of a node that was given none: `dsec`, or a name made from a run directory of its own."""
    return CGROUP if run_dir == RUN_DIR else f"{CGROUP}-{hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:8]}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a node; each has its default from the environment."""
    env = os.environ.get
    parser.add_argument("--run-dir", type=Path, default=Path(env("DSEC_RUN_DIR") or RUN_DIR))
    parser.add_argument("--state-dir", type=Path, default=Path(env("DSEC_STATE_DIR") or STATE_DIR))
    parser.add_argument(
        "--cgroup",
        default=env("DSEC_CGROUP"),
        help="below the root of each hierarchy; default: a name "
        "of the run directory's own, so that two nodes never share one by accident",
    )
    parser.add_argument("--node", default=env("DSEC_NODE") or default_name(), help="the node's name")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="repeat for several; default container")
    parser.add_argument("--listen", type=_address, metavar="HOST:PORT", help="also listen on TCP")
    parser.add_argument("--tls-cert", type=Path)
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument(
        "--origin",
        type=str.lower,
        action="append",
        default=[],
        metavar="URL",
        help="where a web page or a proxy that may ask is served, as https://sandboxes.example (repeatable)",
    )
    parser.add_argument(
        "--overcommit",
        type=_factor,
        action="append",
        default=[],
        metavar="RESOURCE=FACTOR",
        help=f"how many times what the machine has may be promised: {', '.join(RESOURCES)} (repeatable; default: "
        f"{', '.join(f'{name}={factor:g}' for name, factor in OVERCOMMIT.items())}); 1: never more than there is",
    )
    parser.add_argument(
        "--network-policy",
        type=Path,
        default=env("DSEC_NETWORK_POLICY") or None,
        metavar="FILE",
        help="the operator's part of what sandboxes may reach (TOML); read at the start",
    )
    parser.add_argument(
        "--resolver",
        type=_resolver,
        action="append",
        default=[],
        metavar="ADDRESS[:PORT]",
        help="where names are asked for (repeatable; default: the machine's /etc/resolv.conf)",
    )
    parser.add_argument("--log-level", default=env("DSEC_LOG") or "INFO")


def parse(arguments: Sequence[str] | None = None) -> NodeConfig:
    """The configuration from a command line. Raises InvalidSpec."""
    parser = argparse.ArgumentParser(prog="python -m dsec.node", description="The node agent.")
    add_arguments(parser)
    return from_namespace(parser.parse_args(arguments))


def _as_sent(origin: str) -> str:
    """As a browser writes it."""
    usual = _USUAL.get(origin.partition("://")[0])
    return origin.removesuffix(usual) if usual else origin


def from_namespace(given: argparse.Namespace) -> NodeConfig:
    """The configuration from parsed flags. Raises InvalidSpec."""
    return NodeConfig(
        run_dir=given.run_dir.absolute(),
        state_dir=given.state_dir.absolute(),
        cgroup=given.cgroup or default_cgroup(given.run_dir.absolute()),
        node=given.node,
        backends=tuple(given.backend or ("container",)),
        listen=given.listen,
        tls_cert=given.tls_cert and given.tls_cert.absolute(),
        tls_key=given.tls_key and given.tls_key.absolute(),
        origins=tuple(_as_sent(origin) for origin in given.origin),
        overcommit=dict(given.overcommit),
        log_level=given.log_level,
        network_policy=given.network_policy and given.network_policy.absolute(),
        resolvers=tuple(given.resolver),
    ).check()
