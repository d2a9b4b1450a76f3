"""Sandboxes from create to their end: states, names, limits, races."""

from __future__ import annotations

import asyncio
import errno

import pytest

from dsec.model import failpoint
from dsec.model.errors import (
    Conflict,
    DsecError,
    InvalidSpec,
    InvalidState,
    LaunchFailed,
    NodeDiskFull,
    NotFound,
    Rejected,
    SandboxLost,
    Unavailable,
    Unsupported,
)
from dsec.model.specs import Spec
from dsec.node.agent import Query
from dsec.node.layers import ImportRequest
from tests.kit.aio import until
from tests.kit.simnode import SimNode


def test_create_run_stop(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(name="a", job="j", labels={"k": "v"})
        info = await s.node.get("a")
        assert (info.id, info.state, info.name, info.job) == (id_, "running", "a", "j")
        result = await s.run("a", "echo hi; exit 3")
        assert (result.exit_code, result.stdout, result.step) == (3, "hi\n", 1)
        assert (await s.run(id_, ["true"])).step == 2
        stopped = await s.node.stop("a")
        assert (stopped.state, stopped.end_reason) == ("stopped", "stopped")
        assert await s.node.stop(id_) == stopped
        assert (await s.node.get("a")).state == "stopped"
        with pytest.raises(SandboxLost, match="a call stopped it") as caught:
            await s.run(id_, ["true"])
        assert (caught.value.end_reason, caught.value.detail["ended_by"], caught.value.retry) == (
            "stopped",
            "stop",
            "never",
        )
        s.check()
        assert not s.world.inventory()

    sim(scenario)


def test_a_full_disk_does_not_keep_a_sandbox_from_being_stopped(sim, monkeypatch):
    """What it holds is what fills the disk: it is released first, and then there is room to write that it was."""

    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        store = s.node.core.store
        commit = store.commit

        def full(*statements: object, **options: object) -> object:
            if not s.world.inventory():
                return commit(*statements, **options)  # type: ignore[arg-type]  # passed on as it came
            future = asyncio.get_running_loop().create_future()
            future.set_exception(NodeDiskFull("full"))
            return future

        monkeypatch.setattr(store, "commit", full)
        assert (await s.node.stop(id_)).state == "stopped"
        monkeypatch.undo()
        s.check()
        assert not s.world.inventory()

    sim(scenario)


def test_a_stop_on_a_full_disk_is_done_and_told(sim, monkeypatch):
    """What was released cannot be taken back: the answer comes from memory, and is written when there is room."""

    async def scenario(s: SimNode) -> None:
        by_id, by_name = await s.create(), await s.create(name="a", lifetime_s=100)
        store = s.node.core.store
        monkeypatch.setattr(store, "_attempt", lambda statements: OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(NodeDiskFull):
            await s.node.set_labels(by_id, {"k": "v"})
        with pytest.raises(NodeDiskFull):
            await s.node.extend(by_name, 50)
        assert (await s.node.get(by_id)).labels == {}
        assert (await s.node.get(by_name)).expires_at == pytest.approx(s.clock.wall() + 100)
        for _ in range(2):
            assert (await s.node.stop(by_id)).state == "stopped"
            stopped = await s.node.stop("a", "key-of-the-stop", caller="uid 7")
            assert (stopped.id, stopped.state, stopped.ended_by) == (by_name, "stopped", "stop by uid 7")
        assert not s.world.inventory()
        listed = await s.node.find(Query(states={"stopped"}))
        assert {info.id for info in listed.items} == {by_id, by_name}
        with pytest.raises(NodeDiskFull):
            await s.create(name="a")
        monkeypatch.undo()
        # The name is free at once: what is owed is written before.
        another = await s.create(name="a")
        assert (await s.node.stop("a", "key-of-the-stop")).id == by_name
        await s.restart()
        assert [(await s.node.get(id_)).state for id_ in (by_id, by_name, another)] == ["stopped", "stopped", "running"]
        s.check()

    sim(scenario)


def test_what_is_owed_is_written_without_anybodys_call(sim, monkeypatch):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        store = s.node.core.store
        monkeypatch.setattr(store, "_attempt", lambda statements: OSError(errno.ENOSPC, "No space left on device"))
        await s.node.stop(id_)
        await s.clock.advance(20)
        assert store.owes
        monkeypatch.undo()
        await s.clock.advance(20)
        assert not store.owes
        s.check()

    sim(scenario)


def test_a_killed_run_is_not_listed_any_more(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        for _ in range(20):
            running = asyncio.ensure_future(s.run(id_, ["sleep", "1000"]))
            box = s.node.core.boxes[id_]
            await until(lambda box=box: any(flight.launched for flight in box.flights.values()))
            (process,) = (await s.node.programs.list(id_)).programs
            await s.node.kill(id_, process.id)
            assert (await s.node.programs.list(id_)).programs == []
            assert (await running).cause == "killed"
        s.check()

    sim(scenario)


def test_names_are_unique_among_the_living(sim):
    async def scenario(s: SimNode) -> None:
        first = await s.create(name="a")
        with pytest.raises(Conflict):
            await s.create(name="a")
        found = await s.node.create(Spec(name="a", if_exists="get"))
        assert (found.info.id, found.made) == (first, False)
        await s.node.stop("a")
        assert await s.create(name="a") != first
        s.check()

    sim(scenario)


def test_many_at_once_under_one_name_make_one(sim):
    async def scenario(s: SimNode) -> None:
        spec = Spec(name="a", if_exists="get")
        made = await asyncio.gather(*(s.node.create(spec) for _ in range(20)))
        assert len({created.info.id for created in made}) == 1
        assert sum(created.made for created in made) == 1
        s.check()

    sim(scenario)


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"base": "missing"}, InvalidSpec, "base"),
        ({"toolkits": ["missing@1"]}, InvalidSpec, "toolkits"),
        ({"workspace": "debian:12"}, InvalidSpec, "workspace"),
        ({"toolkits": ["harness@7", "harness@7"]}, InvalidSpec, "toolkits"),
        ({"memory_mib": 0}, InvalidSpec, "memory_mib"),
        ({"cpu": float("nan")}, InvalidSpec, "cpu"),
        ({"name": ".."}, InvalidSpec, "name"),
        ({"name": "x" * 300}, InvalidSpec, "name"),
        ({"labels": {"a": "\0"}}, InvalidSpec, "labels"),
        ({"network": {"pypi": True}}, Unsupported, None),
        ({"network": {"version": 1, "phases": {"setup": {"expose": [80]}}}}, Unsupported, None),
        ({"image": "docker://x"}, Unsupported, None),
        ({"snapshot": "x"}, Unsupported, None),
        ({"on_idle": "pause"}, Unsupported, None),
        ({"backend": "vm"}, Unsupported, None),
    ],
)
def test_what_is_refused_leaves_nothing(sim, fields, error, named):
    async def scenario(s: SimNode) -> None:
        with pytest.raises(error) as caught:
            await s.create(**fields)
        assert named is None or caught.value.detail["field"] == named
        s.check()
        assert not s.rows() and not s.open_steps() and not s.world.inventory()

    sim(scenario)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"base": "missing"}, "a layer of this node (there is every other); `dsec layer import` makes one"),
        ({"image": "python:3.12"}, "base= (--base) names a layer of the node, and `docker export` with `dsec layer"),
    ],
)
def test_what_is_refused_says_what_to_do(sim, fields, told):
    async def scenario(s: SimNode) -> None:
        with pytest.raises(Rejected) as caught:
            await s.create(**fields)
        assert told in caught.value.message

    sim(scenario)


