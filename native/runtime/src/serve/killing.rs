//! Ends runs: on request, in time, or because they are not safe.

use dsec_launch::LaunchError;

use super::Server;
use crate::proto::Cause;
use crate::{info, warning};

impl Server {
    /// A put was refused: the run is not safe in the keeper, so it is not to go on unseen.
    pub(super) fn keeper_refused(&mut self, key: &str) {
        if let Some(index) = self.run_by_key(key) {
            if let Some(run) = self.runs.get_mut(&index) {
                // Also without a cgroup: the refusal may be read before what the launch left for us.
                run.meta.marked = Some((Cause::Killed, 0));
                if let Some(leaf) = &run.leaf {
                    drop(leaf.kill());
                }
            }
            info!("run.unsafe", key = key);
        }
    }

    /// `run.kill`.
    pub(super) fn run_kill(
        &mut self,
        index: u64,
        signal: i32,
        cause: Cause,
    ) -> Result<(), LaunchError> {
        let Some(run) = self.runs.get_mut(&index) else {
            return Ok(());
        };
        if run.done() {
            return Ok(());
        }
        // Noted first: a new runtime must give the same cause. The first cause counts.
        if run.meta.marked.map_or(true, |(_, s)| s != 0) {
            let cause = run.meta.marked.map_or(cause, |(first, _)| first);
            run.meta.marked = Some((cause, signal));
            self.keep_meta(index);
        }
        if signal == 0 {
            self.kill_tree(index);
            return Ok(());
        }
        let Some(pidfd) = self.runs.get(&index).and_then(|r| r.pidfd.as_ref()) else {
            return Ok(());
        };
        let Some(signal) = rustix::process::Signal::from_named_raw(signal) else {
            return Err(LaunchError::field("signal", "no such signal"));
        };
        match rustix::process::pidfd_send_signal(pidfd, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(LaunchError::step("run.kill", &e.into())),
        }
    }

    /// SIGKILL to a run's whole tree. While it is being launched there is none: `launched` does it.
    pub(super) fn kill_tree(&mut self, index: u64) {
        let Some(run) = self.runs.get(&index) else {
            return;
        };
        if let Some(Err(e)) = run.leaf.as_ref().map(|l| l.kill()) {
            warning!("run.kill", error = e);
        }
        // Where joining is not part of the clone (cgroup v1) the process may not be in it yet.
        if let Some(pidfd) = &run.pidfd {
            let _ = rustix::process::pidfd_send_signal(pidfd, rustix::process::Signal::KILL);
        }
    }

    pub(super) fn timed_out(&mut self, index: u64) {
        if let Some(run) = self.runs.get_mut(&index) {
            run.timer = None;
        }
        if let Err(e) = self.run_kill(index, 0, Cause::Timeout) {
            warning!("run.timeout", error = e);
        }
    }
}
