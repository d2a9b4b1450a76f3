"""The file helper is no process of the sandbox: root inside can neither see it nor touch it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from tests.kit.rtclient import RuntimeFault
from tests.kit.rtfiles import Files
from tests.security.test_container import SYSCALL, python

pytestmark = pytest.mark.security


@pytest.fixture
def files(sbx: dsec.Sandbox, run_dir: Path) -> Iterator[Files]:
    with Files(run_dir / "runtime.sock", sbx.id) as made:
        made.write(b"/tmp/mark", b"before")
        yield made


def of_host(sbx: dsec.Sandbox) -> int:
    """The helper's number outside."""
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if f"/{sbx.id}/payload/files-" in (comm.parent / "cgroup").read_text():
                return int(comm.parent.name)
        except OSError:
            continue
    raise AssertionError("no helper")


def test_no_number_inside_is_the_helpers(sbx: dsec.Sandbox, files: Files) -> None:
    code = """
    import os
    shown = {int(p) for p in os.listdir("/proc") if p.isdigit()}
    top = int(open("/proc/sys/kernel/pid_max").read())
    def there(p):
        try: os.kill(p, 0)
        except ProcessLookupError: return False
        except PermissionError: return True
        return True
    found = {p for p in range(1, min(top, 100_000)) if there(p)}
    names = {open(f"/proc/{p}/comm").read().strip() for p in found}
    print(len(found - shown), *sorted(names))
    """
    said = python(sbx, code).split()
    assert said[0] == "0"
    assert "dsec-files" not in said
    assert files.read(b"/tmp/mark") == b"before"


def test_its_number_outside_is_nobodys_inside(sbx: dsec.Sandbox, files: Files) -> None:
    number = of_host(sbx)
    code = f"""
    call("kill", 62, {number}, 9)
    call("tgkill", 234, {number}, {number}, 9)
    call("ptrace", 101, 16, {number}, 0, 0)
    call("pidfd_open", 434, {number}, 0)
    room = ctypes.create_string_buffer(16)
    at = (ctypes.c_ulong * 2)(ctypes.addressof(room), 16)
    call("process_vm_readv", 310, {number}, at, 1, at, 1, 0)
    """
    for line in python(sbx, SYSCALL + "\n".join(part.strip() for part in code.splitlines())).splitlines():
        assert line.split()[1] in {"ESRCH", "EPERM", "ENOSYS", "EINVAL"}, line
    assert files.read(b"/tmp/mark") == b"before"


def test_a_signal_to_everybody_is_not_to_the_helper(sbx: dsec.Sandbox, files: Files) -> None:
    code = """
    import os
    try: os.kill(-1, 9)
    except ProcessLookupError: print("nobody")
    """
    assert python(sbx, code) == "nobody"
    assert files.read(b"/tmp/mark") == b"before"
    files.write(b"/tmp/mark", b"after")
    assert sbx.run("cat /tmp/mark").stdout == "after"


@pytest.mark.parametrize(
    "path", [b"/proc/self/mem", b"/proc/self/maps", b"/proc/self/environ", b"/proc/thread-self/status", b"/dev/stdin"]
)
def test_it_cannot_be_asked_for_itself(files: Files, path: bytes) -> None:
    """The /proc inside does not know it, so no path leads to what it has in hand."""
    with pytest.raises(RuntimeFault) as none:
        files.read(path)
    assert none.value.code in {"file_not_found", "permission_denied"}
