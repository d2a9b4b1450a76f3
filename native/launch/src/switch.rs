//! Mechanisms that can be switched off, to test what takes their place and that they matter.
//!
//! `DSEC_NATIVE_DISABLE=overlay.fd,erofs.file`, read once.

use std::sync::OnceLock;

/// The environment variable.
pub const VARIABLE: &str = "DSEC_NATIVE_DISABLE";
/// EROFS straight from a file; without it a loop device.
pub const EROFS_FILE: &str = "erofs.file";
/// Layers handed to overlayfs by descriptor; without it by path.
pub const OVERLAY_FD: &str = "overlay.fd";
/// Layers named one by one; without it all in one option.
pub const OVERLAY_EACH: &str = "overlay.each";
/// Empty files below all layers for what a plan puts into /etc; without it they are made in the upper.
pub const OVERLAY_POINTS: &str = "overlay.points";
/// `cgroup.kill`; without it freeze and signal.
pub const CGROUP_KILL: &str = "cgroup.kill";
/// One way to write v1's `tasks` without a lock over all processes; without it `cgroup.procs`.
pub const CGROUP_TASKS: &str = "cgroup.tasks";
/// Raising the hard limit of descriptors; without it the one we were started with.
pub const NOFILE_RAISE: &str = "nofile.raise";
/// A network namespace that was never used serves another sandbox; without it each has a new one.
pub const NETNS_REUSE: &str = "netns.reuse";
/// The routes of a steered namespace are taken away before it serves another; without it, it is not used again.
pub const NETNS_CLEAN: &str = "netns.clean";
/// The v1 groups of an ended sandbox serve another; without it each has new ones.
pub const CGROUP_REUSE: &str = "cgroup.reuse";
/// The file helper stays out of the sandbox's pid namespace; without it, it is a process among others there.
pub const FILES_HIDDEN: &str = "files.hidden";
/// The file helper is inside the sandbox, with the rights of its user; without it, it is root of the machine, outside,
/// and puts the way to the sandbox's root before each path.
pub const FILES_CONFINED: &str = "files.confined";
/// What a run left behind and writes in small pieces is drained now and then; without it at each piece.
pub const OUTPUT_REST: &str = "output.rest";
/// What is killed is the whole tree of a run; without it its first process alone.
pub const RUN_TREE: &str = "run.tree";
/// A sandbox with many runs at once keeps a cgroup for each; without it for a few, and makes the others anew.
pub const CGROUP_CROWD: &str = "cgroup.crowd";
/// The pipe of a program that floods is made larger; without it, it stays as it was.
pub const OUTPUT_WIDE: &str = "output.wide";
/// What of a program's output stays readable is on the disk; without it in memory.
pub const OUTPUT_DISK: &str = "output.disk";

/// Every name.
pub const NAMES: &[&str] = &[
    EROFS_FILE,
    OVERLAY_FD,
    OVERLAY_EACH,
    OVERLAY_POINTS,
    CGROUP_KILL,
    CGROUP_TASKS,
    NOFILE_RAISE,
    NETNS_REUSE,
    NETNS_CLEAN,
    CGROUP_REUSE,
    FILES_HIDDEN,
    FILES_CONFINED,
    OUTPUT_REST,
    RUN_TREE,
    OUTPUT_DISK,
    CGROUP_CROWD,
    OUTPUT_WIDE,
];

static OFF: OnceLock<String> = OnceLock::new();

/// Whether a mechanism was switched off.
pub fn off(name: &str) -> bool {
    let all = OFF.get_or_init(|| std::env::var(VARIABLE).unwrap_or_default());
    !all.is_empty() && all.split(',').any(|item| item.trim() == name)
}
