"""Names that callers try, and ours for the same: for messages, so nothing here is looked at before one is wrong.

Other libraries for containers and sandboxes call the same things otherwise, and so do subprocess and the shell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

# The first of ours that is known where the word was tried. Ours whose name begins with the word needs no entry.
_OURS: Final[dict[str, tuple[str, ...]]] = {
    "timeout": ("timeout_s", "grace_s", "lifetime_s"),
    "timeout_ms": ("timeout_s", "lifetime_s"),
    "timeout_sec": ("timeout_s", "lifetime_s"),
    "timeout_seconds": ("timeout_s", "lifetime_s"),
    "ttl": ("lifetime_s",),
    "max_lifetime": ("lifetime_s",),
    "auto_stop_interval": ("idle_timeout_s",),
    "grace_period": ("grace_s",),
    "workdir": ("cwd",),
    "working_dir": ("cwd",),
    "working_directory": ("cwd",),
    "directory": ("cwd", "path"),
    "dir": ("cwd", "path"),
    "environment": ("env",),
    "environ": ("env",),
    "env_vars": ("env",),
    "envs": ("env",),
    "secrets": ("env",),
    "variables": ("env",),
    "user_id": ("user",),
    "uid": ("user",),
    "username": ("user",),
    "run_as": ("user",),
    "owner": ("user",),
    "cmd": ("command",),
    "cmds": ("command",),
    "args": ("command",),
    "argv": ("command",),
    "script": ("command",),
    "code": ("command",),
    "input": ("stdin",),
    "on_stdout": ("on_output",),
    "on_stderr": ("on_output",),
    "callback": ("on_output", "on_progress"),
    "progress": ("on_progress",),
    "raise_on_error": ("check",),
    "idempotency_key": ("key",),
    "pty": ("tty",),
    "terminal": ("tty",),
    "keep_alive": ("keepalive",),
    "mem": ("memory_mib",),
    "mem_limit": ("memory_mib",),
    "memory_mb": ("memory_mib",),
    "memory_gb": ("memory_mib",),
    "ram": ("memory_mib",),
    "storage": ("disk_mib",),
    "disk_gb": ("disk_mib",),
    "ephemeral_disk": ("disk_mib",),
    "cpus": ("cpu",),
    "cpu_count": ("cpu",),
    "cores": ("cpu",),
    "vcpus": ("cpu",),
    "template": ("base",),
    "metadata": ("labels",),
    "tags": ("labels",),
    "sandbox_id": ("ref",),
    "id": ("ref", "process_id", "session_id", "key"),
    "name": ("ref", "key"),
    "session_id": ("key",),
    "pid": ("process_id",),
    "content": ("data",),
    "contents": ("data",),
    "text": ("data", "pattern"),
    **dict.fromkeys(("regex", "regexp", "needle", "string", "substring", "marker", "line", "expect"), ("pattern",)),
    "file": ("path",),
    "filename": ("path",),
    "file_path": ("path",),
    "src": ("source",),
    "dst": ("target",),
    "dest": ("target",),
    "destination": ("target",),
    "permissions": ("mode",),
    "make_parents": ("parents",),
    "exist_ok": ("parents",),
    "overwrite": ("replace",),
    "recurse": ("recursive",),
    "force": ("recursive",),
    "sig": ("number",),
    "signum": ("number",),
    "signal": ("number",),
    "signame": ("number",),
    "start": ("offset", "offsets"),
    "since": ("offset", "offsets"),
    "width": ("cols",),
    "columns": ("cols",),
    "height": ("rows",),
    "lines": ("rows",),
    "base_url": ("url",),
    "endpoint": ("url",),
    "host": ("url",),
    "server": ("url",),
    "token": ("api_key",),
}

_OUTPUT: Final = "output is always kept, in .stdout and .stderr of the result; on_output= gets it as it comes"
_SPAWNED: Final = "output is always kept: iterate .stdout or .stderr of the process, or take them of its wait()"
_SPAWN: Final = "spawn(...) starts a program and does not wait for it"
_HOST: Final = "nothing of the host is seen inside: files are copied (files.upload) or brought as a layer"
_NETWORK: Final = "a sandbox has no network but its own loopback, and need not be told"
# What has no argument here, but a way.
_WAYS: Final[dict[str, str]] = {
    "shell": "a str runs as /bin/sh -c, a list is a program with its arguments and needs no shell",
    "capture_output": _OUTPUT,
    "stdout": _OUTPUT,
    "stderr": _OUTPUT,
    "text": _OUTPUT,
    "stream": f"{_OUTPUT}; that of spawn(...) is iterated",
    "background": _SPAWN,
    "detach": _SPAWN,
    "tty": "spawn(tty=True) gives a program a terminal",
    "pty": "spawn(tty=True) gives a program a terminal",
    "volumes": _HOST,
    "mounts": _HOST,
    "network_mode": _NETWORK,
    "block_network": _NETWORK,
    "allow_internet_access": _NETWORK,
    "gpu": "sandboxes have no GPUs",
    "gpus": "sandboxes have no GPUs",
    "privileged": "programs are root inside, and no more than that",
    "env": "`export NAME=value` in a session, session(env=...) for all of it",
    "cwd": "`cd` in a session, session(cwd=...) for all of it",
    "timeout": "`timeout_s=` is an argument of each run",
    "auto_remove": "a sandbox is stopped, and gone, at the end of its `with` block",
    "remove": "a sandbox is stopped, and gone, at the end of its `with` block",
}


_CLIENT: Final = "dsec.{}Client()"
_MAKES: Final = {"Sandbox": f"{_CLIENT}.create(...)", "Process": "sbx.spawn(...)", "Session": "sbx.session(...)"}
# What others ask of the class of a sandbox, and what a client does.
_OF_CLASS: Final = {
    **dict.fromkeys(("create", "new", "start", "run", "launch", "create_async"), "create(...) makes one"),
    **dict.fromkeys(("get", "connect", "from_id", "from_name", "attach", "resume"), "get(id_or_name) finds one"),
    **dict.fromkeys(("list", "list_all"), "list() gives those that are alive"),
}
# What is said of an argument that is missing, of a method.
_WITHOUT: Final = {
    (
        "Files.upload",
        "target",
    ): "; source is a path of this machine, target one of the sandbox (write(path, data) writes bytes)",
    (
        "Files.download",
        "target",
    ): "; source is a path of the sandbox, target one of this machine (read(path) gives the bytes)",
    **dict.fromkeys(
        (("Process.resize", "cols"), ("Attachment.resize", "cols")), "; they are two numbers: resize(50, 100)"
    ),
}
_BOTH: Final = (
    "both streams come, and each line has .stream, 1 or 2; process.stdout and .stderr iterate the bytes of one"
)
_LOOKED: Final = "both streams are looked at, and the line that is returned has .stream, 1 or 2"
_ONE_LINE: Final = "process.lines().next(timeout_s=) waits for one line"
# What one method has no argument for, but a way: the method, what is said, and the words that are tried for it.
_IN_CALLS: Final[tuple[tuple[str, str, str], ...]] = (
    ("Sandbox.events", "follow=False gives what there is, and does not wait", "timeout timeout_s"),
    ("Process.lines", _BOTH, "stream streams stdout stderr fd"),
    ("Process.lines", _ONE_LINE, "timeout timeout_s timeout_ms"),
    ("Process.follow", "both streams come, as (stream, data); .stdout and .stderr iterate one", "stream stdout stderr"),
    ("Process.follow", _ONE_LINE, "timeout timeout_s"),
    ("Process.attach", "both streams come, as (stream, data); `.stream` of a line says which", "stream stdout stderr"),
    ("Process.attach", "a terminal is asked for by spawn(tty=True)", "tty pty"),
    ("Process.wait_for", _LOOKED, "stream streams stdout stderr fd"),
    (
        "Process.wait_for",
        "the next call goes on behind the line; lines(offsets) reads from an offset",
        "offset offsets",
    ),
    ("Process.wait", "signal(number) or kill() ends it; spawn(timeout_s=) does so by itself", "kill signal"),
    ("Process.wait", "the result is a value: .ok, .exit_code, .cause", "check"),
    ("Process.kill", "signal(number) sends one, kill() ends all", "signal sig signum number force"),
    (
        "Process.output",
        "output() does not wait; lines() and wait_for(text, timeout_s=) do",
        "timeout timeout_s wait follow",
    ),
    (
        "Files.list",
        'one directory is listed; sbx.run(["find", path]) lists all below it',
        "depth recursive recurse max_depth",
    ),
    (
        "Files.list",
        'all of it is listed; sbx.run(["sh", "-c", "ls ..."]) picks by a pattern',
        "pattern glob filter hidden",
    ),
    ("Files.read", "read_text(path) gives text", "text encoding format mode errors"),
    ("Files.write", "append(path, data) adds to the end of a file", "append"),
    ("Files.write", "a file is replaced, but with exclusive=True", "overwrite replace force exist_ok"),
    ("Files.write", "a str is written as UTF-8; data.encode(...) makes bytes of it", "encoding"),
    ("Files.download", "a file is replaced, a directory goes into a directory", "replace overwrite force exist_ok"),
    ("Files.upload", "the directories above it are made", "parents make_parents"),
    ("Files.download", "the directories above it are made", "parents make_parents"),
)


def of_class(name: str, cls: str) -> str:
    """What to say behind an attribute that a class has not."""
    found = _OF_CLASS.get(name)
    return f"; {_CLIENT.format('Async' if cls.startswith('Async') else '')}.{found}" if found else ""


def of_module(name: str, known: Collection[str]) -> str:
    """What to say behind a name that the package has not."""
    if name in ("create", "get", "list", "create_many", "job", "layers", "node", "capabilities"):
        return f"; a client has it: dsec.Client().{name}"
    from dsec.model.names import PACKAGE

    by_lower = {other.lower(): other for other in known}
    by_lower |= {theirs.lower(): ours for ours, names in PACKAGE.items() for theirs in names.split()}
    return f"; did you mean {by_lower[name.lower()]}?" if name.lower() in by_lower else meant(name, known)


def makes(cls: str) -> str:
    """What to say to who calls a class himself; empty: that is as it is done, or no class."""
    kind = "Async" if cls.startswith("Async") else ""
    found = _MAKES.get(cls.removeprefix("Async"))
    return f"; {found.format(kind)} makes one" if found else ""


def without(method: str, argument: str) -> str:
    """What to say of an argument that is missing, beyond that it is."""
    return _WITHOUT.get((method, argument), "")


def way(name: str, classes: Iterable[str]) -> str:
    """What to say behind an attribute that is not there: how ours is called, or nothing. `classes`: it, its bases."""
    from dsec.model.names import NAMES

    rows = (row for cls in classes for row in NAMES.get(cls.removeprefix("Async"), ()))
    return _said(name, rows)


def of_method(name: str, method: str) -> str:
    """What to say behind an attribute of a method, which others have as an object."""
    from dsec.model.names import OBJECTS

    return _said(name, OBJECTS[method])


def _said(name: str, rows: Iterable[tuple[str, str, str]]) -> str:
    found = next((text for _, text, names in rows if name in names.split()), None)
    return f"; {found}" if found else ""


def meant(word: str, known: Collection[str], call: str = "") -> str:
    """What to say behind a name that is not among those that are known: the one that was meant, or nothing.

    `call`: the method that has no such argument, as `Files.list`.
    """
    from difflib import get_close_matches

    told = next((text for method, text, words in _IN_CALLS if method == call and word in words.split()), None)
    if told is not None:
        return f"; {told}"
    ours = next((name for name in _OURS.get(word, ()) if name in known), None)
    if ours is None and word not in _WAYS:
        # A word for something that others have a way for here: `workdir` to a session's run, as `cwd`.
        word = next((name for name in _OURS.get(word, ()) if name in _WAYS), word)
    ours = ours or next((name for name in known if name.startswith(f"{word}_")), None)
    if ours is None and word in _WAYS:
        way_here = _WAYS[word]
        return f"; {_SPAWNED if way_here is _OUTPUT and 'on_output' not in known else way_here}"
    near = [ours] if ours else get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
