"""What a node needs from a store of layers, and how a spec names its layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, Protocol

import msgspec

from dsec.model.errors import InvalidSpec
from dsec.model.ids import is_digest
from dsec.model.specs import DEFAULT_BASE, Spec, check_env, check_path, check_user
from dsec.model.states import LayerInfo, LayerRef

Role = Literal["base", "workspace", "toolkit"]


class ImportRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A layer to make. `source` is `dir:/path`, `tar:/path`, `erofs:/path`, `store:/state/dir#ref` or
    `debootstrap:SUITE`; paths are the node's."""

    source: str
    name: str | None = None
    role: Role = "base"
    env: dict[str, str] = {}
    cwd: str | None = None
    user: str | None = None

    def check(self) -> None:
        """Raises InvalidSpec naming the field that is wrong: what a layer sets, every run in it inherits."""
        check_env(self.env)
        if self.cwd is not None:
            check_path("cwd", self.cwd)
        if self.user is not None:
            check_user(self.user)


class Layers(Protocol):
    """A store of layers on this node. Calls may block on the local disk; `import_layer` may take minutes."""

    def resolve(self, ref: str) -> LayerInfo:
        """The layer a reference means now. Raises NotFound; its `detail["hint"]` says what there is."""
        ...

    def path(self, digest: str) -> str:
        """Where the EROFS image lies."""
        ...

    def state(self) -> object:
        """As long as a thread gets the same, every reference means to it what it meant before."""
        ...

    def check_file(self, layer: LayerInfo) -> None:
        """Raises CorruptLayer when the image is not there, or not whole."""
        ...

    def list(self) -> list[LayerInfo]: ...

    def remove(self, ref: str, in_use: Collection[str]) -> None:
        """Raises NotFound; Conflict while its digest is in use."""
        ...

    def import_layer(self, request: ImportRequest, progress: Callable[[str], None]) -> LayerInfo:
        """Make a layer from a source; runs in a thread."""
        ...


def with_base(spec: Spec) -> Spec:
    """As it is told to who asks: with the base it has."""
    sources = (spec.image, spec.base, spec.environment, spec.snapshot)
    return spec if any(source is not None for source in sources) else msgspec.structs.replace(spec, base=DEFAULT_BASE)


def wanted(spec: Spec) -> list[tuple[str, Role]]:
    """References and roles of the layers a spec asks for, base first."""
    refs: list[tuple[str, Role]] = [(spec.base or DEFAULT_BASE, "base")]
    if spec.workspace is not None:
        refs.append((spec.workspace, "workspace"))
    refs.extend((ref, "toolkit") for ref in spec.toolkits)
    return refs


def field_of(role: str) -> str:
    """The field of a spec that names layers of a role."""
    return "toolkits" if role == "toolkit" else role


def check_role(field: str, ref: str, role: Role, layer: LayerInfo) -> None:
    """Raises InvalidSpec for a layer made for another place: a toolkit as the base would start nothing.

    One with the role `base`, which is what an import gives that says none, may stand anywhere; so may a digest, since
    roles belong to names.
    """
    if layer.role not in ("base", role) and not is_digest(ref):
        allowed = f"a layer with the role {role} (or base); this one is a {layer.role} layer"
        raise InvalidSpec.field(field, ref, allowed)


def check_once(field: str, ref: str, digest: str, below: Sequence[LayerRef]) -> None:
    """Raises InvalidSpec for a layer that stands in the stack already, also by another name: overlayfs refuses it."""
    for other in below:
        if other.digest == digest:
            files = f"the same files as {other.role}={other.ref!r}"
            raise InvalidSpec.field(field, ref, f"a layer that is not in the stack yet; it is {files} ({digest})")
