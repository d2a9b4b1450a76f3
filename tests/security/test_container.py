"""Each promise of SECURITY.md: a root user inside tries to break it and must fail.

The programs run as root in the sandbox with python3 of the base; each prints what it managed to do.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import dsec
from tests.kit.home import Home

pytestmark = pytest.mark.security


def python(sbx: dsec.Sandbox, code: str, **kwargs: object) -> str:
    """Runs Python code inside; a failure of the code itself is the test's failure."""
    result = sbx.run(["python3", "-I", "-c", textwrap.dedent(code)], **kwargs)  # type: ignore[arg-type] # test helper
    assert result.ok, (result.exit_code, result.cause, result.stderr)
    return result.stdout.strip()


# Calls a system call by number and prints the name of the error, or "ok".
SYSCALL = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(number, *args)
    print(name, "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()])
"""


def test_root_inside_is_nobody_outside(sbx: dsec.Sandbox) -> None:
    mapping = python(sbx, "print(open('/proc/self/uid_map').read())").split()
    inside, outside, count = map(int, mapping)
    assert inside == 0
    assert outside >= 1 << 16, "root inside must not be a user of the host"
    assert count <= 1 << 16


def test_two_sandboxes_have_no_user_in_common(client: dsec.Client, sbx: dsec.Sandbox) -> None:
    with client.create() as other:
        ranges = [int(python(box, "print(open('/proc/self/uid_map').read())").split()[1]) for box in (sbx, other)]
    assert abs(ranges[0] - ranges[1]) >= 1 << 16


def test_only_its_own_processes_are_visible(sbx: dsec.Sandbox) -> None:
    pids = python(sbx, "import os; print(*sorted(int(p) for p in os.listdir('/proc') if p.isdigit()))").split()
    assert pids[0] == "1"
    assert len(pids) <= 3


def test_no_descriptor_of_ours_is_inherited(sbx: dsec.Sandbox) -> None:
    # 3 is the directory that listdir itself has open.
    assert python(sbx, "import os; print(*os.listdir('/proc/self/fd'))").split() == ["0", "1", "2", "3"]


def test_there_is_only_loopback(sbx: dsec.Sandbox) -> None:
    assert python(sbx, "import socket; print(*[n for _, n in socket.if_nameindex()])") == "lo"
    code = """
    import errno, socket
    for family, address in ((socket.AF_INET, ("192.0.2.1", 80)), (socket.AF_INET6, ("2001:db8::1", 80))):
        s = socket.socket(family, socket.SOCK_STREAM); s.settimeout(3)
        try: s.connect(address); print("connected")
        except OSError as e: print(errno.errorcode.get(e.errno, e))
    """
    assert set(python(sbx, code).split()) <= {"ENETUNREACH", "EADDRNOTAVAIL", "EHOSTUNREACH"}


def test_raw_and_packet_sockets_are_refused(sbx: dsec.Sandbox) -> None:
    code = """
    import errno, socket
    for family, kind, proto in ((socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_PACKET, socket.SOCK_RAW, 3)):
        try: socket.socket(family, kind, proto); print("ok")
        except OSError as e: print(errno.errorcode[e.errno])
    """
    assert set(python(sbx, code).split()) <= {"EPERM", "EACCES"}


def test_the_hosts_device_messages_are_not_heard(sbx: dsec.Sandbox) -> None:
    code = """
    import errno, socket
    for protocol in (0, 15):
        try: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol); print("ok")
        except OSError as e: print(errno.errorcode[e.errno])
    """
    assert python(sbx, code).split() == ["ok", "EPROTONOSUPPORT"]


def test_capabilities_are_dockers_without_net_raw(sbx: dsec.Sandbox) -> None:
    status = python(sbx, "print(open('/proc/self/status').read())")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    expected = sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 27, 29, 31))
    for name in ("CapBnd", "CapEff", "CapPrm"):
        assert int(fields[name], 16) == expected, name
    assert int(fields["CapInh"], 16) == 0
    assert fields["Seccomp"].strip() == "2"


def test_mounts_cannot_be_made_or_taken_off(sbx: dsec.Sandbox) -> None:
    code = SYSCALL + textwrap.dedent("""
    call("mount", 165, b"none", b"/mnt", b"tmpfs", 0, None)
    call("umount", 166, b"/proc/kcore", 2)
    call("umount", 166, b"/proc/sys", 2)
    call("pivot_root", 155, b"/", b"/mnt")
    call("fsopen", 430, b"tmpfs", 0)
    call("open_tree", 428, -100, b"/proc", 1)
    call("move_mount", 429, -100, b"/proc", -100, b"/mnt", 0)
    call("unshare_user", 272, 0x10000000)
    call("unshare_mnt", 272, 0x20000)
    call("setns", 308, 0, 0)
    """)
    for line in python(sbx, code).splitlines():
        assert line.split()[1] in {"EPERM", "EACCES", "ENOSYS"}, line


CHROOT_AND_CLIMB = """
import os
os.mkdir("/tmp/below")
top = os.open("/", os.O_RDONLY)
os.chroot("/tmp/below")
os.fchdir(top)
for _ in range(64):
    os.chdir("..")
