//! Ends runs: on request, in time, or because they are not safe.

use dsec_launch::LaunchError;
use rustix::event::epoll::EventFlags;

use super::{Server, Timer, Token};
use crate::proto::Cause;
use crate::{info, util, warning};

/// Between two looks at an ended process that is traced.
const TRACED_LOOK_NS: u64 = 20_000_000;
/// Looks after which its tracer is not one that collects.
const TRACED_LOOKS: u32 = 6;
/// How often a process that was killed is looked at, if the keeper is to hear of its end.
const ADOPTED_LOOKS: u32 = 100;

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
        if run.adopted {
            self.at(util::monotonic_ns() + TRACED_LOOK_NS, Timer::Traced(index));
        }
    }

    /// An ended process that is traced is its tracer's first: `waitid` says nothing of it here, while its descriptor
    /// stays readable. Not waited for by epoll, which would say so again at once.
    pub(super) fn held_by_tracer(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        run.held += 1;
        if let Some(pidfd) = run.pidfd.as_ref().filter(|_| !run.adopted) {
            let _ = rustix::event::epoll::delete(&self.epoll, pidfd);
        }
        self.at(util::monotonic_ns() + TRACED_LOOK_NS, Timer::Traced(index));
    }

    /// One that collects what it traces has done so by now. One that does not is ended: it holds up a run's end,
    /// and lets go by its own.
    pub(super) fn look_at_traced(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        if run.done() {
            return;
        }
        let Some(pidfd) = &run.pidfd else { return };
        if run.held >= TRACED_LOOKS {
            if let Some(tracer) = run.pid.and_then(|p| util::kill_tracer(p, &run.sandbox_id)) {
                info!("run.tracer_killed", run = run.key(), tracer = tracer);
            }
        }
        if !run.adopted {
            let token = Token::Process(index).pack();
            let added = rustix::event::epoll::add(&self.epoll, pidfd, token, EventFlags::IN);
            if let Err(e) = added {
                warning!("run.watch", error = e);
            }
            return;
        }
        // The keeper hears of its end, and we from the keeper; all we know is that it was killed.
        run.held += 1;
        if run.held < ADOPTED_LOOKS {
            self.at(util::monotonic_ns() + TRACED_LOOK_NS, Timer::Traced(index));
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
