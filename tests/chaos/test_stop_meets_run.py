"""A stop that meets runs being launched comes to its end, and so does everything of the sandbox."""

from __future__ import annotations

import threading

import dsec
from dsec.model.errors import DsecError
from tests.kit.home import BASE, standing

ROUNDS = 12
RUNNERS = 6


def test_a_sandbox_stopped_while_runs_are_launched_ends() -> None:
    with standing() as home:
        for _ in range(ROUNDS):
            with home.client() as client:
                sandbox = client.create(base=BASE)
            going = threading.Event()
            odd: list[DsecError] = []

            def runner(
                sandbox_id: str = sandbox.id, going: threading.Event = going, odd: list[DsecError] = odd
            ) -> None:
                with home.client() as own:
                    box = own.get(sandbox_id)
                    while True:
                        try:
                            box.run(["true"])
                        except dsec.SandboxLost:
                            return
                        except DsecError as error:
                            odd.append(error)
                            return
                        going.set()

            threads = [threading.Thread(target=runner) for _ in range(RUNNERS)]
            for thread in threads:
                thread.start()
            assert going.wait(30)
            sandbox.stop()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
            assert odd == []
            assert sandbox.info().state == "stopped"
