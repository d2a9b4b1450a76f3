"""kill -9 of client, agent, runtime and keeper at random: results are exact or typed errors, and nothing is left.

`DSEC_CHAOS_RUNS=2000` for the long form.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import dsec
from dsec.model.errors import DsecError
from tests.kit.home import BASE, COMMAND, Home, standing
from tests.kit.inventory import Inventory, Scope

RUNS = int(os.environ.get("DSEC_CHAOS_RUNS", "240"))
SANDBOXES = 4
WORKERS = 6
PAUSE_S = (0.2, 1.2)
# What was stopped last is taken down in the background.
SETTLE_S = 20.0
# The keeper holds what makes a result exact; its death is rarer here, so that most runs have one.
VICTIMS = ("agent", "agent", "runtime", "runtime", "client", "client", "keeper")


class Ordeal:
    """Workers that run programs with known results, and somebody who kills what they stand on."""

    def __init__(self, home: Home, ids: list[str]) -> None:
        self.home = home
        self.ids = ids
        self.todo = list(range(RUNS))
        self.exact: set[int] = set()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.killed: Counter[str] = Counter()
        self.clients: list[subprocess.Popen[bytes]] = []
        self.over = threading.Event()

    def work(self) -> None:
        """Runs until none is left."""
        with self.home.client() as client:
            while self.todo:
                with contextlib.suppress(IndexError):
                    self.one(client, self.todo.pop())

    def one(self, client: dsec.Client, number: int) -> None:
        """One run with a known result."""
        sandbox = self.ids[number % SANDBOXES]
        script = f"echo {number} >>/tmp/log; sleep 0.{number % 4}; seq {number}; exit {number % 200}"
        try:
            result = client.get(sandbox).run(script)
        except DsecError as error:
            self.errors[error.code] += 1
            return
        if (result.exit_code, result.stdout.split()) != (number % 200, [str(n + 1) for n in range(number)]):
            self.wrong.append(f"{number}: {result}")
        self.exact.add(number)

    def kill(self) -> None:
        """Kills until it is over."""
        while not self.over.wait(random.uniform(*PAUSE_S)):
            victim = random.choice(VICTIMS)
            with contextlib.suppress(OSError, ValueError, StopIteration):
                os.kill(self.pid(victim), signal.SIGKILL)
                self.killed[victim] += 1
            if victim in ("agent", "keeper"):
                self.home.dsec("up", code=None)
        self.home.dsec("up")

    def pid(self, victim: str) -> int:
        """Who is to die. StopIteration when nobody is there."""
        if victim == "client":
            line = [*COMMAND, "exec", random.choice(self.ids), "sleep 0.5; seq 1000"]
            client = subprocess.Popen(line, env=self.home.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            self.clients.append(client)
            time.sleep(random.uniform(0, 0.6))
            return client.pid
        if victim == "agent":
            return self.home.agent()
        keeper = int((self.home.place.run_dir / "keeper.pid").read_text().split()[0])
        if victim == "keeper":
            return keeper
        # What has fallen to the keeper is its child too: the inits of sandboxes.
        children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        return next(int(pid) for pid in children if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))


@pytest.mark.timeout(1800)
def test_whatever_dies_results_are_exact_or_typed_and_nothing_is_left() -> None:
    with standing() as home:
        place = home.place
        scope = Scope(place.run_dir, place.state_dir, (place.cgroup,))
        with home.client() as client:
            client.create(base=BASE, name="warm").stop()
            before = Inventory.take(scope)
            ids = [client.create(base=BASE, idle_timeout_s=None).id for _ in range(SANDBOXES)]
        ordeal = Ordeal(home, ids)
        killer = threading.Thread(target=ordeal.kill)
        workers = [threading.Thread(target=ordeal.work) for _ in range(WORKERS)]
        for thread in (killer, *workers):
            thread.start()
        for thread in workers:
            thread.join()
        ordeal.over.set()
        killer.join()
        for process in ordeal.clients:
            process.wait()
        print(f"\nkilled {dict(ordeal.killed)}; exact {len(ordeal.exact)} of {RUNS}; errors {dict(ordeal.errors)}")
        assert ordeal.wrong == []
        assert set(ordeal.errors) <= {"unknown", "sandbox_lost", "node_unreachable", "unavailable", "launch_failed"}
        assert len(ordeal.exact) > RUNS / 2
        for log in place.run_dir.glob("*.log"):  # shown when the test fails
            print(f"--- {log.name}\n", log.read_text()[-20000:])
        with home.client() as client:
            for index, sandbox in enumerate(ids):
                ran = Counter(map(int, client.get(sandbox).run("cat /tmp/log", check=True).stdout.split()))
                assert max(ran.values()) == 1, "a program ran twice"
                assert {n for n in ordeal.exact if n % SANDBOXES == index} <= set(ran)
                client.get(sandbox).stop()
        changes = Inventory.take(scope).changes_since(before)
        deadline = time.monotonic() + SETTLE_S
        while (left := remaining(changes, place.run_dir)) and time.monotonic() < deadline:
            time.sleep(0.1)
            changes = Inventory.take(scope).changes_since(before)
        assert not left, "\n".join(changes)


def remaining(changes: list[str], run_dir: Path) -> list[str]:
    """The changes of the inventory that are something of a sandbox that stayed."""
    return [change for change in changes if left_behind(change, run_dir)]


def left_behind(change: str, run_dir: Path) -> bool:
    """Whether a change is something of a sandbox that stayed.

    Agent, keeper and runtime are other processes than before, with other descriptors; and of ended sandboxes the
    runtime keeps a bounded number of small files.
    """
    ours = ("+ descriptors:", f"+ file: {run_dir}/ns/sbx/")
    daemon = change.startswith("+ process:") and any(
        f" {role} " in change for role in ("serve", "keeper", "-m dsec.node")
    )
    return change.startswith("+") and not change.startswith(ours) and not daemon
