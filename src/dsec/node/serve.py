"""Running a node: lock, recover, listen; at SIGTERM drain and leave, with the sandboxes alive."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import uvloop

from dsec.backends.base import Backend
from dsec.linux import cgroups
from dsec.model.errors import Conflict
from dsec.node.agent import VERSION, Node
from dsec.node.capacity import EndlessGauge, MachineGauge, machine_room
from dsec.node.claim import check_run_dir, claim_cgroup, note_places, own_state
from dsec.node.clock import SystemClock
from dsec.node.config import NodeConfig
from dsec.node.http.app import App
from dsec.node.http.auth import Pages, PeerGuard, load_tokens
from dsec.node.http.bodies import Bodies
from dsec.node.http.server import Listener, tcp_socket, unix_socket
from dsec.node.layers import Layers
from dsec.node.memory import GiveBack, trimmer
from dsec.node.network import NetworkConfig, read_operator
from dsec.node.simulated import SimulatedLayers
from dsec.node.store import Store, write_whole

log = logging.getLogger("dsec.node")

# The writer of the store and the event loop share the interpreter: with the default of 5 ms a commit could wait that
# long for its turn.
SWITCH_INTERVAL_S: Final = 0.0005
WORDS_MAX_BYTES: Final = 1 << 20


# Set by `dsec up`: standard error is a file of its own until this agent is up, and the log is standard output.
WORDS_APART_ENV: Final = "DSEC_WORDS_APART"


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(level: str) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # a malformed request is the client's affair


def to_the_log() -> None:
    """From now on standard error is the log. What was said until now is in the file `dsec up` looks into."""
    with contextlib.suppress(OSError):  # the disk may be full
        os.write(sys.stdout.fileno(), os.pread(sys.stderr.fileno(), WORDS_MAX_BYTES, 0))
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the node's lock. Raises Conflict when another agent holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            other = os.read(fd, 32).decode("ascii", "replace").strip()
            raise Conflict(f"a node agent (pid {other}) runs here already: {path} is locked") from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


async def make_backends(config: NodeConfig) -> dict[str, Backend]:
    """The backends of a node, their native parts running."""
    backends: dict[str, Backend] = {}
    for name in config.backends:
        if name == "fake":
            from dsec.backends.fake import FakeBackend

            # It stands for containers: callers of a simulated node should not notice.
            backends["container"] = FakeBackend(name="container")
        else:
            backends[name] = await _container(config)
    return backends


async def _container(config: NodeConfig) -> Backend:
    from dsec.backends.container import ContainerBackend, Place, ensure_runtime

    place = Place(run_dir=config.run_dir, state_dir=config.state_dir, cgroup=config.cgroup)

    async def revive() -> None:
        await ensure_runtime(place)

    await revive()
    return ContainerBackend(config.run_dir, revive=revive)


def make_layers(config: NodeConfig) -> Layers:
    """The store of layers; a simulated node knows every layer."""
    if config.backends == ("fake",):
        return SimulatedLayers()
    from dsec.images import LayerStore

    return LayerStore(config.state_dir)


async def run(config: NodeConfig, ready: asyncio.Event | None = None, *, words_apart: bool = False) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    clock = SystemClock()
    simulated = config.backends == ("fake",)
    # First: what comes after may need of its reserve.
    store = Store(config.state_dir)
    node = Node(
        name=config.node,
        backends=await make_backends(config),
        layers=store.with_room(lambda: make_layers(config)),
        store=store,
        room=machine_room(config.state_dir, config.overcommit),
        gauge=EndlessGauge() if simulated else MachineGauge(config.state_dir, clock),
        clock=clock,
        network=NetworkConfig(operator=read_operator(config.network_policy), resolvers=config.resolvers),
    )
    give_back = GiveBack(trimmer())
    try:
        await node.start()
        give_back.start()
        listeners = await _listen(config, node)
        log.info("node %s serves %s (version %s, pid %d)", config.node, config.socket, VERSION, os.getpid())
        if words_apart:
            to_the_log()
        if ready is not None:
            ready.set()
        await stop.wait()
        left = f"its sandboxes live on: {len(node.core.boxes)}" if node.core.boxes else "it has no sandboxes"
        log.info("node %s stops; %s", config.node, left)
        await asyncio.gather(*(listener.close() for listener in listeners))
    finally:
        give_back.close()
        await node.close()
        config.socket.unlink(missing_ok=True)


async def _listen(config: NodeConfig, node: Node) -> list[Listener]:
    pages, bodies = Pages(config.origins), Bodies()
    listeners = [Listener(App(node, PeerGuard(), pages, bodies), unix_socket(config.socket), peer=True)]
    if config.listen is not None:
        key_file = config.state_dir / "api-key"
        guard, made = load_tokens(config.token_file, lambda key: write_whole(key_file, f"{key}\n".encode()))
        if made is not None:
            log.info("made a key for TCP: %s; use it as DSEC_API_KEY", key_file)
        tls = config.tls()
        # With TLS a browser finds out by itself who has another's name.
        pages = Pages(config.origins, names=tls is None)
        listeners.append(Listener(App(node, guard, pages, bodies), tcp_socket(*config.listen), peer=False, tls=tls))
    # The Unix socket last: who finds it answering finds all of them.
    for listener in reversed(listeners):
        await listener.start()
    return listeners


@contextlib.contextmanager
def _ours(config: NodeConfig, mount: Path | None) -> Iterator[None]:
    """Both directories; a node that is refused the one leaves no name on the other."""
    check_run_dir(config, mount)
    with own_state(config):
        yield


def serve(config: NodeConfig) -> None:
    """Run a node in this process until it is told to stop."""
    set_up_logging(config.log_level)
    words_apart = bool(os.environ.pop(WORDS_APART_ENV, None))
    for directory in (config.run_dir, config.state_dir):
        directory.mkdir(parents=True, exist_ok=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    mount = cgroups.detect().v2
    with lock(config.pid_file), _ours(config, mount):
        if "container" in config.backends:
            claim_cgroup(config, mount)
        note_places(config)
        # What is imported by now lives as long as the process: the collector need not look at it again.
        gc.freeze()
        uvloop.run(run(config, words_apart=words_apart))
