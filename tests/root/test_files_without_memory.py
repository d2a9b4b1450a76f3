"""File calls in a sandbox that has used up its memory: what fails says so, and what was said to be done is done."""

from __future__ import annotations

import itertools
import os

import dsec
from tests.kit.home import Home

MEMORY_MIB = 16
TRIES = 60
# Half of the memory is kept by files, which nobody can be ended for; and nobody alive is larger than a file helper.
SHARED = "for i in $(seq 300); do head -c 65536 /dev/zero > /dev/shm/$i || break; done 2>/dev/null"
CROWD = "for i in $(seq 100); do sleep 1000 & done 2>/dev/null; echo there; wait"


def test_what_fails_for_want_of_memory_says_so(home: Home) -> None:
    with home.client() as client, client.create(memory_mib=MEMORY_MIB, disk_mib=64) as sbx:
        sbx.run(SHARED)
        crowd = sbx.spawn(CROWD)
        errors: list[dsec.DsecError] = []
        written: dict[str, bytes] = {}
        for number in itertools.takewhile(lambda number: number < TRIES and len(errors) < 3, itertools.count()):
            data = os.urandom(1 << 20)
            try:
                sbx.files.write(f"/tmp/{number % 8}", data)
                written[f"/tmp/{number % 8}"] = data
                sbx.files.list("/")
            except (dsec.Unknown, dsec.Unavailable, dsec.Exhausted) as error:
                errors.append(error)
                written.pop(f"/tmp/{number % 8}", None)
        assert errors
        for error in errors:
            assert error.detail["resource"] == "memory" and f"to keep to {MEMORY_MIB} MiB (memory_mib)" in str(error)
        crowd.kill()
        sbx.run("rm -f /dev/shm/*")
        for path, data in written.items():
            assert sbx.files.read(path) == data
