"""SWE-ReX's stock client against a sandbox: the calls of its own runtime tests, and what they do not look at."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import uuid
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from swerex.deployment.remote import RemoteDeployment
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
    SwerexException,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionRequest,
    Command,
    CommandResponse,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)
from swerex.runtime.remote import RemoteRuntime

import dsec
from dsec.adapters.swe_rex import TOKEN_ENV, app, serve, server
from tests.kit.home import BASE, Home

TOKEN = "the-token"
CALLS = ("is_alive", "", "create_session", "run_in_session", "close_session", "execute", "read_file", "upload", "close")


@pytest.fixture
async def sbx(home: Home) -> AsyncIterator[dsec.AsyncSandbox]:
    client = dsec.AsyncClient(f"unix://{home.place.run_dir}/api.sock")
    async with client, await client.create(base=BASE, cwd="/root") as made:
        await made.run("ln -s python3 /usr/bin/python", check=True)
        yield made


@pytest.fixture
async def address(sbx: dsec.AsyncSandbox) -> AsyncIterator[tuple[str, int]]:
    async with serve(sbx, TOKEN) as where:
        yield where


@pytest.fixture
async def rex(address: tuple[str, int]) -> AsyncIterator[RemoteRuntime]:
    host, port = address
    deployment = RemoteDeployment(host=f"http://{host}", port=port, auth_token=TOKEN, timeout=30)
    await deployment.start()
    assert await deployment.is_alive()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    yield deployment.runtime
    await deployment.stop()


async def does(rex: RemoteRuntime, command: str, **options: Any) -> BashObservation:
    seen = await rex.run_in_session(BashAction(command=command, **{"timeout": 60, **options}))
    assert isinstance(seen, BashObservation)
    return seen


async def executes(rex: RemoteRuntime, command: str | list[str], **options: Any) -> CommandResponse:
    return await rex.execute(Command(command=command, **{"timeout": 60, **options}))


# Alive or not.


async def test_dead_server_is_not_alive() -> None:
    assert not await RemoteRuntime(host="http://127.0.0.1", port=1, auth_token="").is_alive()


async def test_ended_sandbox_is_not_alive(rex: RemoteRuntime, sbx: dsec.AsyncSandbox) -> None:
    await sbx.stop(grace_s=0)
    said = await rex.is_alive()
    assert not said and "stopped" in said.message
    for call in (executes(rex, ["true"]), does(rex, "true"), rex.read_file(ReadFileRequest(path="/etc/passwd"))):
        with pytest.raises(SwerexException):
            await call


@pytest.mark.same_everywhere
@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x"])
@pytest.mark.parametrize("call", [*CALLS, "no-such-call"])
async def test_nothing_without_the_token(address: tuple[str, int], call: str, token: str | None) -> None:
    url = f"http://{address[0]}:{address[1]}/{call}"
    headers = {} if token is None else {"X-API-Key": token}
    async with aiohttp.ClientSession() as client:
        for method in ("GET", "POST"):
            async with client.request(method, url, headers=headers) as answer:
                assert answer.status == 403


def test_no_server_without_a_token(sbx: dsec.AsyncSandbox) -> None:
    with pytest.raises(ValueError, match="auth_token"):
        app(sbx, "")


async def test_hello_and_what_is_no_request(address: tuple[str, int]) -> None:
    url, headers = f"http://{address[0]}:{address[1]}", {"X-API-Key": TOKEN}
    async with aiohttp.ClientSession(headers=headers) as client:
        async with client.get(f"{url}/") as answer:
            assert (await answer.json())["message"] == "hello world"
        for call in ("execute", "run_in_session", "read_file", "create_session"):
            for body in (b"", b"[]", b"{nothing", b'{"command": 3, "session": 3}', b"\xff"):
                async with client.post(f"{url}/{call}", data=body) as answer:
                    assert answer.status == 422, call
        async with client.post(f"{url}/upload", data={"target_path": "/f"}) as answer:
            assert answer.status == 511


# Programs.


async def test_execute(rex: RemoteRuntime) -> None:
    assert (await executes(rex, "echo 'a b'", shell=True)).stdout == "a b\n"
    assert (await executes(rex, ["echo", "a b"])).stdout == "a b\n"
    assert (await executes(rex, ["echo $0 $1", "a", "b"], shell=True)).stdout == "a b\n"
    for empty in ("", "\n"):
        await executes(rex, empty, shell=True, check=True)
    done = await executes(rex, "echo out; echo no >&2; exit 3", shell=True)
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "no\n", 3)
    done = await executes(rex, "echo 1; echo 2 >&2; echo 3", shell=True, merge_output_streams=True)
    assert (done.stdout, done.stderr) == ("1\n2\n3\n", "")
    done = await executes(rex, "pwd; echo $A", shell=True, cwd="/var", env={"A": "b"})
    assert done.stdout == "/var\nb\n"
    assert (await executes(rex, "kill -TERM $$", shell=True)).exit_code == -15
    assert (await executes(rex, ["printf", r"\377"])).stdout == r"\xff"


async def test_execute_fails(rex: RemoteRuntime, sbx: dsec.AsyncSandbox) -> None:
    with pytest.raises(CommandTimeoutError):
        await executes(rex, "setsid sleep 4321 & sleep 4321", shell=True, timeout=0.5)
    assert not [process for process in await sbx.processes() if "4321" in process.argv]
    with pytest.raises(NonZeroExitCodeError, match=r"what I said.*\n.*no-way"):
        await executes(rex, "echo no-way; false", shell=True, check=True, error_msg="what I said")
    with pytest.raises(FileNotFoundError):
        await executes(rex, ["no-such-program"])
    with pytest.raises(FileNotFoundError):
        await executes(rex, ["true"], cwd="/no/such")
    with pytest.raises(PermissionError):
        await executes(rex, ["/etc/passwd"])
    with pytest.raises(ValueError, match="NUL"):
        await executes(rex, ["a\0b"])


@pytest.mark.same_everywhere
async def test_request_that_comes_again_is_done_once(address: tuple[str, int], sbx: dsec.AsyncSandbox) -> None:
    url = f"http://{address[0]}:{address[1]}/execute"
    async with aiohttp.ClientSession() as client:

        async def send(name: str, line: str) -> Any:
            headers = {"X-API-Key": TOKEN, "X-Request-ID": name}
            async with client.post(url, json={"command": line, "shell": True}, headers=headers) as answer:
                return await answer.json()

        line = "read -r x </go; echo x >>/done; cat /done"
        await sbx.run("mkfifo /go", check=True)
        name = str(uuid.uuid4())
        both = [asyncio.create_task(send(name, line)) for _ in range(2)]
        await sbx.run("echo >/go", timeout_s=60, check=True)
        assert [answer["stdout"] for answer in await asyncio.gather(*both)] == ["x\n", "x\n"]
        for _ in range(server.ANSWERS_KEPT - 2):
            await send(str(uuid.uuid4()), "true")
        assert (await send(name, line))["stdout"] == "x\n"
        assert (await sbx.files.read_text("/done")) == "x\n"


# Files.


async def test_files(rex: RemoteRuntime) -> None:
    await rex.write_file(WriteFileRequest(path="/new/deep/f", content="t\N{SNOWMAN}"))
    assert (await rex.read_file(ReadFileRequest(path="/new/deep/f"))).content == "t\N{SNOWMAN}"
    await rex.write_file(WriteFileRequest(path="/large", content="x" * 3_000_000))
    assert len((await rex.read_file(ReadFileRequest(path="/large"))).content) == 3_000_000
    with pytest.raises(FileNotFoundError):
        await rex.read_file(ReadFileRequest(path="none"))
    with pytest.raises(IsADirectoryError):
        await rex.read_file(ReadFileRequest(path="/etc"))


@pytest.mark.same_everywhere
@pytest.mark.parametrize(
    ("encoding", "errors", "text"),
    [("latin-1", None, "caf\xe9"), ("utf-8", "replace", "caf\ufffd"), ("utf-8", "ignore", "caf"), (None, None, None)],
)
async def test_read_as_text(
    rex: RemoteRuntime, sbx: dsec.AsyncSandbox, encoding: str | None, errors: str | None, text: str | None
) -> None:
    await sbx.files.write("/f", b"caf\xe9")
    wanted = ReadFileRequest(path="/f", encoding=encoding, errors=errors)
    if text is not None:
        assert (await rex.read_file(wanted)).content == text
        return
    with pytest.raises(SwerexException, match="decode"):  # what this client makes of UnicodeDecodeError
        await rex.read_file(wanted)


@pytest.mark.same_everywhere
async def test_too_much_is_refused(rex: RemoteRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/f").write_bytes(bytes(20_000))
    await rex.write_file(WriteFileRequest(path="/f", content="x" * 20_000))
    for name in ("REQUEST_MAX_BYTES", "UPLOAD_MAX_BYTES", "UNPACKED_MAX_BYTES", "READ_MAX_BYTES"):
        monkeypatch.setattr(server, name, 10_000)
    upload = UploadRequest(source_path=str(tmp_path / "tree/f"), target_path="/g")
    archive = UploadRequest(source_path=str(tmp_path / "tree"), target_path="/g")
    for call in (
        rex.write_file(WriteFileRequest(path="/g", content="x" * 20_000)),
        rex.read_file(ReadFileRequest(path="/f")),
        rex.upload(upload),
        rex.upload(archive),
    ):
        with pytest.raises(ValueError, match="more than 10000 bytes"):
            await call
    assert (await executes(rex, ["ls", "/g"])).exit_code == 2


@pytest.mark.same_everywhere
async def test_upload_that_is_no_archive(address: tuple[str, int], sbx: dsec.AsyncSandbox) -> None:
    """Nor does one lead out of its directory."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("../../out", "x")
        archive.writestr("/abs", "y")
    async with aiohttp.ClientSession(headers={"X-API-Key": TOKEN}) as client:
        for content, status in ((b"no zip", 511), (packed.getvalue(), 200)):
            form = aiohttp.FormData({"target_path": "/up/tree", "unzip": "true"})
            form.add_field("file", content, filename="z")
            async with client.post(f"http://{address[0]}:{address[1]}/upload", data=form) as answer:
                assert answer.status == status
    assert (await sbx.run("find /up -type f | sort")).stdout == "/up/tree/abs\n/up/tree/out\n"


