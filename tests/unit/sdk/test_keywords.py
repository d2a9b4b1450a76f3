"""Wrong arguments of public calls: the error is typed, and names what was meant."""

from __future__ import annotations

import asyncio
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import dsec
from dsec.model import names, words
from dsec.model.processes import CommandSpec
from dsec.sdk import values
from dsec.sdk._sync import attach, layers, lines, output, programs
from dsec.sdk.keywords import called, explained
from dsec.sdk.lines import Line

CLASSES = ("Client", "Sandbox", "Files", "Process", "Session", "Job")


@pytest.fixture
def sbx() -> dsec.Sandbox:
    """Nothing listens there: who asks gets another error than the one that is looked for."""
    return dsec.Sandbox(dsec.Client("unix:///nowhere"), "sbx-n1-aaaaaaaaaaaaa")


RESULT = dsec.RunResult(process_id="p-1", exit_code=0, cause="exited")


def many(n: int, **fields: Any) -> Callable[[dsec.Sandbox], Any]:
    return lambda sbx: sbx._client.create_many(n, **fields)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda s: s.exec("ls"), "run(...) waits for a program's end"),
        (lambda s: s.commands, "spawn(...) does not"),
        (lambda s: s.kill(), "stop() ends it"),
        (lambda s: s.close(), "stop() ends it"),
        (lambda s: s.upload("a", "b"), "files.upload(local, path)"),
        (lambda s: s.create(), "Client().create(...) makes one"),
        (lambda s: s._client.containers, "create(...), get(ref), list()"),
        (lambda s: s.process("p-1").poll(), "info().result is None until then"),
        (lambda s: s.process("p-1").terminate(), "kill() ends all of it"),
        (lambda s: s.process("p-1").returncode, "with exit_code"),
        (lambda s: s.process("p-1").stdout.read(), "wait().stdout is all of it"),
        (lambda s: s.process("p-1").stderr.readline(), "process.output() what is there now"),
        (lambda s: s.process("p-1").stdout.lines(), "process.lines() by whole lines"),
        (lambda s: s.process("p-1").readline(), "lines() gives whole lines as they come"),
        (lambda s: s.process("p-1").expect("x"), "wait_for(text, timeout_s=)"),
        (lambda s: s.read("/f"), "files.read(path)"),
        (lambda s: s.files.ls("/"), "list(path)"),
        (lambda s: s.files.make_dir("/d"), "mkdir(path, parents=True)"),
        (lambda s: s.files.read_bytes("/f"), "read(path) is bytes"),
        (lambda s: s.files.rename("/a", "/b"), "move(source, target"),
        (lambda s: s.files.is_dir("/a"), "stat(path).type"),
        (lambda s: s.set_timeout(60), "extend(seconds)"),
        (lambda s: s.create_session("a"), "session() is a shell that lives on"),
        (lambda s: s.logs(), "process.output()"),
        (lambda s: s._client.connect("a"), "get(ref)"),
        (lambda s: s.process("p-1").stdin.flush(), "has arrived"),
        (lambda s: s.process("p-1").send_stdin("x"), "stdin.write(data)"),
        (lambda s: RESULT.returncode, "exit_code is 0 and ok true for success"),
        (lambda s: RESULT.output, "stdout and stderr are text"),
        (lambda s: RESULT.timed_out, "cause and limits_hit"),
        (lambda s: dsec.Session(s._client, s.id, "p-1").send("a"), "a command reads what it is given"),
        (lambda s: dsec.Session(s._client, s.id, "p-1").exec("a"), "run(text) gives the shell a command"),
        (lambda s: dsec.Session(s._client, s.id, "p-1").interrupt(), "run(text, timeout_s=) ends a command"),
        (lambda s: dsec.Session(s._client, s.id, "p-1").running, "info() tells its state"),
        (lambda s: s.process("p-1").attach().sendline("a"), "write(data)"),
        (lambda s: s.process("p-1").attach().read(), "iterating gives (stream, data) as it comes"),
        (lambda s: s.process("p-1").lines().readline(), "next(timeout_s=) waits for one line"),
        (lambda s: iter(s.process("p-1").stdout).read(), "iterating gives bytes as they come"),
        (lambda s: s.files.watch("/").poll(), "next(timeout_s=) waits for one change"),
        (lambda s: s.process.exec("ls"), "process is a method, and has no attribute 'exec'; sbx.run(...) waits"),
        (lambda s: s.process.create_session("a"), "sbx.session() is a shell that lives on"),
        (lambda s: s.get_host(80), "expose(port).url reaches what listens in it"),
        (lambda s: s._client.ping(), "node() answers where a node does"),
        (lambda s: s._client.layers.create("a"), "import_(source, name)"),
        (lambda s: s._client.create_many(1).stop(), "its `with` block stops them all"),
        (lambda s: Line("a").text, "it is a str itself"),
        (lambda s: s.nonsense, "'Sandbox' object has no attribute 'nonsense'"),
        (lambda s: s._private, "'Sandbox' object has no attribute '_private'"),
    ],
)
def test_an_attribute_that_is_not_there_says_how_ours_is_called(
    sbx: dsec.Sandbox, call: Callable[[dsec.Sandbox], Any], told: str
) -> None:
    with pytest.raises(AttributeError) as caught:
        call(sbx)
    assert told in str(caught.value)
    assert not hasattr(sbx, "exec")
    assert pickle.loads(pickle.dumps(sbx)).id == sbx.id


