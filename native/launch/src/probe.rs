//! What this machine can do, found by trying it.
use crate::config::Config;
use crate::plan::Probe;

/// Never fails: what does not work is in `reasons`. Cached for the life of the process.
pub fn probe(_config: &Config) -> Probe {
    unimplemented!()
}
