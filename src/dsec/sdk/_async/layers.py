"""The node's layers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from dsec.model.errors import InvalidSpec
from dsec.model.ids import check_layer_ref, new_key
from dsec.model.states import LayerInfo
from dsec.sdk import codec, values
from dsec.sdk._async.transport import AsyncItems, AsyncRetry, AsyncTransport
from dsec.sdk.http1 import Broken, Garbage
from dsec.sdk.keywords import explained


class _Page(msgspec.Struct):
    items: tuple[LayerInfo, ...]


@explained
class AsyncLayers:
    """`client.layers`: the read-only layers sandboxes are put together from."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> tuple[LayerInfo, ...]:
        """Every layer in the store."""
        return (await self._transport.call("GET", "/v1/layers", _Page)).items

    async def get(self, ref: str) -> LayerInfo:
        """One layer. NotFound: there is none of that name or digest."""
        return await self._transport.call("GET", f"/v1/layers/{_quote(ref)}", LayerInfo)

    async def remove(self, ref: str) -> None:
        """Remove a layer. Conflict: a sandbox uses it."""
        await self._transport.call("DELETE", f"/v1/layers/{_quote(ref)}", codec.Nothing, key=new_key())

    async def import_(
        self,
        source: str | os.PathLike[str],
        name: str,
        *,
        role: Literal["base", "workspace", "toolkit"] = "base",
        env: Mapping[str, str] | None = None,
        cwd: values.Path | None = None,
        user: values.User | None = None,
        on_progress: Callable[[str], object] | None = None,
    ) -> LayerInfo:
        """Make a layer of `dir:/path`, `tar:/path` (paths of the node) or `debootstrap:bookworm` and name it.

        A `pathlib` path of the node is a tar archive if its name says so, else a directory.
        """
        body: dict[str, object] = {"source": _source(source), "name": check_layer_ref(name, "name"), "role": role}
        body |= {"env": values.variables(env), "cwd": values.remote(cwd), "user": values.user_text(user)}
        data = codec.encode({key: value for key, value in body.items() if value is not None})
        key = new_key()
        retry = AsyncRetry(self._transport)
        while True:
            try:
                items = await self._transport.stream("POST", "/v1/layers:import", body=data, key=key)
                try:
                    return await _follow(items, on_progress)
                finally:
                    items.close()
            except Broken as error:
                await retry.after(error)
            except Garbage as error:
                raise self._transport.garbage(error) from error


async def _follow(items: AsyncItems, on_progress: Callable[[str], object] | None) -> LayerInfo:
    while True:
        item = await items.next(codec.ImportItem)
        if item.progress is not None and on_progress is not None:
            on_progress(item.progress)
        if item.error is not None:
            raise item.error.error()
        if item.layer is not None:
            await items.drain()
            return item.layer


def _source(source: object) -> str:
    if isinstance(source, str):
        return source
    if not isinstance(source, os.PathLike) or not isinstance(path := os.fspath(source), str):
        raise InvalidSpec.field("source", source, "dir:/path, tar:/path or debootstrap:SUITE, or a path of the node")
    kind = "tar" if path.endswith(".tgz") or ".tar" in os.path.basename(path) else "dir"  # noqa: PTH119 - of the node
    return f"{kind}:{path}"


def _quote(ref: str) -> str:
    return codec.quote(check_layer_ref(ref, "layer"))
