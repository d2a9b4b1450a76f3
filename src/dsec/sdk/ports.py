"""What the API answers of exposed ports."""

from __future__ import annotations

import msgspec

from dsec.model.ports import Exposed, check_port

__all__ = ["Closed", "ExposedPage", "check_port"]


class ExposedPage(msgspec.Struct):
    """Ports of a sandbox that can be reached."""

    items: list[Exposed]


class Closed(msgspec.Struct):
    """An answer without content."""
