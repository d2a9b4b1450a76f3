//! Ends runs: on request, in time, or because they are not safe.

use dsec_launch::{switch, LaunchError};
use rustix::event::epoll::EventFlags;

use super::run::signal_bit;
use super::{Server, Timer, Token};
use crate::proto::Cause;
use crate::{info, util, warning};

/// Between two looks at an ended process that is traced.
const TRACED_LOOK_NS: u64 = 20_000_000;
/// Looks after which its tracer is not one that collects.
const TRACED_LOOKS: u32 = 6;
/// How often an ended process is looked at, if the keeper is to hear of its end.
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
        let named = rustix::process::Signal::from_named_raw(signal);
        if signal != 0 && named.is_none() {
            return Err(LaunchError::field("signal", "no such signal"));
        }
        let Some(run) = self.runs.get_mut(&index) else {
            return Ok(());
        };
        if run.done() {
            // What the process has left behind is still the run's: until nothing of it lives its cgroup is nobody else's.
            let left = run
                .leaf
                .as_ref()
                .filter(|_| signal == 0 && !switch::off(switch::RUN_TREE));
            return left.map_or(Ok(()), |leaf| leaf.kill());
        }
        // Noted first: a new runtime must give the same cause. The first cause counts. What is not meant to end it
        // (a size that changed, a reload) is no cause, unless it dies of just that.
        run.meta.signals |= signal_bit(signal);
        let ends = matches!(signal, 0 | libc::SIGKILL | libc::SIGTERM);
        if ends && run.meta.marked.map_or(true, |(_, s)| s != 0) {
            let cause = run.meta.marked.map_or(cause, |(first, _)| first);
            run.meta.marked = Some((cause, signal));
        }
        self.keep_meta(index);
        let Some(named) = named else {
            self.kill_tree(index);
            return Ok(());
        };
        // One that is being launched gets it then.
        let Some(pidfd) = self.runs.get(&index).and_then(|r| r.pidfd.as_ref()) else {
            return Ok(());
        };
        match rustix::process::pidfd_send_signal(pidfd, named) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(LaunchError::step("run.kill", &e.into())),
        }
    }

    /// What was sent to a run while it was being launched.
    pub(super) fn send_signals(&self, index: u64, signals: u64) {
        let Some(pidfd) = self.runs.get(&index).and_then(|r| r.pidfd.as_ref()) else {
            return;
        };
        for number in (1..=64).filter(|n| signals & signal_bit(*n) != 0) {
            if let Some(signal) = rustix::process::Signal::from_named_raw(number) {
                let _ = rustix::process::pidfd_send_signal(pidfd, signal);
            }
        }
    }

    /// SIGKILL to a run's whole tree. While it is being launched there is none: `launched` does it.
    pub(super) fn kill_tree(&mut self, index: u64) {
        let Some(run) = self.runs.get(&index) else {
            return;
        };
        let leaf = run.leaf.as_ref().filter(|_| !switch::off(switch::RUN_TREE));
        if let Some(Err(e)) = leaf.map(|l| l.kill()) {
            warning!("run.kill", error = e);
        }
        // Where joining is not part of the clone (cgroup v1) the process may not be in it yet.
        if let Some(pidfd) = &run.pidfd {
            let _ = rustix::process::pidfd_send_signal(pidfd, rustix::process::Signal::KILL);
        }
        self.expect_death(index);
    }

    /// An ended process that is traced is its tracer's first: `waitid` says nothing of it here, while its descriptor
    /// stays readable. Not waited for by epoll, which would say so again at once. An adopted one's end is the keeper's
    /// to tell, which has seen it by the next look if nobody traces it.
    pub(super) fn held_by_tracer(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        run.held += 1;
        if let Some(pidfd) = &run.pidfd {
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
        // The keeper hears of its end, and we from the keeper.
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
