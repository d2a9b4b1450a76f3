"""Names that callers try, and ours for the same: for messages, so nothing here is looked at before one is wrong.

Other libraries for containers and sandboxes call the same things otherwise, and so do subprocess and the shell.
"""

from __future__ import annotations

from collections.abc import Collection
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
    "text": ("data",),
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


_RUN: Final = ("run", "run(...) waits for a program's end, spawn(...) does not")
_STOP: Final = ("stop", "stop() ends it, as its `with` block does")
_COPY: Final = ("files", "files.upload(local, path) and files.download(path, local) copy files and directories")
_FILES: Final = ("files", "files.read(path), files.write(path, data), files.list(path)")
_KILL: Final = ("kill", "signal(signal.SIGTERM) asks it to end, kill() ends all of it")
_END: Final = ("wait", "wait() gives its result, with exit_code, stdout and stderr; info().result is None until then")
_SHOWN: Final = ("info", "info() tells its state")
# A file's waits for the end, or gives so many bytes; what is there now is neither, so that it is not called so.
_READ: Final = (
    "located",
    "wait().stdout is all of it, iterating gives it as it comes, process.lines() by whole lines, "
    "process.output() what is there now",
)
_LINES: Final = ("wait_for", "lines() gives whole lines as they come, wait_for(text) one that has it")
_WAIT_FOR: Final = ("wait_for", "wait_for(text, timeout_s=) waits for a line that has it")
_CODE: Final = ("limits_hit", "exit_code is 0 and ok true for success; cause and limits_hit say why not")
_TEXT: Final = ("stdout_bytes", "stdout and stderr are text, stdout_bytes and stderr_bytes exact")
_KEPT: Final = ("spawn", "output is its program's: run(...).stdout, process.output()")
_LISTED: Final = ("read_text", "list(path), of one directory")
_CONTENT: Final = ("read_text", "read(path) is bytes, read_text(path) text; write(path, data) takes both")
# Methods that callers try, and ours for the same where a class has it.
_METHODS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    **dict.fromkeys(("exec", "exec_run", "execute", "commands", "run_command", "run_code", "call", "Popen"), (_RUN,)),
    **dict.fromkeys(("kill", "terminate", "close", "delete", "remove", "destroy", "shutdown"), (_STOP, _KILL)),
    **dict.fromkeys(("send_signal", "stop"), (_KILL,)),
    **dict.fromkeys(("poll", "communicate", "result", "wait_for_exit"), (_END,)),
    **dict.fromkeys(("returncode", "exit_code"), (_END, _CODE)),
    **dict.fromkeys(("success", "error", "timed_out", "check_returncode", "failed"), (_CODE,)),
    **dict.fromkeys(("output", "text", "logs"), (_TEXT, _KEPT)),
    **dict.fromkeys(("upload", "download", "put_archive", "get_archive", "copy_from", "copy_to"), (_COPY,)),
    **dict.fromkeys(("filesystem", "fs", "read_file", "write_file"), (_FILES,)),
    **dict.fromkeys(("ls", "glob", "listdir", "scandir", "walk"), (_LISTED, _FILES)),
    **dict.fromkeys(("open", "read_bytes", "write_bytes", "write_text", "readfile"), (_CONTENT, _FILES)),
    **dict.fromkeys(("make_dir", "makedirs", "create_folder"), (("mkdir", "mkdir(path, parents=True)"),)),
    **dict.fromkeys(("is_dir", "is_file", "info", "get_info"), (("stat", "stat(path).type, .size, .mode"),)),
    **dict.fromkeys(("rename", "replace"), (("move", "move(source, target, replace=...)"),)),
    **dict.fromkeys(("copy", "cp", "chown", "symlink"), (("chmod", "a program does that: sbx.run([...])"), _COPY)),
    "watch_dir": (("watch", "watch(path)"),),
    "diff": (("watch", "sbx.diff(path)"),),
    **dict.fromkeys(("read", "readline", "readlines", "getvalue"), (_LINES, _READ, _FILES)),
    **dict.fromkeys(("lines", "splitlines"), (_LINES, _READ)),
    **dict.fromkeys(("expect", "wait_until", "read_until", "readuntil", "wait_for_line"), (_WAIT_FOR,)),
    **dict.fromkeys(("status", "is_running", "reload", "attrs", "inspect", "labels"), (_SHOWN,)),
    **dict.fromkeys(
        ("set_timeout", "keep_alive", "refresh"), (("extend", "extend(seconds) moves the end of its lifetime"),)
    ),
    **dict.fromkeys(("pty", "terminal", "shell"), (("spawn", "spawn(tty=True) gives a program a terminal"),)),
    **dict.fromkeys(("create_session", "get_or_create_session"), (("session", "session() is a shell that lives on"),)),
    **dict.fromkeys(("connect", "get_sandbox", "find", "attach"), (("create", "get(ref): an id or a name"),)),
    "sandboxes": (("create", "list()"),),
    **dict.fromkeys(("write", "send_stdin", "send_input"), (("stdin", "stdin.write(data)"), _FILES)),
    **dict.fromkeys(
        ("close_stdin", "write_eof"), (("stdin", "stdin.close()"), ("close", "close() says that there is no more"))
    ),
    **dict.fromkeys(("flush", "drain", "writelines"), (("locate", "what write(data) answered has arrived"),)),
    "pid": (("stdin", "id names it; the pid inside is in sbx.processes()"),),
    "create": (("id", "Client().create(...) makes one"), ("create_many", "create(...) makes one")),
    "containers": (("create", "create(...), get(ref), list()"),),
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
        "upload",
        "target",
    ): "; source is a path of this machine, target one of the sandbox (write(path, data) writes bytes)",
    (
        "download",
        "target",
    ): "; source is a path of the sandbox, target one of this machine (read(path) gives the bytes)",
}


