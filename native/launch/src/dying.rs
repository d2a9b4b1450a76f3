//! How long what was killed is waited for, and what cannot die: it sleeps in the kernel where no signal reaches it.

use std::time::Duration;

/// What waits for a device by then is not waited for any longer.
pub const GRACE: Duration = Duration::from_secs(2);
/// What is only slow, on a busy machine or with much memory to give back, has this long.
pub const MOST: Duration = Duration::from_secs(30);
/// Between two looks at it.
pub const LOOK: Duration = Duration::from_millis(200);

/// Whether a process waits for a device; `None`: there is no such process.
pub fn waits_for_device(pid: i32) -> Option<bool> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in brackets and may hold anything, brackets too.
    let close = stat.iter().rposition(|b| *b == b')')?;
    Some(stat.get(close + 2) == Some(&b'D'))
}
