"""Inspect AI's own suite for sandbox providers, whole, and what it does not look at."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.solver import Generate, TaskState, solver
from inspect_ai.tool import bash_session
from inspect_ai.util import (
    ExecStdout,
    OutputLimitExceededError,
    SandboxEnvironmentSpec,
    SandboxUnavailableError,
    sandbox,
)
from inspect_ai.util._sandbox.limits import override_max_exec_output_size
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - its tests, as it asks for
from pydantic import ValidationError

from dsec.adapters.inspect import DsecSandboxConfig, DsecSandboxEnvironment, client_of
from tests.kit.home import Home

MIB = 1024 * 1024


def config_of(home: Home, **fields: Any) -> DsecSandboxConfig:
    return DsecSandboxConfig(url=f"unix://{home.place.run_dir}/api.sock", **fields)


@pytest.fixture
async def sandbox_env(home: Home) -> AsyncIterator[DsecSandboxEnvironment]:
    # Not root: the suite expects permissions to bind.
    config = config_of(home, user="nobody", cwd="/tmp")
    made = await DsecSandboxEnvironment.sample_init("suite", config, {})
    yield made["default"].as_type(DsecSandboxEnvironment)
    await DsecSandboxEnvironment.sample_cleanup("suite", config, made, False)


async def alive(env: DsecSandboxEnvironment) -> str:
    """Command lines of all processes in it."""
    listed = await env.sandbox.processes()
    return "\n".join(" ".join(process.argv) for process in listed.processes)


async def test_timeout_kills_children_that_were_seen_alive(sandbox_env: DsecSandboxEnvironment) -> None:
    """The suite's own test of it cannot fail.

    Its command is `sleep 30 # CHILD & sleep 30 # PARENT`: all after the first # is a comment, so there is one sleep
    and no child; the shell becomes that sleep, so that no process ever bears a marker; and without `ps` inside the
    search finds nothing either. Here they are seen first, one of them in a session of its own.
    """
    names = ["child_7f3a", "daemon_7f3a", "parent_7f3a"]
    script = "sh -c 'sleep 4321; : child_7f3a' & setsid sh -c 'trap : TERM; while :; do sleep 1; done; : daemon_7f3a' &"
    line = ["sh", "-c", f"{script} sleep 4321; : parent_7f3a"]
    call = asyncio.create_task(sandbox_env.exec(line, timeout=4))
    found: set[str] = set()
    while len(found) < len(names) and not call.done():
        shown = await alive(sandbox_env)
        found = {name for name in names if f": {name}" in shown}
    assert found == set(names), "they were never there"
    with pytest.raises(TimeoutError):
        await call
    # Not "in a moment": when the call is over they are gone.
    shown = await alive(sandbox_env)
    assert "7f3a" not in shown


async def test_cancelled_call_kills_its_program(sandbox_env: DsecSandboxEnvironment) -> None:
    call = asyncio.create_task(sandbox_env.exec(["sh", "-c", "touch begun; sleep 4321; :"]))
    while not await sandbox_env.sandbox.files.exists("begun"):
        assert not call.done()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    while "sleep 4321" in await alive(sandbox_env):
        pass  # the test's own time limit ends this


async def test_timeout_shows_what_was_said(sandbox_env: DsecSandboxEnvironment) -> None:
    with pytest.raises(TimeoutError) as caught:
        await sandbox_env.exec(["sh", "-c", "echo said; echo so >&2; sleep 4321"], timeout=1)
    assert vars(caught.value)["truncated_output"] == "said\nso\n"


@pytest.mark.parametrize("stream", ["", ">&2"])
async def test_output_up_to_the_limit_is_whole(sandbox_env: DsecSandboxEnvironment, stream: str) -> None:
    with override_max_exec_output_size(3 * MIB):
        done = await sandbox_env.exec(["sh", "-c", f"head -c {3 * MIB} /dev/zero | tr '\\0' x {stream}"])
    assert (done.stderr if stream else done.stdout) == "x" * 3 * MIB


async def test_too_much_output_ends_the_program(sandbox_env: DsecSandboxEnvironment) -> None:
    with override_max_exec_output_size(MIB), pytest.raises(OutputLimitExceededError) as caught:
        await sandbox_env.exec(["yes"])
    assert caught.value.truncated_output == "y\n" * (MIB // 2)
    while "yes" in await alive(sandbox_env):
        pass  # the test's own time limit ends this


async def test_output_that_is_no_text_is_shown_as_well_as_it_goes(sandbox_env: DsecSandboxEnvironment) -> None:
    done = await sandbox_env.exec(["printf", r"a\377b"])
    assert done.stdout == "a\N{REPLACEMENT CHARACTER}b"


async def test_long_input_nobody_reads(sandbox_env: DsecSandboxEnvironment) -> None:
    done = await sandbox_env.exec(["sh", "-c", "head -c 3; exit 7"], input="x" * 8 * MIB)
    assert (done.returncode, done.stdout) == (7, "xxx")
    with pytest.raises(TimeoutError):
        await sandbox_env.exec(["sleep", "4321"], input="x" * 8 * MIB, timeout=1)


@pytest.mark.parametrize(
    ("cmd", "options", "code"),
    [
        (["no-such-program"], {}, 127),
        (["true"], {"cwd": "/no/such/directory"}, 126),
        (["true"], {"user": "nosuchuser"}, 126),
        (["echo", "a\0b"], {}, 126),
        (["echo", "x" * 200_000], {}, 126),
        (["true"], {"env": {"A": "a\0b"}}, 126),
    ],
)
async def test_what_cannot_be_started_is_a_result(
    sandbox_env: DsecSandboxEnvironment, cmd: list[str], options: dict[str, Any], code: int
) -> None:
    done = await sandbox_env.exec(cmd, **options)
    assert (done.success, done.returncode, done.stdout) == (False, code, "")
    assert done.stderr.strip()


EATS = "x = bytearray(1 << 30)"


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (["python3", "-c", EATS], 137, "the sandbox's limit was met: memory\n"),
        (["sh", "-c", f"printf x >&2; python3 -c '{EATS}'; exit 3"], 3, "the sandbox's limit was met: memory\n"),
        (["sh", "-c", "echo x >&2; exit 3"], 3, "x\n"),
        (["sh", "-c", f"python3 -c '{EATS}' 2>/dev/null; true"], 0, ""),
    ],
)
async def test_a_limit_that_a_failed_program_met_is_told(home: Home, line: list[str], code: int, said: str) -> None:
    config = config_of(home, memory_mib=128)
    made = await DsecSandboxEnvironment.sample_init("suite", config, {})
    try:
        done = await made["default"].exec(line)
    finally:
        await DsecSandboxEnvironment.sample_cleanup("suite", config, made, False)
    assert (done.returncode, done.success, done.stdout) == (code, code == 0, "")
    assert done.stderr.endswith(said)
    assert ("limit was met" in done.stderr) == ("limit was met" in said)


async def test_lost_sandbox_is_never_a_programs_failure(sandbox_env: DsecSandboxEnvironment) -> None:
    await sandbox_env.sandbox.stop(grace_s=0)
    for call in (sandbox_env.exec(["true"]), sandbox_env.read_file("/etc/passwd"), sandbox_env.write_file("f", "")):
        with pytest.raises(SandboxUnavailableError):
            await call
    with pytest.raises(ConnectionError):
        await sandbox_env.connection()


async def test_connection_says_how_to_get_in(sandbox_env: DsecSandboxEnvironment, home: Home) -> None:
    said = await sandbox_env.connection(user="root")
    url = f"unix://{home.place.run_dir}/api.sock"
    assert said.command == f"dsec shell --url {url} --user root {sandbox_env.sandbox.id}"


def test_wrong_configuration_names_its_field(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="memory_mib"):
        DsecSandboxConfig(memory_mb=512)
    with pytest.raises(ValidationError, match="cpu"):
        DsecSandboxConfig(cpu=-1)
    config = DsecSandboxConfig(base="debian:12", cpu=2, labels={"a": "b"})
    hash(config)  # Inspect puts configurations into sets
    assert DsecSandboxEnvironment.config_deserialize(json.loads(config.model_dump_json())) == config


async def test_configuration_from_a_file(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "dsec.yaml"
    file.write_text(f"url: unix://{home.place.run_dir}/api.sock\ncwd: /var\nlabels: {{a: b}}\n")
    made = await DsecSandboxEnvironment.sample_init("suite", str(file), {})
    try:
        assert (await made["default"].exec(["pwd"])).stdout == "/var\n"
        info = await made["default"].as_type(DsecSandboxEnvironment).sandbox.info()
        assert info.spec.labels == {"a": "b", "inspect_ai": "sample", "inspect_ai.task": "suite"}
    finally:
        await DsecSandboxEnvironment.sample_cleanup("suite", None, made, False)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("- a list\n", "not a mapping"),
        ("services: {default: {image: python}}\n", "a Compose file, and a sample has one sandbox"),
        ("FROM a: b: c\n", "no YAML"),
        (None, "no such file; the sandbox dsec takes a DsecSandboxConfig"),
    ],
)
async def test_a_wrong_file_is_named(tmp_path: Path, content: str | None, told: str) -> None:
    file = tmp_path / "other.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises((TypeError, FileNotFoundError)) as caught:
        await DsecSandboxEnvironment.sample_init("suite", str(file), {})
    # Inspect shows an error's repr.
    assert f"{file}: " in repr(caught.value)
    assert told in repr(caught.value)


async def test_task_cleanup_stops_what_is_left_unless_told_not_to(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(home)
    for cleanup in (True, False):
        made = await DsecSandboxEnvironment.sample_init("suite", config, {})
        sbx = made["default"].as_type(DsecSandboxEnvironment).sandbox
        await DsecSandboxEnvironment.task_cleanup("suite", config, cleanup)
        assert ((await sbx.info()).state == "running") is not cleanup
        assert (f"dsec stop {sbx.id}" in capsys.readouterr().out) is not cleanup
        await sbx.stop(grace_s=0)


async def test_clean_up_by_hand_stops_what_evaluations_left(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_URL", config_of(home).url or "")
    client_of.cache_clear()
    made = [await DsecSandboxEnvironment.sample_init("suite", None, {}) for _ in range(3)]
    first, *_ = left = [each["default"].as_type(DsecSandboxEnvironment).sandbox for each in made]
    with home.client() as client, client.create() as other:
        await DsecSandboxEnvironment.cli_cleanup(first.id)
        assert [(await sbx.info()).state for sbx in left] == ["stopped", "running", "running"]
        await DsecSandboxEnvironment.cli_cleanup(None)
        assert [(await sbx.info()).state for sbx in left] == ["stopped"] * 3
        assert other.info().state == "running"


@solver
def visiting(ends: str) -> Any:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await sandbox().exec(["sh", "-c", "cat given >kept"])
        state.output.completion = await sandbox().read_file("kept")
        if ends == "error":
            raise ValueError("the solver's own")
        if ends == "limit":
            await sandbox().exec(["sleep", "4321"])
        return state

    return solve


@pytest.mark.parametrize(("ends", "status"), [("well", "success"), ("error", "error"), ("limit", "success")])
def test_evaluation_leaves_nothing(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, status: str
) -> None:
    """By the name `dsec` only, found by the entry point; samples end well, with an error, or in their time limit."""
    monkeypatch.setenv("DSEC_URL", f"unix://{home.place.run_dir}/api.sock")
    samples = [Sample(input="i", id=number, files={"given": f"given {number}"}) for number in range(4)]
    task = Task(samples, solver=visiting(ends), sandbox="dsec", time_limit=5 if ends == "limit" else None)
    [log] = eval(task, model="mockllm/model", log_dir=str(tmp_path), display="none", fail_on_error=True)
    assert log.status == status, log.error
    if ends == "well":
        assert log.samples is not None
        assert [sample.output.completion for sample in log.samples] == [f"given {number}" for number in range(4)]
    with home.client() as client:
        assert list(client.list()) == []


def test_evaluation_with_a_configuration(home: Home, tmp_path: Path) -> None:
    where = SandboxEnvironmentSpec("dsec", config_of(home, cwd="/tmp", user="nobody"))
    task = Task([Sample(input="i", files={"given": "x"})], solver=visiting("well"), sandbox=where)
    [log] = eval(task, model="mockllm/model", log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error


@solver
def using_tools() -> Any:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        done = await sandbox().exec_remote(["sh", "-c", "echo out; echo no >&2; exit 3"], stream=False)
        process = await sandbox().exec_remote(["sh", "-c", "echo begun; exec sleep 4321"])
        async for event in process:
            if isinstance(event, ExecStdout):
                break
        await process.kill()
        left = await sandbox().exec(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[s]leep 4321'"])
        said = await bash_session()(action="type_submit", input="cd /var && echo $((6 * 7))")
        state.output.completion = f"{done.returncode} {done.stdout} {done.stderr} {left.stdout} {said}"
        return state

    return solve


# A guest would be busy with Inspect's server for a minute and a half, and of a kernel it wants no more than others do.
@pytest.mark.same_everywhere
@pytest.mark.timeout(300)
def test_tools_that_inspect_puts_into_a_sandbox(home: Home, tmp_path: Path) -> None:
    """`exec_remote`, and tools such as `bash_session`: by a server of Inspect's, inside."""
    where = SandboxEnvironmentSpec("dsec", config_of(home, cwd="/tmp", user="nobody"))
    task = Task([Sample(input="i")], solver=using_tools(), sandbox=where)
    [log] = eval(task, model="mockllm/model", log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    assert log.samples is not None
    words = log.samples[0].output.completion.split()
    assert words[:4] == ["3", "out", "no", "0"]
    assert "42" in words[4:]