def test_a_failed_start_leaves_nothing_and_frees_its_key(sim):
    async def scenario(s: SimNode) -> None:
        s.world.faults.fail("start", LaunchFailed("no"))
        with pytest.raises(LaunchFailed):
            await s.create("k", name="a")
        s.check()
        assert not s.rows() and not s.open_steps()
        assert await s.create("k", name="a")

    sim(scenario)


def test_a_lifetime_ends_exactly_and_can_be_extended(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(lifetime_s=100, idle_timeout_s=None)
        await s.clock.advance(99.9)
        assert (await s.node.get(id_)).state == "running"
        before = (await s.node.get(id_)).expires_at
        after = (await s.node.extend(id_, 50, "e")).expires_at
        assert (await s.node.extend(id_, 50, "e")).expires_at == after  # the same call again moves nothing
        assert before is not None and after == pytest.approx(before + 50)
        await s.clock.advance(50)
        assert (await s.node.get(id_)).state == "running"
        await s.clock.advance(0.2)
        info = await s.node.get(id_)
        assert (info.state, info.end_reason) == ("stopped", "lifetime")
        s.check()

    sim(scenario)


def test_idle_counts_from_the_end_of_the_last_run(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(idle_timeout_s=10, lifetime_s=None)
        run = asyncio.ensure_future(s.run(id_, "sleep 60"))
        await s.clock.advance(59)
        assert (await s.node.get(id_)).idle_since is None
        await s.clock.advance(1.5)
        assert (await run).ok
        await s.clock.advance(9)
        assert (await s.node.get(id_)).state == "running"
        await s.clock.advance(1)
        info = await s.node.get(id_)
        assert (info.state, info.end_reason) == ("stopped", "idle")
        assert not len(s.node.core.deadlines)

    sim(scenario)


def test_a_wall_clock_that_jumps_moves_no_limit(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(lifetime_s=100, idle_timeout_s=None)
        s.clock.wall_offset += 1_000_000
        await s.clock.advance(50)
        await s.restart()
        await s.clock.advance(49)
        assert (await s.node.get(id_)).state == "running"
        await s.clock.advance(2)
        assert (await s.node.get(id_)).end_reason == "lifetime"

    sim(scenario)


def test_a_sandbox_that_ends_by_itself_is_lost_and_its_room_free(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(name="a")
        run = asyncio.ensure_future(s.run(id_, "sleep 100"))
        await s.clock.settle()
        s.world.lose(id_, "oom", "killed")
        with pytest.raises(SandboxLost):
            await run
        await s.clock.settle()
        info = await s.node.get(id_)
        assert (info.state, info.end_reason) == ("lost", "oom")
        with pytest.raises(SandboxLost):
            await s.run(id_, ["true"])
        s.check()
        assert await s.create(name="a")

    sim(scenario)


@pytest.mark.parametrize("reason", ["idle", "lifetime", "stopped", "oom"])
def test_every_call_after_the_end_says_the_same(sim, reason):
    """One class, the true reason, retry never; for a run in flight as for whatever comes later."""

    async def scenario(s: SimNode) -> None:
        limits = {"idle": {"idle_timeout_s": 5}, "lifetime": {"lifetime_s": 5}}.get(reason, {})
        id_ = await s.create(job="j", **limits)
        runs = [] if reason == "idle" else [asyncio.ensure_future(s.run(id_, "sleep 100", key="k"))]
        await s.clock.settle()
        if reason == "stopped":
            assert await s.node.stop_job("j") == 1
        elif reason == "oom":
            s.world.lose(id_, "oom", "killed")
        else:
            await s.clock.advance(6)
        await s.clock.settle()
        info = await s.node.get(id_)
        assert (info.end_reason, info.ended_by) == (reason, "job stop" if reason == "stopped" else None)
        later = (
            lambda: s.run(id_, ["true"]),
            lambda: s.node.extend(id_, 10),
            lambda: s.node.set_labels(id_, {}),
            lambda: s.node.set_network(id_, {}),
            lambda: s.node.usage(id_),
            lambda: s.node.programs.list(id_),
            lambda: s.node.kill(id_, "p-none"),
            *([lambda: s.run(id_, "sleep 100", key="k")] if runs else []),
        )
        for waiting in (*runs, *(call() for call in later)):
            with pytest.raises(SandboxLost) as caught:
                await waiting
            assert (caught.value.end_reason, caught.value.retry) == (reason, "never")
            assert caught.value.sandbox_id == id_
            assert reason in caught.value.message

    sim(scenario)


def test_stops_at_once_stop_once(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create()
        run = asyncio.ensure_future(s.run(id_, "sleep 100"))
        await s.clock.settle()
        infos = await asyncio.gather(*(s.node.stop(id_) for _ in range(10)))
        assert {(info.state, info.ended_at) for info in infos} == {("stopped", infos[0].ended_at)}
        assert s.world.faults.calls["stop"] == 1
        with pytest.raises(SandboxLost):
            await run
        s.check()

    sim(scenario)


def test_a_stop_that_fails_is_tried_again(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(name="a")
        s.world.faults.fail("stop", LaunchFailed("busy"))
        with pytest.raises(LaunchFailed):
            await s.node.stop(id_)
        with pytest.raises(SandboxLost):
            await s.run(id_, ["true"])
        await s.clock.advance(6)
        assert (await s.node.get(id_)).state == "stopped"
        s.check()

    sim(scenario)


def test_stopping_one_that_is_being_made_undoes_it(sim):
    async def scenario(s: SimNode) -> None:
        s.world.faults.delay_s["start"] = 5
        creation = asyncio.ensure_future(s.create(name="a"))
        await s.clock.settle()
        info = await s.node.stop("a")
        assert info.state == "stopped"
        with pytest.raises(InvalidState):
            await creation
        s.check()
        assert not s.world.inventory() and not s.rows()

    sim(scenario)


@pytest.mark.parametrize(("field", "value"), [("cwd", "/nowhere"), ("user", "bob")])
def test_a_directory_or_user_that_is_not_there_is_refused_at_creation(sim, field, value):
    async def scenario(s: SimNode) -> None:
        with pytest.raises(InvalidSpec) as caught:
            await s.create(**{field: value})
        assert caught.value.detail["field"] == field
        assert not s.world.inventory() and not s.rows()
        for error in [error async for _, error in s.node.create_many([Spec.build(**{field: value})])]:
            assert isinstance(error, InvalidSpec)
        s.check()

    sim(scenario)


@pytest.mark.parametrize(("field", "value"), [("cwd", "/nowhere"), ("user", "bob")])
def test_what_a_layer_sets_and_is_not_there_is_refused_at_creation_by_the_layers_name(sim, field, value):
    async def scenario(s: SimNode) -> None:
        for name, sets in (("repo@1", {field: value}), ("repo@2", {"env": {"A": "1"}})):
            await s.node.import_layer(ImportRequest(source="dir:/x", name=name, role="workspace", **sets), print)
        for fields in ({}, {"toolkits": ["harness@7"]}):
            with pytest.raises(InvalidSpec, match=f"workspace='repo@1'.*{field}.*{value}") as caught:
                await s.create(workspace="repo@1", **fields)
            assert caught.value.detail["field"] == "workspace"
            assert not s.world.inventory() and not s.rows()
        # One of the sandbox's own stands above the layer's; then the layer is not to blame.
        assert await s.create(workspace="repo@1", **{field: "/" if field == "cwd" else "root"})
        with pytest.raises(InvalidSpec) as caught:
            await s.create(workspace="repo@1", **{field: "/none" if field == "cwd" else "eve"})
        assert caught.value.detail["field"] == field
        assert await s.create(workspace="repo@2")

    sim(scenario)


def test_a_layer_stands_only_where_its_role_allows(sim):
    async def scenario(s: SimNode) -> None:
        for name in ("harness@7", "repo@1"):
            role = "toolkit" if name == "harness@7" else "workspace"
            await s.node.import_layer(ImportRequest(source="dir:/x", name=name, role=role), print)
        for field, value in (("base", "harness@7"), ("workspace", "harness@7"), ("toolkits", ["repo@1"])):
            with pytest.raises(InvalidSpec, match="with the role") as caught:
                await s.create(**{field: value})
            assert caught.value.detail["field"] == field
        assert await s.create(workspace="repo@1", toolkits=["harness@7"])

    sim(scenario)


def test_a_layer_stands_once_in_a_stack_whatever_it_is_called(sim):
    async def scenario(s: SimNode) -> None:
        layer = await s.node.import_layer(ImportRequest(source="dir:/x", name="repo@1", role="base"), print)
        with pytest.raises(InvalidSpec, match=f"base='repo@1' .*{layer.digest}") as caught:
            await s.create(base="repo@1", workspace=layer.digest)
        assert (caught.value.detail["field"], caught.value.retry) == ("workspace", "never")
        assert not s.world.inventory() and not s.rows()

    sim(scenario)


def test_lists_page_and_filter(sim):
    async def scenario(s: SimNode) -> None:
        ids = sorted([await s.create(job="j" if i % 2 else None, labels={"n": str(i % 3)}) for i in range(10)])
        seen, cursor = [], ""
        while True:
            page = await s.node.find(Query(limit=3, cursor=cursor))
            seen += [info.id for info in page.items]
            if page.next_cursor is None:
                break
            cursor = page.next_cursor
        assert seen == ids
        assert len((await s.node.find(Query(job="j"))).items) == 5
        assert len((await s.node.find(Query(labels={"n": "0"}))).items) == 4
        assert await s.node.stop_job("j") == 5
        assert len((await s.node.find(Query())).items) == 5
        assert len((await s.node.find(Query(states=["stopped"]))).items) == 5
        every = await s.node.find(Query(states=["any"], limit=4))
        assert [info.id for info in every.items] == ids[:4] and every.next_cursor == ids[3]
        with pytest.raises(InvalidSpec):
            await s.node.find(Query(states=["dead"]))

    sim(scenario)


def test_labels_network_and_layers_in_use(sim):
    async def scenario(s: SimNode) -> None:
        id_ = await s.create(labels={"a": "1"})
        assert (await s.node.set_labels(id_, {"b": "2"}, "k")).labels == {"b": "2"}
        with pytest.raises(Conflict):
            await s.node.set_labels(id_, {"c": "2"}, "k")
        await s.node.set_network(id_, {"pypi": False})
        with pytest.raises(Unsupported) as caught:
            await s.node.set_network(id_, {"pypi": True})
        assert caught.value.detail["mechanism"]
        denial = {"version": 1, "rules": [{"action": "deny", "domain": "a.org"}]}
        assert (await s.node.set_network(id_, denial)).spec.network == denial
        with pytest.raises(InvalidSpec):
            await s.node.set_network(id_, {**denial, "profile": "p"})
        with pytest.raises(Unsupported):
            await s.node.patch_network(id_, {"npm": True})
        patched = await s.node.patch_network(id_, {"npm": False})
        assert {rule["action"] for rule in patched.spec.network["rules"]} == {"deny"}
        with pytest.raises(Conflict, match=id_) as held:
            await s.node.remove_layer("debian:12")
        assert held.value.detail["sandboxes"] == [id_]
        await s.restart()
        assert (await s.node.get(id_)).labels == {"b": "2"}
        await s.node.stop(id_)
        await s.node.remove_layer("debian:12")
        with pytest.raises(NotFound):
            await s.node.get("nobody")

    sim(scenario)


def test_a_repeated_stop_by_name_does_not_stop_the_next_of_that_name(sim):
    async def scenario(s: SimNode) -> None:
        first = await s.create(name="a")
        await s.node.stop("a", "k")
        second = await s.create(name="a")
        assert (await s.node.stop("a", "k")).id == first
        assert (await s.node.get(second)).state == "running"

    sim(scenario)


def test_closing_undoes_what_is_being_made_and_frees_its_key(sim):
    async def scenario(s: SimNode) -> None:
        s.world.faults.delay_s["start"] = 1000
        creation = asyncio.ensure_future(s.create("k", name="a"))
        await s.clock.settle()
        await s.node.close()
        with pytest.raises(Unavailable):
            await creation
        s.world.faults.delay_s.clear()
        assert not s.world.inventory()
        await s.start()
        assert await s.create("k", name="a")
        s.check()

    sim(scenario)


def test_a_creation_whose_undo_failed_is_cleaned_up_later(sim):
    async def scenario(s: SimNode) -> None:
        failpoint.arm("create.started")
        s.world.faults.fail("stop", LaunchFailed("busy"), times=2)
        with pytest.raises(DsecError):
            await s.create("k", name="a")
        failpoint.disarm()
        await s.clock.advance(20)
        s.check()
        assert not s.world.inventory() and not s.open_steps()
        assert await s.create("k", name="a")

    sim(scenario)
