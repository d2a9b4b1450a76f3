"""Ids and names: how they look, how they are made, how they are checked."""

from __future__ import annotations

import os
import re
from base64 import b32encode
from typing import Final

from dsec.model import limits
from dsec.model.errors import InvalidSpec

_RANDOM_CHARS: Final = 13  # 65 bits: no collision among 2^32 sandboxes

_NODE = re.compile(r"[a-z0-9]{1,24}\Z")
_SANDBOX = re.compile(r"sbx-([a-z0-9]{1,24})-[a-z2-7]{13}\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z")
_LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,63}\Z")
_KEY = re.compile(r"[\x21-\x7e]{1,128}\Z")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_LAYER_REF = re.compile(r"[a-z0-9][a-z0-9_./-]{0,127}(?:[:@][A-Za-z0-9][A-Za-z0-9_.-]{0,127})?\Z")


def _random() -> str:
    # One read of the kernel's generator. Letter by letter (`secrets.choice`) a key costs as much as its whole request.
    return b32encode(os.urandom(10))[:_RANDOM_CHARS].decode("ascii").lower()


def new_sandbox_id(node: str) -> str:
    """A new sandbox id; the id names its node."""
    check_node(node)
    return f"sbx-{node}-{_random()}"


def new_process_id() -> str:
    """A new process id, unique within its node."""
    return f"p-{_random()}"


def new_key() -> str:
    """A new idempotency key."""
    return f"k-{_random()}{_random()}"


def new_request_id() -> str:
    """A new request id, for logs and error reports."""
    return f"r-{_random()}"


def node_of(sandbox_id: str) -> str:
    """The node a sandbox id names. Raises InvalidSpec when it is not a sandbox id."""
    match = _SANDBOX.match(sandbox_id)
    if match is None:
        raise InvalidSpec.field("id", sandbox_id, "an id as create() gives it: sbx-<node>-<13 letters>")
    return match.group(1)


def is_sandbox_id(text: str) -> bool:
    """Whether the text has the form of a sandbox id (names may not)."""
    return _SANDBOX.match(text) is not None


def check_node(text: str) -> str:
    """The node name itself, or InvalidSpec."""
    if not _NODE.match(text):
        raise InvalidSpec.field("node", text, "1 to 24 of a-z 0-9")
    return text


def check_name(text: str, field: str = "name") -> str:
    """A sandbox or job name itself, or InvalidSpec."""
    if not isinstance(text, str) or not _NAME.match(text) or is_sandbox_id(text):
        raise InvalidSpec.field(
            field,
            text,
            f"1 to {limits.NAME_MAX_CHARS} of A-Z a-z 0-9 _ . - , starting with a letter or digit, "
            "and not of the form of a sandbox id",
        )
    return text


def check_label_key(text: str) -> str:
    """A label's key itself, or InvalidSpec."""
    if not _LABEL_KEY.match(text):
        raise InvalidSpec.field("labels", text, "keys of 1 to 64 of A-Z a-z 0-9 _ . / -")
    return text


def check_key(text: str, field: str = "Idempotency-Key") -> str:
    """An idempotency key itself, or InvalidSpec."""
    if not isinstance(text, str) or not _KEY.match(text):
        raise InvalidSpec.field(field, text, f"1 to {limits.KEY_MAX_CHARS} visible ASCII letters")
    return text


def is_digest(text: str) -> bool:
    """Whether the text is a layer digest, `sha256:` and 64 hex digits."""
    return _DIGEST.match(text) is not None


def check_layer_ref(text: str, field: str) -> str:
    """A layer reference itself (`name`, `name:tag`, `name@version`, `sha256:...`), or InvalidSpec."""
    known = isinstance(text, str) and (is_digest(text) or (_LAYER_REF.match(text) and ".." not in text))
    if not known or (text.startswith("sha256:") and not is_digest(text)):
        raise InvalidSpec.field(field, text, "name, name:tag, name@version or sha256:<64 hex digits>")
    return text
