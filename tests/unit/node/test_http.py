"""The HTTP API against a server that really listens."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import json
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.model.errors import NodeFull
from dsec.model.states import RunResult, SandboxInfo
from dsec.node.agent import Node
from dsec.node.http import auth, exchange, openapi, server, streams
from dsec.node.http.routes import ROUTES
from tests.kit.aio import until
from tests.kit.simserver import SimServer

Scenario = Callable[[SimServer], Awaitable[None]]
MSGPACK = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., None]:
    def run(scenario: Scenario, guard: auth.Guard | None = None) -> None:
        async def main() -> None:
            async with SimServer(tmp_path, guard) as s:
                await scenario(s)

        uvloop.run(main())

    return run


async def create(s: SimServer, **spec: Any) -> str:
    status, body = await s.call("POST", "/v1/sandboxes", spec)
    assert status == 201, body
    return str(body["id"])


async def lines(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        item = json.loads(line)
        if item:
            yield item


def test_json_and_msgpack_say_the_same(serve):
    async def scenario(s: SimServer) -> None:
        id_ = await create(s, name="a", labels={"k": "v"})
        _, as_json = await s.call("GET", "/v1/sandboxes/a")
        async with s.http.get("/v1/sandboxes/a", headers=MSGPACK) as answer:
            packed = msgspec.msgpack.decode(await answer.read(), type=SandboxInfo)
        assert msgspec.convert(as_json, SandboxInfo).labels == packed.labels and packed.id == id_
        body = msgspec.msgpack.encode({"argv": [b"echo", b"\xff"]})
        async with s.http.post("/v1/sandboxes/a/run", data=body, headers={**MSGPACK, "Idempotency-Key": "k"}) as answer:
            result = msgspec.msgpack.decode(await answer.read(), type=RunResult)
        assert result.stdout_bytes == b"\xff\n"
        again = {"argv": ["ZWNobw==", "/w=="]}
        status, repeated = await s.call("POST", "/v1/sandboxes/a/run", again, "k")
        assert status == 200 and repeated["process_id"] == result.process_id

    serve(scenario)


def test_creating_with_a_key_and_finding(serve):
    async def scenario(s: SimServer) -> None:
        first = await s.call("POST", "/v1/sandboxes", {"name": "a"}, "k")
        again = await s.call("POST", "/v1/sandboxes", {"name": "a"}, "k")
        assert first[0] == again[0] == 201 and first[1]["id"] == again[1]["id"]
        status, error = await s.call("POST", "/v1/sandboxes", {"name": "b"}, "k")
        assert (status, error["code"]) == (409, "conflict")
        status, found = await s.call("POST", "/v1/sandboxes", {"name": "a", "if_exists": "get"})
        assert (status, found["id"]) == (200, first[1]["id"])
        status, page = await s.call("GET", "/v1/sandboxes?label=x=y")
        assert (status, page["items"]) == (200, [])

    serve(scenario)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "field"),
    [
        ("POST", "/v1/sandboxes", {"memory_mib": 0}, 400, "invalid_spec", "memory_mib"),
        ("POST", "/v1/sandboxes", {"memory_mib": "x"}, 400, "invalid_spec", "memory_mib"),
        ("POST", "/v1/sandboxes", {"nonsense": 1}, 400, "invalid_spec", "nonsense"),
        ("POST", "/v1/sandboxes", [], 400, "invalid_spec", None),
        ("POST", "/v1/sandboxes", {"base": "missing"}, 400, "invalid_spec", "base"),
        ("POST", "/v1/sandboxes", {"network": {"pypi": True}}, 422, "unsupported", None),
        ("POST", "/v1/sandboxes", {"network": {f"n{i}": False for i in range(257)}}, 400, "invalid_spec", "network"),
        ("POST", "/v1/sandboxes", {"network": {"a" * 129: False}}, 400, "invalid_spec", "network"),
        ("POST", "/v1/sandboxes", {"network": {"pypi": "yes"}}, 400, "invalid_spec", "network.pypi"),
        ("POST", "/v1/sandboxes", {"network": {"version": 1, "profile": "p"}}, 400, "invalid_spec", "network.profile"),
        ("POST", "/v1/sandboxes", {"network": {"version": 1, "rules": [{}]}}, 400, "invalid_spec", "network.rules[0]"),
        ("PUT", "/v1/sandboxes/x/network", {"version": 1, "expose": [0]}, 400, "invalid_spec", "network.expose"),
        ("POST", "/v1/sandboxes", {"snapshot": "x" * 1025}, 400, "invalid_spec", "snapshot"),
        ("PUT", "/v1/sandboxes/x/network", {f"n{i}": False for i in range(257)}, 400, "invalid_spec", "network"),
        ("POST", "/v1/layers:import", {"source": "dir:/x", "env": {"A=B": "x"}}, 400, "invalid_spec", "env"),
        ("POST", "/v1/layers:import", {"source": "dir:/x", "env": {"A": "x\0"}}, 400, "invalid_spec", "env"),
        ("POST", "/v1/layers:import", {"source": "dir:/x", "cwd": "relative"}, 400, "invalid_spec", "cwd"),
        ("POST", "/v1/layers:import", {"source": "dir:/x", "user": "a b"}, 400, "invalid_spec", "user"),
        ("GET", "/v1/sandboxes/nobody", None, 404, "not_found", None),
        ("GET", "/v1/sandboxes/..", None, 404, "not_found", None),
        ("GET", "/v1/sandboxes/%00", None, 400, "invalid_spec", "sandbox"),
        ("GET", "/v1/sandboxes/%ff", None, 400, "invalid_spec", "path"),
        ("GET", "/v1/sandboxes/" + "x" * 300, None, 400, "invalid_spec", "sandbox"),
        ("GET", "/v1/sandboxes?limit=x", None, 400, "invalid_spec", "limit"),
        ("GET", "/v1/sandboxes?limit=0", None, 400, "invalid_spec", "limit"),
        ("GET", "/v1/sandboxes?state=dead", None, 400, "invalid_spec", "state"),
        ("GET", "/v1/sandboxes?nonsense=1", None, 400, "invalid_spec", "query"),
        ("DELETE", "/v1/sandboxes/x?grace_s=nan", None, 400, "invalid_spec", "grace_s"),
        ("GET", "/v1/nothing", None, 404, "not_found", None),
        ("PATCH", "/v1/sandboxes", None, 405, "unsupported", None),
        ("POST", "/v1/sandboxes:batch", {"count": 0, "spec": {}}, 400, "invalid_spec", "count"),
        ("POST", "/v1/sandboxes:batch", {}, 400, "invalid_spec", "specs"),
        ("POST", "/v1/jobs/%2e%2e:stop", None, 400, "invalid_spec", "job"),
        ("DELETE", "/v1/layers/missing", None, 404, "not_found", None),
        ("DELETE", "/v1/sandboxes:batch", None, 400, "invalid_spec", "Idempotency-Key"),
    ],
)
def test_bad_input_is_refused_by_name(serve, method, path, body, status, code, field):
    async def scenario(s: SimServer) -> None:
        got, error = await s.call(method, path, body)
        assert (got, error["code"]) == (status, code), error
        assert field is None or error["detail"]["field"] == field, error
        assert error["request_id"].startswith("r-") and error["retry"] and error["message"]

    serve(scenario)


def test_the_log_has_a_line_for_what_the_node_could_not_do_and_none_for_what_was_wrong(serve, caplog, monkeypatch):
    async def full(*_: object) -> None:
        raise NodeFull("no room")

    caplog.set_level("WARNING", "dsec.node.http")

    async def scenario(s: SimServer) -> None:
        status, wrong = await s.call("POST", "/v1/sandboxes", {"memory_mib": 1})
        assert status == 400
        monkeypatch.setattr(Node, "create", full)
        status, failed = await s.call("POST", "/v1/sandboxes", {})
        assert status == 503
        [line] = [record.getMessage() for record in caplog.records if record.name == "dsec.node.http"]
        assert failed["request_id"] in line and "POST /v1/sandboxes: node_full" in line
        assert wrong["request_id"] not in line

    serve(scenario)


def test_streaming_sends_output_then_the_result(serve):
    async def scenario(s: SimServer) -> None:
        await create(s, name="a")
        body = {"command": "echo one; echo two >&2; exit 5"}
        async with s.http.post("/v1/sandboxes/a/run?stream=1", json=body, headers={"Idempotency-Key": "k"}) as answer:
            items = [item async for item in lines(answer)]
        assert items[0]["step"] == 1 and items[0]["started"].startswith("p-")
        assert [(i["stream"], i["offset"], i["data"]) for i in items[1:3]] == [(1, 0, "b25lCg=="), (2, 0, "dHdvCg==")]
        assert items[-1]["result"]["exit_code"] == 5
        # The same key again, from an offset.
        async with s.http.post(
            "/v1/sandboxes/a/run?stream=1&stdout_offset=2", json=body, headers={"Idempotency-Key": "k"}
        ) as answer:
            again = [item async for item in lines(answer)]
        assert again[0] == items[0] and again[-1] == items[-1]
        assert [(i["stream"], i["offset"], i["data"]) for i in again[1:3]] == [(1, 2, "ZQo="), (2, 0, "dHdvCg==")]

    serve(scenario)


def test_a_second_reader_joins_and_a_vanished_one_stops_nothing(serve):
    async def scenario(s: SimServer) -> None:
        await create(s, name="a")
        body = {"command": "echo one; sleep 1; echo two"}
        headers = {"Idempotency-Key": "k"}
        first = await s.http.post("/v1/sandboxes/a/run?stream=1", json=body, headers=headers)
        reader = lines(first)
        started = await anext(reader)
        assert (await anext(reader))["data"] == "b25lCg=="
        async with s.http.post("/v1/sandboxes/a/run?stream=1", json=body, headers=headers) as second:
            first.close()  # vanishes
            items = [item async for item in lines(second)]
        assert items[0] == started
        assert b"".join(base64.b64decode(i["data"]) for i in items if "data" in i) == b"one\ntwo\n"
        status, result = await s.call("POST", "/v1/sandboxes/a/run", body, "k")
        assert (status, result["process_id"]) == (200, started["started"])

    serve(scenario)


def test_a_buffered_caller_that_vanishes_finds_its_result(serve):
    async def scenario(s: SimServer) -> None:
        await create(s, name="a")
        body = {"command": "sleep 0.3; echo done"}
        task = asyncio.ensure_future(s.call("POST", "/v1/sandboxes/a/run", body, "k"))
        await until(lambda: s.world.faults.calls["run"] == 1)
        task.cancel()
        status, result = await s.call("POST", "/v1/sandboxes/a/run", body, "k")
        assert (status, result["out"]["head"]) == (200, "ZG9uZQo=")
        assert s.world.faults.calls["run"] == 1

    serve(scenario)


def test_silence_is_filled_with_empty_items(serve, monkeypatch):
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.05)

    async def scenario(s: SimServer) -> None:
        await create(s, name="a")
        async with s.http.post("/v1/sandboxes/a/run?stream=1", json={"command": "sleep 3"}) as answer:
            seen = [json.loads(await answer.content.readline()) for _ in range(2)]
        assert seen[1] == {}

    monkeypatch.setattr("dsec.node.http.exchange.HEARTBEAT_S", 0.05)
    serve(scenario)


def test_a_reader_that_does_not_read_holds_the_program_not_the_node(serve):
    async def scenario(s: SimServer) -> None:
        await create(s, name="a")
        reader, writer = await asyncio.open_unix_connection(str(s.path), limit=1024)
        body = json.dumps({"command": "yes"}).encode()
        writer.write(
            b"POST /v1/sandboxes/a/run?stream=1 HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        assert b"200" in await reader.readline()
        await until(lambda: s.world.faults.calls["run"] == 1)
        for _ in range(20):
            status, result = await s.call("POST", "/v1/sandboxes/a/run", {"command": ["true"]})
            assert (status, result["exit_code"]) == (200, 0)
        (process,) = (await s.call("GET", "/v1/sandboxes/a/processes"))[1]["programs"]
        await s.call("POST", f"/v1/sandboxes/a/processes/{process['id']}/kill")
        writer.close()

    serve(scenario)


@pytest.mark.parametrize("number", ["1_0", "+1", " 1", "0x1", "9223372036854775808", "1e400", "nan", "\u0661"])
def test_numbers_are_plain_and_bounded(serve, number):
    async def scenario(s: SimServer) -> None:
        await create(s, name="a")
        program = (await s.call("POST", "/v1/sandboxes/a/processes", {"command": ["cat"]}))[1]
        path = f"/v1/sandboxes/a/processes/{program['id']}/output?follow=0&stdout_offset={quote(number)}"
        status, error = await s.call("GET", path)
        assert (status, error["code"], error["detail"]["field"]) == (400, "invalid_spec", "stdout_offset")

    serve(scenario)


def test_what_is_read_raw_has_no_byte_that_is_not_the_programs(serve, monkeypatch):
    for module in (exchange, streams):
        monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)

    async def scenario(s: SimServer) -> None:
        await create(s, name="a")
        program = (await s.call("POST", "/v1/sandboxes/a/processes", {"command": "echo one; sleep 1; echo two"}))[1]
        async with s.http.get(f"/v1/sandboxes/a/processes/{program['id']}/output?raw=1&follow=1") as answer:
            assert answer.headers["x-dsec-offset"] == "0"
            assert await answer.read() == b"one\ntwo\n"

    serve(scenario)


def test_batches_stream_and_can_be_cancelled(serve):
    async def scenario(s: SimServer) -> None:
        async with s.http.post("/v1/sandboxes:batch", json={"count": 40, "spec": {"job": "j"}}) as answer:
            items = [item async for item in lines(answer)]
        assert sorted(item["index"] for item in items[:-1]) == list(range(40))
        assert items[-1] == {"done": True, "created": 40, "failed": 0}
        bad = {"specs": [{}, {"base": "missing"}], "atomic": True}
        async with s.http.post("/v1/sandboxes:batch", json=bad) as answer:
            items = [item async for item in lines(answer)]
            asked = answer.headers["X-Request-Id"]
        assert items[-1] == {"done": True, "created": 0, "failed": 2} and items[1]["error"]["code"] == "invalid_spec"
        assert [item["error"]["request_id"] for item in items[:-1]] == [asked, asked]
        assert len(s.world.sandboxes) == 40
        assert (await s.call("POST", "/v1/jobs/j:stop"))[1] == {"stopped": 40}
        s.world.faults.delay_s["start"] = 0.5
        answer = await s.http.post(
            "/v1/sandboxes:batch", json={"count": 100, "spec": {}}, headers={"Idempotency-Key": "b"}
        )
        assert (await s.call("DELETE", "/v1/sandboxes:batch", None, "b"))[0] == 200
        items = [item async for item in lines(answer)]
        assert items[-1]["created"] + items[-1]["failed"] == 100 and items[-1]["failed"] >= 84
        await until(lambda: len(s.world.sandboxes) == items[-1]["created"])
        assert (await s.call("DELETE", "/v1/sandboxes:batch", None, "b"))[0] == 404

    serve(scenario)


def test_layers(serve):
    async def scenario(s: SimServer) -> None:
        async with s.http.post("/v1/layers:import", json={"source": "dir:/x", "name": "w@1"}) as answer:
            items = [item async for item in lines(answer)]
        assert "progress" in items[0] and items[-1]["layer"]["names"] == ["w@1"]
        assert (await s.call("GET", "/v1/layers"))[1]["items"][0].get("in_use", 0) == 0
        assert (await s.call("DELETE", "/v1/layers/w%401", None, "k"))[0] == 200
        assert (await s.call("DELETE", "/v1/layers/w%401", None, "k"))[0] == 200

    serve(scenario)


def test_the_socket_is_private_and_its_peer_is_checked(serve, monkeypatch):
    async def scenario(s: SimServer) -> None:
        assert s.path.stat().st_mode & 0o777 == 0o600
        assert (await s.call("GET", "/v1/health"))[0] == 200
        monkeypatch.setattr(server, "peer_allowed", lambda sock: False)
        assert await s.raw(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n") == b""

    serve(scenario)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_another_user_is_refused(serve):
    async def scenario(s: SimServer) -> None:
        s.path.chmod(0o777)
        for parent in [s.path.parent, *s.path.parent.parents][:-1]:
            parent.chmod(parent.stat().st_mode | 0o111)
        code = (
            "import os,socket,sys\nos.setuid(65534)\ns=socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n"
            "try:\n"
            " s.sendall(b'GET /v1/health HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')\n"
            " got=s.recv(100)\n"
            "except ConnectionError: got=b''\nsys.exit(bool(got))\n"
        )
        child = await asyncio.create_subprocess_exec("/usr/bin/env", "python3", "-c", code, str(s.path))
        assert await child.wait() == 0

    serve(scenario)


def test_tcp_takes_only_a_key(serve, tmp_path):
    guard, key = auth.load_tokens(tmp_path / "tokens")
    assert key is not None and (tmp_path / "tokens").stat().st_mode & 0o777 == 0o600
    assert key not in (tmp_path / "tokens").read_text()
    assert auth.load_tokens(tmp_path / "tokens")[1] is None

    async def scenario(s: SimServer) -> None:
        url = f"http://127.0.0.1:{s.port}/v1/"
        async with aiohttp.ClientSession() as http:
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer wrong"}, 401),
                ({"Authorization": f"Basic {key}"}, 401),
                ({"Authorization": f"Bearer {hashlib.sha256(key.encode()).hexdigest()}"}, 401),
                ({"Authorization": f"Bearer {key}"}, 200),
            ):
                async with http.get(url + "node", headers=headers) as answer:
                    assert answer.status == status
            async with http.get(url + "health") as answer:
                assert answer.status == 200

    serve(scenario, guard)


def test_who_stopped_it_is_said(serve, tmp_path):
    keys = {"named": "# ci\n", "bare": "\n"}
    hashes = {key: hashlib.sha256(key.encode()).hexdigest() for key in keys}
    (tmp_path / "tokens").write_text("".join(hashes[key] + rest for key, rest in keys.items()))
    guard, _ = auth.load_tokens(tmp_path / "tokens")

    async def scenario(s: SimServer) -> None:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{s.port}") as http:
            for key, who in (("named", "key ci"), ("bare", f"key {hashes['bare'][:8]}")):
                ref = await create(s)
                headers = {"Authorization": f"Bearer {key}"}
                async with http.delete(f"/v1/sandboxes/{ref}", headers=headers) as answer:
                    assert (await answer.json())["ended_by"] == f"stop by {who}"
        await create(s, job="j", name="a")
        assert await s.call("POST", "/v1/jobs/j:stop") == (200, {"stopped": 1})
        _, info = await s.call("GET", "/v1/sandboxes/a")
        assert info["ended_by"] == f"job stop by uid {os.geteuid()}"

    serve(scenario, guard)


def test_a_key_that_cannot_be_kept_leaves_no_file_of_tokens(tmp_path):
    def full(key: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        auth.load_tokens(tmp_path / "tokens", full)
    assert not list(tmp_path.iterdir())
    kept: list[str] = []
    assert auth.load_tokens(tmp_path / "tokens", kept.append)[1] == kept[0]


def test_a_client_that_drips_is_cut_off(serve, monkeypatch):
    monkeypatch.setattr(server, "REQUEST_DEADLINE_S", 0.2)
    monkeypatch.setattr(server, "_SWEEP_S", 0.05)

    async def scenario(s: SimServer) -> None:
        for start in (b"", b"GET /v1/health HT", b"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"):
            reader, writer = await asyncio.open_unix_connection(str(s.path))
            writer.write(start)
            async with asyncio.timeout(10):
                try:
                    while await reader.read(1000):
                        pass
                except ConnectionError:
                    pass
            writer.close()
        # One that waits for a long answer is not dripping.
        await create(s, name="a")
        status, result = await s.call("POST", "/v1/sandboxes/a/run", {"command": "sleep 0.8"})
        assert (status, result["exit_code"]) == (200, 0)

    serve(scenario)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01garbage",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/health HTTP/1.1\r\n" + b"X-A: " + b"y" * 40_000,
        b"GET /v1/health HTTP/1.1\r\n" + b"X-A: y\r\n" * 10_000,
        b"GET /" + b"x" * 50_000,
        b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_malformed_requests_end_their_connection_only(serve, data):
    async def scenario(s: SimServer) -> None:
        got = await s.raw(data, until_closed=False)
        if got:
            assert got.split(b" ")[1] == b"400", got[:100]
            assert json.loads(got.partition(b"\r\n\r\n")[2])["code"] == "invalid_spec", got
        assert (await s.call("GET", "/v1/health"))[0] == 200

    serve(scenario)


def test_a_head_goes_with_the_first_bytes_of_its_body():
    class Wire(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            sent.append(bytes(data))

    sent: list[bytes] = []
    go_on, head, big = b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 100_000
    whole = server.WholeResponse(Wire())
    for data in (go_on, head, b"body", b"more"):
        whole.write(data)
    assert sent == [go_on, head + b"body", b"more"]
    sent.clear()
    whole = server.WholeResponse(Wire())
    for data in (head, big):
        whole.write(data)
    assert sent == [head, big]


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"HEAD /v1/health HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 405 "),
        (b"PUT /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 405 "),
        (
            b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n",
            b"HTTP/1.1 100 ",
        ),
    ],
)
def test_a_head_without_a_body_does_not_wait_for_one(serve, data, wanted):
    async def scenario(s: SimServer) -> None:
        assert (await s.raw(data, until_closed=False)).startswith(wanted)

    serve(scenario)


def test_a_body_beyond_the_limit_is_refused(serve, monkeypatch):
    monkeypatch.setattr("dsec.node.http.exchange.REQUEST_MAX_BYTES", 1000)

    async def scenario(s: SimServer) -> None:
        status, error = await s.call("POST", "/v1/sandboxes", {"env": {"A": "x" * 2000}})
        assert (status, error["detail"]["field"]) == (400, "body")

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b" " * 100

        async with s.http.post("/v1/sandboxes", data=chunks(), headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 400

    serve(scenario)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_nothing_a_client_sends_makes_a_500(tmp_path_factory, data):
    body = data.draw(
        st.one_of(
            st.binary(max_size=200),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
            ).map(lambda value: json.dumps(value).encode()),
        )
    )
    route = data.draw(st.sampled_from(ROUTES))
    kind = data.draw(st.sampled_from(["application/json", "application/msgpack", "text/plain", ""]))
    query = data.draw(st.sampled_from(["", "?stream=1", "?limit=5", "?stdout_offset=-1", "?=", "?%ff=1"]))

    async def main() -> None:
        async with (
            SimServer(tmp_path_factory.mktemp("n")) as s,
            s.http.request(route.method, route.path + query, data=body, headers={"Content-Type": kind}) as answer,
        ):
            assert answer.status < 500, await answer.text()
            assert answer.headers["X-Request-Id"]

    uvloop.run(main())


def test_msgpack_streams_are_framed(serve):
    async def scenario(s: SimServer) -> None:
        await create(s, name="a")
        body = msgspec.msgpack.encode({"command": "echo hi"})
        async with s.http.post("/v1/sandboxes/a/run?stream=1", data=body, headers=MSGPACK) as answer:
            assert answer.content_type == "application/vnd.dsec.msgpack-seq"
            raw = await answer.read()
        items = []
        while raw:
            (length,) = struct.unpack(">I", raw[:4])
            items.append(msgspec.msgpack.decode(raw[4 : 4 + length]))
            raw = raw[4 + length :]
        assert items[1]["data"] == b"hi\n" and items[-1]["result"]["exit_code"] == 0

    serve(scenario)


def test_the_committed_document_is_current():
    committed = Path(__file__).parents[3] / "docs/reference/openapi.json"
    assert committed.read_bytes() == openapi.text(), (
        "run: python -m dsec.node.http.openapi > docs/reference/openapi.json"
    )
