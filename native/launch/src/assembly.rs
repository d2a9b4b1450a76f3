//! The usual order of making and ending a sandbox, with everything undone on failure.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use crate::cgroup::{Cgroups, Limits, SandboxCgroup};
use crate::check;
use crate::config::Config;
use crate::failpoint;
use crate::launcher::{Created, Launcher, Prepared};
use crate::layers::Pinned;
use crate::netns::{self, NetnsPool};
use crate::plan::{Result, SandboxPlan, Usage};
use crate::upper::{Upper, Uppers};

/// How long undoing a failed create waits for its processes to be gone.
const UNDO_DEADLINE: Duration = Duration::from_secs(5);

/// All stores of a node, opened once.
#[derive(Debug)]
pub struct Assembly {
    pub cgroups: Cgroups,
    pub pinned: Pinned,
    pub uppers: Uppers,
    pub netns: NetnsPool,
}

/// A sandbox that runs.
#[derive(Debug)]
pub struct Assembled {
    pub created: Created,
    pub cgroup: SandboxCgroup,
    pub upper: Upper,
    /// For what has to be opened inside later; the namespace lives without it too.
    pub netns: OwnedFd,
    pub uid_base: u32,
}

impl Assembly {
    pub fn open(config: &Config) -> Result<Self> {
        let pinned = Pinned::open(config)?;
        Ok(Self {
            cgroups: Cgroups::open(&config.cgroup)?,
            uppers: Uppers::open(config, &pinned)?,
            pinned,
            netns: NetnsPool::new(netns::DEFAULT_SIZE)?,
        })
    }

    /// Checks the plan, makes cgroup, upper and network namespace, then has the launcher create.
    pub fn create(
        &self,
        launcher: &Launcher,
        plan: &SandboxPlan,
        uid_base: u32,
    ) -> Result<Assembled> {
        check::sandbox(plan)?;
        let cgroup = self.cgroups.create(&plan.id, &Limits::from(plan))?;
        let undo = Undo::new(|| {
            let _ = cgroup.kill();
            // What is left is found by the recovery's list of cgroups.
            let _ = cgroup.remove(UNDO_DEADLINE);
        });
        failpoint::at("assembly.cgroup")?;
        let upper = self.uppers.create(&plan.id, &plan.upper)?;
        let undo_upper = Undo::new(|| {
            let _ = self.uppers.remove(&upper);
        });
        failpoint::at("assembly.upper")?;
        let netns = self.netns.take()?;
        failpoint::at("assembly.netns")?;
        let prepared = Prepared {
            upper: &upper,
            uid_base,
            netns: netns.as_fd(),
            cgroup: &cgroup,
        };
        let created = launcher.create(plan, &prepared)?;
        undo_upper.keep();
        undo.keep();
        Ok(Assembled {
            created,
            cgroup,
            upper,
            netns,
            uid_base,
        })
    }

    /// Kills what lives, removes cgroup and upper. The init and the runs must be reaped by the caller
    /// before, or during this call from another thread. Idempotent.
    pub fn release(&self, cgroup: &SandboxCgroup, upper: &Upper, deadline: Duration) -> Result<()> {
        cgroup.kill()?;
        // What lives still has the disk: it is given back with the rest.
        cgroup.remove(deadline)?;
        self.uppers.remove(upper)
    }

    /// Cgroup and disk together.
    pub fn usage(&self, cgroup: &SandboxCgroup, upper: &Upper) -> Result<Usage> {
        let disk = self.uppers.usage(upper)?;
        Ok(Usage {
            disk_bytes: disk.bytes,
            disk_inodes: disk.inodes,
            ..cgroup.usage()?
        })
    }
}

/// Undoes on the way out unless told that all is well. Undone in the reverse order of making.
struct Undo<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Undo<F> {
    fn new(undo: F) -> Self {
        Self(Some(undo))
    }

    fn keep(mut self) {
        self.0 = None;
    }
}

impl<F: FnOnce()> Drop for Undo<F> {
    fn drop(&mut self) {
        if let Some(undo) = self.0.take() {
            undo();
        }
    }
}
