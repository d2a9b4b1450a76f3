"""The unit of `deploy/` under a real systemd: what it promises about restarts, crashes and the end of the service."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.vm import payload
from tests.kit.vm.machine import Guest

pytestmark = pytest.mark.timeout(900)

COMMAND = "/opt/dsec/bin/dsec"
# Where the wheel would be installed stands a command of the same name over the tree that was brought in.
EXPORTS = "\n".join(
    f"export {name}={shlex.quote(value)}"
    for name, value in payload.ENVIRONMENT.items()
    if name in ("PYTHONPATH", "DSEC_RUNTIME_BIN", "PATH")
)
INSTALL = f"""set -e
mkdir -p /opt/dsec/bin /var/lib/dsec
cat >{COMMAND} <<'END'
#!/bin/sh
{EXPORTS}
exec python3 -c 'import sys; from dsec.cli.main import main; sys.exit(main())' "$@"
END
chmod +x {COMMAND}
cp {payload.MOUNT}/deploy/dsec.service /etc/systemd/system/
{EXPORTS}
python3 -m dsec.images --store /var/lib/dsec import store:/var/cache/dsec#debian:12 debian:12
systemctl daemon-reload
systemctl enable --now dsec
"""
TURN = f"{COMMAND} ps >/dev/null 2>&1 && exit 0; sleep 0.5"
ANSWERS = f"for turn in $(seq 40); do {TURN}; done; journalctl -u dsec -n 30; exit 1"
# A counter that no restart of anything may set back.
COUNT = "n=0; while :; do n=$((n+1)); echo $n; echo $n >/root/n; sleep 0.2; done"
BEGIN = f"""
import dsec
sbx = dsec.Client().create(base="debian:12", name="kept", memory_mib=128)
print(sbx.spawn({COUNT!r}, stdin=False, keepalive=True).id)
"""
LOOK = """
import json, sys
import dsec
sbx = dsec.Client().get("kept")
lines = sbx.process(sys.argv[1]).output().splitlines()
exact = lines == [b"%d" % (number + 1) for number in range(len(lines))]
print(json.dumps({"state": sbx.state, "ran": sbx.run(["echo", "ok"]).stdout, "count": len(lines), "exact": exact}))
"""


@pytest.fixture(scope="module")
def service(guest: Guest) -> Iterator[Guest]:
    done = guest.run(INSTALL, timeout_s=300)
    assert done.ok, done.tail
    yield guest
    guest.run(f"{COMMAND} down --stop-all; systemctl disable --now dsec", timeout_s=120)


def _python(guest: Guest, program: str, *args: str) -> str:
    waited = guest.run(ANSWERS, timeout_s=120)
    assert waited.ok, waited.text
    done = guest.run(["python3", "-c", program, *args], env=payload.ENVIRONMENT, timeout_s=180)
    assert done.ok, done.stderr.decode(errors="replace")
    return done.text.strip()


def _main_pid(guest: Guest, other_than: int = 0) -> int:
    """The agent's, once it is another one's than that."""
    turn = f"p=$(systemctl show -p MainPID --value dsec); [ $p != {other_than} ] && [ $p != 0 ] && break; sleep 0.5"
    pid = int(guest.run(f"for turn in $(seq 60); do {turn}; done; echo $p", timeout_s=120).text)
    assert pid not in (0, other_than), "no agent was started again"
    return pid


def _grows(guest: Guest) -> bool:
    """Whether the program inside goes on, seen from outside: nobody is asked."""
    look = "cat /proc/[0-9]*/root/root/n 2>/dev/null | sort -n | tail -n 1"
    turn = f'n=$({look}); [ "${{n:-0}}" -gt "${{first:-0}}" ] && exit 0; sleep 0.5'
    return guest.run(f"first=$({look}); for turn in $(seq 60); do {turn}; done; exit 1", timeout_s=120).ok


def test_sandboxes_outlive_every_way_the_service_ends(service: Guest) -> None:
    """Restarted, killed, read anew, stopped and started: one sandbox, one program, no line lost or twice."""
    program = _python(service, BEGIN)
    count = 0

    def goes_on(after: str) -> None:
        nonlocal count
        found: dict[str, Any] = json.loads(_python(service, LOOK, program))
        assert (found["state"], found["ran"], found["exact"]) == ("running", "ok\n", True), after
        assert found["count"] > count, after
        count = found["count"]

    goes_on("its start")
    for way in ("systemctl restart dsec", "kill -9 $(systemctl show -p MainPID --value dsec)"):
        before = _main_pid(service)
        assert service.run(f"systemctl daemon-reload && {way}", timeout_s=120).ok, way
        _main_pid(service, other_than=before)
        goes_on(way)
    assert service.run("systemctl stop dsec", timeout_s=120).ok
    assert service.run("systemctl is-active dsec").text.strip() == "inactive"
    assert _grows(service), "stopping the service ended a sandbox"
    assert service.run("systemctl start dsec", timeout_s=120).ok
    goes_on("stop and start")
    assert service.run("systemctl is-failed dsec").text.strip() == "active"


def test_the_end_of_the_service_and_its_node_leaves_nothing(service: Guest) -> None:
    """First the service, which would start the agent again; then what has outlived it."""
    made = _python(service, BEGIN.replace("kept", "last"))
    assert made.startswith("p-")
    assert service.run("systemctl stop dsec", timeout_s=120).ok
    assert service.run("pgrep -x dsec-runtime").ok, "stopping the service ended the runtime"
    done = service.run(f"{COMMAND} down --stop-all", timeout_s=180)
    assert done.ok, done.tail
    assert service.run("pgrep -x dsec-runtime").text == ""
    assert service.run("ls -d /sys/fs/cgroup/dsec").text == ""
    assert service.run("losetup -a").text == ""
    assert "/run/dsec" not in service.run("cat /proc/mounts").text
