"""A store of layers for simulated nodes: every reference names a layer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection

from dsec.model.errors import Conflict, NotFound
from dsec.model.ids import is_digest
from dsec.model.states import LayerInfo
from dsec.node.layers import ImportRequest


class SimulatedLayers:
    """Layers by name, made as they are asked for; a name that begins with `missing` is not found."""

    def __init__(self) -> None:
        self._layers: dict[str, LayerInfo] = {}
        self._changes = 0

    def resolve(self, ref: str) -> LayerInfo:
        if ref.startswith("missing"):
            hint = "there is every other"
            raise NotFound(f"no layer {ref!r}; {hint}", detail={"ref": ref, "hint": hint})
        digest = ref if is_digest(ref) else "sha256:" + hashlib.sha256(ref.encode()).hexdigest()
        return self._layers.setdefault(digest, LayerInfo(digest=digest, names=() if ref == digest else (ref,)))

    def state(self) -> object:
        return self._changes

    def check_file(self, layer: LayerInfo) -> None:
        pass

    def path(self, digest: str) -> str:
        return f"/simulated/{digest}"

    def list(self) -> list[LayerInfo]:
        return list(self._layers.values())

    def remove(self, ref: str, in_use: Collection[str]) -> None:
        layer = self.resolve(ref)
        if layer.digest in in_use:
            raise Conflict(f"layer {ref} is used by a sandbox; stop it first", detail={"digest": layer.digest})
        self._changes += 1
        del self._layers[layer.digest]

    def import_layer(self, request: ImportRequest, progress: Callable[[str], None]) -> LayerInfo:
        progress(f"importing {request.source}")
        name = request.name or request.source.lower().replace("/", "-").replace(":", "-").strip("-")
        layer = LayerInfo(
            digest="sha256:" + hashlib.sha256(name.encode()).hexdigest(),
            names=(name,),
            role=request.role,
            source=request.source,
            env=request.env,
            cwd=request.cwd,
            user=request.user,
        )
        self._changes += 1
        self._layers[layer.digest] = layer
        return layer
