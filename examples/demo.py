"""What the platform is for, once around: score candidate patches of a model against a project's own tests.

    python examples/demo.py examples/wordcount        (a node must be running: dsec up)

A repository becomes a workspace layer; each candidate gets sandboxes of its own over the same layers, clones the
repository, applies its patch, runs the tests. Then: what happens at limits, streaming, stopping.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import dsec

JOB = "demo"
TRIES_PER_CANDIDATE = 3
TEST_TIMEOUT_S = 8.0
# Not by hard links: linked from a layer, a file gets a copy of its own first, and git takes that for damage.
CLONE = "git clone -q --no-hardlinks /srv/repo.git /srv/task/repo"
TESTS = ["python3", "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """Says what is done and how long it took."""
    print(f"\n== {name}")
    began = time.monotonic()
    yield
    print(f"   ({time.monotonic() - began:.2f} s)")


def make_workspace(client: dsec.Client, project: Path) -> None:
    """The project as a git repository in a layer of its own."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        repository = tree / "srv/repo.git"
        # A layer's directories are as visible inside as they are here.
        for path in (tree, tree / "srv"):
            path.mkdir()
            path.chmod(0o755)
        clone = Path(directory) / "project"
        identity = ["-c", "user.name=demo", "-c", "user.email=demo@localhost"]
        for command in (
            ["cp", "-r", str(project), str(clone)],
            ["git", "-C", str(clone), "init", "-q"],
            ["git", "-C", str(clone), "add", "."],
            ["git", "-C", str(clone), *identity, "commit", "-q", "-m", "As it was found"],
            ["git", "clone", "-q", "--bare", str(clone), str(repository)],
        ):
            subprocess.run(command, check=True)
        layer = client.layers.import_(f"dir:{tree}", "wordcount:demo", role="workspace")
    print(f"   wordcount:demo is {layer.digest[:19]}..., {layer.size_bytes / 1024:.0f} KiB")


def spec(**fields: object) -> dsec.Spec:
    """One sandbox for a candidate."""
    limits = {"cpu": 1, "memory_mib": 256, "disk_mib": 256, "pids": 128}
    return dsec.Spec(base="debian:12", workspace="wordcount:demo", job=JOB, **{**limits, **fields})  # type: ignore[arg-type] # fields of Spec


def baseline(client: dsec.Client) -> None:
    """The project's tests fail as it is: real failures are results, not errors."""
    with client.create(spec()) as sbx:
        sbx.run(CLONE, check=True)
        result = sbx.run(TESTS, cwd="/srv/task/repo", timeout_s=TEST_TIMEOUT_S)
        for line in result.stdout.splitlines():
            if line.startswith("FAILED") or " passed" in line or " failed" in line:
                print(f"   {line}")
        print(f"   exit code {result.exit_code}, cause {result.cause}, {result.duration_s:.2f} s")
        assert result.exit_code == 1, "the project has failing tests"


def score(sbx: dsec.Sandbox, patch: bytes) -> str:
    """What a candidate is worth: it applied or not, then what its tests say."""
    sbx.run(CLONE, check=True)
    applied = sbx.run(["git", "apply", "-"], cwd="/srv/task/repo", stdin=patch)
    if not applied.ok:
        return f"does not apply: {applied.stderr.strip().splitlines()[-1]}"
    result = sbx.run(TESTS, cwd="/srv/task/repo", timeout_s=TEST_TIMEOUT_S)
    if result.cause == "timeout":
        return f"timeout after {TEST_TIMEOUT_S:.0f} s"
    if result.cause == "oom" or "memory" in result.limits_hit:
        return f"out of memory (exit code {result.exit_code}, limits hit: {', '.join(result.limits_hit)})"
    counts = re.search(r"(\d+ failed, )?\d+ passed|\d+ failed", result.stdout)
    return f"{counts[0] if counts else result.stdout[-80:]} (exit code {result.exit_code})"


