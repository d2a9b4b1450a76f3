"""Each framework's suite, in the environment that has the frameworks, against a node of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest

from tests.kit.adapters import OPTIONS, say_installed, too_few
from tests.kit.lanes import TESTS, adapters_python, runtime_binary

ROOT: Final = TESTS.parent
HERE: Final = Path(__file__).parent
SUITES: Final = sorted(path.stem.removesuffix("_suite") for path in HERE.glob("*_suite.py"))
# With the versions that are `beside` in requirements.txt.
BESIDE: Final = ["deepagents"]
SUITE_TIMEOUT_S: Final = 900
# At once: much of a suite's time is waiting.
WORKERS: Final = 2


class Suite:
    """The run of one suite. `name` with `-beside`: with those versions."""

    def __init__(self, name: str, installed: Path, place: Path, pool: ThreadPoolExecutor) -> None:
        self.report = place / "report.xml"
        self.output = place / "output"
        self._name, self._installed, self._place = name, installed, place
        self._process: subprocess.Popen[bytes] | None = None
        self.code: Future[int] = pool.submit(self._run)

    def _run(self) -> int:
        python = adapters_python()
        assert python is not None
        suite, _, beside = self._name.partition("-")
        others = [python.parent.parent / "beside"] if beside else []
        line = [python, "-m", "pytest", HERE / f"{suite}_suite.py", "-q", "--tb=short", "-p", "no:cacheprovider"]
        line += [*OPTIONS, "-p", "no:benchmark", f"--junitxml={self.report}"]
        env = {
            **os.environ,
            "PYTHONPATH": ":".join(map(str, [*others, ROOT / "src", self._installed])),
            "DSEC_RUNTIME_BIN": str(runtime_binary()),
            "DSEC_ADAPTERS_VENV": str(python.parent.parent),
            "HOME": str(self._place),  # frameworks keep things there
            "NO_COLOR": "1",
        }
        words = list(map(str, line))
        with (
            self.output.open("wb") as out,
            subprocess.Popen(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as process,
        ):
            self._process = process
            return process.wait()

    def end(self) -> None:
        """Nobody wants to know any more: as ^C, so that it takes down its node."""
        if not self.code.cancel() and self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def counted(self) -> tuple[int, list[str], list[str]]:
        """How many passed, what was skipped and what failed."""
        passed, skipped, failed = 0, [], []
        for case in ElementTree.parse(self.report).iter("testcase"):
            outcomes = {child.tag: child for child in case}
            if "skipped" in outcomes:
                skipped.append(f"{case.get('name')}: {outcomes['skipped'].get('message')}")
            elif outcomes.keys() & {"failure", "error"}:
                failed.append(str(case.get("name")))
            else:
                passed += 1
        return passed, skipped, failed


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("installed")
    say_installed(place)
    return place


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Suite]]:
    """All that were asked for, begun."""
    items = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.path == Path(__file__)
    ]
    names = [item.callspec.params["suite"] for item in items]
    with ThreadPoolExecutor(WORKERS) as pool:
        begun = {name: Suite(name, installed, tmp_path_factory.mktemp(name), pool) for name in names}
        try:
            yield begun
        finally:
            for suite in begun.values():
                suite.end()


@pytest.mark.timeout(SUITE_TIMEOUT_S)
@pytest.mark.parametrize("suite", [*SUITES, *(f"{name}-beside" for name in BESIDE)])
def test_suite(suite: str, runs: dict[str, Suite], capsys: pytest.CaptureFixture[str]) -> None:
    run = runs[suite]
    code = run.code.result()
    output = run.output.read_text(errors="replace")[-8000:]
    assert run.report.exists(), output
    passed, skipped, failed = run.counted()
    with capsys.disabled():
        print(f"\n[{suite}] {passed} passed, {len(skipped)} skipped, {len(failed)} failed")
        for reason in skipped:
            print(f"    skipped {reason}")
    assert code == 0 and not failed, f"{failed}\n{output}"
    assert not too_few({suite: passed}, [suite]), skipped
