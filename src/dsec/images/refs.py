"""Layer references: `name`, `name:tag`, `name@version`, `sha256:<64 hex digits>`.

A tag may move to another layer; a version and a digest never do. A bare `name` means `name:latest`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dsec.model import ids

DEFAULT_TAG = "latest"

Kind = Literal["tag", "version", "digest"]


class Ref(msgspec.Struct, frozen=True):
    """A parsed reference. For a digest, `name` is empty and `label` is the digest itself."""

    kind: Kind
    name: str
    label: str

    def __str__(self) -> str:
        if self.kind == "digest":
            return self.label
        return f"{self.name}{'@' if self.kind == 'version' else ':'}{self.label}"


def parse(text: str, field: str = "layer") -> Ref:
    """The reference a text stands for, or InvalidSpec naming `field`."""
    ids.check_layer_ref(text, field)
    if ids.is_digest(text):
        return Ref("digest", "", text)
    for separator, kind in (("@", "version"), (":", "tag")):
        name, found, label = text.partition(separator)
        if found:
            return Ref("version" if kind == "version" else "tag", name, label)
    return Ref("tag", text, DEFAULT_TAG)
