//! Read-only layers, each mounted once per node in a pinned mount namespace.
use crate::config::Config;
use crate::plan::Result;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    pub digest: String,
    pub path: String,
}

/// The pinned namespace of a node. Cheap to clone; several processes may hold one.
#[derive(Debug, Clone)]
pub struct Pinned {}

impl Pinned {
    /// Finds the namespace at `RUN_DIR/ns/mnt` or makes it; safe under races.
    pub fn open(_config: &Config) -> Result<Self> {
        unimplemented!()
    }
    /// Mounts the EROFS file `path`; idempotent; `conflict` if the digest is mounted from elsewhere.
    pub fn mount(&self, _digest: &str, _path: &str) -> Result<()> {
        unimplemented!()
    }
    /// Idempotent. Sandboxes keep their own clone: the caller decides whether it is `busy`.
    pub fn unmount(&self, _digest: &str) -> Result<()> {
        unimplemented!()
    }
    pub fn list(&self) -> Result<Vec<Layer>> {
        unimplemented!()
    }
    /// Unmounts everything and lets the namespace go. Only when no sandbox lives.
    pub fn close(self) -> Result<()> {
        unimplemented!()
    }
}
