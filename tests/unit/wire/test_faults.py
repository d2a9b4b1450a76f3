from __future__ import annotations

import pytest

from dsec.model import errors
from dsec.wire.faults import translate
from dsec.wire.values import WireError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("code", "detail", "cls", "expected"),
    [
        ("no_program", {}, errors.ProgramNotStarted, {"field": "command"}),
        ("no_program", {"errno": 36}, errors.InvalidSpec, {"field": "command"}),
        ("no_user", {}, errors.ProgramNotStarted, {"field": "user"}),
        ("no_cwd", {}, errors.ProgramNotStarted, {"field": "cwd"}),
        ("too_long", {"limit": 131071, "field": "argv"}, errors.InvalidSpec, {"field": "command", "limit": 131071}),
        ("bad_request", {"field": "argv"}, errors.InvalidSpec, {"field": "command"}),
        ("bad_request", {"field": "hostname"}, errors.InvalidSpec, {"field": "hostname"}),
        ("not_found", {}, errors.NotFound, {}),
        ("exists", {}, errors.Conflict, {"reason": "exists"}),
        ("busy", {}, errors.Conflict, {"reason": "busy"}),
        ("unsupported", {"mechanism": "overlay"}, errors.Unsupported, {"mechanism": "overlay"}),
        ("no_space", {}, errors.NodeDiskFull, {}),
        ("limit", {}, errors.NodeFull, {}),
        ("limit", {"resource": "terminals"}, errors.Exhausted, {"resource": "terminals"}),
        ("launch", {"step": "overlay", "errno": 1}, errors.LaunchFailed, {"step": "overlay", "errno": 1}),
        ("deadline", {"step": "mount"}, errors.LaunchFailed, {"step": "mount"}),
        ("unknown", {}, errors.Unknown, {}),
        ("gone", {}, errors.SandboxLost, {}),
        ("internal", {}, errors.Unavailable, {"runtime_code": "internal"}),
        ("from_the_future", {}, errors.Unavailable, {"runtime_code": "from_the_future"}),
    ],
)
def test_each_code_has_its_error(
    code: str, detail: dict[str, object], cls: type[errors.DsecError], expected: dict[str, object]
) -> None:
    error = translate(WireError(code, "words", detail), op="run.start", sandbox_id="sbx-a")  # type: ignore[arg-type] # any
    assert type(error) is cls
    assert "words" in error.message
    assert error.sandbox_id == "sbx-a"
    assert expected.items() <= error.detail.items()


def test_what_is_wrong_inside_says_what_is_allowed() -> None:
    error = translate(WireError("no_cwd", "/nowhere: no such directory"), op="run.start")
    assert "/nowhere" in error.message
    assert "a directory that exists in the sandbox" in error.message


def test_an_errno_is_named() -> None:
    error = translate(WireError("launch", "mounting", {"step": "overlay", "errno": 28}), op="sandbox.create")
    assert "ENOSPC" in error.message


@pytest.mark.parametrize(
    ("code", "errno", "expected"), [("no_program", 2, 127), ("no_program", 13, 126), ("no_cwd", 2, 126)]
)
def test_what_was_not_started_has_the_exit_code_of_a_shell(code: str, errno: int, expected: int) -> None:
    error = translate(WireError(code, "words", {"errno": errno}), op="run.start")  # type: ignore[arg-type] # any
    assert isinstance(error, errors.ProgramNotStarted) and not isinstance(error, errors.Rejected)
    assert error.exit_code == expected