@pytest.mark.parametrize(
    ("call", "field", "told"),
    [
        (
            lambda s: s.run("ls", timeout=5),
            "timeout",
            "run() has no argument timeout; did you mean timeout_s? (it has ",
        ),
        (lambda s: s.run("ls", workdir="/"), "workdir", "did you mean cwd?"),
        (lambda s: s.run("ls", environment={"A": "secret"}), "environment", "did you mean env?"),
        (lambda s: s.run("ls", user_id=5), "user_id", "did you mean user?"),
        (lambda s: s.run("ls", stdni=""), "stdni", "did you mean stdin?"),
        (lambda s: s.run(cmd="ls"), "cmd", "did you mean command?"),
        (lambda s: s.run("ls", shell=True), "shell", "a str runs as /bin/sh -c"),
        (lambda s: s.run("ls", background=True), "background", "spawn(...)"),
        (lambda s: s.run("ls", tty=True), "tty", "spawn(tty=True)"),
        (lambda s: s._client.create(gpu=1), "gpu", "sandboxes have no GPUs"),
        (lambda s: s._client.create(block_network=True), "block_network", "no network but its own loopback"),
        (lambda s: s._client.create(network="none"), "network", "by default a sandbox has none"),
        (lambda s: s._client.create(environment={"A": "1"}), "environment", "variables are env={...}"),
        (lambda s: dsec.Session(s._client, s.id, "p-1").run("ls", cwd="/"), "cwd", "`cd` in a session"),
        (lambda s: dsec.Session(s._client, s.id, "p-1").run("ls", workdir="/"), "workdir", "`cd` in a session"),
        (lambda s: s.session(timeout=3), "timeout", "an argument of each run"),
        (lambda s: s.session("my shell"), "shell", "or its name, as bash (a name for the session itself is key=)"),
        (lambda s: s.session(name="a"), "name", "did you mean key?"),
        (lambda s: s.session(id="a"), "id", "did you mean key?"),
        (lambda s: s.run("ls", stream=True), "stream", "on_output= gets it as it comes; that of spawn(...)"),
        (lambda s: s.run("ls", stdout=1), "stdout", "on_output= gets it"),
        (lambda s: s.spawn("ls", stdout=1), "stdout", "iterate .stdout or .stderr of the process"),
        (lambda s: s.files.write("/f", "", mode="0755"), "mode", "a number, as 0o755"),
        (lambda s: s.files.chmod("/f", "755"), "mode", "a number, as 0o755"),
        (
            lambda s: s.files.write("/f", {"a": "secret"}),
            "data",
            "of the type dict; allowed: str or bytes (json.dumps(",
        ),
        (lambda s: s.files.write("/f", io.BytesIO(b"secret")), "data", "(data.read(); upload(local, path) copies"),
        (lambda s: s.files.write("/f", Path("/a")), "data", "upload(local, path) copies a file of this machine"),
        (lambda s: s.files.append("/f", 5), "data", "of the type int; allowed: str or bytes"),
        (lambda s: s.process("p-1").signal("TREM"), "signal", 'such as signal.SIGTERM, or a name, as "SIGTERM"'),
        (lambda s: s.process("p-1").lines(1), "offsets", "where to begin in stdout and in stderr (both come"),
        (lambda s: s.process("p-1").lines("stdout"), "offsets", ".stdout iterates one"),
        (lambda s: s.process("p-1").lines((5,)), "offsets", "allowed: (0, 0)"),
        (lambda s: s.process("p-1").follow((0, -1)), "offsets", "allowed: (0, 0)"),
        (lambda s: s.process("p-1").attach(0), "offsets", "allowed: (0, 0)"),
        (lambda s: s.process("p-1").stdout.follow("1"), "offset", "a number of bytes"),
        (lambda s: s.process("p-1").output("stderr"), "offset", "stream= says which stream"),
        (lambda s: s.process("p-1").lines(stream=1), "stream", "each line has .stream, 1 or 2"),
        (lambda s: s.process("p-1").lines(timeout_s=1), "timeout_s", "process.lines().next(timeout_s=) waits for one"),
        (lambda s: s.process("p-1").lines().next(timeout=1), "timeout", "did you mean timeout_s?"),
        (lambda s: s.process("p-1").lines().next("1"), "timeout_s", "a number of seconds, or None"),
        (lambda s: s.process("p-1").wait(timeout_s="1"), "timeout_s", "a number of seconds, or None"),
        (lambda s: s.process("p-1").wait_for("a", stream=1), "stream", "both streams are looked at"),
        (lambda s: s.process("p-1").wait_for(text="a"), "text", "did you mean pattern?"),
        (lambda s: s.process("p-1").wait_for("a\nb"), "pattern", "text of one line, without a newline"),
        (lambda s: s.process("p-1").wait_for("a\n"), "pattern", "text of one line, without a newline"),
        (lambda s: s.process("p-1").wait_for(b"a\nb"), "pattern", "text of one line, without a newline"),
        (lambda s: s.process("p-1").resize((50, 100)), "cols", "they are two numbers: resize(50, 100)"),
        (lambda s: s.process("p-1").attach().resize((50, 100)), "cols", "they are two numbers: resize(50, 100)"),
        (lambda s: s.files.watch("/").next(timeout=1), "timeout", "did you mean timeout_s?"),
        (lambda s: s.files.list("/", depth=2), "depth", 'sbx.run(["find", path]) lists all below it'),
        (lambda s: s.files.list("/", recursive=True), "recursive", "one directory is listed"),
        (lambda s: s.run("ls", nonsense=1), "nonsense", "run() has no argument nonsense (it has command, cwd, "),
        (lambda s: s.run("ls", "-l"), "command", "a program and its arguments are one list"),
        (lambda s: s.spawn("ls", pty=True), "pty", "did you mean tty?"),
        (lambda s: s.spawn("ls", timeout=5), "timeout", "did you mean timeout_s?"),
        (lambda s: s.session(workdir="/"), "workdir", "did you mean cwd?"),
        (lambda s: s.stop(timeout=5), "timeout", "did you mean grace_s?"),
        (lambda s: s.stop(5), None, "the others go by name: grace_s="),
        (lambda s: s.info(full=True), "full", "it has none"),
        (lambda s: s.files.write("/f", content=b""), "content", "did you mean data?"),
        (lambda s: s.files.write("/f", b"", 0o644), "data", "the others go by name: mode=, parents="),
        (lambda s: s.files.mkdir("/d", exist_ok=True), "exist_ok", "did you mean parents?"),
        (lambda s: s.files.read("/f", text=True), "text", "read_text(path) gives text"),
        (lambda s: s.files.remove("/d", recurse=True), "recurse", "did you mean recursive?"),
        (lambda s: s.process("p-1").resize(height=1, width=2), "height", "did you mean rows?"),
        (lambda s: s.process("p-1").wait(timeout=2), "timeout", "did you mean timeout_s?"),
        (
            lambda s: dsec.Client(base_url="unix:///x"),
            "base_url",
            "Client() has no argument base_url; did you mean url?",
        ),
        (lambda s: s._client.create(timeout=60), "timeout", "did you mean lifetime_s?"),
        (lambda s: s._client.create(memory="1g"), "memory", "did you mean memory_mib?"),
        (lambda s: s._client.create(idle_timeout=1), "idle_timeout", "did you mean idle_timeout_s?"),
        (lambda s: s._client.create(volumes={}), "volumes", "nothing of the host is seen inside"),
        (many(2, metadata={}), "metadata", "did you mean labels?"),
        (lambda s: s._client.create_many(count=2), "specs", "lacks specs, which stands first, without a name"),
        (lambda s: s._client.create_many(base="debian:12"), "specs", "create_many() lacks specs"),
        (lambda s: s._client.create_many("ab"), "specs", "a number of equal sandboxes, or a list of dsec.Spec"),
        (lambda s: s._client.create_many(None), "specs", "a number of equal sandboxes"),
        (lambda s: s._client.create_many(True), "specs", "a number of equal sandboxes"),
        (
            lambda s: s._client.create(msgspec.structs.replace(dsec.Spec(), env=5)),
            "env",
            "env=5 is not allowed; allowed: a dict",
        ),
        (lambda s: s.run("ls", env={"A": 5, "B": "secret"}), "env", "env: the value of 'A' is of the type int"),
        (lambda s: s.run("ls", env=["A=secret"]), "env", "env is of the type list"),
        (lambda s: s.session(env=["A=secret"]), "env", "env is of the type list"),
        (lambda s: s._client.create(env={"A": b"secret"}), "env", "the value of 'A' is of the type bytes"),
        (lambda s: s._client.create(env=["A=secret"]), "env", "env is of the type list"),
        (lambda s: s.stop(grace_s="1"), "grace_s", "allowed: a number of seconds"),
        (lambda s: s.extend(None), "seconds", "allowed: a number of seconds"),
        (lambda s: s.set_labels(None), "labels", "of the type NoneType; allowed: a dict"),
        (lambda s: s.set_labels("a=secret"), "labels", "of the type str; allowed: a dict"),
        (lambda s: s.set_labels({"a": 5}), "labels", "the value of 'a' is of the type int"),
        (lambda s: s.set_network(["pypi"]), "network", "of the type list; allowed: a dict"),
        (lambda s: s.patch_network("pypi"), "network", "of the type str; allowed: a dict"),
        (lambda s: next(s._client.list(labels="a")), "labels", "of the type str; allowed: a dict"),
        (lambda s: next(s._client.list(state=5)), "state", 'several of them, or "any"'),
        (lambda s: next(s._client.list(state=[5])), "state", 'several of them, or "any"'),
        (lambda s: s._client.job(5), "job", "job=5 is not allowed"),
        (lambda s: s._client.layers.get(None), "layer", "layer=None is not allowed"),
        (lambda s: s._client.layers.import_("dir:/a", 5), "name", "name=5 is not allowed"),
        (lambda s: s.files.chmod("/f", None), "mode", "a number, as 0o755"),
        (lambda s: s.events(timeout=4), "timeout", "follow=False gives what there is"),
        (lambda s: dsec.Client(5), "url", "url is of the type int; allowed: a str"),
        (lambda s: dsec.Client(api_key=b"secret"), "api_key", "api_key is of the type bytes"),
        (lambda s: s.run("ls", user=1.5), "user", "or a number as 1000"),
        (lambda s: s.spawn("ls", user=True), "user", "or a number as 1000"),
        (lambda s: s.session(user=[1000]), "user", "or a number as 1000"),
        (lambda s: s.files.read("/f", user=True), "user", "or a number as 1000"),
        (lambda s: s._client.create(user=True), "user", "or a number as 1000"),
        (lambda s: s._client.layers.import_("dir:/a", "a", user=1.5), "user", "or a number as 1000"),
        (lambda s: s._client.layers.import_(5, "a"), "source", "or a path of the node"),
        (lambda s: s.run("ls", cwd=b"/tmp"), "cwd", "a str or a path"),
        (lambda s: s.process(12), "process_id", "spawn(...).id (a pid inside is another number)"),
        (lambda s: s.get_session(12), "session_id", "an id, which is a str, as session(...).id"),
        (
            lambda s: s.files.upload(b"secret", "/f"),
            "source",
            "of the type bytes; allowed: a path of this machine; write(",
        ),
        (lambda s: s.files.upload(io.BytesIO(b"secret"), "/f"), "source", "write(path, data) writes bytes or text"),
        (lambda s: s.files.upload("/etc/hosts"), "target", "upload() lacks target; source is a path of this machine"),
        (lambda s: s.files.download("/f"), "target", "download() lacks target; source is a path of the sandbox"),
        (
            lambda s: s.files.download("/f", None),
            "target",
            "of the type NoneType; allowed: a path of this machine; read(",
        ),
        (lambda s: s.files.read(5), "path", "a path of the sandbox: str, bytes or a Path"),
        (lambda s: s.diff(None), "path", "a path of the sandbox"),
        (lambda s: dsec.Sandbox(), "client", "Sandbox() lacks client; dsec.Client().create(...) makes one"),
        (lambda s: dsec.Sandbox("debian:12"), "sandbox_id", "dsec.Client().create(...) makes one"),
        (lambda s: dsec.Sandbox(base="debian:12"), "base", "dsec.Client().create(...) makes one"),
        (lambda s: dsec.AsyncSandbox(), "client", "dsec.AsyncClient().create(...) makes one"),
        (lambda s: dsec.Process(), "client", "; sbx.spawn(...) makes one"),
    ],
)
def test_what_was_meant_is_said(
    sbx: dsec.Sandbox, call: Callable[[dsec.Sandbox], Any], field: str | None, told: str
) -> None:
    with pytest.raises(dsec.InvalidSpec) as caught:
        call(sbx)
    assert told in str(caught.value)
    assert caught.value.detail["field"] == field
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("second", "more", "detail", "told"),
    [
        ({"memory_mib": 5}, {}, {"field": "memory_mib", "index": 1}, "specs[1]: memory_mib=5 is not allowed"),
        (None, {}, {"field": "spec", "index": 1}, "specs[1]: spec=None is not allowed"),
        ({}, {"metadata": {}}, {"field": "metadata"}, "did you mean labels?"),  # of all of them
        ({}, {"pids": "5"}, {"field": "pids"}, "pids='5' is not allowed; allowed: a whole number"),
    ],
)
def test_of_many_specs_the_wrong_one_is_named(
    sbx: dsec.Sandbox, second: dict[str, Any] | None, more: dict[str, Any], detail: dict[str, Any], told: str
) -> None:
    wrong: Any = None if second is None else dsec.Spec(**second)
    with pytest.raises(dsec.InvalidSpec) as caught:
        sbx._client.create_many([dsec.Spec(), wrong, dsec.Spec()], **more)
    assert told in caught.value.message
    assert caught.value.message.startswith("specs[") == ("index" in detail)
    assert {key: caught.value.detail.get(key) for key in ("field", "index") if key in caught.value.detail} == detail


