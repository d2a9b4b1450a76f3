"""Policies that are enforced: what a sandbox reaches, live changes, and deaths of whatever stands between."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dsec
from tests.kit.home import BASE, Home, standing
from tests.kit.netcontrol import Control
from tests.kit.world import RESOLVER, World, cannot_steer, get, policy, rule, world

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(bool(cannot_steer()), reason=cannot_steer())]

OPERATOR = """
version = 1
floor = [{ action = "deny", domain = "floor.example" }]
[profiles]
inside = [{ action = "allow", cidr = "10.1.0.0/16", ports = [80] }]
[mirrors]
ours = { hosts = ["mirror.example"], ports = [80] }
"""
# Says hello on a connection, and again for each line that it gets, until the connection is gone.
TALK = (
    "import itertools, socket, sys\n"
    "s = socket.create_connection((sys.argv[1], 22), 20)\n"
    "s.settimeout(20)\n"
    "try:\n"
    " for line in itertools.chain(['first'], sys.stdin):\n"
    "  s.sendall(line.strip().encode() + b'.')\n"
    "  print(s.recv(100).decode() or 'closed', flush=True)\n"
    "except OSError:\n"
    " print('closed', flush=True)\n"
)


HTTP = rule(domain="allowed.example", ports=[80])
TALKS = rule(domain="allowed.example", ports=[22], by="address")


def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def verdicts(sbx: dsec.Sandbox) -> list[dict[str, Any]]:
    return [event.detail for event in sbx.events() if event.kind == "verdict"]


def said(sbx: dsec.Sandbox, **fields: Any) -> bool:
    return any(fields.items() <= detail.items() for detail in verdicts(sbx))


def net_pid(home: Home) -> int:
    with Control(home.place.run_dir) as control:
        return control.pid()


def ended(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    return True


@pytest.fixture(scope="module")
def outside() -> Iterator[World]:
    with world() as made:
        yield made


@pytest.fixture(scope="module")
def home(outside: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    text = tmp_path_factory.mktemp("operator") / "network.toml"
    text.write_text(OPERATOR)
    options = ("--resolver", RESOLVER, "--network-policy", str(text))
    with standing(before=outside.before, up=options) as made:
        yield made


@pytest.fixture
def client(home: Home) -> Iterator[dsec.Client]:
    with home.client() as made:
        yield made


def test_without_a_policy_nothing_is_reached(client: dsec.Client, outside: World) -> None:
    for network in ({}, {"ours": False}):
        outside.asked.clear(), outside.taken.clear()
        with client.create(base=BASE, network=network) as sbx:
            assert get(sbx, "allowed.example") == "gaierror"
            assert get(sbx, "20.0.1.1") == "OSError"  # there is no way at all
            assert "default" not in sbx.run("cat /proc/net/fib_trie; grep '^00* 00 ' /proc/net/ipv6_route").stdout
        assert (outside.asked, outside.taken) == ([], [])


def test_what_is_allowed_is_reached_and_nothing_else(client: dsec.Client, outside: World) -> None:
    outside.asked.clear(), outside.taken.clear()
    with client.create(base=BASE, network=policy(HTTP)) as sbx:
        assert get(sbx, "allowed.example") == "this is 20.0.1.1"
        assert get(sbx, "other.example") == "gaierror"
        assert get(sbx, "secret-data.allowed.example") == "gaierror"
        assert get(sbx, "20.0.1.2") == "ConnectionResetError"
        assert get(sbx, "20.0.1.1", "allowed.example") == "this is 20.0.1.1", "the address of the name that it says"
        assert get(sbx, "20.0.1.1", "other.example") == "ConnectionResetError"
        assert get(sbx, "allowed.example", port=22) == "ConnectionResetError"
        assert set(outside.asked) == {"allowed.example"}
        assert {at for at, _ in outside.taken} == {"20.0.1.1"}
        until(lambda: said(sbx, about="connect", allow=False, address="20.0.1.2"))
        allowed = "own/allow/domain:allowed.example"
        assert said(sbx, about="connect", allow=True, rule=allowed, name="allowed.example", address="20.0.1.1", port=80)
        assert said(sbx, about="dns", allow=False, name="other.example")


def test_mirrors_profiles_and_what_a_name_does_not_open(client: dsec.Client, outside: World) -> None:
    outside.names["floor.example"] = ["20.0.1.2"]
    private = rule(domain="private.example")
    with client.create(base=BASE, network={"ours": True}) as sbx:
        assert get(sbx, "mirror.example") == "this is 20.0.1.4"
    with client.create(base=BASE, network=policy(private, rule(domain="floor.example"))) as sbx:
        assert get(sbx, "private.example") == "gaierror", "a private address is not answered"
        assert get(sbx, "10.1.1.1") == "ConnectionResetError"
        assert get(sbx, "floor.example") == "gaierror"
    with client.create(base=BASE, network=policy(private, profile="inside")) as sbx:
        assert get(sbx, "10.1.1.1") == "this is 10.1.1.1"
    with client.create(base=BASE, network=policy(rule(domain="*.wild.example"))) as sbx:
        assert get(sbx, "below.wild.example") == "this is 20.0.1.3"
        assert get(sbx, "allowed.example") == "gaierror"


UDP = {"action": "allow", "cidr": "20.0.0.0/8", "ports": [53], "protocol": "udp"}


@pytest.mark.parametrize(
    ("network", "error", "says"),
    [
        ({"nosuch": True}, dsec.InvalidSpec, "network"),
        (policy(profile="nosuch"), dsec.InvalidSpec, "network.profile"),
        (policy(rule(cidr="10.0.0.0/8", ports=[80])), dsec.InvalidSpec, r"network.rules\[0\]"),
        (policy(rule(cidr="20.0.0.0/8", ports=[53], protocol="udp")), dsec.Unsupported, "network_routed"),
        (policy(phases={"later": {"rules": [UDP]}}), dsec.Unsupported, "network_routed"),
    ],
)
def test_what_is_not_enforced_is_refused(client: dsec.Client, network: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        client.create(base=BASE, network=network)
    with client.create(base=BASE) as sbx:
        with pytest.raises(error, match=says):
            sbx.set_network(network)
        assert sbx.info().spec.network == {}


def test_changes_hold_when_they_return_and_leave_alone_what_stays_allowed(client: dsec.Client) -> None:
    with client.create(base=BASE, network=policy(HTTP, TALKS)) as sbx:
        talk = sbx.spawn(["python3", "-c", TALK, "allowed.example"])
        lines = iter(talk.stdout)
        assert next(lines) == b"first.\n"
        sbx.patch_network(policy(rule(domain="other.example", ports=[80])))
        talk.stdin.write(b"second\n")
        assert next(lines) == b"second.\n", "it is not disturbed"
        assert get(sbx, "other.example") == "this is 20.0.1.2"
        report = sbx.explain_network()
        assert report.connections == 1
        assert {row.id for row in report.rules if row.hits} >= {"own/allow/domain:other.example"}
        sbx.set_network(policy(rule(domain="other.example", ports=[80])))
        # Nothing is sent any more: it was cut before the call returned.
        assert sbx.explain_network().connections == 0
        talk.stdin.write(b"third\n")
        assert next(lines) == b"closed\n"
        assert get(sbx, "allowed.example") == "gaierror"
        assert get(sbx, "20.0.1.1", "allowed.example") == "ConnectionResetError"
        until(lambda: said(sbx, about="cut", address="20.0.1.1", port=22))
        sbx.set_network({})
        assert get(sbx, "other.example") == "gaierror"


def test_a_sandbox_that_had_nothing_may_get_something_later_and_phases_change_by_name(client: dsec.Client) -> None:
    with client.create(base=BASE) as sbx:
        assert get(sbx, "allowed.example") == "gaierror"
        assert not sbx.explain_network().steered
        phases = {"setup": {"rules": [HTTP]}, "agent": {"rules": [rule(domain="other.example", ports=[80])]}}
        sbx.set_network(policy(phases=phases, phase="setup"))
        assert (get(sbx, "allowed.example"), get(sbx, "other.example")) == ("this is 20.0.1.1", "gaierror")
        sbx.patch_network({"version": 1, "phase": "agent"})
        assert (get(sbx, "allowed.example"), get(sbx, "other.example")) == ("gaierror", "this is 20.0.1.2")
        assert sbx.explain_network().phase == "agent"


def test_sandboxes_do_not_share_what_they_may(client: dsec.Client) -> None:
    with (
        client.create(base=BASE, network=policy(HTTP)) as one,
        client.create(base=BASE, network=policy(rule(domain="other.example", ports=[80]))) as two,
    ):
        assert get(one, "allowed.example") == "this is 20.0.1.1"
        assert get(two, "20.0.1.1", "allowed.example") == "ConnectionResetError"
        assert get(two, "allowed.example") == "gaierror"


def test_a_port_of_its_own_still_works(client: dsec.Client) -> None:
    server = "import http.server; http.server.HTTPServer(('127.0.0.1', 80), http.server.SimpleHTTPRequestHandler)"
    with client.create(base=BASE, network=policy(HTTP)) as sbx:
        sbx.spawn(["python3", "-c", f"{server}.serve_forever()"], cwd="/etc")
        until(lambda: get(sbx, "127.0.0.1") not in ("ConnectionRefusedError", ""))


def test_the_process_may_die_at_any_time(client: dsec.Client, home: Home) -> None:
    with client.create(base=BASE, network=policy(HTTP)) as sbx, client.create(base=BASE) as bare:
        for _ in range(3):
            assert get(sbx, "allowed.example") == "this is 20.0.1.1"
            pid = net_pid(home)
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: ended(pid))  # type: ignore[misc] # mypy: a lambda with a default
            # Nothing but what is allowed is reached meanwhile, and that soon again.
            assert get(sbx, "20.0.1.2") in ("ConnectionRefusedError", "ConnectionResetError")
            until(lambda: get(sbx, "allowed.example") == "this is 20.0.1.1")
            assert get(sbx, "other.example") == "gaierror"
        assert get(bare, "20.0.1.1") == "OSError"


def test_a_change_while_the_process_is_dead_holds_when_it_returns(client: dsec.Client, home: Home) -> None:
    with client.create(base=BASE, network=policy(HTTP)) as sbx:
        os.kill(net_pid(home), signal.SIGKILL)
        sbx.set_network(policy(rule(domain="other.example", ports=[80])))
        assert get(sbx, "other.example") == "this is 20.0.1.2"
        assert get(sbx, "allowed.example") == "gaierror"


@pytest.mark.parametrize("who", ["agent", "runtime", "both", "all"])
def test_deaths_of_agent_and_runtime_change_nothing(client: dsec.Client, home: Home, who: str) -> None:
    with client.create(base=BASE, network=policy(HTTP, TALKS)) as sbx:
        talk = sbx.spawn(["python3", "-c", TALK, "allowed.example"])
        lines = iter(talk.stdout)
        assert next(lines) == b"first.\n"
        pid = net_pid(home)
        keeper = int((home.place.run_dir / "keeper.pid").read_text().split()[0])
        children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        runtime = next(int(child) for child in children if b"serve\0--run-dir" in _line(int(child)))
        killed = {"agent": [], "runtime": [runtime], "both": [runtime], "all": [runtime, pid]}[who]
        if who != "runtime":
            os.kill(home.agent(), signal.SIGKILL)
        for one in killed:
            os.kill(one, signal.SIGKILL)
        if who != "runtime":
            home.up()
        if who != "all":
            assert net_pid(home) == pid
            talk.stdin.write(b"second\n")
            assert next(lines) == b"second.\n", "its connection lives on"
        until(lambda: get(sbx, "allowed.example") == "this is 20.0.1.1")
        assert get(sbx, "other.example") == "gaierror"
        sbx.patch_network(policy(rule(domain="other.example", ports=[80])))
        assert get(sbx, "other.example") == "this is 20.0.1.2"


def _line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_what_ended_is_let_go_also_after_the_agent_was_away(client: dsec.Client, home: Home) -> None:
    def served() -> list[str]:
        with Control(home.place.run_dir) as control:
            found: list[str] = control.ask("list").get("sandboxes", [])
            return found

    with client.create(base=BASE, network=policy(HTTP)) as sbx:
        assert sbx.id in served()
    assert sbx.id not in served()
    kept = client.create(base=BASE, network=policy(HTTP))
    lost = client.create(base=BASE, network=policy(HTTP))
    os.kill(home.agent(), signal.SIGKILL)
    with Control(home.place.run_dir) as control:
        assert {kept.id, lost.id} <= set(control.ask("list")["sandboxes"])
    keeper = int((home.place.run_dir / "keeper.pid").read_text().split()[0])
    assert keeper
    home.up()
    lost.stop()
    assert get(kept, "allowed.example") == "this is 20.0.1.1"
    assert served() == [kept.id]
    kept.stop()


def test_many_verdicts_push_out_nothing_else(client: dsec.Client) -> None:
    scan = (
        "import socket\n"
        "for port in range(1000, 4000):\n"
        " s = socket.socket(); s.settimeout(5)\n"
        " try: s.connect(('20.0.1.2', port)); s.recv(1)\n"
        " except OSError: pass\n"
        " s.close()\n"
    )
    with client.create(base=BASE, network=policy(HTTP)) as sbx:
        sbx.run("true")
        sbx.run(["python3", "-c", scan])
        until(lambda: any("dropped" in detail for detail in verdicts(sbx)))
        told = list(sbx.events())
        assert [event.kind for event in told if event.kind.endswith(".ended")] == ["run.ended"] * 2
        assert sum(detail.get("count", 1) for detail in verdicts(sbx) if detail.get("about")) < 3000
        assert sum(detail.get("dropped", 0) for detail in verdicts(sbx)) > 0


def test_the_command_explains_and_changes(client: dsec.Client, home: Home) -> None:
    with client.create(base=BASE) as sbx:
        assert b"loopback only" in home.dsec("policy", "explain", sbx.id)
        home.dsec("policy", "set", sbx.id, "ours=on")
        assert get(sbx, "mirror.example") == "this is 20.0.1.4"
        text = home.dsec("policy", "explain", sbx.id).decode()
        rows = {tuple(line.split()[:4]): line for line in text.splitlines()}
        assert ("floor", "deny", "domain", "floor.example") in rows
        assert "sk_lookup" in rows["own", "allow", "mirror", "ours"]
        home.dsec("policy", "patch", sbx.id, "ours=off")
        assert get(sbx, "mirror.example") == "gaierror"
        home.dsec(
            "policy", "set", sbx.id, "--file", "-", code=1, stdin=json.dumps({"version": 1, "rules": [UDP]}).encode()
        )
        assert sbx.info().spec.network == {"ours": False}
