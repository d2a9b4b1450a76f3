//! The launcher: a tiny process that clones inits and runs, and the handle of the runtime on it.
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::cgroup::{RunCgroup, SandboxCgroup};
use crate::config::Config;
use crate::plan::{Result, RunPlan, RunPolicy, SandboxPlan};
use crate::upper::Upper;

/// One launcher process. Requests are served one after the other: for parallel creates hold several,
/// and keep one for `enter` alone. It ends when the handle is dropped or its owner dies. When it
/// dies or misses a deadline it is killed and started again with the next request.
#[derive(Debug)]
pub struct Launcher {}

/// What the runtime made beforehand.
#[derive(Debug)]
pub struct Prepared<'a> {
    pub upper: &'a Upper,
    /// First of the 65,536 ids of the sandbox; a multiple of 65,536, never 0.
    pub uid_base: u32,
    pub netns: BorrowedFd<'a>,
    pub cgroup: &'a SandboxCgroup,
}

/// The init is a child of the caller's process: wait for it by the pidfd. It is already set up.
#[derive(Debug)]
pub struct Created {
    pub init_pid: i32,
    pub init_pidfd: OwnedFd,
}

/// The sandbox that is entered.
#[derive(Debug)]
pub struct Target<'a> {
    pub init_pidfd: BorrowedFd<'a>,
    pub policy: &'a RunPolicy,
}

/// A child of the caller's process. `status`: end of file = the program was exec'ed; otherwise a
/// msgpack `LaunchError` (see [`read_status`]) and the process exits with 127.
#[derive(Debug)]
pub struct Entered {
    pub pid: i32,
    pub pidfd: OwnedFd,
    pub status: OwnedFd,
}

impl Launcher {
    /// Starts the process. Makes the pinned namespace and the node's cgroups where they are missing.
    pub fn spawn(_config: &Config) -> Result<Self> {
        unimplemented!()
    }
    /// Blocks until the sandbox is complete or `plan.deadline_ms` passed. On failure no process is
    /// left; cgroup, upper and netns stay the caller's.
    pub fn create(&self, _plan: &SandboxPlan, _prepared: &Prepared<'_>) -> Result<Created> {
        unimplemented!()
    }
    /// Returns right after the clone, a frozen sandbox included.
    pub fn enter(
        &self,
        _target: &Target<'_>,
        _plan: &RunPlan,
        _stdio: [BorrowedFd<'_>; 3],
        _cgroup: &RunCgroup,
    ) -> Result<Entered> {
        unimplemented!()
    }
}

/// What a readable status descriptor says: `None` = exec succeeded.
pub fn read_status(_status: BorrowedFd<'_>) -> Option<crate::plan::LaunchError> {
    unimplemented!()
}

/// `dsec-runtime launcher ARGS`: never returns.
pub fn main(_args: &[String]) -> ! {
    unimplemented!()
}