async def test_upload(rex: RemoteRuntime, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "a").write_text("1")
    (tree / "sub/b").write_bytes(os.urandom(3_000_000))
    await rex.upload(UploadRequest(source_path=str(tree / "a"), target_path="/up/a"))
    assert (await rex.read_file(ReadFileRequest(path="/up/a"))).content == "1"
    await rex.upload(UploadRequest(source_path=str(tree), target_path="/up/tree"))
    listed = (await executes(rex, "cd /up/tree; find . -type f | sort; stat -c %s sub/b", shell=True)).stdout
    assert listed == "./a\n./sub/b\n3000000\n"


# Sessions.


async def test_session_keeps_its_state(rex: RemoteRuntime) -> None:
    assert (await does(rex, "cd /var && export A=1 && f() { echo $A $PWD; }")).output == ""
    assert (await does(rex, "f")).output == "1 /var"
    assert (await does(rex, "echo 'asdf'")).output == "asdf"
    assert (await does(rex, "echo 1; echo 2 >&2; echo 3")).output == "1\n2\n3"


@pytest.mark.same_everywhere
@pytest.mark.parametrize(
    ("command", "code"), [("true", 0), ("false", 1), ("nosuchprogram", 127), ("false && true", 1), ("A=(); false", 1)]
)
async def test_exit_codes(rex: RemoteRuntime, command: str, code: int) -> None:
    assert (await does(rex, command, check="silent")).exit_code == code
    assert (await does(rex, command, check="ignore")).exit_code is None
    if code:
        with pytest.raises(NonZeroExitCodeError):
            await does(rex, command, check="raise")


