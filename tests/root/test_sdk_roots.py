"""Root file systems without a shell, and with another C library than the node's."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from tests.kit.home import Home

pytestmark = pytest.mark.timeout(300)

# A program that needs nothing but its C library: says what it was given, copies its input, and has its own exit code.
PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <pwd.h>
int main(int argc, char **argv) {
    char piece[4096], *home = getenv("HOME");
    size_t count;
    struct passwd *who = getpwuid(getuid());
    printf("%s %s %s\n", argc > 1 ? argv[1] : "-", home ? home : "-", who ? who->pw_name : "-");
    while ((count = fread(piece, 1, sizeof piece, stdin)) > 0) fwrite(piece, 1, count, stdout);
    fprintf(stderr, "%d\n", isatty(0));
    return argc > 2 ? atoi(argv[2]) : 0;
}
"""
LOADER = Path("/lib/ld-musl-x86_64.so.1")


def root(directory: Path, kind: str) -> Path:
    """Nothing but one program, users, and what that needs to start."""
    tree = directory / kind
    for name in ("app", "etc", "tmp"):
        (tree / name).mkdir(parents=True)
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532::/home/nonroot:\n")
    (tree / "etc/group").write_text("root:x:0:\nnonroot:x:65532:\n")
    source = directory / "program.c"
    source.write_text(PROGRAM)
    compiler = ["musl-gcc"] if kind == "musl" else ["gcc", "-static"]
    subprocess.run([*compiler, "-O1", "-o", tree / "app/program", source], check=True, capture_output=True)
    if kind == "musl":
        (tree / "lib").mkdir()
        shutil.copy(LOADER.resolve(), tree / LOADER.relative_to("/"))
    return tree


@pytest.fixture(params=["distroless", "musl"])
def bare(request: pytest.FixtureRequest, home: Home, tmp_path: Path) -> Iterator[dsec.Sandbox]:
    needed = "musl-gcc" if request.param == "musl" else "gcc"
    if shutil.which(needed) is None:
        pytest.skip(f"no {needed} (scripts/setup --for test)")
    with home.client() as client:
        name = f"{request.param}:1"
        client.layers.import_(f"dir:{root(tmp_path, request.param)}", name)
        with client.create(base=name, idle_timeout_s=None) as sbx:
            yield sbx
        client.layers.remove(name)


def test_programs_run(bare: dsec.Sandbox) -> None:
    result = bare.run(["/app/program", "given", "3"], stdin="in")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "given /root root\nin", "0\n")
    other = bare.run(["/app/program", "given"], user="nonroot")
    assert (other.exit_code, other.stdout) == (0, "given /home/nonroot nonroot\n")
    program = bare.spawn(["/app/program"])
    program.stdin.write("much")
    program.stdin.close()
    assert program.wait().stdout == "- /root root\nmuch"
    with bare.spawn(["/app/program", "x", "4"], tty=True) as terminal:
        terminal.stdin.write(b"\x04")
        result = terminal.wait()
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (4, "1")


def test_what_needs_a_shell_says_so(bare: dsec.Sandbox) -> None:
    with pytest.raises(dsec.ProgramNotStarted) as caught:
        bare.run("echo hi")
    assert caught.value.exit_code == 127
    with pytest.raises(dsec.DsecError) as refused, bare.session() as sh:
        sh.run("echo hi")
    assert '"sh"' in str(refused.value)
    assert bare.run(["/app/program"]).ok


def test_files_need_nothing_inside(bare: dsec.Sandbox, tmp_path: Path) -> None:
    bare.files.write("/new/f", "hi", parents=True)
    assert bare.files.read_text("/new/f") == "hi"
    assert [entry.name for entry in bare.files.list("/new")] == ["f"]
    (tmp_path / "up").mkdir()
    (tmp_path / "up/one").write_text("1")
    bare.files.upload(tmp_path / "up", "/tree")
    assert bare.files.read_text("/tree/one") == "1"
    assert any("f" in str(change.path) for change in bare.diff("/new"))
