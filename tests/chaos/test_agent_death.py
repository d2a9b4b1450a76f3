"""kill -9 of the agent at any moment: results are exact, nothing runs twice, nothing is left."""

from __future__ import annotations

import asyncio
import base64
import random
import signal

import aiohttp
import pytest

from tests.kit.realnode import BASE, RealNode

SANDBOXES = 3
RUNS = 120
KILLS = 8
WORKERS = 8


def test_runs_survive_the_death_of_the_agent_exactly_once(real):
    async def scenario(node: RealNode) -> None:
        ids = [(await node.call("POST", "/v1/sandboxes", {"base": BASE}))["id"] for _ in range(SANDBOXES)]
        todo = list(range(RUNS))
        wrong: list[str] = []

        async def worker() -> None:
            while todo:
                number = todo.pop()
                command = f"echo {number} >> /tmp/log; sleep 0.{number % 5}; echo out {number}; exit {number % 256}"
                path = f"/v1/sandboxes/{ids[number % SANDBOXES]}/run"
                result = await node.call("POST", path, {"command": command}, f"run-{number}")
                text = base64.b64decode(result["out"]["head"]).decode()
                if (result["exit_code"], text) != (number % 256, f"out {number}\n"):
                    wrong.append(f"{number}: {result}")

        async def killer() -> None:
            for _ in range(KILLS):
                await asyncio.sleep(random.uniform(0.1, 0.9))
                await node.end(signal.SIGKILL)
                await node.start()

        await asyncio.gather(killer(), *(worker() for _ in range(WORKERS)))
        assert not wrong
        for index, id_ in enumerate(ids):
            result = await node.call("POST", f"/v1/sandboxes/{id_}/run", {"command": "cat /tmp/log"})
            ran = sorted(map(int, base64.b64decode(result["out"]["head"]).split()))
            assert ran == [number for number in range(RUNS) if number % SANDBOXES == index]
            # What came back once comes back again, and nothing runs for it.
            again = await node.call(
                "POST",
                f"/v1/sandboxes/{id_}/run",
                {"command": f"echo {index} >> /tmp/log; sleep 0.{index % 5}; echo out {index}; exit {index % 256}"},
                f"run-{index}",
            )
            assert again["exit_code"] == index
        for id_ in ids:
            await node.call("DELETE", f"/v1/sandboxes/{id_}")
        assert not node.subject.inventory()

    real(scenario)


def test_sigterm_leaves_sandboxes_and_runs_alive(real):
    async def scenario(node: RealNode) -> None:
        id_ = (await node.call("POST", "/v1/sandboxes", {"base": BASE, "name": "a"}))["id"]
        run = asyncio.ensure_future(
            node.call("POST", "/v1/sandboxes/a/run", {"command": "sleep 3; echo done; exit 9"}, "k")
        )
        while not (await node.call("GET", "/v1/sandboxes/a/processes"))["programs"]:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
        assert await node.end() == 0
        await node.start()
        result = await run
        assert (result["exit_code"], result["out"]["head"]) == (9, base64.b64encode(b"done\n").decode())
        assert (await node.call("GET", "/v1/sandboxes/a"))["id"] == id_
        await node.call("DELETE", "/v1/sandboxes/a")
        assert not node.subject.inventory()

    real(scenario)


@pytest.mark.parametrize(
    "failpoint",
    [
        "create.admitted",
        "create.begun",
        "create.started",
        "create.recorded",
        "run.begun",
        "run.ended",
        "run.recorded",
        "stop.marked",
        "stop.ended",
        "stop.recorded",
        "batch.begun",
    ],
)
def test_killed_at_a_step_the_same_calls_come_to_the_same_end(real, failpoint):
    async def scenario(node: RealNode) -> None:
        await node.end()
        await node.start(f"{failpoint}:1:kill")

        async def story() -> None:
            a = await node.call("POST", "/v1/sandboxes", {"base": BASE, "name": "a"}, "c")
            result = await node.call("POST", "/v1/sandboxes/a/run", {"command": "echo x >> /tmp/n; exit 4"}, "r")
            assert result["exit_code"] == 4
            count = await node.call("POST", "/v1/sandboxes/a/run", {"command": "exit $(wc -l < /tmp/n)"}, "n")
            assert count["exit_code"] == 1
            if failpoint == "batch.begun":
                await batch()
            stopped = await node.call("DELETE", "/v1/sandboxes/a", None, "s")
            assert (stopped["id"], stopped["state"]) == (a["id"], "stopped")

        async def batch() -> None:
            with pytest.raises(aiohttp.ClientError):
                async with asyncio.timeout(5):
                    async with node.session() as http:
                        body = {"count": 2, "spec": {"base": BASE}, "atomic": True}
                        async with http.post("/v1/sandboxes:batch", json=body) as answer:
                            await answer.read()

        async def restart() -> None:
            assert await node.died() == -signal.SIGKILL
            await node.start()

        await asyncio.gather(story(), restart())
        assert not (await node.call("GET", "/v1/sandboxes"))["items"]
        assert not node.subject.inventory()

    real(scenario)