@pytest.mark.same_everywhere
@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("", []),
        ("\n", []),
        ("\n\n \n", []),
        ("# echo no", []),
        ("\n echo 'test'\n\n", ["test"]),
        ("\n\n\n echo 1 \n  \n \n echo 2 \n\n\n", ["1", "2"]),
        ("echo 1; echo 2", ["1", "2"]),
        ("echo 1 && echo 2", ["1", "2"]),
        ("for i in {1..3};\n do echo x;\n done", ["x"] * 3),
        ("python <<EOF\nprint('a b')\nprint('c')\nEOF", ["a b", "c"]),
        ("bash -n <<'EOF'\necho x\nEOF", []),
        ("[[ $env == $env ]]", []),
        ("echo a;A=();echo b", ["a", "b"]),
        ("echo 'hello\nworld'", ["hello", "world"]),
        ("echo SHELLPS1PREFIX", ["SHELLPS1PREFIX"]),
        ("printf '\\033[1mbold\\033[0m\\r\\n'", ["bold"]),
        ("(sleep 4321) &", []),
    ],
)
async def test_commands_of_a_session(rex: RemoteRuntime, command: str, lines: list[str]) -> None:
    seen = await does(rex, command)
    assert (seen.output.splitlines(), seen.exit_code) == (lines, 0)


