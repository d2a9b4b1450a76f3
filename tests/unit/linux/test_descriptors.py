"""A process that was started without standard descriptors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from dsec.linux.descriptors import open_standard
if {on}:
    open_standard()
other = os.open("/dev/null", os.O_RDWR)
os.write(int(sys.argv[1]), b"%d" % other)
if {on}:
    print("to nobody", file=sys.stdout, flush=True)
    print("to nobody", file=sys.stderr, flush=True)
    assert sys.stdin.read() == ""
"""


def lowest(closed: str, *, on: bool) -> int:
    """The number of what such a process opens next."""
    reader, writer = os.pipe()
    script = SCRIPT.format(on=on)
    line = f'exec "$0" -c "$1" {writer} {closed}'
    subprocess.run(["sh", "-c", line, sys.executable, script], pass_fds=[writer], check=True, timeout=60)
    os.close(writer)
    with os.fdopen(reader) as said:
        return int(said.read())


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-", ">&- 2>&-", "<&- 2>&-"])
def test_nothing_that_is_opened_is_standard_output(closed: str) -> None:
    assert lowest(f"{closed} </dev/null" if "<" not in closed else closed, on=True) > 2
    # The ablation.
    assert lowest(closed, on=False) <= 2