def test_one_spec_that_is_given_often_is_sent_once(sbx: dsec.Sandbox) -> None:
    spec = dsec.Spec(name="a", if_exists="get")
    made = values.make_specs([spec, dsec.Spec(pids=64), spec], {"job": "j"})
    assert made[0] is made[2]
    assert [one.pids for one in made] == [spec.pids, 64, spec.pids]
    assert {one.job for one in made} == {"j"}


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda: dsec.Sandbox.create, "'Sandbox' has no attribute 'create'; dsec.Client().create(...) makes one"),
        (lambda: dsec.AsyncSandbox.create, "; dsec.AsyncClient().create(...) makes one"),
        (lambda: dsec.Sandbox.connect, "; dsec.Client().get(id_or_name) finds one"),
        (lambda: dsec.Sandbox.list, "; dsec.Client().list() gives"),
        (lambda: dsec.create, "module 'dsec' has no attribute 'create'; a client has it: dsec.Client().create"),
        (lambda: dsec.sandbox, "did you mean Sandbox?"),
        (lambda: dsec.AsyncClinet, "did you mean AsyncClient?"),
    ],
)
def test_what_a_client_makes_is_said_by_the_class(ask: Callable[[], Any], told: str) -> None:
    with pytest.raises(AttributeError) as caught:
        ask()
    assert str(caught.value).endswith(told) or told in str(caught.value)
    assert not hasattr(dsec.Sandbox, "_create") and not hasattr(dsec, "__path_of_none__")


