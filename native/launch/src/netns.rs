//! A pool of loopback-only network namespaces owned by the initial user namespace.
use std::os::fd::OwnedFd;

use crate::plan::Result;

/// Filled by one background thread (`unshare` moves only that thread; nothing is forked).
#[derive(Debug)]
pub struct NetnsPool {}

impl NetnsPool {
    /// Keeps `size` namespaces ready.
    pub fn new(_size: usize) -> Result<Self> {
        unimplemented!()
    }
    /// One namespace; gone when the last descriptor and process in it are.
    pub fn take(&self) -> Result<OwnedFd> {
        unimplemented!()
    }
}
