//! What the runtime needs from whatever makes containers: the boundary between supervision and launching.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use dsec_launch::cgroup::RunUsage;
use dsec_launch::launcher::{Entered, FilesPlan};
use dsec_launch::layers::Layer;
use dsec_launch::processes::Process;
use dsec_launch::upper::Upper;
use dsec_launch::{Probe, Result, RunPlan, SandboxPlan, Usage};

use crate::record::Record;

/// A sandbox that was made.
pub struct Made {
    pub init_pid: i32,
    pub init_pidfd: OwnedFd,
    pub place: Arc<dyn Place>,
    pub upper: Option<Upper>,
}

/// Everything here may block, each call with a bound, and is called from worker threads unless the
/// method says otherwise.
pub trait Backend: Send + Sync {
    fn probe(&self) -> Probe;
    fn layer_mount(&self, digest: &str, path: &str) -> Result<()>;
    fn layer_unmount(&self, digest: &str) -> Result<()>;
    fn layer_list(&self) -> Result<Vec<Layer>>;
    /// On failure everything is undone.
    fn create(&self, plan: &SandboxPlan, uid_base: u32) -> Result<Made>;
    /// A sandbox that was made by an earlier runtime.
    fn find(&self, record: &Record) -> Result<Arc<dyn Place>>;
    /// Ids of those whose writable part is lost with the disk below it. May wait for the disk.
    fn disks_lost(&self, uppers: &[Upper]) -> Result<Vec<String>>;
    /// Removes whatever there is of a sandbox that was only half made, or whose record is all there is.
    fn remove(&self, record: &Record, deadline: Duration) -> Result<()>;
    /// Removes what belongs to no sandbox named in `known`. Says what it removed.
    fn remove_strangers(&self, known: &[String], deadline: Duration) -> Result<Vec<String>>;
    /// Unmounts the layers and lets pinned namespaces go. Only when no sandbox lives.
    fn close(&self) -> Result<()>;
}

/// A sandbox, from outside.
pub trait Place: Send + Sync {
    /// Inode of its v2 cgroup.
    fn cgroup_id(&self) -> Result<u64>;
    /// Makes a cgroup for runs, one at a time; idempotent.
    fn create_leaf(&self, leaf: &str, memory: bool) -> Result<Arc<dyn Leaf>>;
    /// One that an earlier runtime made.
    fn find_leaf(&self, leaf: &str) -> Option<Arc<dyn Leaf>>;
    /// Every one there is.
    fn leaves(&self) -> Result<Vec<String>>;
    /// Whether the writable part is full. May wait for the disk.
    fn disk_full(&self) -> Result<bool>;
    /// Whether it is lost with the disk below it. May wait for the disk.
    fn disk_lost(&self) -> Result<bool>;
    /// Whether writes to it show in a process's resource usage. Never waits.
    fn counts_writes(&self) -> bool;
    /// Starts a program inside; returns right after the clone.
    fn enter(
        &self,
        plan: &RunPlan,
        stdio: &[BorrowedFd<'_>],
        leaf: &dyn Leaf,
        init: BorrowedFd<'_>,
    ) -> Result<Entered>;
    /// Makes the cgroup of a file helper.
    fn create_files_leaf(&self, name: &str) -> Result<Arc<dyn Leaf>>;
    /// Names and cgroups of all file helpers.
    fn files_leaves(&self) -> Result<Vec<(String, Arc<dyn Leaf>)>>;
    /// Starts a file helper on a connected socket; returns right after the clone.
    fn enter_files(
        &self,
        plan: &FilesPlan,
        socket: BorrowedFd<'_>,
        leaf: &dyn Leaf,
        init: BorrowedFd<'_>,
    ) -> Result<Entered>;
    /// Every process but file helpers', with `run` the name of a leaf; whether there are more. May wait for one
    /// that is stuck.
    fn processes(&self, uid_base: u32) -> Result<(Vec<Process>, bool)>;
    /// SIGKILL to everything. Never waits: the event loop calls it.
    fn kill(&self) -> Result<()>;
    /// Whether a process is in it that has not died yet. Never waits.
    fn populated(&self) -> Result<bool>;
    /// EPOLLPRI when it empties.
    fn events(&self) -> Result<OwnedFd>;
    fn usage(&self) -> Result<Usage>;
    /// Processes of it that were killed for want of memory.
    fn oom_kills(&self) -> u64;
    /// The sandbox's network namespace, while its init lives; nothing where it cannot be used again. Never
    /// waits.
    fn network(&self, init: BorrowedFd<'_>) -> Option<OwnedFd>;
    /// Kills what lives and removes everything. Idempotent. `network` may serve another sandbox.
    fn release(&self, network: Option<OwnedFd>, deadline: Duration) -> Result<()>;
}

/// The cgroup of a run. Nothing here waits, but for the fences: the event loop calls all of it.
pub trait Leaf: Send + Sync {
    fn kill(&self) -> Result<()>;
    fn count(&self) -> Result<u64>;
    /// Whether a process is in it that has not died yet.
    fn populated(&self) -> Result<bool>;
    /// Whether all that is left in it waits for a device.
    fn stuck(&self) -> bool;
    /// EPOLLPRI when it empties.
    fn events(&self) -> Result<OwnedFd>;
    /// Since the leaf was made; `memory_peak_bytes` since it was last made ready.
    fn usage(&self) -> Result<RunUsage>;
    fn pids_max_events(&self) -> u64;
    /// Makes it ready for another run, if it can be. Only when it is empty.
    fn renew(&self, used: &RunUsage) -> bool;
    fn remove(&self) -> Result<()>;
    /// Makes a fence and moves the run's process into it. May wait.
    fn fence(&self, number: u64, process: BorrowedFd<'_>, pid: i32) -> Result<()>;
    /// Kills what is in the newest fence, but for the run's process, and waits until it is gone, within reason.
    fn kill_fence(&self, number: u64, process: Option<(BorrowedFd<'_>, i32)>) -> Result<()>;
    /// For the implementation to find its own type again.
    fn as_any(&self) -> &dyn std::any::Any;
}