def test_what_was_not_awaited_says_so() -> None:
    client = dsec.AsyncClient("unix:///nowhere")
    made = client.create()
    with pytest.raises(AttributeError, match=r"create\(\) was not awaited, and has no attribute 'run'; `await create"):
        made.run  # type: ignore[attr-defined]  # noqa: B018 - looking it up is the test
    made.close()
    with pytest.raises(dsec.InvalidSpec, match="did you mean memory_mib"):
        asyncio.run(client.create(memory=5))  # type: ignore[call-arg]  # what is refused


def test_all_whose_result_is_entered_need_no_await() -> None:
    client = dsec.AsyncClient("unix:///nowhere")
    sandbox = dsec.AsyncSandbox(client, "sbx-n1-aaaaaaaaaaaaa")
    calls = [client.create(), client.get("a"), sandbox.spawn("ls"), sandbox.session(), sandbox.get_session("p-1")]

    async def enter(call: Any) -> None:
        async with call:
            pass

    for call in calls:
        with pytest.raises(dsec.NodeUnreachable):
            asyncio.run(enter(call))


def test_it_is_pythons_own_error_too(sbx: dsec.Sandbox) -> None:
    with pytest.raises(TypeError) as caught:
        sbx.run("ls", timeout=5)  # type: ignore[call-arg]  # what is refused
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'command'"):
        sbx.run()  # type: ignore[call-arg]  # what is refused


