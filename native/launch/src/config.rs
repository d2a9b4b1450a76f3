//! Where a node keeps its things.

use std::path::PathBuf;

/// The three places of a node, and the binary it starts its helpers from.
#[derive(Debug, Clone)]
pub struct Config {
    /// `RUN_DIR`: sockets, the pinned namespace; on a tmpfs.
    pub run_dir: PathBuf,
    /// `STATE_DIR`: writable parts of sandboxes; on a disk.
    pub state_dir: PathBuf,
    /// Name below the root of each cgroup hierarchy; may contain `/`.
    pub cgroup: String,
    /// Started as `BINARY launcher ...`; `/proc/self/exe` is the usual value.
    pub binary: PathBuf,
}
