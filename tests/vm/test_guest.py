"""The guests themselves: exact results over the control channel, and the mechanisms this lane is for."""

from __future__ import annotations

import json
import time

import pytest

from tests.kit.vm.channel import GuestError, GuestTimeout
from tests.kit.vm.machine import Guest

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_exit_code_is_exact(guest: Guest, code: int) -> None:
    assert guest.run(f"exit {code}").exit_code == code


def test_signal_is_128_plus_its_number(guest: Guest) -> None:
    assert guest.run("kill -TERM $$").exit_code == 128 + 15


def test_streams_are_apart_and_whole(guest: Guest) -> None:
    data = bytes(range(256)) * 4096
    done = guest.run("cat; echo done >&2", stdin=data)
    assert (done.stdout, done.stderr) == (data, b"done\n")


def test_output_comes_before_the_end(guest: Guest) -> None:
    seen: list[bytes] = []
    with pytest.raises(GuestTimeout):
        guest.run("echo early; sleep 1000", timeout_s=5, on_output=seen.append)
    assert b"".join(seen) == b"early\n"


def test_program_that_is_not_there(guest: Guest) -> None:
    with pytest.raises(GuestError, match="/nowhere"):
        guest.run(["/nowhere"])


def test_background_child_does_not_hold_the_result(guest: Guest) -> None:
    assert guest.run("sleep 1000 & echo started").stdout == b"started\n"


def test_clock_is_set_after_a_restore(guest: Guest) -> None:
    assert abs(float(guest.run("date +%s").text) - time.time()) < 60


def test_restored_guests_do_not_share_random_numbers(guest: Guest) -> None:
    """Two guests from one snapshot would draw the same bytes, and with them the same names and keys."""
    from tests.kit.vm import machine

    series = ".".join(guest.run("uname -r").text.split(".")[:2])
    with machine.restored(series) as other:
        draw = "head -c 32 /dev/urandom"
        assert guest.run(draw).stdout != other.run(draw).stdout


def test_systemd_has_started_everything(guest: Guest) -> None:
    failed = guest.run("systemctl --failed --no-legend --plain").text
    assert failed == ""


def test_cgroup_v2_has_its_controllers(guest: Guest) -> None:
    assert guest.run("stat -f -c %T /sys/fs/cgroup").text.strip() == "cgroup2fs"
    assert {"cpu", "io", "memory", "pids"} <= set(guest.run("cat /sys/fs/cgroup/cgroup.controllers").text.split())
    assert guest.run("test -e /sys/fs/cgroup/system.slice/memory.reclaim").ok


def test_apparmor_binds_root(guest: Guest) -> None:
    profile = "profile guest-check flags=(attach_disconnected) { file, deny /var/tmp/kept w, }"
    assert guest.run("apparmor_parser -r", stdin=profile.encode()).ok
    write = "aa-exec -p guest-check -- sh -c 'echo x > /var/tmp/kept'"
    done = guest.run(f"echo old > /var/tmp/kept; {write}; cat /var/tmp/kept")
    assert (done.stdout, b"Permission denied" in done.stderr) == (b"old\n", True)


def test_security_modules_include_bpf(guest: Guest) -> None:
    assert {"apparmor", "bpf"} <= set(guest.run("cat /sys/kernel/security/lsm").text.split(","))


def test_root_disk_has_project_quotas(guest: Guest) -> None:
    assert "prjquota" in guest.run("findmnt -n -o OPTIONS /").text


def test_network_is_loopback_only(guest: Guest) -> None:
    assert [link["ifname"] for link in json.loads(guest.run("ip -j link").text)] == ["lo"]