def test_async_calls_say_so_when_they_are_awaited() -> None:
    sandbox = dsec.AsyncSandbox(dsec.AsyncClient("unix:///nowhere"), "sbx-n1-aaaaaaaaaaaaa")
    waiting = sandbox.run("ls", timeout=5)  # type: ignore[call-arg]  # what is refused
    with pytest.raises(dsec.InvalidSpec, match="did you mean timeout_s"):
        asyncio.run(waiting)
    assert inspect.iscoroutinefunction(dsec.AsyncSandbox.run)
    with pytest.raises(dsec.InvalidSpec, match=r"list\(\) has no argument status"):
        sandbox._client.list(status="running")  # type: ignore[call-arg]  # what is refused


def test_on_output_is_told_how_it_is_called() -> None:
    with pytest.raises(TypeError, match=r"takes 1 positional argument.*; it is called as on_output\(stream, data\)"):
        called(lambda data: None, 1, b"x")  # type: ignore[misc, arg-type]  # what is refused
    with pytest.raises(dsec.InvalidSpec, match="called as on_output"):
        called(io.BytesIO().write, 1, b"x")  # type: ignore[arg-type]  # what is refused

    def theirs(stream: int, data: bytes) -> None:
        raise TypeError("its own")

    with pytest.raises(TypeError, match=r"\Aits own\Z") as caught:
        called(theirs, 1, b"x")
    assert type(caught.value) is TypeError


