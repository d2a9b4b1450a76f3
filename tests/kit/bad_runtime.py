"""What a keeper starts in place of a runtime: says what is almost right to it, and dies.

A program by itself: `bad_runtime.py serve .. --fds=KEEPER,LISTEN`. Beside it lie `seed`, counted up with each start,
and `packets`, how many it has said so far.
"""

from __future__ import annotations

import array
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from tests.kit import mutations

PACKETS = 400
DESCRIPTORS = (0, 0, 1, 2, 10)
ENCODE = msgspec.msgpack.Encoder().encode


def put(key: str, **over: Any) -> dict[str, Any]:
    """A `Put` in the order of its fields."""
    fields = {"key": key, "meta": b"of nobody", "pid": None, "add": [], "close": []} | over
    return {"Put": list(fields.values())}


def said() -> list[Any]:
    """Messages that all can be said. None ends the keeper, or makes it wait."""
    return [
        "List",
        "Ready",
        put("fuzz/1"),
        put("fuzz/2", add=["one", "two"]),
        put("fuzz/2", add=["one"], close=["two", "none", "none"]),
        put("fuzz/3", pid=1, meta=None),
        put("fuzz/3", add=["go"], pid=2),
        put("fuzz/4", meta=b"x" * 60_000),
        put("run/fuzz/r", meta=ENCODE({"version": 1, "marked": None})),
        put("", meta=b""),
        {"Del": "fuzz/1"},
    ]


def main() -> None:
    home = Path(sys.argv[0]).parent
    seed = int((home / "seed").read_text())
    (home / "seed").write_text(str(seed + 1))
    rnd = random.Random(seed)
    keeper = next(word for word in sys.argv if word.startswith("--fds=")).removeprefix("--fds=").split(",")[0]
    sock = socket.socket(fileno=int(keeper))
    # A life that has begun: the next one is not waited with.
    sock.send(ENCODE("Ready"))
    sock.settimeout(1)
    messages = said()
    # What does not decode ends the connection: most lives get further.
    spoiled = rnd.choice((0.0, 0.01, 0.05, 0.5))
    sent = 0
    for _ in range(rnd.randrange(1, PACKETS)):
        message = rnd.choice(messages)
        if rnd.random() < spoiled:
            message = mutations.value(rnd, message)
        body = ENCODE(message)
        if rnd.random() < spoiled / 2:
            body = mutations.raw(rnd, body)
        fds = [os.open("/dev/null", os.O_RDWR) for _ in range(rnd.choice(DESCRIPTORS))]
        try:
            sock.sendmsg([body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
            sent += 1
            if rnd.random() < 0.3:
                sock.recv(1 << 20, socket.MSG_DONTWAIT)
        except OSError:  # nothing there, nobody there, or full
            pass
        for fd in fds:
            os.close(fd)
    before = int((home / "packets").read_text())
    (home / "packets").write_text(str(before + sent))


if __name__ == "__main__":
    main()
