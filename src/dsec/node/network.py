"""What sandboxes may reach: policies checked, compiled, told to what enforces them, and its verdicts kept."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from dsec import policy as policies
from dsec.backends.base import NetworkCounters, Networks
from dsec.linux import addresses
from dsec.model.errors import DsecError, InvalidSpec, Unavailable, Unsupported
from dsec.model.network import Network, NetworkReport, NetworkRow, Policy, policy_of
from dsec.model.states import Capability
from dsec.node.box import Box
from dsec.node.core import Core
from dsec.node.verdicts import VerdictLog
from dsec.policy import Artifact, Operator

log = logging.getLogger("dsec.node.network")

# Connections of one sandbox at once.
CONNECTIONS: Final = 1024
# The address in a sandbox's /etc/resolv.conf: any but a loopback one is answered by the node.
NAMESERVER: Final = "192.0.2.1"
_MS: Final = 1000


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of a node: the operator's policy, and where names are asked for (`ADDRESS:PORT`); none: as the machine does."""

    operator: Operator = policies.operator()
    resolvers: tuple[str, ...] = ()


def read_operator(path: Path | None) -> Operator:
    """The operator's part from a file, or none. Raises InvalidSpec naming the file and the field that is wrong."""
    if path is None:
        return policies.operator()
    try:
        return policies.operator(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"{path}: it cannot be read: {error}", detail={"field": "--network-policy"}) from error
    except InvalidSpec as error:
        raise InvalidSpec(f"{path}: {error.message}", detail=error.detail) from error


