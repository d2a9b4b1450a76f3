//! How often and how long, where everything is slower.

use std::time::Duration;

/// Whether this is a guest of the vm lane, which may be twenty times slower.
pub fn in_guest() -> bool {
    std::env::var_os("DSEC_GUEST").is_some_and(|value| !value.is_empty())
}

/// How often a test does what it does many times: a tenth of it in a guest.
pub fn fewer(times: usize) -> usize {
    if in_guest() {
        (times / 10).max(2)
    } else {
        times
    }
}

/// How long a program that hangs is waited for.
pub(super) fn patience() -> Duration {
    Duration::from_secs(if in_guest() { 240 } else { 60 })
}
