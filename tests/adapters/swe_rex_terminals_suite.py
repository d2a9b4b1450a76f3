"""SWE-ReX's stock client and programs that are talked to: each has a terminal of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from swerex.exceptions import CommandTimeoutError
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionRequest,
    CreateBashSessionRequest,
)
from swerex.runtime.remote import RemoteRuntime

import dsec
from dsec.adapters.swe_rex import search, serve
from dsec.adapters.swe_rex.search import Search
from tests.kit.home import BASE, Home

ASK = [">>> "]
WAIT_S = 60.0


@pytest.fixture
async def sbx(home: Home) -> AsyncIterator[dsec.AsyncSandbox]:
    client = dsec.AsyncClient(f"unix://{home.place.run_dir}/api.sock")
    async with client, await client.create(base=BASE, cwd="/root") as made:
        yield made


@pytest.fixture
async def rex(sbx: dsec.AsyncSandbox) -> AsyncIterator[RemoteRuntime]:
    async with serve(sbx, "token") as (host, port):
        runtime = RemoteRuntime(host=f"http://{host}", port=port, auth_token="token")
        await runtime.create_session(CreateBashSessionRequest())
        yield runtime
        await runtime.close()


async def does(rex: RemoteRuntime, command: str, **options: Any) -> BashObservation:
    seen = await rex.run_in_session(BashAction(command=command, **{"timeout": WAIT_S, **options}))
    assert isinstance(seen, BashObservation)
    return seen


async def tells(rex: RemoteRuntime, command: str, expect: list[str] = ASK, **options: Any) -> BashObservation:
    return await does(rex, command, is_interactive_command=True, expect=expect, **options)


async def living(sbx: dsec.AsyncSandbox, word: str) -> bool:
    return any(word in " ".join(process.argv) for process in await sbx.processes())


async def test_interpreter_and_shell_by_turns(rex: RemoteRuntime, sbx: dsec.AsyncSandbox) -> None:
    await does(rex, "cd /var; export A=b; x=kept")
    for _ in range(2):
        seen = await tells(rex, "python3 -q")
        assert (seen.expect_string, seen.output) == (">>> ", "")
        assert (await tells(rex, "import os; print(os.getcwd(), os.environ['A'])")).output == "/var b"
        assert (await tells(rex, "for i in range(3): print(i)\n")).output.split() == ["...", "0", "1", "2"]
        assert (await does(rex, "quit()\n", is_interactive_quit=True)).exit_code == 0
        assert not await living(sbx, "python3")
        assert (await does(rex, "echo $x")).output == "kept"


async def test_it_has_a_terminal(rex: RemoteRuntime) -> None:
    script = "import sys; print([f.isatty() for f in (sys.stdin, sys.stdout, sys.stderr)])"
    assert (await does(rex, f'python3 -c "{script}"')).output == "[False, False, False]"
    seen = await tells(rex, f'python3 -c "{script}"', expect=[])
    assert (seen.output, seen.expect_string) == ("[True, True, True]", "SHELLPS1PREFIX")


async def test_expected_is_a_pattern_and_the_first_that_comes(rex: RemoteRuntime) -> None:
    script = "echo one; echo two; read line; echo got $line"
    seen = await tells(rex, script, expect=["t.o", "on[ef]"])
    assert (seen.output, seen.expect_string) == ("", "on[ef]")
    seen = await tells(rex, "answer", expect=["got .*r"])
    # What was typed is shown by the terminal, and left out where it comes first.
    assert (seen.output.split()[0], seen.expect_string) == ("two", "got .*r")


async def test_expected_without_being_called_interactive(rex: RemoteRuntime) -> None:
    seen = await does(rex, "echo before; echo ready; sleep 4321", expect=["ready"])
    assert (seen.output, seen.expect_string) == ("before", "ready")
    await rex.run_in_session(BashInterruptAction(timeout=WAIT_S))
    assert (await does(rex, "echo on")).output == "on"


async def test_what_never_comes_is_a_timeout(rex: RemoteRuntime, sbx: dsec.AsyncSandbox) -> None:
    with pytest.raises(CommandTimeoutError):
        await tells(rex, "python3 -q", expect=["NEVER"], timeout=2)
    assert await living(sbx, "python3")
    seen = await rex.run_in_session(BashInterruptAction(expect=ASK, timeout=WAIT_S))
    assert seen.expect_string == ">>> "
    assert (await tells(rex, "print(6 * 7)")).output.splitlines()[-1] == "42"


async def test_what_ignores_an_interrupt_is_killed(rex: RemoteRuntime, sbx: dsec.AsyncSandbox) -> None:
    await tells(rex, "trap '' INT; echo ready; setsid sleep 4321 & sleep 4321", expect=["ready"])
    await rex.run_in_session(BashInterruptAction(timeout=0.2, n_retry=2))
    assert not await living(sbx, "4321")
    assert (await does(rex, "echo on")).output == "on"


async def test_end_that_nobody_asked_for(rex: RemoteRuntime) -> None:
    await tells(rex, "python3 -q")
    seen = await tells(rex, "import os; os._exit(3)")
    assert seen.expect_string == "SHELLPS1PREFIX"
    assert (await does(rex, "echo on")).output == "on"


async def test_close_ends_it(rex: RemoteRuntime, sbx: dsec.AsyncSandbox) -> None:
    await tells(rex, "python3 -q")
    await rex.close_session(CloseBashSessionRequest())
    assert not await living(sbx, "python3")


async def test_one_that_is_replaced_is_ended(rex: RemoteRuntime, sbx: dsec.AsyncSandbox) -> None:
    await tells(rex, "python3 -q")
    assert (await does(rex, "echo ready; sleep 4321", expect=["ready"])).expect_string == "ready"
    assert not await living(sbx, "python3")
    await rex.close_session(CloseBashSessionRequest())
    assert not await living(sbx, "4321")


async def test_much_output_before_what_is_expected(rex: RemoteRuntime) -> None:
    seen = await tells(rex, "seq 1 200000; echo DONE; sleep 4321", expect=["DONE"])
    assert seen.output.splitlines() == [str(number) for number in range(1, 200_001)]


async def test_two_sessions_have_a_terminal_each(rex: RemoteRuntime) -> None:
    names = ["one", "two"]
    for name in names:
        await rex.create_session(CreateBashSessionRequest(session=name))
        await tells(rex, "python3 -q", session=name)
    await asyncio.gather(*(tells(rex, f"x = '{name}'", session=name) for name in names))
    said = await asyncio.gather(*(tells(rex, "print(x)", session=name) for name in names))
    assert [seen.output for seen in said] == names


# 2 to the 60th steps: no machine is through with them.
ENDLESS, FOOD = "(a+)+b", "a" * 60


async def test_a_pattern_that_never_ends_holds_nobody_up(rex: RemoteRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SEARCH_S", 0.5)
    for name in ("hostile", "other"):
        await rex.create_session(CreateBashSessionRequest(session=name))
    asked = asyncio.create_task(tells(rex, f"echo {FOOD}; sleep 4321", expect=[ENDLESS], session="hostile"))
    for turn in range(3):
        assert (await does(rex, f"echo {turn}", session="other")).output == str(turn)
    with pytest.raises(CommandTimeoutError, match=r"looking for .* took over 0.5 seconds of CPU"):
        await asked
    assert (await tells(rex, "more", expect=["m.+e"], session="hostile")).expect_string == "m.+e"


async def test_a_pattern_that_never_ends_is_given_up_with_its_call(rex: RemoteRuntime) -> None:
    with pytest.raises(CommandTimeoutError, match=r"timeout after 1 second"):
        await tells(rex, f"echo {FOOD}; sleep 4321", expect=[ENDLESS], timeout=1)
    assert (await does(rex, "echo on")).output == "on"


async def test_an_end_is_heard_by_who_looks_for_a_pattern(rex: RemoteRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when another who waits for news has heard of it first."""
    monkeypatch.setattr(search, "SEARCH_S", 3.0)
    script = f"echo {FOOD}; exec sleep 4321"
    asked = asyncio.create_task(does(rex, script, expect=[ENDLESS], timeout=600))
    await asyncio.sleep(1)
    await rex.run_in_session(BashInterruptAction(timeout=WAIT_S))
    with contextlib.suppress(CommandTimeoutError):  # the search may have ended first
        await asyncio.wait_for(asked, WAIT_S)


