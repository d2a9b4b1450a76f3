//! Switches that make a named point fail, for the sweep that looks for leftovers.
//!
//! `DSEC_NATIVE_FAILPOINTS=name:nth:action[,..]`, read once; `action` is `error`, `kill` (SIGKILL to
//! itself) or `hang`. `nth` counts from 1 within one process. Off, a point costs one relaxed load.
use crate::plan::Result;

/// Every name, for `dsec-runtime failpoints`.
pub const NAMES: &[&str] = &[];

/// Does what was asked for this point, usually nothing.
pub fn at(_name: &'static str) -> Result<()> {
    unimplemented!()
}
