"""One run: asked for under one key, taken up again when the connection breaks, killed when its caller gives up.

The key is ours, or the caller's: one that is started again with it takes up what it began.
"""

from __future__ import annotations

from typing import Final

from dsec.model.errors import DsecError, NodeUnreachable
from dsec.model.ids import check_key, new_key
from dsec.model.processes import CommandSpec
from dsec.model.specs import RunSpec
from dsec.model.states import RunResult
from dsec.sdk import codec
from dsec.sdk._async.net import finish, output
from dsec.sdk._async.transport import AsyncItems, AsyncRetry, AsyncTransport
from dsec.sdk.http1 import Broken, Garbage
from dsec.sdk.values import OnOutput

_EMPTY: Final = codec.encode({})


class _Interrupted(Exception):
    """The caller's `on_output` failed: carries its error past the handlers of ours."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class AsyncRun:
    """One call of `run`."""

    def __init__(
        self,
        transport: AsyncTransport,
        sandbox: str,
        spec: RunSpec | CommandSpec,
        on_output: OnOutput | None,
        key: str | None,
        *,
        session: str | None = None,
    ) -> None:
        self._transport = transport
        self._sandbox = sandbox
        # In a session it is a call of that; its program is one of the sandbox all the same.
        self._call = f"{sandbox}/sessions/{session}/run" if session is not None else f"{sandbox}/run"
        self._body = codec.encode(spec)
        self._on_output = on_output
        self._key = new_key() if key is None else check_key(key, "key")
        self._process: str | None = None
        # How much of each stream has been handed out.
        self._offsets = {1: 0, 2: 0}

    async def result(self) -> RunResult:
        """How the program ended."""
        try:
            if self._on_output is None:
                return await self._transport.call("POST", self._call, RunResult, body=self._body, key=self._key)
            return await self._streamed()
        except _Interrupted as caught:
            await self._give_up(caught.error)
            raise caught.error from None
        except NodeUnreachable as error:
            self._tell_how_to_go_on(error)
            raise
        except Exception:
            # Ours: the server refused.
            raise
        except BaseException as error:
            # The caller's: KeyboardInterrupt, a cancelled task, SystemExit.
            await self._give_up(error)
            raise

    def _tell_how_to_go_on(self, error: NodeUnreachable) -> None:
        """The server is away; a run that is going on goes on, and its result waits under the key."""
        if not self._transport.met:
            return
        error.detail["idempotency_key"] = self._key
        began = "the program was started and goes on" if self._process else "if the call arrived, the program goes on"
        sandbox = self._sandbox.rpartition("/")[2]
        error.add_note(
            f"{began}; once the node answers again, `dsec inspect {sandbox}` shows whether it still runs, and the same "
            f"run with key={self._key!r} (over HTTP: the same POST {self._call} with `Idempotency-Key: "
            f"{self._key}`) waits for its result and starts nothing anew"
        )

    async def _streamed(self) -> RunResult:
        retry = AsyncRetry(self._transport)
        while True:
            try:
                items = await self._open()
                try:
                    return await self._follow(items, retry)
                finally:
                    items.close()
            except Broken as error:
                await retry.after(error)
            except Garbage as error:
                raise self._transport.garbage(error) from error

    async def _open(self) -> AsyncItems:
        offsets = f"&stdout_offset={self._offsets[1]}&stderr_offset={self._offsets[2]}"
        path = f"{self._call}?stream=1{offsets if any(self._offsets.values()) else ''}"
        return await self._transport.stream("POST", path, body=self._body, key=self._key)

    async def _follow(self, items: AsyncItems, retry: AsyncRetry) -> RunResult:
        while True:
            item = await items.next(codec.RunItem)
            if item.started is not None:
                self._process = item.started
            if item.stream is not None and await self._hand_out(item.stream, item.offset, item.data):
                retry.went_on()
            if item.error is not None:
                raise item.error.error()
            if item.result is not None:
                await items.drain()
                return item.result

    async def _hand_out(self, stream: int, offset: int, data: bytes) -> bool:
        """Whether any of it is new."""
        if stream not in self._offsets:
            raise Garbage(f"output of stream {stream}")
        seen = self._offsets[stream]
        # After a broken connection a server may start a little earlier than asked; nobody gets a byte twice.
        new = data[max(seen - offset, 0) :]
        self._offsets[stream] = max(seen, offset + len(data))
        if not new or self._on_output is None:
            return bool(new)
        try:
            await output(self._on_output, stream, new)
        except Exception as error:  # the caller's code: anything
            raise _Interrupted(error) from error
        return True

    async def _give_up(self, error: BaseException) -> None:
        """Kill the program before the caller's error goes on; a failure to do so is added to it."""
        await finish(self._kill(error), self._transport.timing.kill_s)

    async def _kill(self, error: BaseException) -> bool:
        try:
            process = self._process or await self._find_process()
            if process is not None:
                path = f"{self._sandbox}/processes/{codec.quote(process)}/kill"
                await self._transport.call("POST", path, codec.Nothing, body=_EMPTY, key=new_key())
        except (DsecError, Broken, Garbage) as failure:
            error.add_note(f"the program may still be running: killing it failed: {failure}")
            return False
        return True

    async def _find_process(self) -> str | None:
        """The process begun under our key: repeating the call attaches to it and says its id; None: it has ended.

        If the first request never arrived this starts the program, which is then killed; without asking we could
        not know that the request is not still on its way.
        """
        items = await self._open()
        try:
            while True:
                item = await items.next(codec.RunItem)
                if item.started is not None:
                    return item.started
                if item.result is not None or item.error is not None:
                    return None
        finally:
            items.close()