os.chroot(".")
print(os.stat("/").st_ino == os.fstat(top).st_ino, os.path.exists("/etc/passwd"), os.path.exists("/stage"))
"""


def test_no_change_of_the_root_leads_below_it(sbx: dsec.Sandbox) -> None:
    # The root lies over the directory the init was born with.
    done = sbx.run(["python3", "-c", CHROOT_AND_CLIMB], check=True)
    assert done.stdout.split() == ["True", "True", "False"]
    mounts = sbx.run("cut -d ' ' -f 5 /proc/self/mountinfo", check=True).stdout.split()
    assert mounts.count("/") == 1
    assert not [path for path in mounts if path.startswith(("/stage", "/host"))]


def test_the_kernel_is_not_for_sandboxes(sbx: dsec.Sandbox) -> None:
    code = SYSCALL + textwrap.dedent("""
    call("bpf", 321, 0, 0, 0)
    call("kexec_load", 246, 0, 0, 0, 0)
    call("init_module", 175, 0, 0, 0)
    call("finit_module", 313, 0, b"", 0)
    call("perf_event_open", 298, 0, 0, -1, -1, 0)
    call("userfaultfd", 323, 0)
    call("keyctl", 250, 0, 0, 0, 0, 0)
    call("add_key", 248, b"user", b"x", b"x", 1, -1)
    call("io_uring_setup", 425, 1, 0)
    call("open_by_handle_at", 304, 0, 0, 0)
    call("name_reboot", 169, 0xfee1dead, 672274793, 0, 0)
    call("swapon", 167, b"/swap", 0)
    call("settimeofday", 164, 0, 0)
    call("clock_settime", 227, 0, 0)
    call("syslog", 103, 3, 0, 0)
    call("acct", 163, b"/acct")
    call("quotactl", 179, 0, 0, 0, 0)
    """)
    for line in python(sbx, code).splitlines():
        assert line.split()[1] in {"EPERM", "EACCES", "ENOSYS"}, line


def test_devices_cannot_be_made_or_opened(sbx: dsec.Sandbox) -> None:
    code = """
    import errno, os, stat
    for major, minor in ((1, 1), (8, 0), (10, 232), (254, 0)):
        try:
            os.mknod("/dev/evil", stat.S_IFBLK | 0o666, os.makedev(major, minor)); print("made")
        except OSError as e: print(errno.errorcode[e.errno])
        try:
            os.mknod("/root/evil", stat.S_IFCHR | 0o666, os.makedev(major, minor)); os.open("/root/evil", os.O_RDONLY); print("opened")
        except OSError as e: print(errno.errorcode[e.errno])
    """
    assert set(python(sbx, code).split()) <= {"EPERM", "EACCES", "ENXIO"}
    names = python(sbx, "import os; print(*sorted(os.listdir('/dev')))").split()
    assert set(names) <= {
        "console", "fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty",
        "urandom", "zero",
    }  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        "/proc/diskstats", "/proc/kcore", "/proc/keys", "/proc/kpagecgroup", "/proc/kpageflags", "/proc/kpagecount",
        "/proc/partitions", "/proc/swaps", "/proc/timer_list",
    ],
)  # fmt: skip
def test_masked_files_have_nothing(sbx: dsec.Sandbox, path: str) -> None:
    code = f"""
    try: print(len(open({path!r}, "rb").read(64)))
    except (FileNotFoundError, PermissionError): print(0)
    """
    assert python(sbx, code) == "0"


@pytest.mark.parametrize(
    "path",
    [
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/proc/irq/default_smp_affinity",
        "/sys/kernel/uevent_helper",
        "/proc/sys/vm/drop_caches",
    ],
)
def test_kernel_settings_cannot_be_written(sbx: dsec.Sandbox, path: str) -> None:
    code = f"""
    import errno
    try: open({path!r}, "w").write("1"); print("written")
    except OSError as e: print(errno.errorcode[e.errno])
    """
    assert python(sbx, code) in {"EROFS", "EACCES", "EPERM", "ENOENT"}


def test_what_the_hosts_disks_do_is_not_shown(sbx: dsec.Sandbox) -> None:
    code = """
    import glob, os
    places = ["/proc/fs/*", "/sys/fs/*/*", "/sys/block/*/stat", "/sys/block/*/size", "/sys/class/block/*/stat"]
    print(*(path for place in places for path in glob.glob(place)))
    """
    assert python(sbx, code) == ""


def test_the_hosts_paths_are_not_named(sbx: dsec.Sandbox, home: Home) -> None:
    code = """
    for process in ("1", "self"):
        for name in ("cmdline", "environ", "comm", "cgroup", "mounts", "mountinfo", "mountstats", "status", "stat"):
            try: print(process, name, open(f"/proc/{process}/{name}", "rb").read())
            except PermissionError: print(process, name, "refused")
    print(open("/proc/mounts").read(), open("/proc/net/unix").read())
    """
    text = python(sbx, code)
    assert "lowerdir=/" not in text
    place = home.place
    for named in (sbx.id, str(place.run_dir), str(place.state_dir), place.cgroup.rpartition("/")[2], "/var/lib/dsec"):
        assert named not in text, named
    # The same constant everywhere.
    assert "1 cmdline b'dsec-launcher\\x00launcher\\x00'" in text


def test_files_behind_the_hosts_loop_devices_are_not_named(sbx: dsec.Sandbox) -> None:
    assert sbx.run("cat /sys/block/*/loop/backing_file /sys/devices/virtual/block/*/loop/backing_file").stdout == ""


def test_the_init_gives_nothing_away(sbx: dsec.Sandbox) -> None:
    code = """
    import errno, os
    for name in ("mem", "exe", "root", "cwd", "environ", "maps", "fd"):
        path = f"/proc/1/{name}"
        try:
            if name in ("exe", "root", "cwd"): print(name, os.readlink(path))
            elif name == "fd": print(name, *os.listdir(path))
            else: print(name, len(open(path, "rb").read(16)))
        except OSError as e: print(name, errno.errorcode[e.errno])
    """
    for line in python(sbx, code).splitlines():
        assert line.split()[1] in {"EACCES", "EPERM"}, line


def test_a_program_that_is_entering_cannot_be_touched(sbx: dsec.Sandbox) -> None:
    # A watcher tries to read the memory, the descriptors and the executable of each new process that enters from outside.
    watcher = """
    import os, time
    mine = {int(p) for p in os.listdir("/proc") if p.isdigit()}
    end = time.time() + 6; caught = set()
    while time.time() < end:
        for p in os.listdir("/proc"):
            if not p.isdigit() or int(p) in mine: continue
            for name in ("exe", "root"):
                try: target = os.readlink(f"/proc/{p}/{name}")
                except OSError: continue
                if target not in ("/", "/bin/true", "/usr/bin/true"): caught.add(target)
    print("caught", *caught)
    """
    # What may be seen is what the sandbox itself has: its own programs.
    assert [
        name for name in seen_of_entering(sbx, watcher).split()[1:] if not name.startswith(("/usr/", "/bin/"))
    ] == []


def seen_of_entering(sbx: dsec.Sandbox, watcher: str) -> str:
    """What a program says that looks around while others enter the sandbox, one after the other."""
    out: list[str] = []
    thread = threading.Thread(target=lambda: out.append(python(sbx, watcher)))
    thread.start()
    while thread.is_alive():
        assert sbx.run(["/bin/true"]).ok
    thread.join()
    return out[0]


def test_a_program_that_is_entering_shows_no_network_but_loopback(sbx: dsec.Sandbox) -> None:
    # What lies in /proc/PID/net needs no right over the process, only its number, and those come one after the other.
    watcher = """
    import os, time
    next_ = max(int(p) for p in os.listdir("/proc") if p.isdigit()) + 1
    end = time.time() + 4; caught = set(); seen = 0
    # On a busy machine none may be met for a while.
    while time.time() < end or (not seen and time.time() < end + 100):
        for p in range(next_, next_ + 3):
            try: text = open(f"/proc/{p}/net/unix").read()
            except OSError: continue
            seen += 1; next_ = max(next_, p)
            caught.update(text.splitlines()[1:])
            if not os.path.exists(f"/proc/{p}"): next_ = p + 1
        if not os.path.exists(f"/proc/{next_}"): next_ = int(open("/proc/loadavg").read().split()[-1]) + 1
    print(min(seen, 1), *caught)
    """
    assert seen_of_entering(sbx, watcher) == "1"


def test_cgroups_cannot_be_reached(sbx: dsec.Sandbox) -> None:
    code = """
    import os
    writable = [d for d, _, _ in os.walk("/sys/fs/cgroup") if os.access(d + "/cgroup.procs", os.W_OK)]
    print(len(writable))
    """
    assert python(sbx, code) == "0"


def test_a_fork_bomb_ends_at_the_limit_and_the_sandbox_lives(client: dsec.Client) -> None:
    with client.create(pids=64) as sbx:
        result = sbx.run("f() { f | f & }; f; sleep 2", timeout_s=10)
        assert "pids" in result.limits_hit
        sbx.run("kill -9 -1")  # everybody but the init and itself, at once
        assert sbx.run(["/bin/true"], timeout_s=10).ok


def test_a_full_disk_stays_its_own(client: dsec.Client, sbx: dsec.Sandbox) -> None:
    with client.create(disk_mib=64) as small:
        result = small.run("head -c 200M /dev/urandom > /root/big; echo $?; stat -c %s /root/big")
        code, size = result.stdout.split()
        assert code != "0"
        assert 32 << 20 < int(size) <= 64 << 20
        assert "disk" in result.limits_hit
        assert small.run("rm /root/big && echo x > /root/again && cat /root/again").stdout == "x\n"
    assert sbx.run("head -c 10M /dev/zero > /root/mine").ok


def test_memory_ends_at_the_limit_and_says_so(client: dsec.Client) -> None:
    with client.create(memory_mib=64) as sbx:
        result = sbx.run(["python3", "-c", "x = bytearray(512 << 20)"])
        assert (result.cause, result.exit_code, result.signal) == ("oom", 137, 9)
        assert result.limits_hit == ("memory",)
        assert sbx.run(["/bin/true"]).ok


def test_a_timeout_kills_the_whole_tree(sbx: dsec.Sandbox) -> None:
    script = """
    trap '' TERM
    setsid sh -c "trap '' TERM; sleep 600" & setsid nohup sleep 601 & sleep 602
    """
    result = sbx.run(script, timeout_s=1)
    assert result.cause == "timeout"
    left = sbx.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    assert "sleep 60" not in left


def test_a_program_that_is_traced_ends_in_time(client: dsec.Client) -> None:
    seize = """
    import ctypes, os, time
    libc = ctypes.CDLL(None)
    def name(pid):
        try: return open(f"/proc/{pid}/comm").read().strip()
        except OSError: return ""
    seized = None
    while seized is None:
        seized = next((p for p in os.listdir("/proc") if p.isdigit() and name(p) == "sleep"), None)
    assert libc.ptrace(0x4206, int(seized), 0, 0) == 0
    time.sleep(600)
    """
    with client.create() as sbx:
        argv = ["python3", "-I", "-c", textwrap.dedent(seize)]
        tracer = threading.Thread(target=lambda: sbx.run(argv, timeout_s=60))
        tracer.start()
        began = time.monotonic()
        result = sbx.run(["sleep", "600"], timeout_s=3)
        assert (result.cause, result.signal) == ("timeout", 9)
        assert time.monotonic() - began < 20
        tracer.join()
        assert sbx.run(["true"]).ok


def test_setuid_programs_work_unless_forbidden(client: dsec.Client) -> None:
    become = ["sh", "-c", "cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id"]
    with client.create() as sbx:
        sbx.run(become, check=True)
        assert "euid=0" in sbx.run(["/tmp/id"], user="nobody").stdout
    with client.create(no_new_privs=True) as sbx:
        sbx.run(become, check=True)
        assert "euid=0" not in sbx.run(["/tmp/id"], user="nobody").stdout


def test_the_nodes_sockets_are_not_inside(sbx: dsec.Sandbox, run_dir: Path) -> None:
    assert not sbx.run(["test", "-e", str(run_dir)]).ok
    assert "dsec" not in sbx.run("cat /proc/net/unix").stdout


# Takes what it can of a resource that the kernel counts by user, tells how much, and holds it until it is ended.
HOARD = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)

class Mq(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("flags", "maxmsg", "msgsize", "curmsgs", "a", "b", "c", "d")]

def watcher(_):
    return libc.inotify_init1(0)

def queue(number):
    return libc.syscall(240, b"q%d" % number, os.O_CREAT | os.O_RDWR, 0o600, ctypes.byref(Mq(0, 10, 8192, 0)))

def signal(_):
    return libc.sigqueue(os.getpid(), 40, None)

libc.signal(40, ctypes.c_void_p(1)); libc.sigprocmask(0, ctypes.create_string_buffer(b"\\xff" * 128), None)
take, most = {"watcher": watcher, "queue": queue, "signal": signal}[sys.argv[1]], int(sys.argv[2])
got = 0
while got < most and take(got) >= 0: got += 1
print(got, flush=True)
if sys.argv[3] == "hold": time.sleep(600)
"""