def test_a_watch_is_entered(sbx: dsec.Sandbox) -> None:
    with pytest.raises(dsec.InvalidState, match=r"use it as `with sbx\.files\.watch"):
        next(iter(sbx.files.watch("/")))


def test_an_error_from_within_stays_as_it_is() -> None:
    def theirs(key: int) -> None:
        raise TypeError("theirs")

    @explained
    class Class:
        def direct(self, key: int) -> None:
            raise TypeError("its own")

        def through(self) -> None:
            theirs(wrong=1)  # type: ignore[call-arg]  # what is refused

    with pytest.raises(TypeError, match="its own") as caught:
        Class().direct(1)
    assert type(caught.value) is TypeError
    with pytest.raises(TypeError, match="unexpected keyword") as caught:
        Class().through()
    assert type(caught.value) is TypeError


HOLDS = {
    "Input": programs.Input,
    "Output": output.Output,
    "Reader": output.Reader,
    "Follow": output.Follow,
    "Attachment": attach.Attachment,
    "Lines": lines.Lines,
    "Layers": layers.Layers,
}


@pytest.mark.parametrize("name", names.NAMES)
def test_names_lead_to_what_is_there(sbx: dsec.Sandbox, name: str) -> None:
    """Also when one of ours gets another name, or one that others have."""
    cls = HOLDS.get(name) or getattr(dsec, name)
    own = {*dir(cls), *getattr(cls, "__annotations__", ())}
    made = {
        "Client": sbx._client,
        "Follow": sbx.process("p-1").follow(),
        "Attachment": sbx.process("p-1").attach(),
        "Job": sbx._client.job("a"),
        "Diff": sbx.diff(),
        "Batch": sbx._client.create_many(1),
    }
    own |= set(dir(made.get(name, cls)))
    tried: list[str] = []
    for ours, text, words_of_others in names.NAMES[name]:
        assert ours in own, f"{name} has no {ours}, of which is said: {text}"
        tried += words_of_others.split()
    assert not own & set(tried), "what is there needs no hint"
    assert len(tried) == len(set(tried)), sorted(word for word in tried if tried.count(word) > 1)
    for word in tried:
        assert words.way(word, (f"Async{name}",)).startswith("; ")


