//! Descriptors: one pot for the node, of which no sandbox may take more than its share.

use dsec_launch::plan::Code;
use dsec_launch::LaunchError;

use super::run::{self, Run};
use super::Server;

/// Runs of one sandbox, ended ones that are kept included.
const MAX_RUNS: usize = 4096;
/// Descriptors of a run that lives, or whose pipes something still holds; the keeper has no more of it.
const FDS_PER_RUN: u64 = 8;
/// And of one with a third output.
const FDS_OF_CONTROL: u64 = 2;
/// And for each output that is on the disk.
const FDS_OF_SPOOL: u64 = 1;
/// Descriptors kept free for clients, cgroup files and the like.
const FD_RESERVE: u64 = 512;
/// File helpers of one sandbox.
const MAX_HELPERS: usize = 64;
/// Socket, status and pidfd while it starts.
const FDS_PER_HELPER: u64 = 3;
/// A sandbox's share: one part in so many of what the others leave. However many it starts, the next one
/// still has as many, and so on.
const SHARE: u64 = 2;

impl Run {
    fn descriptors(&self) -> u64 {
        if !self.done() || self.streams.iter().any(|s| s.pipe.is_some()) {
            return fds_of(self.meta.control, self.meta.on_disk);
        }
        let segments = self.streams.iter().filter(|s| s.segment.is_some()).count() as u64;
        let disks = self.streams.iter().filter_map(|s| s.disk.as_ref());
        let files = disks.filter(|disk| disk.file.is_some()).count() as u64;
        segments + files + u64::from(self.emptied.is_some())
    }
}

pub(super) fn fds_of(control: bool, on_disk: bool) -> u64 {
    let outputs = run::CONTROL as u64 + u64::from(control);
    let spools = if on_disk { outputs * FDS_OF_SPOOL } else { 0 };
    FDS_PER_RUN + if control { FDS_OF_CONTROL } else { 0 } + spools
}

impl Server {
    /// Counts anew what a run holds.
    pub(super) fn count_descriptors(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let now = run.descriptors();
        let before = std::mem::replace(&mut run.counted, now);
        let sandbox = run.sandbox;
        self.add_descriptors(sandbox, before, now);
    }

    /// A run is not there any more.
    pub(super) fn uncount_descriptors(&mut self, run: &Run) {
        self.add_descriptors(run.sandbox, run.counted, 0);
    }

    fn add_descriptors(&mut self, sandbox: u64, before: u64, now: u64) {
        self.descriptors = (self.descriptors + now).saturating_sub(before);
        if let Some(s) = self.sandboxes.get_mut(&sandbox) {
            s.descriptors = (s.descriptors + now).saturating_sub(before);
        }
    }

    /// Whether one more run may be started.
    pub(super) fn check_room(&mut self, sandbox: u64, needed: u64) -> Result<(), LaunchError> {
        self.drop_old_results(sandbox);
        let (runs, own) = self
            .sandboxes
            .get(&sandbox)
            .map_or((0, 0), |s| (s.runs.len(), s.descriptors));
        if runs >= MAX_RUNS {
            let text = "too many runs in this sandbox; forget some";
            return Err(full(text, "runs", MAX_RUNS as u64));
        }
        let others = self.fixed_descriptors() + self.descriptors.saturating_sub(own);
        let share = self.nofile.saturating_sub(others) / SHARE;
        let kept = self.link.held() + needed + FD_RESERVE;
        if kept > self.nofile || others + own + needed > self.nofile {
            let text = "no descriptors left for another run on this node";
            return Err(full(text, "descriptors", self.nofile));
        }
        if own + needed > share {
            let text = "the runs of this sandbox, and what their children hold, have its share of the node's descriptors";
            return Err(full(text, "descriptors", share));
        }
        Ok(())
    }
}

impl Server {
    /// Of everything but runs.
    fn fixed_descriptors(&self) -> u64 {
        let clients = (self.sandboxes.len() + self.clients.len()) as u64;
        FD_RESERVE + clients + self.helpers.len() as u64 * FDS_PER_HELPER
    }

    /// Whether a file helper may be started.
    pub(super) fn check_helper_room(&self, helpers: usize) -> Result<(), LaunchError> {
        if helpers >= MAX_HELPERS {
            let text = "too many file helpers in this sandbox";
            return Err(full(text, "helpers", MAX_HELPERS as u64));
        }
        if self.fixed_descriptors() + self.descriptors + FDS_PER_HELPER > self.nofile {
            let text = "no descriptors left for a file helper on this node";
            return Err(full(text, "descriptors", self.nofile));
        }
        Ok(())
    }
}

fn full(text: &str, resource: &str, limit: u64) -> LaunchError {
    LaunchError::new(Code::Limit, text)
        .with("resource", resource)
        .with("limit", i64::try_from(limit).unwrap_or(i64::MAX))
}
