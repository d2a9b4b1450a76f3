"""Commands, exit codes and messages, against a scripted server."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import dsec as dsec_package
from dsec.cli.commands import service
from dsec.cli.commands.programs import advise
from dsec.cli.main import COMMANDS, main
from dsec.cli.words import COMMANDS_ELSEWHERE, PHRASES, in_our_words
from tests.kit.scripted import Request, Script, Server, Wire

ID = "sbx-n1-aaaaaaaaaaaaa"
INFO = {
    "id": ID,
    "node": "n1",
    "state": "running",
    "backend": "container",
    "spec": {"base": "debian:12"},
    "name": "evil\x1b[2J",
    "created_at": 1.0,
}
NO_START = "import sys; from dsec.cli.main import main; sys.exit(main())"


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Script], Server]]:
    servers: list[Server] = []

    def start(script: Script) -> Server:
        servers.append(Server(tmp_path / "s", script))
        monkeypatch.setenv("DSEC_URL", servers[0].url)
        return servers[0]

    yield start
    for server in servers:
        server.close()


def no_events(wire: Wire) -> None:
    """A stream of events without any."""
    wire.stream()
    wire.item({"done": True})
    wire.end()


def program(*items: dict[str, object]) -> Script:
    """A server with one sandbox in which every program does the same."""

    def script(request: Request, wire: Wire) -> None:
        if "stream=1" not in request.path:
            wire.answer(INFO)
            return
        wire.stream()
        for item in items:
            wire.item(item)
        wire.end()

    return script


def ended(code: int, **more: object) -> dict[str, object]:
    return {"result": {"process_id": "p", "exit_code": code, "cause": "exited", **more}}


def dsec(*args: str, stdin: bytes | None = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", NO_START, *args], input=stdin, capture_output=True, check=False)


Serve = Callable[[Script], Server]


def test_usage_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "ps " in capsys.readouterr().out
    assert main(["nonsense"]) == 2
    assert "did you mean" not in capsys.readouterr().err
    assert main(["--version"]) == 0


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("inspct x", "inspect"),
        ("stopp x", "stop"),
        ("run --imgae debian:12 true", "--image"),
        ("run --imgae=debian:12 true", "--image"),
        ("ps --josn", "--json"),
        ("layer import dir:/x y:1 --usr x", "--user"),
        ("up --stat-dir x", "--state-dir"),
        ("run -m 512m true", "--memory-mib"),
        ("run --cpus 2 true", "--cpu"),
        ("run --workdir=/x true", "--cwd"),
        ("stop -t 5 x", "--grace-s"),
    ],
)
def test_what_is_mistyped_or_of_another_tool_is_guessed(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        assert main(line.split()) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("destroy x", "no command 'destroy'; `dsec stop SANDBOX` may be what is meant\n"),
        ("cp -r a x:/b", "a directory is copied with all below it"),
        ("inspect x p-1", "`dsec ps -a SANDBOX` and `dsec events SANDBOX` tell of its programs"),
        ("rmi x", "`dsec layer rm LAYER` may be"),
        ("run -v /a:/b true", "unrecognized arguments: -v; nothing of the host is seen inside"),
        ("run --rm true", "unless --keep is given"),
        ("rm -f x", "unrecognized arguments: -f; `dsec stop` needs none"),
        ("run -f true", "unrecognized arguments: -f\n"),
        ("version", "`dsec --version` may be what is meant"),
        ("exec -q x true", "unrecognized arguments: -q\n"),
        ("logs --tail 5 x", "`dsec logs SANDBOX | tail -n 5` shows the end of it"),
        ("logs --tail=5 x", "| tail -n 5`"),
        ("logs -n 5 x", "| tail -n 5`"),
        ("logs --since 1m x", "output is kept without times"),
        ("logs -q x", "unrecognized arguments: -q\n"),
        ("ps -m", "unrecognized arguments: -m\n"),
        ("shell", "are required: sandbox\n"),
        ("exec", "are required: sandbox, COMMAND\n"),
    ],
)
def test_what_there_is_instead_is_said(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert main(line.split()) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("line", ["destroy x", "nonsense", "--name x run", "run --memory 5 true", "exec --bogus x y"])
def test_what_is_wrong_is_the_last_thing_on_the_screen(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert main(line.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("usage: dsec") and line.split(maxsplit=1)[0] in lines[-1] and ": " in lines[-1]
    assert [line for line in lines if "error:" in line or "no command" in line] == lines[-1:]


def test_no_word_of_another_tool_is_one_of_ours() -> None:
    assert not COMMANDS.keys() & COMMANDS_ELSEWHERE.keys()
    assert {words.split()[1] for words in COMMANDS_ELSEWHERE.values()} <= {*COMMANDS, "--version"}


def test_who_detaches_a_program_is_told_what_does_not_wait(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-d", "--", "sleep", "9"]) == 125
    told = capsys.readouterr().err
    assert "`dsec exec -d SANDBOX COMMAND` starts one in it that goes on by itself; `dsec exec` waits for it" in told


@pytest.mark.parametrize(("words", "method"), [(("x:/no", "."), "stat"), (("/etc/hosts", "x:/no/"), "write")])
def test_a_copy_that_fails_says_in_which_sandbox(
    serve: Serve, capsys: pytest.CaptureFixture[str], words: tuple[str, str], method: str
) -> None:
    def script(request: Request, wire: Wire) -> None:
        if "/files" in request.path:
            wire.error("file_not_found", f"{method} /no: No such file or directory (ENOENT)", 404, errno="ENOENT")
        else:
            wire.answer(INFO)

    serve(script)
    assert main(["cp", *words]) == 1
    assert capsys.readouterr().err == f"dsec: x: {method} /no: No such file or directory (ENOENT)\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: dsec {name}" in capsys.readouterr().out


def test_the_help_of_bench_is_that_of_the_benchmarks(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--help"])
    assert caught.value.code == 0
    said = capfd.readouterr().out
    assert said.index("usage: dsec bench") < said.index("usage: bench") < said.index("--require-marks")


def test_the_help_of_bench_without_a_checkout_says_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.cli.commands.bench.find_checkout", lambda: None)
    with pytest.raises(SystemExit) as caught:
        main(["bench", "-h"])
    assert caught.value.code == 0
    assert "in a checkout of the project" in capsys.readouterr().out


def test_no_node_is_one_line_that_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["ps", "--url", f"unix://{tmp_path}/none"]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"dsec: no answer from unix://{tmp_path}/none")
    assert message.count("\n") == 1
    assert "dsec up" in message
    assert main(["exec", "--url", f"unix://{tmp_path}/none", "x", "true"]) == 125


@pytest.mark.parametrize(("field", "errno", "code"), [("command", 2, 127), ("command", 13, 126), ("cwd", 2, 126)])
def test_a_program_that_was_not_started_has_the_exit_code_of_a_shell(
    serve: Serve, capsys: pytest.CaptureFixture[str], field: str, errno: int, code: int
) -> None:
    detail = {"field": field, "errno": errno}
    serve(program({"error": {"code": "program_not_started", "message": "words", "detail": detail, "retry": "never"}}))
    assert main(["exec", ID, "nosuch", "prog"]) == code
    assert capsys.readouterr().err == "dsec: words\n"


def test_a_directory_that_a_new_sandbox_does_not_have_has_the_exit_code_of_a_shell(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    details = iter([{"field": "cwd", "errno": 2}, {"field": "user"}, {"field": "cwd", "allowed": "an absolute path"}])
    serve(lambda request, wire: wire.error("invalid_spec", "words", 400, **next(details)))
    assert [main(["run", "--cwd", "/nope", "true"]) for _ in range(3)] == [126, 126, 125]
    assert capsys.readouterr().err == "dsec: words\n" * 3


def test_options_stand_after_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "unix:///x", "ps", "-a"]) == 2
    assert "dsec ps --url unix:///x -a" in capsys.readouterr().err


def test_errors_are_in_the_words_of_the_command(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        "memory_mib=0 is not allowed; allowed: 16 to 9": (
            "memory_mib",
            "--memory-mib=0 is not allowed; allowed: 16 to 9",
        ),
        "a sandbox named 'a' exists: x; use if_exists='get' or another name": ("name", "`dsec exec` runs in it"),
        "no sandbox 'wrok' on node n, alive or ended not long ago": (None, "`dsec ps -a`"),
        "this node has no room (pids: 2 asked, 1 left); wait longer (wait_s)": (None, "--wait-s"),
    }
    for message, (field, expected) in said.items():
        assert expected in in_our_words(message, field)
    assert main(["run", "--env", "FOO", "true"]) == 125
    assert capsys.readouterr().err.startswith("dsec: --env='FOO' is not allowed; allowed: KEY=VALUE")
    assert main(["run", "-d", "true"]) == 125
    assert "=" not in capsys.readouterr().err


def test_the_phrases_that_are_translated_are_said_somewhere() -> None:
    root = Path(dsec_package.__file__).parent
    sources = "".join(path.read_text() for part in ("node", "sdk") for path in (root / part).rglob("*.py"))
    for theirs, _ in PHRASES:
        assert theirs in sources


def test_notes_for_what_is_easily_meant_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    advise(["true", "--memory-mib", "64"], terminal=False)
    assert "--memory-mib stands after the command" in capsys.readouterr().err
    advise(["python3"], terminal=True)
    assert (
        "`dsec run -it python3`, or in a sandbox that is there `dsec shell NAME python3`, gives"
        in capsys.readouterr().err
    )
    advise(["--timeout-s", "3", "sleep", "5"], terminal=False)
    assert "--timeout-s stands after the sandbox" in capsys.readouterr().err
    advise(["cd", "/tmp"], terminal=False)
    assert "'cd /tmp; ls'" in capsys.readouterr().err
    advise(["debian:12", "true"], terminal=False)
    assert "--base debian:12" in capsys.readouterr().err
    advise(["--", "tool", "--timeout-s", "3"], terminal=True)
    advise(["python3", "-c", "1"], terminal=True)
    advise(["cd /tmp; ls"], terminal=True)
    advise(["bash"], terminal=False)
    assert capsys.readouterr().err == ""


def test_ps_is_newest_first_and_says_how_they_ended(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    old = {**INFO, "id": "sbx-n1-bbbbbbbbbbbbb", "created_at": 100.0, "name": "old"}
    new = {**INFO, "created_at": 200.0, "ended_at": 260.0, "state": "stopped", "end_reason": "idle", "name": "new"}
    serve(lambda request, wire: wire.answer({"items": [old, new]}))
    assert main(["ps", "-a"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.endswith("ENDED")
    assert "new" in first and "stopped (idle)" in first and " 1m " in first and first.endswith("ago")
    assert "old" in second


def test_stopping_what_has_ended_says_so(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(lambda request, wire: wire.answer({**INFO, "state": "stopped", "end_reason": "lifetime"}))
    assert main(["rm", ID]) == 0
    got = capsys.readouterr()
    assert (got.out, got.err) == ("", f"dsec: {ID} has ended already (lifetime)\n")
    assert all(request.method == "GET" for request in server.requests)


def test_inspect_shows_the_limits_in_effect_and_readable_times(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(request: Request, wire: Wire) -> None:
        if "/events" in request.path:
            return no_events(wire)
        if "/files:stat" in request.path:
            return wire.answer({"path": "/dev/null", "name": "null", "type": "char"})
        wire.answer({} if request.path.endswith("/processes") else INFO)

    serve(script)
    assert main(["inspect", ID]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["limits"]["memory_mib"] == 512 and about["limits"]["idle_timeout_s"] == 3600
    assert about["times"] == {"created_at": "1970-01-01T00:00:01+00:00"}


def test_a_layer_is_removed_by_the_digits_that_are_shown(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    endings = ("a" * 52, "b" * 52)
    digests = ["sha256:" + "a" * 64, "sha256:" + "b" * 64, *("sha256:" + "c" * 12 + ending for ending in endings)]
    layers: list[dict[str, object]] = [{"digest": digest, "names": []} for digest in digests]
    layers[1]["names"] = ["aaaaaaaaaaaaa:latest"]

    def script(request: Request, wire: Wire) -> None:
        if request.path == "/v1/layers":
            wire.answer({"items": layers})
        else:
            wire.answer({} if request.method == "DELETE" else layers[0])

    server = serve(script)

    def gone() -> list[str]:
        found = [request.path.rpartition("/")[2] for request in server.requests if request.method == "DELETE"]
        server.requests.clear()
        return [path.partition("?")[0].replace("%3A", ":") for path in found]

    for ref in ("sha256:aaaaaaaaaaaa", "aaaaaaaaaaaa", "a" * 64):
        assert main(["layer", "rm", ref]) == 0
        assert gone() == [digests[0]], ref
    # A name comes first; fewer digits are a name.
    assert main(["layer", "rm", "a" * 13, "a" * 11]) == 0
    assert gone() == ["a" * 13, "a" * 11]
    capsys.readouterr()
    for ref in ("sha256:dddddddddddd", "dddddddddddd"):
        assert main(["layer", "rm", ref]) == 1
        assert "no layer has this name or a digest that begins with it" in capsys.readouterr().err
    assert main(["layer", "rm", "c" * 12]) == 1
    said = capsys.readouterr().err
    assert digests[2] in said and digests[3] in said and digests[0] not in said
    assert gone() == []


def test_up_says_that_options_are_not_applied_to_a_running_agent(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with (tmp_path / "agent.pid").open("w") as held:
        held.write("4711\n")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        where = ["--run-dir", str(tmp_path), "--state-dir", str(tmp_path)]
        assert main(["up", *where]) == 0
        assert main(["up", *where, "--", "--listen", "127.0.0.1:1"]) == 1
    assert "not applied: --listen 127.0.0.1:1" in capsys.readouterr().err
    assert main(["down", *where, "--stop-all"]) == 0  # nothing lives there


def test_up_says_that_the_running_agent_has_another_state(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = tmp_path / "state"
    (tmp_path / "same").symlink_to(has)
    line = [sys.executable, "-c", "input()", "--state-dir", str(has), "--cgroup", "c"]
    with (
        subprocess.Popen(line, stdin=subprocess.PIPE) as agent,
        (tmp_path / "agent.pid").open("w") as held,
    ):
        held.write(f"{agent.pid}\n")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        up = ["up", "--run-dir", str(tmp_path)]
        for same in ([], ["--state-dir", str(has)], ["--state-dir", f"{tmp_path}/same", "--cgroup", "c"]):
            assert main([*up, *same]) == 0
        assert capsys.readouterr().err == ""
        assert main([*up, "--cgroup", "d"]) == 1
        assert "--cgroup d (it has c)" in capsys.readouterr().err
        monkeypatch.setenv("DSEC_STATE_DIR", f"{tmp_path}/other")
        assert main(up) == 1
        assert f"--state-dir {tmp_path}/other (it has {has})" in capsys.readouterr().err


def test_up_that_is_interrupted_leaves_no_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[service._Starting] = []

    def interrupted(starting: service._Starting, *_: object) -> str:
        started.append(starting)
        raise KeyboardInterrupt

    monkeypatch.setattr(service, "_await", interrupted)
    places = ["--run-dir", f"{tmp_path}/run", "--state-dir", f"{tmp_path}/state"]
    assert main(["up", *places, "--", "--backend", "fake", "--node", "t"]) == 130
    [starting] = started
    assert starting.process.returncode is not None


def test_up_says_where_options_of_the_agent_stand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["up", "--listen", "127.0.0.1:1"])
    assert caught.value.code == 2
    assert "dsec up -- --listen 127.0.0.1:1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["ps", "--listen"])
    assert "dsec up" not in capsys.readouterr().err


def test_ps_escapes_and_filters(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(lambda request, wire: wire.answer({"items": [INFO]}))
    assert main(["ps", "--label", "a=b", "--job", "j", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "evil\\x1b[2J" in shown
    assert server.requests[0].path == "/v1/sandboxes?label=a%3Db&job=j&state=any&limit=1000"
    assert main(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == INFO["name"]
    assert main(["ps", "-q"]) == 0
    assert capsys.readouterr().out == f"{ID}\n"
    assert main(["ps", "--label", "nonsense"]) == 1
    assert "KEY=VALUE" in capsys.readouterr().err


def test_exec_gives_the_programs_streams_and_exit_code(serve: Serve) -> None:
    server = serve(program({"stream": 1, "data": b"out\xff"}, {"stream": 2, "data": b"err"}, ended(7)))
    done = dsec("exec", "-e", "A=1", "-w", "/tmp", "-u", "me", "--timeout-s", "5", ID, "ls", "-la", stdin=b"in")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\xff", b"err")
    assert server.requests[1].value() == {
        "command": ["ls", "-la"],
        "env": {"A": "1"},
        "cwd": "/tmp",
        "user": "me",
        "timeout_s": 5.0,
        "stdin": b"in",
    }


def test_one_word_is_a_shell_line_and_stdin_can_be_left_alone(serve: Serve) -> None:
    server = serve(program(ended(0)))
    assert dsec("exec", "--no-stdin", ID, "--", "echo $A | wc", stdin=b"in").returncode == 0
    assert server.requests[1].value() == {"command": "echo $A | wc"}


def test_limits_are_said_on_stderr(serve: Serve) -> None:
    serve(program(ended(137, cause="oom", signal=9, limits_hit=["memory"])))
    done = dsec("exec", ID, "x")
    assert done.returncode == 137
    assert done.stdout == b""
    assert b"out of memory" in done.stderr
    assert b"limits hit: memory" in done.stderr


def test_output_that_was_streamed_whole_met_no_limit(serve: Serve) -> None:
    kept = {"head": b"o", "tail": b"t", "total": 3}
    serve(program({"stream": 1, "data": b"out"}, ended(0, out=kept, limits_hit=["output", "disk"])))
    assert dsec("exec", ID, "x").stderr == b"dsec: limits hit: disk\n"


def test_output_that_did_not_come_whole_is_said(serve: Serve) -> None:
    kept = {"head": b"o", "tail": b"t", "total": 4}
    serve(program({"stream": 1, "data": b"out"}, ended(0, out=kept, limits_hit=["output"])))
    assert dsec("exec", ID, "x").stderr == b"dsec: limits hit: output\n"


def test_run_creates_runs_and_stops(serve: Serve) -> None:
    server = serve(program(ended(3)))
    done = dsec("run", "--base", "b:1", "--toolkit", "t@1", "--network", "npm=off", "--label", "k=v", "--", "x")
    assert done.returncode == 3
    create, run, stop = server.requests
    assert create.value()["base"] == "b:1"
    assert create.value()["toolkits"] == ["t@1"]
    assert create.value()["network"] == {"npm": False}
    assert create.value()["labels"] == {"k": "v"}
    assert run.path.startswith(f"/v1/sandboxes/{ID}/run")
    assert stop.method == "DELETE"


def test_dockers_word_for_no_network(serve: Serve) -> None:
    server = serve(program(ended(0)))
    assert dsec("run", "--network", "none", "x").returncode == 0
    assert not server.requests[0].value().get("network")
    before = len(server.requests)
    for words in (["npm"], ["none", "npm=off"]):
        done = dsec("run", *(f"--network={word}" for word in words), "x")
        assert done.returncode == 125 and b"NAME=on or NAME=off, or none alone" in done.stderr
    assert len(server.requests) == before


def test_run_stops_its_sandbox_when_the_platform_fails(serve: Serve) -> None:
    server = serve(program({"error": {"code": "launch_failed", "message": "no", "request_id": "r-1"}}))
    done = dsec("run", "x")
    assert done.returncode == 125
    assert done.stderr == b"dsec: no\ndsec: request r-1: the node's log has more\n"
    assert server.requests[-1].method == "DELETE"


def test_detach_and_keep(serve: Serve) -> None:
    server = serve(program(ended(0)))
    assert dsec("run", "-d").stdout == f"{ID}\n".encode()
    assert dsec("run", "--keep", "x").stderr == f"{ID}\n".encode()
    assert all(request.method != "DELETE" for request in server.requests)
    assert dsec("run").returncode == 125
    assert dsec("run", "-d", "x").returncode == 125


@pytest.mark.parametrize("number", [1, 2, 15])
def test_interrupt_kills_the_program_and_stops_the_sandbox(serve: Serve, number: int) -> None:
    def script(request: Request, wire: Wire) -> None:
        if "stream=1" in request.path:
            wire.stream()
            wire.item({"started": "p-9"})
            wire.item({"stream": 1, "data": b"going\n"})
            wire.hang()
        else:
            wire.answer(INFO if request.method != "POST" or request.path == "/v1/sandboxes" else {})

    server = serve(script)
    with subprocess.Popen(
        [sys.executable, "-c", NO_START, "run", "x"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"going\n"
        process.send_signal(number)
        assert process.wait() == 128 + number
    assert [request.path for request in server.requests[-2:]] == [
        f"/v1/sandboxes/{ID}/processes/p-9/kill",
        f"/v1/sandboxes/{ID}?grace_s=0",
    ]


def test_reader_that_leaves_is_no_traceback(serve: Serve) -> None:
    serve(lambda request, wire: wire.answer({"items": [INFO] * 20_000}))
    with subprocess.Popen(
        [sys.executable, "-c", NO_START, "ps"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.parametrize(("output", "code"), [(">&-", 0), (">&- 2>&-", 0), (">/dev/full", 1)])
def test_output_that_goes_nowhere_is_no_traceback(serve: Serve, output: str, code: int) -> None:
    serve(lambda request, wire: wire.answer({"items": [INFO] * 20_000}))
    line = f'exec "$0" -c "$1" ps {output}'
    done = subprocess.run(["sh", "-c", line, sys.executable, NO_START], capture_output=True, check=False)
    assert done.returncode == code
    lines = done.stderr.decode().splitlines()
    assert len(lines) == code and all(line.startswith("dsec: ") for line in lines)


def test_stop_goes_on_after_a_failure(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: Request, wire: Wire) -> None:
        if request.path.endswith("/nope"):
            wire.error("not_found", "no sandbox nope", 404)
        else:
            wire.answer(INFO)

    serve(script)
    assert main(["rm", "nope", "yes"]) == 1
    got = capsys.readouterr()
    assert got.out == "yes\n"
    assert got.err == "dsec: nope: no sandbox nope\n"


def test_layers(
    serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layer = {"digest": "sha256:" + "0" * 64, "names": ["t:1"], "size_bytes": 2048}

    def script(request: Request, wire: Wire) -> None:
        if request.path.endswith(":import"):
            wire.stream()
            wire.item({"progress": "packing \x1b[2J"})
            wire.item({"layer": layer})
            wire.end()
        else:
            wire.answer({"items": [layer]} if request.path == "/v1/layers" else layer)

    server = serve(script)
    monkeypatch.chdir(tmp_path)
    assert main(["layer", "import", "dir:x", "t:1", "--role", "toolkit", "--env", "A=1"]) == 0
    got = capsys.readouterr()
    assert got.out == layer["digest"] + "\n"  # type: ignore[operator] # it is a str
    assert got.err == "packing \\x1b[2J\n"
    assert server.requests[0].value()["source"] == f"dir:{tmp_path}/x"
    for given in ("tar:", "erofs:", "store:"):
        assert main(["layer", "import", f"{given}x#y", "t:1"]) == 0
        assert server.requests[-1].value()["source"] == f"{given}{tmp_path}/x#y"
    capsys.readouterr()
    assert main(["layer", "ls"]) == 0
    assert "t:1   base  2.0 KiB  -" in capsys.readouterr().out
    assert main(["layer", "rm", "t:1"]) == 0


def test_every_command_that_asks_a_node_takes_its_url_last(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(request: Request, wire: Wire) -> None:
        if request.path.endswith(":import"):
            wire.stream()
            wire.item({"layer": {"digest": "sha256:" + "0" * 64}})
            wire.end()
        elif "/events" in request.path:
            no_events(wire)
        else:
            wire.answer({"digest": "sha256:" + "0" * 64, "stopped": 1, "items": [], **INFO})

    url = serve(script).url
    monkeypatch.setenv("DSEC_URL", "unix:///nowhere/at/all")
    lines = ("layer ls", "layer rm t:1", "layer import debootstrap:bookworm t:1", "ps", f"stop {ID}", f"inspect {ID}")
    for line in (*lines, "job stop j"):
        assert main([*line.split(), "--url", url]) == 0, line
    assert main(["layer", "--url", url, "ls"]) == 0
    assert main(["layer", "ls"]) == 1


def test_inspect_and_job(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: Request, wire: Wire) -> None:
        if "/events" in request.path:
            return no_events(wire)
        if "/files:stat" in request.path:
            return wire.answer({"path": "/dev/null", "name": "null", "type": "char"})
        answers = {"/usage": {"pids": 1}, "/processes": {}, ":stop": {"stopped": 3}}
        wire.answer(next((value for end, value in answers.items() if request.path.endswith(end)), INFO))

    serve(script)
    assert main(["inspect", ID]) == 0
    assert json.loads(capsys.readouterr().out)["usage"] == {"pids": 1}
    assert main(["job", "stop", "grpo-12"]) == 0
    assert capsys.readouterr().out == "stopped 3\n"


def test_a_job_that_has_nothing_to_stop_is_a_failure(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    serve(lambda request, wire: wire.answer({"stopped": 0}))
    assert main(["job", "stop", "grpo-21"]) == 1
    assert "'grpo-21'" in capsys.readouterr().err


def test_ps_imports_little() -> None:
    """What makes it answer at once when called cold."""
    code = "import sys\nfrom dsec.cli.main import main\nmain(['ps', '--url', 'unix:///none'])\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"asyncio", "ssl", "http.client", "email", "subprocess", "json", "typer", "rich", "inspect", "pathlib"}
    loaded = set(done.stdout.split())
    # msgspec itself imports inspect when typing_extensions is installed.
    allowed = {"inspect"} if "typing_extensions" in loaded else set()
    assert not (loaded & heavy) - allowed


@pytest.mark.parametrize("command", ["up", "down"])
def test_the_node_of_another_machine_is_not_started_or_ended_from_here(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--url", "ssh://elsewhere"])
    assert ended.value.code == 2
    assert "the node of this machine" in capsys.readouterr().err
