"""Adapters without their frameworks."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Of each what is not there; as if it were not, where it is.
ADAPTERS = {
    "inspect": ("inspect", "inspect_ai", "yaml"),
    "deepagents": ("deepagents", "deepagents"),
    "mini_swe_agent": ("mini-swe-agent", "minisweagent"),
    "swe_rex": ("swe-rex", "swerex", "uvicorn"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_without_its_framework_says_what_brings_it(name: str) -> None:
    extra, *modules = ADAPTERS[name]
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    gone = "".join(f"sys.modules[{module!r}] = None; " for module in modules)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {gone}import dsec.adapters.{name}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().rpartition("\n")[2]
    assert last.startswith("ModuleNotFoundError: this adapter needs ") and last.endswith(f"pip install 'dsec[{extra}]'")


def test_every_adapter_is_looked_at() -> None:
    found = {path.stem for path in (ROOT / "src/dsec/adapters").iterdir() if path.name[0] not in "_."}
    assert found == set(ADAPTERS)