async def test_what_is_no_pattern_is_said(rex: RemoteRuntime) -> None:
    for pattern in ("(", "a{2,1}", "(?P<x"):
        with pytest.raises(ValueError, match="cannot be used"):
            await tells(rex, "echo a; sleep 4321", expect=[pattern])
    assert (await tells(rex, "cat", expect=["cat"])).expect_string == "cat"


async def test_the_match_that_begins_first() -> None:
    finder = Search()
    assert await finder.find(["two", "one"], "zero one two") == (1, 5, 8)
    assert await finder.find(["t.o", "one"], "zero one two") == (1, 5, 8)
    assert await finder.find(["e.*t", "one"], "\udcff\u20ac zero one\ntwo") == (0, 4, 13)
    assert await finder.find(["a.", "\udcff."], "\udcff\u20ac") == (1, 0, 2)
    assert await finder.find(["none", "no.."], "zero") is None
    # Each has the answer to its own, also when one before was given up.
    hostile = asyncio.create_task(finder.find([ENDLESS], FOOD))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(finder.find([f"{n}+"], "0123456789")) for n in range(5)]
    hostile.cancel()
    assert await asyncio.gather(*waiting) == [(0, n, n + 1) for n in range(5)]
    process = finder._process
    assert process is not None
    hostile = asyncio.create_task(finder.find([ENDLESS], FOOD))
    await asyncio.sleep(0)
    await finder.close()
    assert await hostile is None
    assert process.returncode is not None
