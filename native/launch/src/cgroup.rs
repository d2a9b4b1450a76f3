//! The cgroups of sandboxes and runs, on v2 with controllers and on v1 beside a bare v2.
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use crate::plan::{CgroupMode, Result, SandboxPlan, Usage};

/// The hierarchies of this machine and our directory in each. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cgroups {}

/// Limits of one sandbox, as cgroups know them.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    pub memory_bytes: u64,
    pub swap_bytes: u64,
    pub cpu_milli: u64,
    pub cpu_weight: u32,
    pub pids_max: u64,
}
impl From<&SandboxPlan> for Limits {
    fn from(_plan: &SandboxPlan) -> Self {
        unimplemented!()
    }
}

impl Cgroups {
    /// Finds the hierarchies, makes `CG` in each, enables controllers.
    pub fn open(_name: &str) -> Result<Self> {
        unimplemented!()
    }
    pub fn mode(&self) -> CgroupMode {
        unimplemented!()
    }
    /// Makes the tree of a sandbox with its limits; `exists` if there is one. Undone on failure.
    pub fn create(&self, _id: &str, _limits: &Limits) -> Result<SandboxCgroup> {
        unimplemented!()
    }
    /// The tree of a sandbox that exists already (after a restart); `not_found` otherwise.
    pub fn find(&self, _id: &str) -> Result<SandboxCgroup> {
        unimplemented!()
    }
    /// Ids of all sandboxes that have a directory in any hierarchy.
    pub fn list(&self) -> Result<Vec<String>> {
        unimplemented!()
    }
}

/// `CG/ID` in each hierarchy. A value, not an owner: dropping it removes nothing.
#[derive(Debug, Clone)]
pub struct SandboxCgroup {}

impl SandboxCgroup {
    /// The v2 inode number: what BPF helpers see.
    pub fn id(&self) -> Result<u64> {
        unimplemented!()
    }
    /// Makes `payload/run-RUN` (and with `memory` a memory child); idempotent.
    pub fn create_run(&self, _run: &str, _memory: bool) -> Result<RunCgroup> {
        unimplemented!()
    }
    pub fn find_run(&self, _run: &str) -> Result<RunCgroup> {
        unimplemented!()
    }
    /// Runs that have a cgroup.
    pub fn runs(&self) -> Result<Vec<String>> {
        unimplemented!()
    }
    /// Makes `aux` (the file helper's place, never frozen with the payload); idempotent.
    pub fn create_aux(&self) -> Result<RunCgroup> {
        unimplemented!()
    }
    /// SIGKILL to everything in the sandbox, frozen or not, aux included. Returns without waiting.
    pub fn kill(&self) -> Result<()> {
        unimplemented!()
    }
    /// Freezes the payload; waits at most `deadline`.
    pub fn freeze(&self, _deadline: Duration) -> Result<()> {
        unimplemented!()
    }
    pub fn thaw(&self) -> Result<()> {
        unimplemented!()
    }
    pub fn populated(&self) -> Result<bool> {
        unimplemented!()
    }
    /// `cgroup.events`; POLLPRI (EPOLLPRI) when populated or frozen changes.
    pub fn events(&self) -> Result<OwnedFd> {
        unimplemented!()
    }
    pub fn usage(&self) -> Result<Usage> {
        unimplemented!()
    }
    /// Removes the whole tree, waiting at most `deadline` for dying processes; idempotent.
    pub fn remove(&self, _deadline: Duration) -> Result<()> {
        unimplemented!()
    }
}

/// What a run hit and used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunUsage {
    pub user_us: u64,
    pub system_us: u64,
    /// 0 without a memory child.
    pub memory_peak_bytes: u64,
    /// OOM kills within the run (within the sandbox without a memory child).
    pub oom_kills: u64,
    /// Times pids_max refused a fork in the whole sandbox.
    pub pids_max_events: u64,
}

/// A leaf for one run. A value, not an owner.
#[derive(Debug, Clone)]
pub struct RunCgroup {}

impl RunCgroup {
    /// SIGKILL to the whole tree of the run, without waiting.
    pub fn kill(&self) -> Result<()> {
        unimplemented!()
    }
    pub fn populated(&self) -> Result<bool> {
        unimplemented!()
    }
    /// Number of live processes.
    pub fn count(&self) -> Result<u64> {
        unimplemented!()
    }
    /// `cgroup.events`; EPOLLPRI when it empties.
    pub fn events(&self) -> Result<OwnedFd> {
        unimplemented!()
    }
    pub fn usage(&self) -> Result<RunUsage> {
        unimplemented!()
    }
    /// Removes it; `busy` while a process is in it. Idempotent.
    pub fn remove(&self) -> Result<()> {
        unimplemented!()
    }
    #[doc(hidden)]
    pub fn _borrow(_fd: BorrowedFd<'_>) {}
}
