"""The operations of the native protocol that this side uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from dsec.wire import values as v

T = TypeVar("T")


class Op(Generic[T]):
    """An operation of the contract: its name, the decoder of its answer, whether it may be sent again after a break."""

    def __init__(self, name: str, answer: type[T], *, repeat: bool = True) -> None:
        self.name = name
        self.decode: Callable[[Any], T] = msgspec.msgpack.Decoder(answer).decode
        self.repeat = repeat


HELLO = Op("hello", v.Hello, repeat=False)
PROBE = Op("probe", v.Probe)
LAYER_MOUNT = Op("layer.mount", v.Nothing)
LAYER_UNMOUNT = Op("layer.unmount", v.Nothing)
LAYER_LIST = Op("layer.list", v.Layers)
CREATE = Op("sandbox.create", v.SandboxStatus)
LIST = Op("sandbox.list", v.Sandboxes)
GET = Op("sandbox.get", v.SandboxStatus)
STOP = Op("sandbox.stop", v.SandboxStatus)
NETWORK_START = Op("network.start", v.Nothing)
NETWORK_STEER = Op("network.steer", v.Nothing)
USAGE = Op("sandbox.usage", v.SandboxUsage)
RUN = Op("run.start", v.RunResult)
ATTACH = Op("run.attach", v.RunResult)
KILL_TREE = Op("run.kill", v.Nothing)
# A signal may mean something each time it comes (two SIGINT are not one), so it is never sent twice by itself.
SIGNAL = Op("run.kill", v.Nothing, repeat=False)
RUN_LIST = Op("run.list", v.Runs)
STDIN = Op("run.stdin", v.InputSize)
READ = Op("run.read", v.Piece)
RESIZE = Op("run.resize", v.Nothing)
# Sent twice it makes two: the newest is the one that counts.
FENCE = Op("run.fence", v.Fence)
STATUS = Op("run.status", v.RunStatus)
PROCESSES = Op("process.list", v.ProcessTable)
FORGET = Op("run.forget", v.Nothing)
SHUTDOWN = Op("shutdown", v.Nothing, repeat=False)
STOP_KEEPER = Op("stop_keeper", v.Nothing, repeat=False)
