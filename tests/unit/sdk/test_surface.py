"""The public names, the two clients' agreement, and what importing costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import dsec
from dsec.model import errors
from dsec.sdk.values import ManyFields, SpecFields

ROOT = Path(__file__).resolve().parents[3]
TWINS = ("Client", "Sandbox", "Batch", "Job", "Process", "Session")


def test_generated_code_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/generate_sync.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"run scripts/generate_sync.py; stale: {done.stdout}{done.stderr}"


def members(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


@pytest.mark.parametrize("name", TWINS)
def test_twins_have_the_same_names_and_signatures(name: str) -> None:
    sync, twin = members(getattr(dsec, name)), members(getattr(dsec, f"Async{name}"))
    assert sync.keys() == twin.keys()
    for member, value in sync.items():
        if callable(value):
            ours = [(p.name, p.kind, p.default) for p in inspect.signature(value).parameters.values()]
            theirs = [(p.name, p.kind, p.default) for p in inspect.signature(twin[member]).parameters.values()]
            assert ours == theirs, member


@pytest.mark.parametrize("name", TWINS)
def test_public_members_are_documented(name: str) -> None:
    for member, value in members(getattr(dsec, name)).items():
        assert inspect.getdoc(value), f"{name}.{member}"


def test_keywords_are_the_fields_of_spec() -> None:
    fields = set(dsec.Spec.__struct_fields__)
    assert set(get_type_hints(SpecFields)) == fields
    assert set(get_type_hints(ManyFields)) == fields - {"wait_s"}


def test_every_public_name_is_there() -> None:
    for name in dsec.__all__:
        assert getattr(dsec, name) is not None
    public_errors = {name for name, value in vars(errors).items() if isinstance(value, type) and name[0] != "_"}
    assert public_errors - {"Any", "ClassVar"} <= set(dsec.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        dsec.nonsense  # noqa: B018 - looking it up is the test


def imported(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_dsec_loads_nothing_else() -> None:
    loaded = {name for name in imported("import dsec") if name.startswith(("dsec", "msgspec", "asyncio"))}
    assert loaded == {"dsec"}


def test_blocking_client_stays_small() -> None:
    """Each of these would cost a cold `dsec ps` tens of milliseconds."""
    loaded = imported("import dsec; dsec.Client('unix:///none'); dsec.Spec; dsec.Sandbox")
    assert not loaded & {"asyncio", "ssl", "http.client", "email", "urllib.parse", "subprocess", "aiohttp", "json"}