def of_class(name: str, cls: str) -> str:
    """What to say behind an attribute that a class has not."""
    found = _OF_CLASS.get(name)
    return f"; {_CLIENT.format('Async' if cls.startswith('Async') else '')}.{found}" if found else ""


def of_module(name: str, known: Collection[str]) -> str:
    """What to say behind a name that the package has not."""
    if name in ("create", "get", "list", "create_many", "job", "layers", "node", "capabilities"):
        return f"; a client has it: dsec.Client().{name}"
    by_lower = {other.lower(): other for other in known}
    return f"; did you mean {by_lower[name.lower()]}?" if name.lower() in by_lower else meant(name, known)


def makes(cls: str) -> str:
    """What to say to who calls a class himself; empty: that is as it is done, or no class."""
    kind = "Async" if cls.startswith("Async") else ""
    found = _MAKES.get(cls.removeprefix("Async"))
    return f"; {found.format(kind)} makes one" if found else ""


def without(method: str, argument: str) -> str:
    """What to say of an argument that is missing, beyond that it is."""
    return _WITHOUT.get((method, argument), "")


def way(name: str, known: Collection[str]) -> str:
    """What to say behind an attribute that is not there: how ours is called, or nothing."""
    found = next((text for ours, text in _METHODS.get(name, ()) if ours in known), None)
    return f"; {found}" if found else ""


def meant(word: str, known: Collection[str]) -> str:
    """What to say behind a name that is not among those that are known: the one that was meant, or nothing."""
    from difflib import get_close_matches

    ours = next((name for name in _OURS.get(word, ()) if name in known), None)
    if ours is None and word not in _WAYS:
        # A word for something that others have a way for here: `workdir` to a session's run, as `cwd`.
        word = next((name for name in _OURS.get(word, ()) if name in _WAYS), word)
    ours = ours or next((name for name in known if name.startswith(f"{word}_")), None)
    if ours is None and word in _WAYS:
        way_here = _WAYS[word]
        if word == "text" and "length" in known:
            return "; read_text(path) gives text"
        return f"; {_SPAWNED if way_here is _OUTPUT and 'on_output' not in known else way_here}"
    near = [ours] if ours else get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