def test_methods_that_others_have_as_objects_are_methods(sbx: dsec.Sandbox) -> None:
    for name, rows in names.OBJECTS.items():
        cls, _, method = name.partition(".")
        for kind in (cls, f"Async{cls}"):
            assert inspect.signature(getattr(getattr(dsec, kind), method)).parameters
        assert all(hasattr(getattr(dsec, cls), ours) for ours, _, _ in rows)
    assert sbx.process("p-1").id == "p-1"
    with pytest.raises(dsec.InvalidSpec, match="did you mean process_id"):
        sbx.process(id="p-1")  # type: ignore[call-arg]  # what is refused
    assert not hasattr(sbx.process, "_private")


def test_names_of_the_package_lead_to_ours() -> None:
    for ours, theirs in names.PACKAGE.items():
        assert ours in dsec.__all__
        for name in theirs.split():
            with pytest.raises(AttributeError, match=rf"did you mean {ours}\?"):
                getattr(dsec, name)


def test_what_methods_have_a_way_for_is_none_of_their_arguments() -> None:
    for name, _, tried in words._IN_CALLS:
        cls, _, method = name.partition(".")
        known = inspect.signature(getattr(HOLDS.get(cls) or getattr(dsec, cls), method)).parameters
        assert not known.keys() & set(tried.split()), name


def test_the_words_lead_to_arguments_that_are_there() -> None:
    """Also when one of ours gets another name."""
    known = {*dsec.Spec.__struct_fields__, *CommandSpec.__struct_fields__}
    for name in CLASSES:
        for member in vars(getattr(dsec, name)).values():
            if callable(member):
                known.update(inspect.signature(member).parameters)
    led = {ours for names in words._OURS.values() for ours in names}
    assert led <= known, led - known
