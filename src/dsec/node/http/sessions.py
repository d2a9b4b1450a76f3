"""The calls for sessions."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dsec.model.processes import CommandSpec, Session, SessionSpec
from dsec.model.states import RunResult
from dsec.node.agent import Node
from dsec.node.http.exchange import Exchange
from dsec.node.http.route import Route, S
from dsec.node.http.streams import RunItem, serve_run


class SessionList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sessions that are alive."""

    items: list[Session]


async def start(node: Node, ex: Exchange, spec: SessionSpec) -> None:
    await ex.reply(201, await node.sessions.start(ex.params[0], spec, ex.key))


async def sessions(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, SessionList(items=await node.sessions.list(ex.params[0])))


async def session(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, await node.sessions.get(ex.params[0], ex.params[1]))


async def close(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, await node.sessions.close(ex.params[0], ex.params[1]))


async def run(node: Node, ex: Exchange, spec: CommandSpec) -> None:
    ref, session_id = ex.params[0], ex.params[1]
    await serve_run(node, ex, ref, lambda sink: node.sessions.run(ref, session_id, spec, ex.key, sink))


def session_routes(run_query: tuple[tuple[str, Any], ...]) -> tuple[Route, ...]:
    """Their routes; a command is asked for as a run is."""
    return (
        Route("POST", _P, start, "Start a session", body=SessionSpec, answer=Session, status=201, keyed=True),
        Route("GET", _P, sessions, "Sessions that are alive", answer=SessionList),
        Route("GET", f"{_P}/{{id}}", session, "One session, also after its end", answer=Session),
        Route("DELETE", f"{_P}/{{id}}", close, "End it, with all it has begun", answer=Session, keyed=True),
        Route(
            "POST",
            f"{_P}/{{id}}/run",
            run,
            "Run a command in its shell; with stream=1 as a stream",
            body=CommandSpec,
            answer=RunResult,
            item=RunItem,
            query=run_query,
            keyed=True,
        ),
    )


_P: Final = f"{S}/{{ref}}/sessions"
