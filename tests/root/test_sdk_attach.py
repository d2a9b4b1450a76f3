"""One connection to a program, in real containers: the cases of the fake backend, and an agent that dies meanwhile."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest

import dsec
from tests.contract import test_sdk_attach as cases
from tests.kit.home import Home

globals().update({name: case for name, case in vars(cases).items() if name.startswith("test_")})


def test_a_terminal_over_one_connection(sbx: dsec.Sandbox) -> None:
    program = sbx.spawn("stty -echo; echo ready; read x; stty size; exec cat", tty=(24, 80))
    with program.attach() as attached:
        seen = b""

        def until(word: bytes) -> None:
            nonlocal seen
            while word not in seen:
                seen += next(attached)[1]

        until(b"ready")
        attached.resize(40, 100)
        attached.write(b"\n")
        until(b"40 100")
        with pytest.raises(dsec.InvalidSpec):
            attached.close_input()
        attached.write(b"well\n")
        until(b"well")
        attached.write(b"\x04")
        assert list(attached) == []
        assert attached.result is not None and attached.result.ok


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_agent_that_dies_in_the_middle_loses_and_doubles_no_byte(
    home: Home, sbx: dsec.Sandbox, number: signal.Signals
) -> None:
    program = sbx.spawn(["cat"])
    sent = random.Random(int(number)).randbytes(6 << 20)
    attached = program.attach()

    def write() -> None:
        attached.write(sent)
        attached.close_input()

    writer = threading.Thread(target=write)
    writer.start()
    got = bytearray()
    revived: threading.Thread | None = None
    for _, data in attached:
        got += data
        if len(got) >= 2 << 20 and revived is None:
            os.kill(home.agent(), number)
            revived = threading.Thread(target=_up, args=(home,))
            revived.start()
    writer.join(60)
    assert not writer.is_alive()
    assert len(got) == len(sent) and got == sent
    assert attached.result is not None and attached.result.ok
    assert revived is not None
    revived.join()


def _up(home: Home) -> None:
    """Once the agent before has ended: `up` refuses to start a second."""
    while home.dsec_code("up"):
        pass
