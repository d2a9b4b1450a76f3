"""What an agent took for a flood of large requests it gives back when that is over."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, suppress

import dsec
from dsec.model.limits import MIB, STDIN_MAX_BYTES
from tests.kit.agent import Agent
from tests.kit.memory import held_kib

AT_ONCE = 24
ROUNDS = 3
# Far less than one round of them, and more than tables and caches grow.
MAY_STAY_KIB = 24 << 10
# Bodies of which nobody sends the end, and what of them may be held: those that have room, what the others have sent
# ahead, and what an allocator keeps.
HALF_ONES = 100
HALF_BYTES = 7 * MIB
HALF_FIT = 256 // 8
HALF_MAY_HOLD_KIB = (256 + 64 + 64) << 10
# Only ends what would never end.
PATIENCE_S = 60.0


def test_after_a_flood_of_large_requests_memory_is_given_back(agent: Agent) -> None:
    with dsec.Client(agent.url) as client, client.create(disk_mib=64) as sbx:
        sbx.run("cat", stdin=b"x")
        before, most = held_kib(agent.pid), 0

        def flood() -> None:
            for _ in range(ROUNDS):
                assert sbx.run("cat", stdin=b"x" * STDIN_MAX_BYTES).ok

        threads = [threading.Thread(target=flood) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most = max(most, held_kib(agent.pid))
            time.sleep(0.01)
        assert most - before > MAY_STAY_KIB, "it was a flood"
        deadline = time.monotonic() + PATIENCE_S
        while (held := held_kib(agent.pid)) - before > MAY_STAY_KIB:
            assert time.monotonic() < deadline, f"{before} KiB before, {most} at most, {held} stay"
            time.sleep(0.1)


def test_bodies_without_an_end_hold_no_more_than_they_may_and_nobody_up(agent: Agent) -> None:
    with dsec.Client(agent.url) as client, client.create(disk_mib=64) as sbx, ExitStack() as ended:
        sbx.run("cat", stdin=b"x" * MIB)
        before, most, refused = held_kib(agent.pid), 0, []
        head = f"POST /v1/sandboxes/{sbx.id}/run HTTP/1.1\r\nHost: x\r\nContent-Length: {HALF_BYTES + MIB}\r\n\r\n"

        def cut(connection: socket.socket) -> None:
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)

        def half() -> None:
            with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
                connection.connect(str(agent.run_dir / "api.sock"))
                ended.callback(cut, connection)
                connection.sendall(head.encode() + b" " * HALF_BYTES)
                answer = connection.recv(65536)
                if b" 503 " in answer and b'"code":"unavailable"' in answer:
                    refused.append(answer)

        threads = [threading.Thread(target=half) for _ in range(HALF_ONES)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + PATIENCE_S
        large = threading.Thread(target=lambda: [sbx.run("cat", stdin=b"x" * MIB) for _ in range(ROUNDS)])
        large.start()
        # Those that all fit at the end are left alone.
        while large.is_alive() or len(refused) < HALF_ONES - HALF_FIT:
            most = max(most, held_kib(agent.pid))
            assert sbx.run("echo ok").ok
            assert time.monotonic() < deadline, f"{len(refused)} were refused"
        ended.close()
        for thread in threads:
            thread.join()
        assert HALF_MAY_HOLD_KIB / 4 < most - before < HALF_MAY_HOLD_KIB