@pytest.mark.same_everywhere
async def test_no_bash_is_told_before_it_is_run(rex: RemoteRuntime) -> None:
    with pytest.raises(BashIncorrectSyntaxError) as caught:
        await does(rex, "touch /ran; (a")
    assert caught.value.extra_info["bash_stdout"] == ""
    assert "syntax error" in caught.value.extra_info["bash_stderr"]
    assert (await does(rex, "ls /ran", check="silent")).exit_code == 2


async def test_sessions_by_name(rex: RemoteRuntime) -> None:
    with pytest.raises(SessionExistsError):
        await rex.create_session(CreateBashSessionRequest())
    for name in ("one", "two"):
        await rex.create_session(CreateBashSessionRequest(session=name))
    await asyncio.gather(does(rex, "x=42", session="one"), does(rex, "y=24", session="two"))
    asked = [("$x", "one"), ("$y", "two"), ("$y", "one"), ("$x", "two")]
    assert [(await does(rex, f"echo {what}", session=name)).output for what, name in asked] == ["42", "24", "", ""]
    await rex.close_session(CloseBashSessionRequest(session="one"))
    for call in (rex.close_session(CloseBashSessionRequest(session="one")), does(rex, "true", session="one")):
        with pytest.raises(SessionDoesNotExistError):
            await call
    assert (await does(rex, "echo $y", session="two")).output == "24"


async def test_names_that_come_at_once_are_one_session(rex: RemoteRuntime) -> None:
    starts = [rex.create_session(CreateBashSessionRequest(session="s")) for _ in range(4)]
    ends = await asyncio.gather(*starts, return_exceptions=True)
    assert sorted(type(end).__name__ for end in ends) == ["CreateBashSessionResponse"] + ["SessionExistsError"] * 3


async def test_startup_sources(rex: RemoteRuntime, sbx: dsec.AsyncSandbox) -> None:
    await sbx.files.write("/rc", "echo from rc; X=1\n")
    start = CreateBashSessionRequest(session="s", startup_source=["/rc"], startup_timeout=60)
    assert (await rex.create_session(start)).output == "from rc"
    assert (await does(rex, "echo $X", session="s")).output == "1"
    await sbx.files.write("/rc", "sleep 4321\n")
    with pytest.raises(CommandTimeoutError):
        await rex.create_session(CreateBashSessionRequest(session="t", startup_source=["/rc"], startup_timeout=0.3))
    with pytest.raises(SessionDoesNotExistError):
        await does(rex, "true", session="t")


async def test_close_while_a_session_is_started(rex: RemoteRuntime, sbx: dsec.AsyncSandbox) -> None:
    await sbx.run("mkfifo /rc /opened", check=True)
    start = CreateBashSessionRequest(session="s", startup_source=["/rc"], startup_timeout=60)
    starting = asyncio.create_task(rex.create_session(start))
    # A pipe opens for writing once the shell has it open for reading; the shell waits for the end of what is written.
    writer = await sbx.spawn("exec 3>/rc; echo >/opened; read line", timeout_s=60)
    await sbx.run("read line </opened", timeout_s=60, check=True)
    await rex.close()
    await writer.kill()
    with pytest.raises(SessionDoesNotExistError):
        await starting
    assert not [process for process in await sbx.processes() if "bash" in " ".join(process.argv)]


