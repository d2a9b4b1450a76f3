"""A program as a node shows it: scripted output, input that is taken as the API promises, connections that break."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from tests.kit.scripted import Request, Wire

PROGRAM = {"id": "p-1", "kind": "spawn", "state": "running"}


@dataclass
class ScriptedProgram:
    """Answers the calls about one program, `p-1`.

    `cut_output` and `cut_input`: at which requests of that kind (from 1) the connection breaks, in the middle of what
    is sent, or after the input was taken and before it is said so.
    """

    out: dict[int, bytes] = field(default_factory=lambda: {1: b"", 2: b""})
    kept_from: dict[int, int] = field(default_factory=lambda: {1: 0, 2: 0})
    result: dict[str, object] | None = None
    tty: bool = False
    piece: int = 7
    # Most of one call's input that is taken.
    takes: int = 1 << 30
    cut_output: frozenset[int] = frozenset()
    cut_input: frozenset[int] = frozenset()
    taken: bytes = b""
    eof: bool = False
    reader_gone: bool = False
    kills: list[object] = field(default_factory=list)
    sizes: list[object] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    _outputs: int = 0
    _inputs: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: Request, wire: Wire) -> None:
        url = urlsplit(request.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        what = url.path.partition("/processes")[2].removeprefix("/p-1").lstrip("/") or request.method
        getattr(self, f"_{what.lower()}")(request, wire, query)

    def _post(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        wire.answer(PROGRAM, 201)

    def _get(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        wire.answer(self._program())

    def _program(self) -> dict[str, object]:
        return {**PROGRAM, "state": "ended", "result": self.result} if self.result else {**PROGRAM, "tty": self.tty}

    def _wait(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        self.ended.wait(min(float(query["timeout_s"]), 0.05))
        wire.answer(self._program())

    def _kill(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        self.kills.append(request.value())
        wire.answer({})

    def _resize(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        self.sizes.append(request.value())
        wire.answer({})

    def _stdin(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        with self._lock:
            self._inputs += 1
            offset = int(query["offset"])
            if offset > len(self.taken):
                wire.error("invalid_spec", "beyond the input", 400, size=len(self.taken))
                return
            if not self.reader_gone:
                self.taken += request.body[len(self.taken) - offset :][: self.takes]
                whole = len(self.taken) >= offset + len(request.body)
                self.eof = self.eof or ("eof" in query and whole)
            if self._inputs in self.cut_input:
                wire.drop()
            wire.answer({"size": len(self.taken), "closed": self.reader_gone or self.eof})

    def _attach(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        # As behind a proxy that lets no WebSocket through.
        wire.error("unsupported", "only with an Upgrade", 426, mechanism="WebSocket")

    def _output(self, request: Request, wire: Wire, query: dict[str, str]) -> None:
        if "raw" in query:
            stream = int(query["raw"])
            offset = max(int(query.get("offset", 0)), self.kept_from[stream])
            wire.answer(self.out[stream][offset:], media="application/octet-stream")
            return
        self._outputs += 1
        cut = self._outputs in self.cut_output
        wire.stream()
        at = {1: int(query["stdout_offset"]), 2: int(query["stderr_offset"])}
        for stream in (1, 2):
            at[stream] = max(at[stream], self.kept_from[stream])
            # A server may begin a little earlier than it was asked to.
            at[stream] = max(at[stream] - 2, self.kept_from[stream])
        while any(at[stream] < len(self.out[stream]) for stream in (1, 2)):
            for stream in (1, 2):
                data = self.out[stream][at[stream] :][: self.piece]
                if data:
                    wire.item({"stream": stream, "offset": at[stream], "data": data})
                    at[stream] += len(data)
            wire.item({})
            if cut:
                wire.raw(b"10\r\n\0\0\1")
                wire.drop()
        if query.get("follow") == "0":
            wire.item({"program": self._program()})
            wire.end()
            return
        if self.result is None:
            wire.hang()
        wire.item({"result": self.result})
        wire.end()