def candidates(client: dsec.Client, patches: dict[str, bytes]) -> None:
    """Every patch several times, all sandboxes created by one call, each scored as soon as it is there."""
    order = [name for name in patches for _ in range(TRIES_PER_CANDIDATE)]
    specs = [spec(labels={"patch": name}) for name in order]
    scores: dict[str, list[str]] = {name: [] for name in patches}
    with client.create_many(specs, wait_s=120) as boxes:
        for sbx in boxes:
            if isinstance(sbx, dsec.CreateFailed):
                raise sbx
            name = sbx.info().labels["patch"]
            scores[name].append(score(sbx, patches[name]))
    for name, said in scores.items():
        print(f"   {name:10} {len(said)} x {' | '.join(sorted(set(said)))}")
        assert len(set(said)) == 1, "the same patch has the same score"
    assert scores["right"][0].startswith("5 passed")
    assert scores["endless"][0].startswith("timeout")


def at_limits(client: dsec.Client) -> None:
    """What a program runs into is said; the sandbox can be used afterwards."""
    programs: dict[str, str | list[str]] = {
        "memory": ["python3", "-c", "x = bytearray(2**30); x[::4096] = b'1' * len(x[::4096])"],
        "processes": "i=0; while [ $i -lt 400 ]; do sleep 20 & i=$((i+1)); done 2>&1 | tail -n 1",
        "disk": "head -c 1G /dev/zero > /root/big",
        "output": "rm /root/big; head -c 100M /dev/zero | tr '\\0' y",
        "time": "trap '' TERM; setsid sleep 1000 & sleep 1000",
    }
    with client.create(spec()) as sbx:
        for name, program in programs.items():
            result = sbx.run(program, timeout_s=5)
            said = (result.stderr or result.stdout).strip().splitlines()[-1:] or [""]
            print(
                f"   {name:10} exit code {result.exit_code}, cause {result.cause}, "
                f"limits hit: {', '.join(result.limits_hit) or 'none'}, "
                f"{result.dropped_bytes} bytes of output dropped; {said[0][:60]}"
            )
        left = sbx.run("ps -e -o comm= | grep -c sleep || true")
        print(f"   afterwards it works: {left.ok}; of the killed runs {left.stdout.strip()} processes are left")
        assert left.ok and left.stdout.strip() == "0"


def streaming(client: dsec.Client) -> None:
    """Output as it comes, and an exception of ours that ends the program."""
    with client.create(spec()) as sbx:
        began = time.monotonic()

        def show(stream: int, data: bytes) -> None:
            print(f"   {time.monotonic() - began:5.2f} s  stream {stream}: {data.decode().strip()}")
            if b"3" in data:
                raise KeyError("enough")

        with contextlib.suppress(KeyError):
            sbx.run("for i in 1 2 3 4 5; do echo step $i; sleep 0.2; done", on_output=show)
            raise AssertionError("the exception of on_output is raised")
        assert sbx.run("true").ok


def main() -> None:
    """All parts, in order."""
    directory = Path(sys.argv[1])
    patches = {path.stem: path.read_bytes() for path in sorted((directory / "patches").glob("*.patch"))}
    with dsec.Client() as client:
        with part("a repository becomes a workspace layer"):
            make_workspace(client, directory / "project")
        with part("the project's tests, as it was found"):
            baseline(client)
        count = len(patches) * TRIES_PER_CANDIDATE
        with part(f"{len(patches)} candidate patches, {count} sandboxes by one create_many"):
            candidates(client, patches)
        with part("limits"):
            at_limits(client)
        with part("streaming"):
            streaming(client)
        with part("stopping what is left of the job"):
            client.create(spec())
            print(f"   stopped {client.job(JOB).stop()}")
            assert not [sbx for sbx in client.list(job=JOB) if sbx.state == "running"]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        # Every block above has stopped its sandboxes on the way here.
        print("interrupted", file=sys.stderr)
        sys.exit(130)
