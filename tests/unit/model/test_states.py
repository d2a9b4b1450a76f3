"""Values that nodes give."""

from __future__ import annotations

import pytest

from dsec.model.states import Output, RunResult

pytestmark = pytest.mark.unit


def test_a_result_is_shown_short_however_much_was_written() -> None:
    out = Output(head=b"x" * 1_000_000, total=5_000_000)
    result = RunResult(process_id="p-1", exit_code=0, cause="exited", out=out, err=Output(head=b"err\n", total=4))
    assert len(repr(result)) < 1000
    assert f"out=Output({b'x' * 64!r}..., total=5000000)" in repr(result)
    assert "err=Output(b'err\\n', total=4)" in repr(result)
