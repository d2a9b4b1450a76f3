"""What a node holds for itself alone: run directory, state and cgroup. Two nodes over one of them end each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec.linux import cgroups
from dsec.model.errors import Conflict, InvalidSpec, Unsupported
from dsec.node.config import STATE_DIR, NodeConfig
from dsec.node.store import write_whole

# In the run directory: the state directory and the cgroup of the node that was here last, a line each.
PLACES: Final = "node.places"
# In the state directory, before anything lives: the run directory of the node that uses it, and locked by its agent.
LOCK: Final = "node.lock"


def check_run_dir(config: NodeConfig, mount: Path | None) -> None:
    """Raises Conflict when what lives in this run directory belongs to another state directory, or to none any more.

    A node ends what lives there and has no row in its state: over another state, or where the disk with it is not
    mounted, that is every sandbox. A living keeper's own command line says whose it is; of one that has died, what the
    agent before us noted. `mount` is where cgroup v2 is.
    """
    from dsec.backends.container.keeper import living_keeper, options_of

    noted = _places(config.run_dir)
    keeper = living_keeper(config.run_dir)
    if keeper is not None:
        said = options_of(keeper.pid).get("--state-dir")
        has, lives = Path(said) if said else noted[0] if noted is not None else STATE_DIR, "the runtime"
        end = f", or end it: DSEC_RUN_DIR={config.run_dir} dsec down --stop-all"
    elif noted is not None and mount is not None and _lives(mount / noted[1]):
        has, lives, end = noted[0], f"what lives in the cgroup {noted[1]}", ""
    else:
        return
    if not _same(has, config.state_dir):
        raise Conflict(
            f"{lives} belongs to the node in {config.run_dir} with its state in {has}, and its sandboxes would end "
            f"under one with {config.state_dir}; start that one (DSEC_RUN_DIR={config.run_dir} DSEC_STATE_DIR={has} "
            f"dsec up){end}, or give this one a run directory of its own by DSEC_RUN_DIR",
            detail={"run_dir": str(config.run_dir), "owner": str(has), "state_dir": str(config.state_dir)},
        )
    if keeper is not None and not (config.state_dir / LOCK).exists():
        raise Conflict(
            f"the runtime in {config.run_dir} lives, its node's state is not in {config.state_dir} any more, and the "
            "sandboxes would end: is a disk not mounted there? If it was removed for good, end them: "
            f"DSEC_RUN_DIR={config.run_dir} dsec down --stop-all",
            detail={"run_dir": str(config.run_dir), "owner": str(has), "state_dir": str(config.state_dir)},
        )


def note_places(config: NodeConfig) -> None:
    """Write down whose this run directory is, before anything lives in it: a keeper that dies says it no more."""
    from dsec.backends.container.keeper import living_keeper, options_of

    keeper = living_keeper(config.run_dir)  # one that was here before us keeps its cgroup, whatever ours is called
    cgroup = options_of(keeper.pid).get("--cgroup", config.cgroup) if keeper is not None else config.cgroup
    if _places(config.run_dir) != (config.state_dir, cgroup):  # a disk that is full need not be written to
        write_whole(config.run_dir / PLACES, os.fsencode(f"{config.state_dir}\n{cgroup}\n"))


def _places(run_dir: Path) -> tuple[Path, str] | None:
    try:
        state_dir, cgroup, rest = os.fsdecode((run_dir / PLACES).read_bytes()).rsplit("\n", 2)
    except (FileNotFoundError, ValueError):
        return None
    return None if rest else (Path(state_dir), cgroup)


def _lives(cgroup: Path) -> bool:
    try:
        return cgroups.populated(cgroup)
    except FileNotFoundError:
        return False


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.realpath(one) == os.path.realpath(other) or one.samefile(other)
    except OSError:  # one of them is not there
        return False


@contextlib.contextmanager
def own_state(config: NodeConfig) -> Iterator[None]:
    """Hold the state directory for this run directory. Raises Conflict while the node of another one uses it.

    Two agents over one state would each take the other's sandboxes for lost, also when only the other's sandboxes live.
    """
    path = config.state_dir / LOCK
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        owner = os.fsdecode(os.pread(fd, 4096, 0).strip())
        taken = f"the node of {owner} uses the state in {config.state_dir}; give this one DSEC_STATE_DIR"
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(taken) from error
        if owner not in ("", str(config.run_dir)) and _keeper_lives(Path(owner)):
            raise Conflict(f"{taken}, or end it: DSEC_RUN_DIR={owner} dsec down --stop-all")
        if owner != str(config.run_dir):  # a disk that is full need not be written to
            size = os.pwrite(fd, os.fsencode(config.run_dir) + b"\n", 0)
            os.ftruncate(fd, size)
        yield
    finally:
        os.close(fd)


def claim_cgroup(config: NodeConfig, mount: Path | None) -> None:
    """Put this run directory's name on the cgroup. Raises Conflict while it is another node's.

    A node ends what it finds in its cgroup and does not know: two over one would kill each other's sandboxes. The name
    is on the cgroup itself, so it goes with it: at `dsec down --stop-all`, and when the machine is restarted. `mount`
    is where cgroup v2 is; without one the runtime says what is missing.
    """
    if mount is None:
        return
    if any(part in ("", ".", "..") for part in config.cgroup.split("/")):
        raise InvalidSpec.field("--cgroup", config.cgroup, "a path below the root of each hierarchy: dsec, or a/b")
    at = mount / config.cgroup
    try:
        at.mkdir(parents=True, exist_ok=True)
        with cgroups.locked(at):  # of two nodes that come at once one sees the other's name
            owner = cgroups.owner(at)
            if owner not in (None, str(config.run_dir)):
                _check_left(config.cgroup, at, Path(owner))
            cgroups.set_owner(at, str(config.run_dir))
    except OSError as error:  # not root, or a file system that is mounted read-only
        raise Unsupported.lacks("a node", "cgroups", f"{at} could not be made or marked as ours: {error}") from error


def _check_left(name: str, at: Path, owner: Path) -> None:
    """Raises Conflict unless the owner's agent and keeper are dead and nothing lives in its cgroup."""
    if _agent_lives(owner) or _keeper_lives(owner):
        raise Conflict(
            f"the cgroup {name} is that of the node of {owner}; give this one another by DSEC_CGROUP or --cgroup, or "
            f"end that one: DSEC_RUN_DIR={owner} dsec down --stop-all",
            detail={"cgroup": name, "owner": str(owner)},
        )
    if cgroups.populated(at):
        raise Conflict(
            f"programs of the node of {owner}, which has died, live in the cgroup {name}; start that one again, it "
            f"finds or ends them (DSEC_RUN_DIR={owner} dsec up), or give this one another by DSEC_CGROUP or --cgroup",
            detail={"cgroup": name, "owner": str(owner)},
        )


def _keeper_lives(run_dir: Path) -> bool:
    from dsec.backends.container.keeper import living_keeper

    return living_keeper(run_dir) is not None


def _agent_lives(run_dir: Path) -> bool:
    """Whether an agent holds the lock of this directory: it may be about to start its keeper."""
    try:
        fd = os.open(run_dir / "agent.pid", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
