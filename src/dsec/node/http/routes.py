"""The calls of the API: what each takes, what it gives, who does it. The OpenAPI document comes from this table."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dsec.model import limits
from dsec.model.errors import InvalidSpec, NotFound
from dsec.model.network import Network, NetworkReport
from dsec.model.specs import RunSpec, Spec
from dsec.model.states import Capabilities, LayerInfo, NodeInfo, RunResult, SandboxInfo, Usage
from dsec.node.agent import VERSION, Node, Page, Query
from dsec.node.http import codec, streams
from dsec.node.http.attach import attach
from dsec.node.http.codec import number, one
from dsec.node.http.exchange import Exchange
from dsec.node.http.files import FILE_ROUTES
from dsec.node.http.inspection import INSPECTION_ROUTES
from dsec.node.http.ports import PORT_ROUTES
from dsec.node.http.programs import PROGRAM_ROUTES
from dsec.node.http.route import Empty, Route, S
from dsec.node.http.sessions import session_routes
from dsec.node.layers import ImportRequest
from dsec.node.steps import WireError


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Either `specs`, or `count` times `spec`. `wait_s` stands for that of every spec."""

    specs: list[Spec] | None = None
    count: int | None = None
    spec: Spec | None = None
    atomic: bool = False
    wait_s: float | None = None

    def all(self) -> list[Spec]:
        """The specs of all items. Raises InvalidSpec."""
        if (self.specs is None) == (self.spec is None or self.count is None):
            raise InvalidSpec.field("specs", self.specs, "either specs, or spec and count")
        if self.specs is not None:
            specs = self.specs
        else:
            count = self.count or 0
            if not 1 <= count <= limits.CREATE_MANY_MAX or self.spec is None:
                raise InvalidSpec.field("count", count, f"1 to {limits.CREATE_MANY_MAX}")
            specs = [self.spec] * count
        if self.wait_s is None:
            return specs
        return [msgspec.structs.replace(spec, wait_s=self.wait_s) for spec in specs]


class BatchItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One item of a batch, or its end."""

    index: int | None = None
    sandbox: SandboxInfo | None = None
    error: WireError | None = None
    done: bool | None = None
    created: int | None = None
    failed: int | None = None


class ImportItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One item of an import's stream."""

    progress: str | None = None
    layer: LayerInfo | None = None
    error: WireError | None = None


class KillRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which signal; none: the whole tree is killed."""

    signal: int | None = None


class ExtendRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much longer it may live."""

    seconds: float


class LabelsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """All labels it has from now on."""

    labels: dict[str, str]


