//! Writable parts with an exact limit.
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::layers::Pinned;
use crate::plan::{Result, UpperKind, UpperSpec};

/// A writable part: enough to find and remove it after a restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upper {
    pub id: String,
    pub kind: UpperKind,
    pub bytes: u64,
    pub inodes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskUsage {
    pub bytes: u64,
    pub inodes: u64,
}

/// The store of writable parts of a node.
#[derive(Debug)]
pub struct Uppers {}

impl Uppers {
    /// Opens the store; a shared loop file is made with the first upper that needs it.
    pub fn open(_config: &Config, _pinned: &Pinned) -> Result<Self> {
        unimplemented!()
    }
    /// Kinds that work here, best first.
    pub fn kinds(&self) -> Vec<UpperKind> {
        unimplemented!()
    }
    pub fn create(&self, _id: &str, _spec: &UpperSpec) -> Result<Upper> {
        unimplemented!()
    }
    /// Idempotent; a missing upper is no error.
    pub fn remove(&self, _upper: &Upper) -> Result<()> {
        unimplemented!()
    }
    pub fn usage(&self, _upper: &Upper) -> Result<DiskUsage> {
        unimplemented!()
    }
    /// Every upper that is there, for recovery.
    pub fn list(&self) -> Result<Vec<Upper>> {
        unimplemented!()
    }
}
