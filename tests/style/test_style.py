"""Formatting, types, imports, links, sizes; and generated files that must be current."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.kit.lanes import TESTS

ROOT: Final = TESTS.parent
TOOLS: Final = Path(sys.executable).parent
# A file aims at 400 lines; over this it is more than one thing.
FILE_MAX_LINES: Final = 600
# Programs that write files which are committed; each takes --check.
GENERATORS: Final = sorted((ROOT / "scripts").glob("generate_*.py"))
TOOL_TIMEOUT_S: Final = 600

pytestmark = pytest.mark.timeout(TOOL_TIMEOUT_S)


def check(*command: str | Path, cwd: Path = ROOT) -> None:
    """The command succeeds, or its output is the failure."""
    plain = {**os.environ, "NO_COLOR": "1"}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, env=plain)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}{done.stderr[-8000:]}"


def tracked(*patterns: str) -> list[Path]:
    """Files of the project: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_ruff_finds_nothing() -> None:
    check(TOOLS / "ruff", "check", ".")


def test_python_is_formatted() -> None:
    check(TOOLS / "ruff", "format", "--check", ".")


def test_types() -> None:
    check(TOOLS / "mypy")


def test_imports_point_down() -> None:
    check(TOOLS / "lint-imports")


@pytest.mark.parametrize("tool", [("fmt", "--check"), ("clippy", "--all-targets", "--locked", "--", "-D", "warnings")])
def test_rust(tool: tuple[str, ...]) -> None:
    name = {"fmt": "rustfmt", "clippy": "cargo-clippy"}[tool[0]]
    if shutil.which("cargo") is None or shutil.which(name) is None:
        pytest.skip(f"no {name} on PATH")
    check("cargo", *tool, cwd=ROOT / "native")


def test_no_dependency_needs_a_newer_compiler_than_we_say() -> None:
    """Of our own code clippy says so (incompatible_msrv), as far as the standard library goes."""
    if shutil.which("cargo") is None:
        pytest.skip("no cargo on PATH")
    command = ["cargo", "metadata", "--locked", "--format-version=1", "--filter-platform=x86_64-unknown-linux-gnu"]
    said = subprocess.run(command, cwd=ROOT / "native", capture_output=True, check=True, timeout=TOOL_TIMEOUT_S).stdout
    packages = json.loads(said)["packages"]
    [ours] = {package["rust_version"] for package in packages if package["source"] is None}
    assert f"RUST_MIN={ours}\n" in (ROOT / "scripts/lib/rust.sh").read_text()
    wanted = {f"{p['name']} {p['version']}": p["rust_version"] for p in packages if p["rust_version"]}
    assert {name: least for name, least in wanted.items() if _number(least) > _number(ours)} == {}


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def test_shell_scripts_parse() -> None:
    scripts = [path for path in tracked("scripts", ".ci") if path.read_bytes().startswith(b"#!/usr/bin/env bash")]
    assert scripts
    for path in [*scripts, *tracked("scripts/lib")]:
        check("bash", "-n", path)


@pytest.mark.parametrize("script", ["demo", "setup", "test"])
@pytest.mark.parametrize(("argument", "code"), [("-h", 0), ("--help", 0), ("--nonsense", 2)])
def test_a_script_says_how_it_is_used_and_does_nothing(script: str, argument: str, code: int) -> None:
    # Set-up without a place for its cache would end soon: nothing happens here if a script goes on instead.
    done = subprocess.run(
        [ROOT / "scripts" / script, argument],
        env={"PATH": "/usr/bin:/bin", "DSEC_VENV": "/nowhere", "DSEC_CACHE": "/dev/null/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert f"  scripts/{script}" in (done.stderr if code else done.stdout)


def test_silenced_checks_say_why() -> None:
    silenced = re.compile(r"# (?:noqa(?:: ?[A-Z]+[0-9]+(?:, ?[A-Z]+[0-9]+)*)?|type: ignore(?:\[[a-z, -]+\])?)[ #-]*$")
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if silenced.search(line)
    ]
    assert bare == []


def test_broad_handlers_say_why() -> None:
    """A handler for everything is a task's edge or undoes and goes on; it says which, there or on its next line."""
    broad = re.compile(r"\s*except(?: \(?(?:Base)?Exception\b.*)?:")
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked("src/*.py", "bench/*.py", "tests/kit/*.py")
        for lines in [path.read_text().splitlines()]
        for number, line in enumerate(lines, 1)
        if broad.match(line) and "  # " not in line and not lines[number].lstrip().startswith("# ")
    ]
    assert bare == []


def test_allowed_lints_say_why() -> None:
    allowed = re.compile(r"\s*#!?\[(?:allow|expect)\(")
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked("native/*.rs")
        for lines in [path.read_text().splitlines()]
        for number, line in enumerate(lines, 1)
        if allowed.match(line) and "// " not in line and not lines[number - 2].lstrip().startswith("//")
    ]
    assert bare == []


def test_no_file_is_several_things() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in tracked("src/*.py", "native/*.rs")}
    assert {str(path): count for path, count in lengths.items() if count > FILE_MAX_LINES} == {}


def test_generated_files_are_current() -> None:
    for generator in GENERATORS:
        check(sys.executable, generator, "--check")


def anchors(text: str) -> set[str]:
    """Anchors of a document's headings, as a forge makes them."""
    found = re.findall(r"^#{1,6} +(.+?) *#*$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def links(path: Path) -> Iterator[str]:
    yield from re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", re.sub(r"`[^`\n]*`", "", without_code(path.read_text())))


def broken(path: Path, link: str) -> bool:
    """Whether a relative link leads nowhere."""
    if re.match(r"[a-z][a-z0-9+.-]*:", link):
        return False  # another site's; not looked at, tests need no network
    target, _, anchor = link.partition("#")
    file = (path.parent / target).resolve() if target else path
    if not file.exists() or not file.is_relative_to(ROOT):
        return True
    return bool(anchor) and file.suffix == ".md" and anchor not in anchors(file.read_text())


def test_links_in_documents_lead_somewhere() -> None:
    documents = tracked("*.md")
    assert documents
    assert [
        f"{path.relative_to(ROOT)}: {link}" for path in documents for link in links(path) if broken(path, link)
    ] == []


def test_the_link_checker_sees_broken_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[ok](#a-b-c) [no](#nothing) [gone](other.md) [out](../x) [site](https://x.y/)\n")
    assert [link for link in links(page) if broken(page, link)] == ["#nothing", "other.md", "../x"]
