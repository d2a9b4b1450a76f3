"""The native crates' own tests."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.kit.lanes import TESTS

BUILD_TIMEOUT_S = 1200


@pytest.mark.timeout(BUILD_TIMEOUT_S)
@pytest.mark.parametrize("crate", ["dsec-sys", "dsec-launch", "dsec-runtime", "dsec-files", "dsec-net"])
def test_crate(crate: str) -> None:
    done = subprocess.run(
        ["cargo", "test", "--locked", "--quiet", "-p", crate],
        cwd=TESTS.parent / "native",
        env={**os.environ, "CARGO_TERM_COLOR": "never"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert "test result: ok" in done.stdout
