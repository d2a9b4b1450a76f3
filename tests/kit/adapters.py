"""What the runs of the frameworks' suites have in common, here and in a guest."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.kit.lanes import TESTS

#: For pytest: the suites are plain coroutines.
OPTIONS: Final = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")
#: What the frameworks themselves bring; with fewer tests a suite was not collected whole.
AT_LEAST: Final = {"inspect": 44, "deepagents": 79, "deepagents-beside": 86}


def say_installed(place: Path) -> None:
    """Into the directory, what this project's wheel would say of it: frameworks find adapters by entry points."""
    about = place / "dsec-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: dsec\nVersion: 0\n")
    groups = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in of.items()) for group, of in groups.items()
    ]
    (about / "entry_points.txt").write_text("\n".join(lines))


def too_few(passed: Mapping[str, int], suites: list[str]) -> list[str]:
    """Of the suites, those of which fewer tests passed than there must be, in words."""
    counted = Counter(passed)
    wanted = {suite: AT_LEAST.get(suite, 1) for suite in suites}
    return [f"{suite}: {counted[suite]} passed, of at least {n}" for suite, n in wanted.items() if counted[suite] < n]
