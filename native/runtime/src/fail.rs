//! Failpoints of this crate. See `dsec_launch::failpoint`.

use dsec_launch::plan::Code;
use dsec_launch::LaunchError;

/// In the order a run and a sandbox pass them.
pub const NAMES: &[&str] = &[
    "sandbox.recorded",
    "sandbox.made",
    "sandbox.put",
    "network.steered",
    "network.added",
    "sandbox.stopping",
    "sandbox.released",
    "sandbox.ended",
    "run.marked",
    "run.cloned",
    "run.put_pid",
    "run.segment",
    "run.spliced",
    "output.relayed",
    "run.stdin",
    "output.move",
    "output.moved",
    "output.fetch",
    "run.opened",
    "run.fence",
    "run.fenced",
    "run.ended",
    "run.put_outcome",
    "run.reaped",
];

/// Does what was asked for this point, usually nothing.
pub fn at(name: &'static str) -> Result<(), LaunchError> {
    debug_assert!(NAMES.contains(&name), "{name}");
    dsec_launch::failpoint::at(name)
}

/// Where there is nobody to give an error to: only `kill` and `hang` make sense, `error` is ignored.
pub fn pass(name: &'static str) {
    if at(name).is_err_and(|e| e.code != Code::Launch) {
        crate::info!("failpoint", name = name);
    }
}
