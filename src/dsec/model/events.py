"""What happened to a sandbox, one thing after the other."""

from __future__ import annotations

from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened. `seq` counts from 1 within the sandbox, without gaps; `at` is seconds since the epoch.

    `kind`: `created`; `run.ended` (`step`, `process_id`, `command`); for `spawn`, `session` and `command` (one of a
    session) likewise, and before it `.started`, or `.not_started` (nothing ran, its key is free again); `kill`,
    `extend`, `labels`, `network`; `verdict` (what its policy said to a connection or a question for a name: `allow`,
    `about` connect, dns, cut or dial, and what is known of `rule`, `why`, `name`, `address`, `port`, `count` of alike
    ones; or `dropped`, how many there was no room for); `node_restarted` (the sandbox was found again); `ended`;
    `missed` (events before this one are not kept any more: `detail.count`, and `seq` is that of the last of them).
    What else there is to say is in `detail`.
    """

    seq: int
    at: float
    kind: str
    step: int | None = None
    process_id: str | None = None
    command: str | None = None
    detail: dict[str, Any] = {}