class NetworkPolicies:
    """Policies of a node's sandboxes."""

    def __init__(self, core: Core, config: NetworkConfig) -> None:
        self._core = core
        self._config = config
        self._own: tuple[str, ...] = ()
        self._features: dict[str, Mapping[str, Capability]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._generations: dict[str, int] = {}  # of those that something enforces a table for
        self._verdicts = VerdictLog(core)
        self._watch: addresses.Watch | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Before any sandbox: look at the machine."""
        for name, backend in self._core.backends.items():
            self._features[name] = (await backend.probe()).features
        if any(backend.networks is not None for backend in self._core.backends.values()):
            self._configure()
            self._watch = addresses.Watch(self._addresses_changed)

    def _configure(self) -> None:
        self._own = addresses.own()
        resolvers = self._config.resolvers or addresses.resolvers()
        for backend in self._core.backends.values():
            if backend.networks is not None:
                backend.networks.configure(resolvers=resolvers, own=self._own, told=self._verdicts.told)

    def _addresses_changed(self) -> None:
        if addresses.own() == self._own:
            return
        log.info("the machine's addresses have changed")
        self._configure()
        if self._renewing is not None:
            self._renewing.cancel()
        self._renewing = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        """What a range opens depends on which addresses are the machine's own."""
        for box in list(self._core.boxes.values()):
            if box.id in self._generations:
                try:
                    await self.put(box)
                except DsecError as error:
                    log.error("%s: its policy does not know the machine's new addresses: %s", box.id, error)

    async def settled(self) -> None:
        """Everything that lives was put again."""
        for backend in self._core.backends.values():
            if backend.networks is not None:
                await backend.networks.settled()

    def close(self) -> None:
        """Let go; what is enforced stays so."""
        if self._renewing is not None:
            self._renewing.cancel()
        if self._watch is not None:
            self._watch.close()
        self._verdicts.close()

    def names(self, backend: str) -> bool:
        """Whether its sandboxes may be told where to ask for names."""
        found = self._features.get(backend, {}).get("network_names")
        return found is not None and found.available

    # Policies.

    async def check(self, network: Network, backend: str) -> None:
        """Raises InvalidSpec, and Unsupported unless all of it, in each of its phases, is enforced here."""
        policy = policy_of(network)
        if not network and not self._config.operator.default:
            return
        try:
            self._refuse_unenforced(policy, self._features.get(backend, {}))
        except Unsupported:
            # What was looked at when the node started may have come since. What has gone fails when it is asked for.
            self._features[backend] = (await self._core.backend(backend).probe()).features
            self._refuse_unenforced(policy, self._features[backend])

    def _refuse_unenforced(self, policy: Policy, features: Mapping[str, Capability]) -> None:
        for phase in dict.fromkeys((policy.phase, None, *policy.phases)):
            rows = policies.explain(policy.in_phase(phase), self._config.operator, features, self._own)
            policies.refuse_unenforced(rows)

    def may_expose(self, box: Box, port: int) -> bool:
        """Whether its policy leaves that port to be exposed."""
        return policies.exposes(policy_of(box.info.spec.network), port)

    def _networks(self, box: Box) -> Networks | None:
        return self._core.backend(box.info.backend).networks

    async def put(self, box: Box) -> None:
        """What its spec says holds from now on: of a sandbox that was started, or found again."""
        async with self._locks[box.id]:
            await self._put(box, box.info.spec.network)

    async def _put(self, box: Box, network: Network) -> None:
        if not network and not self._config.operator.default and box.id not in self._generations:
            return
        artifact = policies.compile_policy(policy_of(network), self._config.operator, self._own)
        opens = any(rule.action == "allow" for rule in artifact.table.rules)
        networks = self._networks(box)
        if networks is None or (not opens and box.id not in self._generations):
            return  # nothing leads out of it
        last = self._generations.get(box.id, 0)
        generation = max(last + 1, round(self._core.clock.wall() * _MS))
        self._generations[box.id] = generation
        try:
            await networks.put(box.id, _table(artifact.numbered(generation)))
        except BaseException:  # also cancelled: the one before holds
            if not last:
                self._generations.pop(box.id, None)
            raise

    async def replace(self, box: Box, network: Network) -> None:
        """Another policy holds when this returns, and is in its spec."""
        async with self._locks[box.id]:
            await self._change(box, dict(network))

    async def patch(self, box: Box, changes: Network) -> None:
        """The same with a patch laid over the one it has. Raises InvalidSpec, Unsupported; then nothing was changed."""
        async with self._locks[box.id]:
            merged = _merged(box.info.spec.network, changes)
            await self.check(merged, box.info.backend)
            await self._change(box, merged)

    async def _change(self, box: Box, network: Network) -> None:
        await self._put(box, network)
        box.change(spec=msgspec.structs.replace(box.info.spec, network=network))

    async def put_back(self, box: Box) -> None:
        """After a change that could not be written: what the spec says, again."""
        try:
            await self.put(box)
        except DsecError as error:
            log.error("%s: a policy that was not written may hold: %s", box.id, error)

    async def forget(self, box: Box) -> None:
        """It ends, or has ended."""
        networks = self._networks(box)
        self._generations.pop(box.id, None)
        self._locks.pop(box.id, None)
        if networks is not None:
            await networks.remove(box.id)

    async def report(self, box: Box) -> NetworkReport:
        """What holds, rule by rule, and what came of it."""
        network = box.info.spec.network
        policy = policy_of(network)
        features = (await self._core.backend(box.info.backend).probe()).features
        rows = policies.explain(policy, self._config.operator, features, self._own)
        networks = self._networks(box)
        found: NetworkCounters | None = None
        reason: str | None = None
        if networks is not None:
            try:
                found = await networks.counters(box.id)
            except Unavailable as error:
                reason = error.message
        counters = found or NetworkCounters()
        return NetworkReport(
            network=network,
            phase=policy.phase,
            steered=box.id in self._generations,
            reason=reason,
            generation=self._generations.get(box.id, 0),
            connections=counters.connections,
            sent_bytes=counters.sent_bytes,
            received_bytes=counters.received_bytes,
            rules=tuple(_row(row, counters) for row in rows),
        )


def _row(row: NetworkRow, counters: NetworkCounters) -> NetworkRow:
    hits = counters.hits.get(row.id, 0)
    if row.id == policies.DENIED:
        hits += counters.unmatched
    return msgspec.structs.replace(row, hits=hits)


def _merged(network: Network, changes: Network) -> Network:
    """The short form stays short."""
    if all(isinstance(value, bool) for value in (*network.values(), *changes.values())):
        return {**network, **changes}
    return policies.merge(policy_of(network), policy_of(changes, patch=True)).document()


def _table(artifact: Artifact) -> bytes:
    """As the process for connections reads it."""
    table = msgspec.to_builtins(artifact.table)
    return msgspec.msgpack.encode({**table, "connections": CONNECTIONS})
