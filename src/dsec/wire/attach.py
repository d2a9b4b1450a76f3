"""What a WebSocket to a program carries: messages whose first byte is their channel."""

from __future__ import annotations

import struct
from typing import Final

from dsec.model import limits
from dsec.model.errors import InvalidSpec

PROTOCOL: Final = b"dsec.v1"

STDIN: Final = 0
STDOUT: Final = 1
STDERR: Final = 2
CONTROL: Final = 3
CONTROL_BYTE: Final = bytes((CONTROL,))

# Input that may be on its way: so much beyond what the server has told as taken.
WINDOW_BYTES: Final = 256 * limits.KIB

# Channel, and where in the stream the first byte behind this stands.
_lead = struct.Struct(">BQ")
LEAD_BYTES: Final = _lead.size

lead = _lead.pack


def piece(data: memoryview) -> tuple[int, memoryview]:
    """Offset and bytes of a message of a stream. Raises InvalidSpec."""
    if len(data) < LEAD_BYTES:
        raise InvalidSpec.field("message", f"{len(data)} bytes", f"{LEAD_BYTES} and what belongs there")
    return int.from_bytes(data[1:LEAD_BYTES], "big"), data[LEAD_BYTES:]
