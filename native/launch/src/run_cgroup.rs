//! The cgroup of one run.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use crate::cgroup::SandboxCgroup;
use crate::hierarchy::{children, flag, kill_tree, make, read, stuck, wait_empty, write};
use crate::plan::{CgroupMode, Code, LaunchError, Result, Step};

/// Memory that may stay charged to a group when it is used again: what the kernel charges ahead for
/// each CPU (256 KiB), which is in every reading, is of this order.
const RESIDUE_MAX: u64 = 1 << 20;

/// What was hit and used in a run's group since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunUsage {
    pub user_us: u64,
    pub system_us: u64,
    /// 0 without a memory child.
    pub memory_peak_bytes: u64,
    /// OOM kills within the run (within the sandbox's own group without a memory child).
    pub oom_kills: u64,
    /// Times pids_max refused a fork in the whole sandbox.
    pub pids_max_events: u64,
}

/// A group below a run's, with what its process has started since.
pub(crate) const FENCE: &str = "fence-";

pub(crate) const PEAK_V1: &str = "memory.max_usage_in_bytes";

/// Where the launcher has what belongs into [`RunCgroup::path`] born when the payload is full: `ID/entering-RUN`,
/// `ID/entering-files-N`.
pub(crate) fn entering(path: &str) -> String {
    let run = path.replacen("/payload/run-", "/entering-", 1);
    run.replacen("/payload/", "/entering-", 1)
}

/// A leaf for one run at a time. A value, not an owner.
#[derive(Debug, Clone)]
pub struct RunCgroup {
    pub(crate) sandbox: SandboxCgroup,
    pub(crate) leaf: String,
    pub(crate) memory: Option<PathBuf>,
}

impl RunCgroup {
    pub(crate) fn v2(&self) -> PathBuf {
        self.sandbox.v2(&self.leaf)
    }

    /// `ID/payload/run-RUN`.
    pub(crate) fn path(&self) -> String {
        format!("{}/{}", self.sandbox.sandbox_id(), self.leaf)
    }

    /// The groups to join in the v1 hierarchies.
    pub(crate) fn v1_homes(&self) -> Vec<PathBuf> {
        let mut homes = self.sandbox.v1_homes();
        if let (Some(first), Some(memory)) = (homes.first_mut(), &self.memory) {
            first.clone_from(memory);
        }
        homes
    }

    /// Where its memory is counted.
    pub(crate) fn memory_home(&self) -> PathBuf {
        let own = self.memory.clone();
        own.unwrap_or_else(|| self.sandbox.home("memory"))
    }

    /// SIGKILL to the whole tree of the run, without waiting.
    pub fn kill(&self) -> Result<()> {
        kill_tree(&self.v2())
    }

    pub fn populated(&self) -> Result<bool> {
        Ok(flag(&self.v2(), "populated").step("cgroup.events")? == Some(1))
    }

    /// Whether all that is left in it waits for a device.
    pub fn stuck(&self) -> bool {
        stuck(&self.v2())
    }

    /// `cgroup.events`; EPOLLPRI when it empties.
    pub fn events(&self) -> Result<OwnedFd> {
        let file = File::open(self.v2().join("cgroup.events")).step("cgroup.events")?;
        Ok(file.into())
    }

    /// Makes an empty group ready for another run: `used` is what [`Self::usage`] said after its last
    /// process ended. `false`: it cannot serve again, remove it.
    ///
    /// Making and removing a memory group is the dearest part of a short run, and most of it is done
    /// later by kernel threads. The counters go on from where they are; the peak starts again, which
    /// only v1 can do, and only if next to nothing stayed charged (pages the run was the first to read).
    pub fn renew(&self, used: &RunUsage) -> bool {
        let Some(memory) = &self.memory else {
            return true;
        };
        if self.sandbox.mode() == CgroupMode::V2 {
            return false;
        }
        if used.memory_peak_bytes <= RESIDUE_MAX {
            return true;
        }
        let charged = read(&memory.join("memory.usage_in_bytes"));
        let charged = charged.ok().and_then(|t| t.trim().parse().ok());
        charged.is_some_and(|bytes: u64| bytes <= RESIDUE_MAX)
            && write(&memory.join(PEAK_V1), "0").is_ok()
    }

    /// Removes it; `busy` while a process is in it. Idempotent.
    pub fn remove(&self) -> Result<()> {
        for at in self.memory.iter().chain([&self.v2()]) {
            match fs::remove_dir(at) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    self.remove_fences("");
                    if fs::remove_dir(at).is_err() {
                        return Err(LaunchError::new(Code::Busy, "a process of the run lives"));
                    }
                }
                other => other.step("cgroup.rmdir")?,
            }
        }
        Ok(())
    }
}

/// Fences. The run's own group gives its children no controllers, so processes may be in it and in them.
impl RunCgroup {
    fn at_fence(&self, number: u64) -> PathBuf {
        self.v2().join(format!("{FENCE}{number}"))
    }

    fn fences(&self) -> io::Result<Vec<String>> {
        let mut names = children(&self.v2())?;
        names.retain(|name| name.starts_with(FENCE));
        Ok(names)
    }

    /// Those in which nothing lives, but for one.
    fn remove_fences(&self, but: &str) {
        for name in self.fences().unwrap_or_default() {
            if name != but {
                // One that is not empty stays: it is removed with the run.
                let _ = fs::remove_dir(self.v2().join(name));
            }
        }
    }

    /// Makes a fence and moves the run's process into it: all it starts from now on is born there. Waits for the
    /// kernel's lock over forks.
    pub fn fence(&self, number: u64, pid: i32) -> Result<()> {
        let at = self.at_fence(number);
        make(&at).step("cgroup.fence")?;
        write(&at.join("cgroup.procs"), &pid.to_string()).step("cgroup.fence")?;
        self.remove_fences(&format!("{FENCE}{number}"));
        Ok(())
    }

    /// Kills what is in a fence, but for the run's process, which is moved out before. Waits until all of it has
    /// died, but not for ever: what waits for a device cannot.
    pub fn kill_fence(&self, number: u64, pid: Option<i32>) -> Result<()> {
        if let Some(pid) = pid {
            match write(&self.v2().join("cgroup.procs"), &pid.to_string()) {
                // It has ended by now.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                other => other.step("cgroup.fence")?,
            }
        }
        let at = self.at_fence(number);
        kill_tree(&at)?;
        wait_empty(&at)
    }

    /// The newest there is; 0: none.
    pub fn newest_fence(&self) -> u64 {
        let names = self.fences().unwrap_or_default().into_iter();
        let number = |name: String| name.strip_prefix(FENCE)?.parse().ok();
        names.filter_map(number).max().unwrap_or(0)
    }

    /// Processes in fences.
    pub fn fenced(&self) -> Result<u64> {
        let mut count = 0;
        for name in self.fences().step("cgroup.fence")? {
            let procs = read(&self.v2().join(name).join("cgroup.procs")).unwrap_or_default();
            count += procs.lines().count() as u64;
        }
        Ok(count)
    }
}