@pytest.mark.parametrize("what", ["watcher", "queue", "signal"])
def test_what_is_counted_by_user_is_counted_by_sandbox(client: dsec.Client, sbx: dsec.Sandbox, what: str) -> None:
    hoard = ["python3", "-I", "-c", HOARD, what]
    with client.create() as greedy:
        wait = "while [ ! -s /tmp/got ]; do sleep 0.1; done; cat /tmp/got"
        hold = f"{shlex.join([*hoard, '1000000', 'hold'])} > /tmp/got & {wait}"

        def holding() -> None:
            with contextlib.suppress(dsec.SandboxLost):  # how it ends, with its sandbox
                greedy.run(hold + "; wait", timeout_s=600)

        thread = threading.Thread(target=holding)
        thread.start()
        taken = ""
        while not taken:
            taken = greedy.run("cat /tmp/got 2>/dev/null || true").stdout.strip()
        assert 0 < int(taken) < 1_000_000, "there is a limit, and it has been reached"
        left = sbx.run([*hoard, "5", "go"], check=True, timeout_s=60).stdout.strip()
        assert left == "5"
    thread.join()


def test_asynchronous_io_is_said_not_to_exist(sbx: dsec.Sandbox) -> None:
    code = SYSCALL + 'call("io_setup", 206, 1, ctypes.byref(ctypes.c_ulong(0)))\ncall("io_submit", 209, 0, 0, None)'
    assert python(sbx, code).split() == ["io_setup", "ENOSYS", "io_submit", "ENOSYS"]


def test_user_files_that_are_no_files_hold_up_nothing(client: dsec.Client) -> None:
    with client.create() as sbx:
        sbx.run("rm /etc/passwd /etc/group; mkfifo /etc/passwd; ln -s /dev/zero /etc/group", check=True)
        assert sbx.run(["/bin/true"], timeout_s=30).ok
        assert sbx.run("true", timeout_s=30).ok


def test_a_layer_with_a_directory_for_a_file_is_named(tmp_path: Path, home: Home, client: dsec.Client) -> None:
    root = tmp_path / "root"
    (root / "etc" / "hosts").mkdir(parents=True)
    line = [sys.executable, "-m", "dsec.images", "--store", str(home.place.state_dir), "import", f"dir:{root}", "bad:1"]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    with pytest.raises(dsec.InvalidSpec, match="/etc/hosts"):
        client.create(base="debian:12", toolkits=["bad:1"])
