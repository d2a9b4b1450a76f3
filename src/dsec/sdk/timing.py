"""How long the SDK waits for what. The program's own time is never among it."""

from __future__ import annotations

import msgspec


class Timing(msgspec.Struct, frozen=True):
    """Seconds. A silent server is found after at most `patience_s + health_s`, which stays below 30."""

    connect_s: float = 10.0
    # Silence after which the server is asked for its health over another connection.
    patience_s: float = 10.0
    health_s: float = 10.0
    # Silence after which a call is asked again under its key on a new connection, though the server is well: what is
    # between us may have lost this one connection only.
    reask_s: float = 120.0
    # How long a call whose connection broke is tried again: the time a node agent may take to restart.
    reconnect_s: float = 30.0
    # A connection that lived this long before it broke starts a new `reconnect_s`.
    lived_s: float = 5.0
    backoff_first_s: float = 0.05
    backoff_max_s: float = 1.0
    # How long a cancelled run's kill may take before the cancellation goes on without it.
    kill_s: float = 10.0


DEFAULT = Timing()
