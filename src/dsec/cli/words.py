"""Errors in the words of the command line: what the SDK calls a field is an option here; and other tools' words."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dsec.model.errors import DsecError

# Fields of `dsec.Spec` and `run` that are options, under another name than `--a-b` for `a_b`; and those under that.
_OPTIONS: Final = {"toolkits": "--toolkit", "labels": "--label"}
_AS_THEY_ARE: Final = frozenset(
    {"backend", "image", "base", "workspace", "cpu", "memory_mib", "disk_mib", "pids", "idle_timeout_s", "lifetime_s"}
    | {"wait_s", "network", "env", "cwd", "user", "name", "job", "timeout_s", "role"}
)
# Commands of other tools, mostly docker's, and what does the same here.
COMMANDS_ELSEWHERE: Final = {
    **dict.fromkeys(("delete", "destroy", "terminate", "remove"), "dsec stop SANDBOX"),
    **dict.fromkeys(("pkill", "signal"), "dsec kill [-s SIGNAL] SANDBOX PROGRAM"),
    **dict.fromkeys(("create", "start", "new"), "dsec run -d"),
    **dict.fromkeys(("images", "image"), "dsec layer ls"),
    **dict.fromkeys(("pull", "load", "import", "build"), "dsec layer import SOURCE NAME"),
    **dict.fromkeys(("ls", "list"), "dsec ps"),
    **dict.fromkeys(("ssh", "enter", "sh", "bash"), "dsec shell SANDBOX"),
    **dict.fromkeys(("info", "status"), "dsec doctor"),
    "version": "dsec --version",
    "rmi": "dsec layer rm LAYER",
    "top": "dsec ps SANDBOX",
    "stats": "dsec inspect SANDBOX",
    "wait": "dsec events -f SANDBOX",
    **dict.fromkeys(("port", "forward", "port-forward", "tunnel"), "dsec expose SANDBOX PORT"),
}
_HOST: Final = "nothing of the host is seen inside: `dsec cp` copies files, `dsec layer import` makes a layer of them"
_NONE: Final = "no sandbox has that"
# Options of theirs: one of ours, or what there is instead.
OPTIONS_ELSEWHERE: Final = {
    "-m": "--memory-mib",
    "--memory": "--memory-mib",
    "--cpus": "--cpu",
    "--pids-limit": "--pids",
    "--workdir": "--cwd",
    "--time": "--grace-s",
    "-t": "--grace-s",
    "--rm": "a sandbox ends with its program unless --keep is given",
    "--entrypoint": "COMMAND is the program, and nothing stands before it",
    "-f": "`dsec stop` needs none: it is always for good",
    "--force": "`dsec stop` needs none: it is always for good",
    **dict.fromkeys(("-v", "--volume", "--mount"), _HOST),
    **dict.fromkeys(("-p", "--publish"), "`dsec expose SANDBOX PORT` makes a port reachable"),
    **dict.fromkeys(("--privileged", "--cap-add", "--device", "--gpus"), _NONE),
}
# The node's and the SDK's advice, and what it is here.
PHRASES: Final = (
    ("use if_exists='get' or another name", "`dsec exec` runs in it; or take another name"),
    ("wait longer (wait_s)", "wait longer (--wait-s)"),
    ("alive or ended not long ago", "alive or ended not long ago (`dsec ps -a` lists them)"),
)


def meant_command(word: str) -> str:
    """What to say of a command of another tool; empty: it is none that is known."""
    ours = COMMANDS_ELSEWHERE.get(word)
    return f"; `{ours}` may be what is meant" if ours else ""


def meant_option(word: str, known: Collection[str]) -> str:
    """What to say of an option of another tool, for a command with those that are known."""
    ours = OPTIONS_ELSEWHERE.get(word, "")
    if ours.startswith("--"):
        return f"; did you mean {ours}?" if ours in known else ""
    # Ways instead of an option are those of `run`; but for the last.
    of_stop = ours.startswith("`dsec stop`")
    return f"; {ours}" if ours and of_stop == ("--grace-s" in known) else ""


def option(field: str) -> str | None:
    """The option that sets a field; None: there is none."""
    if field in _AS_THEY_ARE:
        return "--" + field.replace("_", "-")
    return _OPTIONS.get(field)


def said(error: DsecError) -> str:
    """The message of an error."""
    return in_our_words(error.message, error.detail.get("field"))


def in_our_words(message: str, field: object) -> str:
    """A message with options for fields."""
    for theirs, ours in PHRASES:
        message = message.replace(theirs, ours)
    name = option(field) if isinstance(field, str) else None
    if name is not None and message.startswith((f"{field}=", f"{field}:")):
        return name + message[len(str(field)) :]
    return message
