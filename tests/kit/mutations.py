"""Bytes that are almost right: requests changed a little, in their values and in their bytes.

Everything follows from a seed, so what failed can be done again: `DSEC_FUZZ_SEED=... DSEC_FUZZ_S=...`.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

SECONDS_ENV: Final = "DSEC_FUZZ_S"
SEED_ENV: Final = "DSEC_FUZZ_SEED"
SECONDS: Final = 3.0
STRANGE: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1 << 31, 1 << 32, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63), 0.5, float("nan"), float("inf"),
    "", "\0", "..", "/", "a" * 5000, "\ud7ff\u202e", b"", b"\0", b"\xff\xfe", b"../../../../etc/passwd", b"/" * 4096,
    [], {}, [[[[[[]]]]]], {"": None},
)  # fmt: skip
LENGTHS: Final = (0, 1, 3, 1 << 16, 1 << 20, (1 << 20) + 1, 1 << 24, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF)
ENCODE: Final = msgspec.msgpack.Encoder().encode


def seed() -> int:
    """Of this run: chosen anew each time unless given."""
    return int(os.environ.get(SEED_ENV) or random.SystemRandom().randrange(1 << 32))


def until_over(rnd: random.Random) -> Iterator[random.Random]:
    """Again and again, for as long as fuzzing shall take."""
    end = time.monotonic() + float(os.environ.get(SECONDS_ENV) or SECONDS)
    while True:
        yield rnd
        if time.monotonic() > end:
            return


def value(rnd: random.Random, what: Any) -> Any:
    """One value with one place in it changed."""
    if isinstance(what, dict) and what and rnd.random() < 0.9:
        changed = dict(what)
        key = rnd.choice(list(changed))
        match rnd.randrange(6):
            case 0:
                del changed[key]
            case 1:
                changed[rnd.choice(STRANGE[12:17])] = rnd.choice(STRANGE)
            case _:
                changed[key] = value(rnd, changed[key])
        return changed
    if isinstance(what, list) and what and rnd.random() < 0.8:
        at = rnd.randrange(len(what))
        return [*what[:at], value(rnd, what[at]), *what[at + 1 :]] if rnd.random() < 0.8 else what * 2
    if isinstance(what, str) and what and rnd.random() < 0.5:
        at = rnd.randrange(len(what))
        return what[:at] + what[at : at + rnd.randrange(3)] * rnd.choice((0, 2, 300))
    if isinstance(what, bytes) and what and rnd.random() < 0.5:
        at = rnd.randrange(len(what))
        return what[:at] + what[at : at + rnd.randrange(3)] * rnd.choice((0, 2, 300))
    return rnd.choice(STRANGE)


def raw(rnd: random.Random, data: bytes) -> bytes:
    """The same with bytes changed, cut out, doubled or put in."""
    out = bytearray(data)
    for _ in range(rnd.choice((1, 1, 1, 2, 5))):
        at = rnd.randrange(len(out) + 1)
        match rnd.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << rnd.randrange(8)
            case 1 if at < len(out):
                out[at] = rnd.choice((0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xC6, 0xDB, 0xDD, 0xDF, 0xFF))
            case 2:
                del out[at : at + rnd.randrange(1, 9)]
            case 3:
                out[at:at] = out[at : at + rnd.randrange(1, 33)]
            case _:
                out[at:at] = rnd.randbytes(rnd.randrange(1, 9))
    return bytes(out)


def framed(body: bytes, flag: int = 0) -> bytes:
    """With its length before it."""
    return struct.pack(">I", len(body) | flag) + body


def stream(rnd: random.Random, requests: Sequence[dict[str, Any]], data_flag: int = 0) -> bytes:
    """Some frames in a row; most are whole requests, one or two of which are not quite right."""
    out = []
    for number in range(1, rnd.randrange(2, 6)):
        request = dict(rnd.choice(requests), id=number)
        kind = rnd.randrange(8)
        if kind < 3:
            request = value(rnd, request)
        body = ENCODE(request)
        if kind == 3:
            body = raw(rnd, body)
        frame = framed(body)
        if kind == 4:
            frame = struct.pack(">I", rnd.choice(LENGTHS)) + body
        elif kind == 5 and data_flag:
            frame += framed(rnd.randbytes(rnd.randrange(2000)), data_flag) * rnd.randrange(4) + framed(b"", data_flag)
        out.append(frame)
    sent = b"".join(out)
    return sent[: rnd.randrange(len(sent) + 1)] if rnd.random() < 0.2 else sent
