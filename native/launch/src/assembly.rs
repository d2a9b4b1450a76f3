//! The usual order of making and ending a sandbox, with everything undone on failure.
use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::cgroup::{Cgroups, SandboxCgroup};
use crate::config::Config;
use crate::launcher::{Created, Launcher};
use crate::layers::Pinned;
use crate::netns::NetnsPool;
use crate::plan::{Result, SandboxPlan};
use crate::upper::{Upper, Uppers};

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
    pub netns: OwnedFd,
    pub uid_base: u32,
}

impl Assembly {
    pub fn open(_config: &Config) -> Result<Self> {
        unimplemented!()
    }
    /// Checks the plan, makes cgroup, upper and network namespace, then has the launcher create.
    pub fn create(&self, _launcher: &Launcher, _plan: &SandboxPlan, _uid_base: u32) -> Result<Assembled> {
        unimplemented!()
    }
    /// Kills what lives, removes cgroup and upper. The init must be reaped by the caller (by its
    /// pidfd) before or during this call from another thread. Idempotent.
    pub fn release(&self, _cgroup: &SandboxCgroup, _upper: &Upper, _deadline: Duration) -> Result<()> {
        unimplemented!()
    }
}
