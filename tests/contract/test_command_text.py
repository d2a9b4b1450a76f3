"""What a sandbox chose, through the dsec command: on any output of any encoding it is shown, and does nothing there."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from collections.abc import Iterator

import pytest

import dsec
from tests.kit.agent import Agent

pytestmark = [pytest.mark.contract, pytest.mark.same_everywhere]

COMMAND = [sys.executable, "-c", "import sys; from dsec.cli.main import main; sys.exit(main())"]
# Controls of both sets, what reorders text (also the Arabic letter mark), what hides it, and letters.
CHOSEN = "a\x1b]0;x\x07\x7f\x85\x9b2J\u202e\u2066\u061c\u200b\u00ad\U000e0041 \u00fc\u00db\u65e5\U0001f600"
LINES = [["ps"], ["inspect", "text"], ["events", "text"], ["diff", "text", "/home"], ["policy", "explain", "text"]]
AS_JSON = [["ps", "--json"], ["ps", "text", "--json"], ["inspect", "text", "--json"], ["events", "text", "--json"]]
AS_JSON += [["diff", "text", "/home", "--json"]]


@pytest.fixture(scope="module")
def chosen(agent: Agent) -> Iterator[dsec.Sandbox]:
    """A sandbox that has such a text wherever it may."""
    with dsec.Client(agent.url) as client, client.create(name="text", labels={"q": CHOSEN}) as made:
        made.files.write(f"/home/{CHOSEN}", b"")
        made.files.write(b"/home/\xff\xc3\x9b", b"")
        made.run(["echo", CHOSEN])
        with made.spawn(["sleep", "4321", CHOSEN]):
            yield made


def said(agent: Agent, encoding: str, *words: str, code: int = 0) -> str:
    env = {**agent.env, "PYTHONIOENCODING": encoding}
    done = subprocess.run([*COMMAND, *words], env=env, capture_output=True, check=False)
    assert done.returncode == code, (words, done)
    return (done.stdout + done.stderr).decode(encoding)


def harmless(text: str) -> bool:
    return all(unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in text.replace("\n", ""))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize("words", [*LINES, *AS_JSON], ids=" ".join)
def test_it_is_shown_and_does_nothing(agent: Agent, chosen: dsec.Sandbox, words: list[str], encoding: str) -> None:
    text = said(agent, encoding, *words)
    assert text and harmless(text)


@pytest.mark.parametrize("words", AS_JSON, ids=" ".join)
def test_json_is_exact(agent: Agent, chosen: dsec.Sandbox, words: list[str]) -> None:
    text = said(agent, "ascii", *words)
    whole = [json.loads(line) for line in text.splitlines()] if words[0] in ("events", "diff") else json.loads(text)
    assert CHOSEN in strings(whole)


def test_a_process_whose_own_names_are_not_utf8(agent: Agent, chosen: dsec.Sandbox) -> None:
    """It shows the same."""
    env = {**agent.env, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in (["diff", "text", "/home"], ["diff", "text", "/home", "--json"]):
        done = subprocess.run([*COMMAND, *words], env=env, capture_output=True, check=True)
        assert done.stdout.decode("ascii") == said(agent, "ascii", *words)


def strings(value: object) -> str:
    """All strings of a document."""
    if isinstance(value, dict):
        return "\n".join(map(strings, [*value, *value.values()]))
    return "\n".join(map(strings, value)) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("words", [["--url", CHOSEN, "ps"], [CHOSEN], ["ps", "x", CHOSEN], ["layer", CHOSEN]])
def test_words_of_the_command_line_are_repeated_so_as_well(agent: Agent, words: list[str]) -> None:
    text = said(agent, "utf-8", *words, code=2)
    assert "]0;x" in text and harmless(text)
