"""The guests of a whole run of the tests: they work while the other lanes do.

Those wait for much of their time, and an emulator never does. Left for last, the guests would add all of theirs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from tests.kit.vm import lanes, machine, payload


class Beside:
    """Payload, snapshots and guests, made by a thread. Whoever needs one of them waits for it."""

    def __init__(self, asked: Mapping[str, Sequence[str]]) -> None:
        self._asked = asked
        self._disk: Future[Path] = Future()
        self._runs: Future[dict[str, lanes.GuestRun]] = Future()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="guests")
        self._thread.start()

    def disk(self) -> Path:
        return self._disk.result()

    def runs(self) -> dict[str, lanes.GuestRun]:
        return self._runs.result()

    def close(self) -> None:
        """Nothing of it is left; a guest that nobody waits for any more is ended."""
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                self._disk.set_result(stack.enter_context(payload.disk()))
                # One after the other: two builds or two boots at once would only be slower on two cores.
                for series in self._asked:
                    if self._over.is_set():
                        return
                    machine.snapshot(series)
                disk = self.disk()
                runs = {series: lanes.GuestRun(series, disk, names) for series, names in self._asked.items()}
                self._runs.set_result(runs)
                self._over.wait()
                for run in runs.values():
                    run.end()
        except BaseException as error:  # noqa: BLE001 - a thread's edge: the waiting tests get it
            for waiting in (self._disk, self._runs):
                if not waiting.done():
                    waiting.set_exception(error)
