"""Blocking connections."""

from __future__ import annotations

import os
import socket
import threading
import time

from dsec.sdk._sync.net import Conn
from dsec.sdk.http1 import Broken


def test_who_waits_is_told_when_another_thread_closes() -> None:
    """Or else it would wait on, for ever or for another's connection that has got the same number."""
    ours, theirs = socket.socketpair()
    conn = Conn(ours)
    got: list[object] = []

    def wait() -> None:
        try:
            got.append(conn.recv(3600))
        except Broken as error:
            got.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.2)
    conn.close()
    waiting.join(30)
    assert got
    conn.close()
    assert theirs.recv(1) == b""
    theirs.close()


def test_a_child_that_closes_leaves_it_to_its_parent() -> None:
    ours, theirs = socket.socketpair()
    conn = Conn(ours)
    if (child := os.fork()) == 0:
        conn.close()
        os._exit(0)
    os.waitpid(child, 0)
    conn.send(b"on", 10)
    assert theirs.recv(2) == b"on"
    conn.close()
    theirs.close()
