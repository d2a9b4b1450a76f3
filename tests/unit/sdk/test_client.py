"""Creating, listing, batches, jobs, layers, pickles; both clients."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dsec
from tests.kit.scripted import Request, Server, Wire
from tests.unit.sdk.conftest import INFO, SANDBOX_ID, Kit, collect, get, result

Serve = Callable[..., Server]


def info(n: int, **more: object) -> dict[str, object]:
    return {**INFO, "id": f"sbx-n1-{'a' * 12}{chr(97 + n)}", **more}


def test_create_context_manager_stops(kit: Kit, serve: Serve) -> None:
    server = serve(lambda request, wire: wire.answer(INFO, 201))

    async def body() -> None:
        client = kit.client(server.url)
        sbx = await get(client.create(base="debian:12", cpu=2, toolkits=["harness@7"], network={"npm": False}))
        assert (sbx.id, sbx.name, sbx.state) == (SANDBOX_ID, None, "running")
        if kit.kind == "sync":
            with sbx:
                pass
        else:
            async with sbx:
                pass

    kit.run(body())
    create, stop = server.requests
    assert create.value() == {"base": "debian:12", "cpu": 2.0, "toolkits": ["harness@7"], "network": {"npm": False}}
    assert create.key
    assert (stop.method, stop.path) == ("DELETE", f"/v1/sandboxes/{SANDBOX_ID}?grace_s=0")


def test_failing_stop_does_not_hide_the_callers_error(kit: Kit, serve: Serve) -> None:
    def script(request: Request, wire: Wire) -> None:
        if request.method == "DELETE":
            wire.error("internal", "no", 500)
        else:
            wire.answer(INFO)

    server = serve(script)

    async def body() -> None:
        client = kit.client(server.url)
        with pytest.raises(ZeroDivisionError) as caught:
            if kit.kind == "sync":
                with client.create():
                    raise ZeroDivisionError
            async with await client.create():
                raise ZeroDivisionError
        assert SANDBOX_ID in caught.value.__notes__[0]

    kit.run(body())


def test_spec_is_checked_before_anything_is_sent(kit: Kit, serve: Serve) -> None:
    server = serve(lambda request, wire: wire.answer(INFO))

    async def body() -> None:
        client = kit.client(server.url)
        for field, fields in (
            ("cpu", {"cpu": 0}),
            ("memory_mib", {"memory_mib": "2"}),
            ("colour", {"colour": 1}),
            ("name", {"name": "../x"}),
        ):
            with pytest.raises(dsec.InvalidSpec) as caught:
                await get(client.create(**fields))
            assert caught.value.detail["field"] == field
        with pytest.raises(dsec.InvalidSpec):
            await get(client.get(""))
        with pytest.raises(dsec.InvalidSpec):
            client.create_many(0)
        with pytest.raises(dsec.InvalidSpec, match="unique"):
            client.create_many(2, name="a")

    kit.run(body())
    assert server.requests == []


def test_list_pages_by_itself(kit: Kit, serve: Serve) -> None:
    def script(request: Request, wire: Wire) -> None:
        if "cursor" in request.path:
            wire.answer({"items": [info(2)]})
        else:
            wire.answer({"items": [info(0), info(1)], "next_cursor": "a/b"})

    server = serve(script)

    async def body() -> None:
        client = kit.client(server.url)
        found = await collect(client.list(labels={"k": "v w"}, job="j", state=["running", "lost"]))
        assert [sbx.id for sbx in found] == [str(info(n)["id"]) for n in range(3)]
        assert len(await collect(client.job("j").list(state="any"))) == 3

    kit.run(body())
    query = "label=k%3Dv%20w&job=j&state=running&state=lost&limit=1000"
    assert [request.path for request in server.requests] == [
        f"/v1/sandboxes?{query}",
        f"/v1/sandboxes?{query}&cursor=a%2Fb",
        "/v1/sandboxes?job=j&state=any&limit=1000",
        "/v1/sandboxes?job=j&state=any&limit=1000&cursor=a%2Fb",
    ]


@pytest.mark.parametrize("if_exists", ["error", "get"])
def test_cancelled_creation_leaves_nothing_of_its_own(serve: Serve, if_exists: str) -> None:
    arrived = threading.Event()

    def script(request: Request, wire: Wire) -> None:
        if len(server.requests) == 1:
            arrived.set()
            wire.hang()
        wire.answer(INFO)

    server = serve(script)

    async def body() -> None:
        task = asyncio.create_task(Kit("async").client(server.url).create(name="a", if_exists=if_exists))
        await asyncio.to_thread(arrived.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    methods = [request.method for request in server.requests]
    # One that was there before is not ours to stop.
    assert methods == (["POST", "POST", "DELETE"] if if_exists == "error" else ["POST"])
    assert len({request.key for request in server.requests if request.method == "POST"}) == 1


async def enter(kit: Kit, batch: Any, use: Callable[[Any], Any]) -> None:
    if kit.kind == "sync":
        with batch as boxes:
            await use(boxes)
    else:
        async with batch as boxes:
            await use(boxes)


def test_create_many_yields_failures_as_items_and_stops_all(kit: Kit, serve: Serve) -> None:
    def script(request: Request, wire: Wire) -> None:
        if request.method == "DELETE":
            wire.answer(INFO)
            return
        wire.stream()
        wire.item({"index": 2, "sandbox": info(2)})
        wire.item({"index": 1, "error": {"code": "node_full", "message": "no", "retry": "elsewhere"}})
        wire.item({"index": 0, "sandbox": info(0)})
        wire.item({"done": True, "created": 2, "failed": 1})
        wire.end()

    server = serve(script)

    async def use(boxes: Any) -> None:
        two, failed, zero = await collect(boxes)
        assert (two.id, zero.id) == (info(2)["id"], info(0)["id"])
        assert isinstance(failed, dsec.CreateFailed)
        assert failed.index == 1
        assert isinstance(failed.error, dsec.NodeFull)
        assert failed.retry == "elsewhere"

    async def body() -> None:
        client = kit.client(server.url)
        await enter(kit, client.create_many([dsec.Spec(name=name) for name in "abc"], wait_s=9), use)

    kit.run(body())
    assert server.requests[0].value() == {
        "specs": [{"name": "a"}, {"name": "b"}, {"name": "c"}],
        "atomic": False,
        "wait_s": 9,
    }
    stopped = {request.path.split("/")[3].partition("?")[0] for request in server.requests[1:]}
    assert stopped == {info(0)["id"], info(2)["id"]}


def test_create_many_of_equal_ones_is_one_small_request(kit: Kit, serve: Serve) -> None:
    def script(request: Request, wire: Wire) -> None:
        wire.stream()
        wire.item({"done": True})
        wire.end()

    server = serve(script)

    async def use(boxes: Any) -> None:
        assert await collect(boxes) == []
        assert len(boxes) == 1000

    async def body() -> None:
        await enter(kit, kit.client(server.url).create_many(1000, job="j"), use)

    kit.run(body())
    assert server.requests[0].value() == {"count": 1000, "spec": {"job": "j"}, "atomic": False, "wait_s": 0}


def test_cut_batch_is_taken_up_without_doubles(kit: Kit, serve: Serve) -> None:
    def script(request: Request, wire: Wire) -> None:
        if request.method == "DELETE":
            wire.answer(INFO)
            return
        wire.stream()
        wire.item({"index": 0, "sandbox": info(0)})
        if len(server.requests) == 1:
            wire.drop()
        wire.item({"index": 1, "sandbox": info(1)})
        wire.item({"done": True})
        wire.end()

    server = serve(script)

    async def use(boxes: Any) -> None:
        assert len(await collect(boxes)) == 2

    async def body() -> None:
        await enter(kit, kit.client(server.url).create_many(2), use)

    kit.run(body())
    posts = [request.key for request in server.requests if request.method == "POST"]
    assert len(posts) == 2
    assert len(set(posts)) == 1


def test_leaving_early_cancels_the_rest_and_stops_what_came_late(kit: Kit, serve: Serve) -> None:
    cancelled = threading.Event()

    def script(request: Request, wire: Wire) -> None:
        if request.path == "/v1/sandboxes:batch" and request.method == "DELETE":
            cancelled.set()
            wire.answer({})
        elif request.method == "DELETE":
            wire.answer(INFO)
        else:
            wire.stream()
            wire.item({"index": 0, "sandbox": info(0)})
            cancelled.wait()
            wire.item({"index": 1, "sandbox": info(1)})
            wire.item({"done": True})
            wire.end()

    server = serve(script)

    async def use(boxes: Any) -> None:
        raise ZeroDivisionError

    async def body() -> None:
        with pytest.raises(ZeroDivisionError):
            await enter(kit, kit.client(server.url).create_many(2), use)

    kit.run(body())
    batch = [request for request in server.requests if request.path == "/v1/sandboxes:batch"]
    assert len({request.key for request in batch}) == 1
    assert sum(request.path.startswith("/v1/sandboxes/sbx") for request in server.requests) == 2


def test_atomic_raises_what_failed(kit: Kit, serve: Serve) -> None:
    def script(request: Request, wire: Wire) -> None:
        wire.stream()
        wire.item({"index": 0, "error": {"code": "node_full", "message": "undone"}})
        wire.item({"done": True})
        wire.end()

    server = serve(script)

    async def body() -> None:
        with pytest.raises(dsec.CreateFailed, match="undone"):
            await enter(kit, kit.client(server.url).create_many(1, atomic=True), collect)

    kit.run(body())


def test_batch_outside_with_is_refused(kit: Kit) -> None:
    async def body() -> None:
        with pytest.raises(dsec.InvalidState, match="with client"):
            await collect(kit.client("unix:///none").create_many(1))

    kit.run(body())


def test_calls_of_a_sandbox(kit: Kit, serve: Serve) -> None:
    def script(request: Request, wire: Wire) -> None:
        if request.path.endswith("/usage"):
            wire.answer({"cpu_user_s": 1.5})
        elif request.path.endswith("/processes"):
            wire.answer({"programs": [{"id": "p-1", "kind": "run", "state": "running", "step": 2}], "processes": []})
        else:
            wire.answer({**INFO, "spec": {"network": {"npm": False}}})

    server = serve(script)

    async def body() -> None:
        sbx = kit.sandbox(server.url)
        await get(sbx.extend(600))
        await get(sbx.set_labels({"a": "b"}))
        await get(sbx.set_network({"pypi": False}))
        await get(sbx.patch_network(dsec.Policy(rules=(dsec.Rule(action="deny", mirror="npm"),))))
        assert (await get(sbx.usage())).cpu_user_s == 1.5
        assert (await get(sbx.processes())).programs[0].step == 2

    kit.run(body())
    sent = [(r.method, r.path.rpartition("/")[2], r.value() if r.body else None) for r in server.requests]
    assert sent == [
        ("POST", "extend", {"seconds": 600}),
        ("PUT", "labels", {"labels": {"a": "b"}}),
        ("PUT", "network", {"pypi": False}),
        ("PATCH", "network", {"version": 1, "rules": [{"action": "deny", "mirror": "npm"}]}),
        ("GET", "usage", None),
        ("GET", "processes", None),
    ]
    assert all((r.key is None) == (r.method == "GET") for r in server.requests)


def test_layers_node_and_jobs(kit: Kit, serve: Serve) -> None:
    layer = {"digest": "sha256:" + "0" * 64, "names": ["tools@1"]}

    def script(request: Request, wire: Wire) -> None:
        if request.path == "/v1/layers:import":
            wire.stream()
            wire.item({"progress": "packing"})
            wire.item({"layer": layer})
            wire.end()
        elif request.path == "/v1/layers":
            wire.answer({"items": [layer]})
        elif request.path == "/v1/capabilities":
            wire.answer({"container": {"backend": "container", "available": True}})
        elif request.path == "/v1/jobs/j:stop":
            wire.answer({"stopped": 4})
        else:
            wire.answer(layer)

    server = serve(script)
    said: list[str] = []

    async def body() -> None:
        client = kit.client(server.url)
        made = await get(client.layers.import_("dir:/x", "tools@1", role="toolkit", on_progress=said.append))
        assert made.names == ("tools@1",)
        for path in ("/x/root", "/x/root.tar", "/x.tar/root.tar.gz", "/x/root.tgz", "/x.tar/root"):
            await get(client.layers.import_(Path(path), "tools@1", user=1000, cwd=Path("/srv")))
        assert len(await get(client.layers.list())) == 1
        await get(client.layers.get("tools@1"))
        await get(client.layers.remove("a/b:1"))
        assert (await get(client.capabilities()))["container"].available
        assert await get(client.job("j").stop()) == 4

    kit.run(body())
    assert said == ["packing"]
    assert server.requests[0].value() == {"source": "dir:/x", "name": "tools@1", "role": "toolkit", "env": {}}
    paths, server.requests[1:6] = [request.value() for request in server.requests[1:6]], []
    assert [value["source"].partition(":")[0] for value in paths] == ["dir", "tar", "tar", "tar", "dir"]
    assert all((value["user"], value["cwd"]) == ("1000", "/srv") for value in paths)
    assert [r.path for r in server.requests[2:4]] == ["/v1/layers/tools%401", "/v1/layers/a%2Fb%3A1"]


def test_pickle_is_url_and_id_never_the_key(kit: Kit, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(lambda request, wire: wire.answer(INFO), tcp=True)

    async def body() -> None:
        client = kit.client(server.url, api_key="s3cret")
        sbx = await get(client.create())
        data = pickle.dumps(sbx)
        assert b"s3cret" not in data
        assert b"s3cret" not in pickle.dumps(client)
        assert "s3cret" not in repr(client) + repr(sbx)
        monkeypatch.setenv("DSEC_API_KEY", "other")
        again = pickle.loads(data)
        assert (again.id, again.state) == (sbx.id, None)
        assert (await get(again.info())).id == sbx.id

    kit.run(body())
    assert server.requests[-1].headers["authorization"] == "Bearer other"


def test_threads_share_a_client(serve: Serve) -> None:
    server = serve(lambda request, wire: wire.answer(result(0, request.value()["command"].encode())))
    sbx = Kit("sync").sandbox(server.url)
    wrong: list[str] = []

    def work(n: int) -> None:
        for i in range(50):
            if sbx.run(f"{n}.{i}").stdout != f"{n}.{i}":
                wrong.append(f"{n}.{i}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert server.connections <= 8


def test_forked_child_uses_connections_of_its_own(serve: Serve) -> None:
    server = serve(lambda request, wire: wire.answer(INFO))
    sbx = Kit("sync").sandbox(server.url)
    sbx.info()
    pid = os.fork()
    if pid == 0:
        try:
            ok = sbx.info().id == SANDBOX_ID
        finally:
            os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert sbx.info().id == SANDBOX_ID
    assert server.connections == 2


def test_async_client_works_in_one_loop_after_another(serve: Serve) -> None:
    server = serve(lambda request, wire: wire.answer(INFO))
    sbx = Kit("async").sandbox(server.url)
    for _ in range(3):
        assert asyncio.run(sbx.info()).id == SANDBOX_ID


def test_async_client_in_several_loops_at_once(serve: Serve) -> None:
    server = serve(lambda request, wire: wire.answer(INFO))
    sbx = Kit("async").sandbox(server.url)
    errors: list[BaseException] = []

    async def body() -> None:
        for _ in range(50):
            await sbx.info()

    def work() -> None:
        try:
            asyncio.run(body())
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert server.connections == 4


def test_many_tasks_at_once(serve: Serve) -> None:
    server = serve(lambda request, wire: wire.answer(result(0, request.value()["command"].encode())))

    async def body() -> None:
        sbx = Kit("async").sandbox(server.url)
        results = await asyncio.gather(*(sbx.run(str(n)) for n in range(200)))
        assert [r.stdout for r in results] == [str(n) for n in range(200)]

    asyncio.run(body())
