"""An environment of mini-swe-agent: each command runs in one sandbox.

environment:
  environment_class: dsec.adapters.mini_swe_agent.DsecEnvironment
  spec: {base: "debian:12"}
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

import dsec
from dsec.adapters import missing

try:
    from minisweagent.exceptions import Submitted
except ModuleNotFoundError as error:
    raise missing(error, "mini-swe-agent") from error

__all__ = ["DsecEnvironment", "DsecEnvironmentConfig"]

_SUBMIT: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
# The framework shows a model one output: both streams, in the order they were written.
_ONE_STREAM: Final = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh"]
# As the framework's other environments have it.
_IMAGES: Final = ("image", "docker_image", "container_image")
_NO_IMAGE: Final = (
    'no image is pulled: spec={"base": NAME} or spec={"workspace": NAME} names a layer of the node, and '
    "`docker export` with `dsec layer import tar:ROOT.tar NAME` makes one of an image"
)
# What the framework's own templates ask for, by the names of Python's platform.uname().
_UNAME: Final = {"system": "-s", "node": "-n", "release": "-r", "version": "-v", "machine": "-m"}


@dataclass
class DsecEnvironmentConfig:
    """What a configuration may say. `spec` has the fields of `dsec.Spec`; `url` is the node's, as for `dsec.Client`."""

    spec: dict[str, Any] = field(default_factory=lambda: {"base": "debian:12"})
    url: str | None = None
    cwd: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    timeout: float = 30
    interpreter: list[str] = field(default_factory=lambda: ["bash", "-c"])


class DsecEnvironment:
    """One sandbox, from its making to `cleanup`, or to the end of this object or of the process."""

    def __init__(self, **given: Any) -> None:
        _check(given)
        self.config = DsecEnvironmentConfig(**given)
        self.sandbox = dsec.Client(self.config.url).create(**self.config.spec)
        # The framework's programs never call `cleanup`.
        self._stop = weakref.finalize(self, _stop, self.sandbox)
        try:
            # A configuration that cannot work fails here, and not as the answer to each command of a model.
            self.sandbox.run([*_ONE_STREAM, "true"], cwd=self.config.cwd, env=self.config.env)
            # Asked now: the framework asks for it before each of a model's turns, when there may be no process left
            # for it, or no shell.
            self._uname = _uname(self.sandbox)
        except BaseException:  # also ^C: nobody else knows of the sandbox
            self._stop()
            raise

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Run an action's command. The framework's Submitted is raised when the command says the task is done."""
        limit = timeout or self.config.timeout
        line = [*_ONE_STREAM, *self.config.interpreter, action.get("command", "")]
        try:
            result = self.sandbox.run(line, cwd=cwd or self.config.cwd, env=self.config.env, timeout_s=limit)
        except dsec.InvalidSpec as error:
            if error.detail.get("field") not in ("command", "cwd"):
                raise
            return _output("", -1, f"the command was not started: {error.message}")
        except dsec.ProgramNotStarted as error:
            # Also for want of /bin/sh or of the user, which an agent may have removed: the sandbox was made with them.
            return _output("", -1, f"the command was not started: {error.message}")
        if result.cause != "exited":
            how = f"its timeout of {limit:g} s" if result.cause == "timeout" else result.cause
            return _output(result.stdout, -1, f"the command did not exit by itself: {how}")
        first, _, rest = result.stdout.lstrip().partition("\n")
        if first.strip() == _SUBMIT and result.exit_code == 0:
            extra = {"exit_status": "Submitted", "submission": rest}
            raise Submitted({"role": "exit", "content": rest, "extra": extra})
        return _output(result.stdout, result.exit_code, "")

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        """What templates may name: the configuration, and what the sandbox's `uname` said."""
        return {**asdict(self.config), **self._uname, **more}

    def serialize(self) -> dict[str, Any]:
        """What a trajectory keeps of it."""
        kind = f"{type(self).__module__}.{type(self).__name__}"
        return {"info": {"config": {"environment": asdict(self.config), "environment_type": kind}}}

    def cleanup(self) -> None:
        """Stop the sandbox. Can be repeated."""
        self._stop()


def _check(given: Mapping[str, Any]) -> None:
    """Raises InvalidSpec for what the configuration does not have; that of another environment may have more."""
    known = [one.name for one in fields(DsecEnvironmentConfig)]
    for name in given:
        if name in known:
            continue
        text = f"{name}: no field of the configuration of {DsecEnvironment.__name__}, which has {', '.join(known)}"
        if name in _IMAGES:
            text += f"; {_NO_IMAGE}"
        elif name in dsec.Spec.__struct_fields__:
            text += f"; it stands in spec: spec={{{name!r}: ...}}"
        raise dsec.InvalidSpec(text, detail={"field": name})


def _uname(sandbox: dsec.Sandbox) -> dict[str, str]:
    """All of them; empty is what the sandbox does not say."""
    asked = "; ".join(f'echo "{name}=$(uname {option})"' for name, option in _UNAME.items())
    said = dict(line.partition("=")[::2] for line in sandbox.run(asked).stdout.splitlines())
    return {name: said.get(name, "") for name in _UNAME}


def _stop(sandbox: dsec.Sandbox) -> None:
    with suppress(dsec.NotFound, dsec.SandboxLost):  # it has ended by itself
        sandbox.stop(grace_s=0)


def _output(output: str, code: int, exception_info: str) -> dict[str, Any]:
    return {"output": output, "returncode": code, "exception_info": exception_info}