async def test_shell_that_ends(rex: RemoteRuntime) -> None:
    assert (await does(rex, "exit 3", check="silent")).exit_code == 3
    with pytest.raises(SessionDoesNotExistError):
        await does(rex, "true")
    await rex.close_session(CloseBashSessionRequest())
    await rex.create_session(CreateBashSessionRequest())
    assert (await does(rex, "echo again")).output == "again"


async def test_timeout_and_interrupt(rex: RemoteRuntime, sbx: dsec.AsyncSandbox) -> None:
    await does(rex, "X=kept")
    with pytest.raises(CommandTimeoutError):
        await does(rex, "sleep 4321", timeout=0.3)
    assert not [process for process in await sbx.processes() if "4321" in process.argv]
    await rex.run_in_session(BashInterruptAction())
    assert (await does(rex, "echo $X")).output == "kept"


@pytest.mark.parametrize(
    "text", ["for i in 1 2; do sleep 4321; done", "sleep 4321; touch /ran", "sleep 4321\ntouch /ran"]
)
async def test_a_session_goes_on_after_a_timeout(rex: RemoteRuntime, sbx: dsec.AsyncSandbox, text: str) -> None:
    await does(rex, "X=kept")
    with pytest.raises(CommandTimeoutError) as caught:
        await does(rex, text, timeout=0.3)
    assert "ended" not in str(caught.value)
    await rex.run_in_session(BashInterruptAction())
    assert (await does(rex, "echo $X")).output == "kept"
    assert not await sbx.files.exists("/ran")


async def test_a_session_that_ends_with_a_timeout_says_so(rex: RemoteRuntime) -> None:
    with pytest.raises(CommandTimeoutError, match="the session has ended with it"):
        await does(rex, "trap '' 16; while :; do :; done", timeout=0.2)
    with pytest.raises(SessionDoesNotExistError):
        await rex.run_in_session(BashInterruptAction())
    with pytest.raises(SessionDoesNotExistError, match=r"timeout of 0\.2 s"):
        await does(rex, "echo on")


async def test_interrupt_of_a_command_that_runs(rex: RemoteRuntime, sbx: dsec.AsyncSandbox) -> None:
    running = asyncio.create_task(does(rex, "touch /begun; sleep 4321", timeout=None, check="silent"))
    while not await sbx.files.exists("/begun"):
        assert not running.done()
    await rex.run_in_session(BashInterruptAction())
    seen = await running
    assert (seen.exit_code, seen.failure_reason) == (130, "interrupted")
    assert (await does(rex, "echo on")).output == "on"


async def test_end_of_the_runtime_ends_its_sessions(rex: RemoteRuntime, sbx: dsec.AsyncSandbox) -> None:
    await does(rex, "sleep 4321 &")
    await rex.close()
    assert not [process for process in await sbx.processes() if "4321" in process.argv]
    assert await rex.is_alive()


# The command.


@pytest.mark.same_everywhere
def test_command(home: Home) -> None:
    env = {**home.env, "DSEC_URL": f"unix://{home.place.run_dir}/api.sock", TOKEN_ENV: "from-the-environment"}
    line = [sys.executable, "-m", "dsec.adapters.swe_rex"]
    with (
        home.client() as client,
        client.create(base=BASE, name="rex"),
        subprocess.Popen([*line, "rex"], env=env, stdout=subprocess.PIPE, text=True) as serving,
    ):
        try:
            assert serving.stdout is not None
            said = dict(word.split("=", 1) for word in serving.stdout.readline().split())
            host, port = said["--deployment.host"], int(said["--deployment.port"])
            rex = RemoteRuntime(host=host, port=port, auth_token="from-the-environment")
            assert asyncio.run(executes(rex, ["cat", "/etc/debian_version"])).stdout.startswith("12")
            serving.send_signal(signal.SIGINT)
            assert serving.wait(timeout=30) == 0
        finally:
            serving.kill()
    done = subprocess.run([*line, "none"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "none" in done.stderr) == (1, True)
