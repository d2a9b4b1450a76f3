"""What lives in a sandbox, as told by `process.list`."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.kit.rtclient import Client, Node, RuntimeFault, run_plan
from tests.kit.rtfiles import Files
from tests.kit.rtnode import create, frozen_file, needs, sh

pytestmark = needs


def listed(c: Client, box: str) -> list[dict[str, Any]]:
    found = c.call("process.list", sandbox=box)
    assert not found["more"]
    processes: list[dict[str, Any]] = found["processes"]
    return processes


def until(c: Client, box: str, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 30
    while len(found := listed(c, box)) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def test_every_process_with_what_it_is(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    with shared.client() as asks, Files(shared.socket, name):
        (init,) = listed(asks, name)
        assert (init["pid"], init["ppid"], init["run"], init["uid"]) == (1, 0, None, 0)
        script = "cd /tmp; mkdir -p 'a b'; cd 'a b'; sleep 1000 & exec sleep 2000"
        c.send("run.start", run_plan(name, "his", sh(script), user="1000:1000"))
        # With a name that looks like the end of its line.
        odd = "printf '#!/bin/sh\\nsleep 3000; :' > '/tmp/x) R 1 ('; chmod 755 /tmp/x*; exec '/tmp/x) R 1 ('"
        c.send("run.start", run_plan(name, "odd", sh(odd)))
        begun = time.monotonic()
        while True:
            found = {p["argv"][-1]: p for p in listed(asks, name) if p["argv"]}
            if {b"1000", b"2000", b"/tmp/x) R 1 ("} <= found.keys():
                break
            assert time.monotonic() - begun < 30, found
        child, own, other = found[b"1000"], found[b"2000"], found[b"/tmp/x) R 1 ("]
        assert (child["run"], child["uid"], child["cwd"], child["ppid"]) == ("his", 1000, b"/tmp/a b", own["pid"])
        assert child["argv"] == [b"sleep", b"1000"]
        assert (own["ppid"], own["threads"]) == (0, 1)
        assert own["state"] in "SR"
        assert own["rss_bytes"] > 0
        assert 0 <= own["age_ms"] < 120_000
        assert (other["run"], other["name"]) == ("odd", b"x) R 1 (")
        pids = [p["pid"] for p in listed(asks, name)]
        assert pids == sorted(pids)
        for run in ("his", "odd"):
            asks.call("run.kill", sandbox=name, run=run)
        until(asks, name, 1)


def test_what_a_run_left_behind_is_still_its_own(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    assert c.call("run.start", **run_plan(name, "r", sh("sleep 1000 & true")))["leftover"] == 1
    (left,) = [p for p in listed(c, name) if p["pid"] != 1]
    assert (left["run"], left["ppid"]) == ("r", 1)


def test_many_processes_of_a_frozen_sandbox(node: Node) -> None:
    with node.client() as c:
        create(c, "a")
        each = f"sh -c 'sleep 1000; :' {'x' * 2000}"
        c.call("run.start", **run_plan("a", "r", sh(f"for i in $(seq 500); do {each} & done; true")))
        frozen_file(node, "a").write_text("1")
        found = listed(c, "a")
        assert len(found) > 400
        assert max(sum(map(len, p["argv"])) for p in found) <= 1024
        frozen_file(node, "a").write_text("0")


def test_of_no_other_sandbox(shared: Node, box: tuple[Client, str]) -> None:
    c, name = box
    create(c, f"{name}x")
    c.send("run.start", run_plan(f"{name}x", "r", ["sleep", "1000"]))
    with shared.client() as asks:
        until(asks, f"{name}x", 2)
        assert [p["pid"] for p in listed(asks, name)] == [1]
        asks.call("sandbox.stop", id=f"{name}x")
        with pytest.raises(RuntimeFault) as gone:
            listed(asks, f"{name}x")
        assert gone.value.code == "gone"