class Health(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The node answers."""

    status: str
    node: str
    version: str


class LayerList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Layers of a node."""

    items: list[LayerInfo]


class Stopped(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How many sandboxes were stopped."""

    stopped: int


async def health(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, Health(status="ok", node=node.core.node, version=VERSION))


async def node_info(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, await node.info())


async def capabilities(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, await node.capabilities())


async def create(node: Node, ex: Exchange, spec: Spec) -> None:
    created = await node.create(spec, ex.key)
    await ex.reply(201 if created.made else 200, created.info)


async def create_many(node: Node, ex: Exchange, request: BatchRequest) -> None:
    await streams.batch(ex, node.create_many(request.all(), ex.key, atomic=request.atomic))


async def cancel_many(node: Node, ex: Exchange, _: None) -> None:
    if ex.key is None:
        raise InvalidSpec.field("Idempotency-Key", None, "the key of the batch")
    node.cancel_many(ex.key)
    await ex.reply(200, Empty())


async def find(node: Node, ex: Exchange, _: None) -> None:
    labels = {}
    for pair in ex.fields.get("label", ()):
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidSpec.field("label", pair, "label=name=value")
        labels[name] = value
    query = Query(
        labels=labels,
        job=one(ex.fields, "job"),
        states=ex.fields.get("state", ()),
        limit=number(ex.fields, "limit", limits.LIST_PAGE_DEFAULT, int),
        cursor=one(ex.fields, "cursor") or "",
    )
    await ex.reply(200, await node.find(query))


async def get(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, await node.get(ex.params[0]))


async def stop(node: Node, ex: Exchange, _: None) -> None:
    grace_s = number(ex.fields, "grace_s", 0.0, float)
    await ex.reply(200, await node.stop(ex.params[0], ex.key, grace_s=grace_s, caller=ex.caller))


async def run(node: Node, ex: Exchange, spec: RunSpec) -> None:
    await streams.serve_run(node, ex, ex.params[0], lambda sink: node.run(ex.params[0], spec, ex.key, sink))


async def kill(node: Node, ex: Exchange, request: KillRequest | None) -> None:
    await node.kill(ex.params[0], ex.params[1], request.signal if request else None, ex.key)
    await ex.reply(200, Empty())


async def extend(node: Node, ex: Exchange, request: ExtendRequest) -> None:
    await ex.reply(200, await node.extend(ex.params[0], request.seconds, ex.key))


async def labels(node: Node, ex: Exchange, request: LabelsRequest) -> None:
    await ex.reply(200, await node.set_labels(ex.params[0], request.labels, ex.key))


async def usage(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, await node.usage(ex.params[0]))


async def network(node: Node, ex: Exchange, request: Network) -> None:
    await ex.reply(200, await node.set_network(ex.params[0], request, ex.key))


async def patch_network(node: Node, ex: Exchange, request: Network) -> None:
    await ex.reply(200, await node.patch_network(ex.params[0], request, ex.key))


async def network_report(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, await node.network(ex.params[0]))


async def layers(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, LayerList(items=await node.layers()))


async def layer(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, await node.layer(ex.params[0]))


async def remove_layer(node: Node, ex: Exchange, _: None) -> None:
    await node.remove_layer(ex.params[0], ex.key)
    await ex.reply(200, Empty())


async def import_layer(node: Node, ex: Exchange, request: ImportRequest) -> None:
    await streams.import_layer(node, ex, request)


async def stop_job(node: Node, ex: Exchange, _: None) -> None:
    await ex.reply(200, Stopped(stopped=await node.stop_job(ex.params[0], ex.caller)))


async def document(node: Node, ex: Exchange, _: None) -> None:
    from dsec.node.http import openapi  # it reads the table below

    await ex.reply_bytes(200, openapi.text(), msgpack=False)


_LIST_QUERY = (("label", list[str]), ("job", str), ("state", list[str]), ("limit", int), ("cursor", str))
_OFFSETS_QUERY = (("stdout_offset", int), ("stderr_offset", int))
_RUN_QUERY = (("stream", Literal["0", "1"]), *_OFFSETS_QUERY)

ROUTES: tuple[Route, ...] = (
    Route("GET", "/v1/health", health, "Whether the node answers", answer=Health, open=True),
    Route("GET", "/v1/node", node_info, "The node, its room and what it can do", answer=NodeInfo),
    Route("GET", "/v1/capabilities", capabilities, "What each backend can do", answer=dict[str, Capabilities]),
    Route("POST", S, create, "Create a sandbox", body=Spec, answer=SandboxInfo, status=201, keyed=True),
    Route("GET", S, find, "List sandboxes", answer=Page, query=_LIST_QUERY),
    Route("POST", f"{S}:batch", create_many, "Create many", body=BatchRequest, item=BatchItem, keyed=True),
    Route("DELETE", f"{S}:batch", cancel_many, "Make no more of a batch", answer=Empty, keyed=True),
    Route("GET", f"{S}/{{ref}}", get, "One sandbox", answer=SandboxInfo),
    Route(
        "DELETE", f"{S}/{{ref}}", stop, "Stop it for good", answer=SandboxInfo, query=(("grace_s", float),), keyed=True
    ),
    Route(
        "POST",
        f"{S}/{{ref}}/run",
        run,
        "Run a program; with stream=1 as a stream",
        body=RunSpec,
        answer=RunResult,
        item=streams.RunItem,
        query=_RUN_QUERY,
        keyed=True,
    ),
    *PROGRAM_ROUTES,
    Route(
        "GET",
        f"{S}/{{ref}}/processes/{{id}}/attach",
        attach,
        "Output, input and the rest over one WebSocket",
        query=(*_OFFSETS_QUERY, ("lossy", Literal["0", "1"]), ("silence_s", float), ("writer", str)),
        socket=True,
    ),
    *session_routes(_RUN_QUERY),
    *PORT_ROUTES,
    Route(
        "POST",
        f"{S}/{{ref}}/processes/{{id}}/kill",
        kill,
        "Signal a program, or end its tree",
        body=KillRequest,
        answer=Empty,
        keyed=True,
        body_optional=True,
    ),
    Route("POST", f"{S}/{{ref}}/extend", extend, "Live longer", body=ExtendRequest, answer=SandboxInfo, keyed=True),
    Route("PUT", f"{S}/{{ref}}/labels", labels, "Replace labels", body=LabelsRequest, answer=SandboxInfo, keyed=True),
    Route("GET", f"{S}/{{ref}}/usage", usage, "What it uses", answer=Usage),
    Route(
        "PUT",
        f"{S}/{{ref}}/network",
        network,
        "What it may reach",
        body=Network,
        answer=SandboxInfo,
        keyed=True,
    ),
    Route(
        "PATCH",
        f"{S}/{{ref}}/network",
        patch_network,
        "A patch laid over what it may reach",
        body=Network,
        answer=SandboxInfo,
        keyed=True,
    ),
    Route("GET", f"{S}/{{ref}}/network", network_report, "What it may reach, rule by rule", answer=NetworkReport),
    *FILE_ROUTES,
    *INSPECTION_ROUTES,
    Route("GET", "/v1/layers", layers, "All layers", answer=LayerList),
    Route("POST", "/v1/layers:import", import_layer, "Make a layer", body=ImportRequest, item=ImportItem, keyed=True),
    Route("GET", "/v1/layers/{ref}", layer, "One layer", answer=LayerInfo),
    Route("DELETE", "/v1/layers/{ref}", remove_layer, "Remove a layer", answer=Empty, keyed=True),
    Route("POST", "/v1/jobs/{job}:stop", stop_job, "Stop all sandboxes of a job", answer=Stopped, keyed=True),
    Route("GET", "/v1/openapi.json", document, "This document", answer=dict[str, Any]),
)


class Table:
    """Finds the route of a path: a tree by segments."""

    def __init__(self, routes: tuple[Route, ...] = ROUTES) -> None:
        self._root: dict[Any, Any] = {}
        for route in routes:
            here: dict[Any, Any] = self._root
            for segment in route.path.encode().split(b"/")[1:]:
                name, _, rest = segment.partition(b"}")
                here = here.setdefault(b"{}" + rest if name.startswith(b"{") else segment, {})
            here.setdefault("methods", {})[route.method] = Entry(route)

    def find(self, raw_path: bytes) -> tuple[dict[str, Entry], list[bytes]]:
        """The calls of a path by method, and the path's parameters, still encoded. Raises NotFound."""
        here: dict[Any, Any] = self._root
        params = []
        for segment in raw_path.split(b"/")[1:]:
            child = here.get(segment)
            if child is None and segment:
                name, colon, action = segment.rpartition(b":")
                child = here.get(b"{}:" + action) if colon and name else None
                params.append(name if child is not None else segment)
                child = child if child is not None else here.get(b"{}")
            if child is None:
                break
            here = child
        else:
            if "methods" in here:
                return here["methods"], params
        raise NotFound("no such call; GET /v1/openapi.json lists them")


class Entry:
    """A route, prepared."""

    __slots__ = ("allowed", "codec", "exact", "route")

    def __init__(self, route: Route) -> None:
        self.route = route
        self.allowed = frozenset(name for name, _ in route.query)
        self.exact = frozenset(name for name, kind in route.query if kind is bytes)
        self.codec = None if route.body is None else codec.Codec(route.body)
