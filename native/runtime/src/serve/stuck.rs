//! What was killed and cannot die: it sleeps in the kernel, waiting for a device, and no signal wakes it. Nobody waits
//! for it longer than for a while, no thread does, nothing says that it is gone, and once it is, all it had goes.

use std::os::fd::{AsFd, OwnedFd};

use dsec_launch::plan::Code;
use dsec_launch::{dying, LaunchError};
use dsec_sys::io::{wait_child, Who};
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::{Server, Timer, Token};
use crate::kproto::Fallen;
use crate::proto::Nothing;
use crate::{info, util, warning};

/// A killed run's process has this long, as the rest of its tree.
pub(super) const DYING_NS: u64 = dying::GRACE.as_nanos() as u64;
pub(super) const LOOK_NS: u64 = dying::LOOK.as_nanos() as u64;
pub(super) const DYING_MAX_NS: u64 = dying::MOST.as_nanos() as u64;
/// So long a stop waits for a sandbox in which something cannot die.
const STOP_NS: u64 = 10_000_000_000;

/// A killed sandbox in which something has not died yet.
pub(super) struct Lingering {
    /// Says when the last of it has.
    events: OwnedFd,
    /// When those who wait for its end are told.
    timer: Option<(u64, u64)>,
}

impl Server {
    /// A run's tree was killed: its process has this long.
    pub(super) fn expect_death(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        if run.killed_ns.is_some() || run.pidfd.is_none() || run.done() {
            return;
        }
        let now = util::monotonic_ns();
        run.killed_ns = Some(now);
        self.at(now + DYING_NS, Timer::Unkillable(index));
    }

    /// The process of a killed run had its time to die. That it will never do anything again is certain, so the run is
    /// over; its process counts among what is left of it.
    pub(super) fn look_at_killed(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let (Some(pidfd), Some(killed_ns)) = (&run.pidfd, run.killed_ns) else {
            return;
        };
        // What has ended is told of in a moment.
        if run.done() || run.ending || has_ended(pidfd) {
            return;
        }
        let now = util::monotonic_ns();
        let waits = run.pid.and_then(dying::waits_for_device) == Some(true);
        if !waits && now < killed_ns + DYING_MAX_NS {
            self.at(now + LOOK_NS, Timer::Unkillable(index));
            return;
        }
        info!("run.unkillable", run = run.key());
        let adopted = run.adopted;
        if let Some(pidfd) = run.pidfd.take() {
            self.unwatch(pidfd.as_fd());
            if !adopted {
                self.reap_later(pidfd);
            }
        }
        let ending = Fallen {
            code: None,
            signal: Some(libc::SIGKILL),
            user_us: 0,
            system_us: 0,
            max_rss_bytes: 0,
            at_ns: now,
            out_blocks: 0,
        };
        self.end_unkillable(index, ending);
    }

    /// An ended run's process of ours is collected when it dies. One of an earlier runtime is the keeper's.
    fn reap_later(&mut self, pidfd: OwnedFd) {
        let number = self.index();
        let flags = EventFlags::IN | EventFlags::ET;
        if let Err(e) = self.watch(pidfd.as_fd(), Token::Late(number), flags) {
            warning!("run.watch", error = e);
        }
        self.late.insert(number, pidfd);
    }

    /// It has died after all.
    pub(super) fn late_death(&mut self, number: u64) {
        let Some(pidfd) = self.late.get(&number) else {
            return;
        };
        match wait_child(Who::PidFd(pidfd.as_fd()), true) {
            // Its tracer's first.
            Ok(None) => return,
            Ok(Some(_)) => {}
            Err(e) => warning!("run.reap", error = e),
        }
        if let Some(pidfd) = self.late.remove(&number) {
            self.unwatch(pidfd.as_fd());
        }
    }

    /// Something of a killed sandbox does not die: it is released once the last of it has.
    pub(super) fn sandbox_lingers(&mut self, index: u64) {
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        let Some(place) = s.place.clone() else { return };
        s.tries = 0;
        info!("sandbox.lingers", id = s.record.id);
        let events = match place.events() {
            Ok(events) => events,
            // Its group is gone, and all that was in it.
            Err(_) => return self.release_sandbox(index, None),
        };
        let flags = EventFlags::PRI | EventFlags::ET;
        if let Err(e) = self.watch(events.as_fd(), Token::Lingering(index), flags) {
            warning!("sandbox.watch", error = e);
        }
        if let Some(s) = self.sandboxes.get_mut(&index) {
            s.lingering = Some(Lingering {
                events,
                timer: None,
            });
        }
        self.stop_takes_long(index);
        // It may have emptied before it was watched.
        self.sandbox_emptied(index);
    }

    /// Who asks for the end of one in which something does not die waits no longer than this.
    pub(super) fn stop_takes_long(&mut self, index: u64) {
        let when = util::monotonic_ns() + STOP_NS;
        let lingering =
            |s: &super::Sandbox| s.lingering.as_ref().is_some_and(|l| l.timer.is_none());
        if !self.sandboxes.get(&index).is_some_and(lingering) {
            return;
        }
        let timer = self.at(when, Timer::Lingering(index));
        let s = self.sandboxes.get_mut(&index);
        if let Some(lingering) = s.and_then(|s| s.lingering.as_mut()) {
            lingering.timer = Some(timer);
        }
    }

    pub(super) fn stop_took_long(&mut self, index: u64) {
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        let Some(lingering) = s.lingering.as_mut() else {
            return;
        };
        lingering.timer = None;
        let text = "all of the sandbox was killed, and something in it cannot die: it waits for a device; what the \
                    sandbox has is given back when that answers";
        let err = LaunchError::new(Code::Deadline, text).with("step", "stop.dying");
        for (client, id) in std::mem::take(&mut s.stoppers) {
            self.answer(client, id, Err::<Nothing, _>(err.clone()));
        }
    }

    /// A group of a lingering sandbox has changed.
    pub(super) fn sandbox_emptied(&mut self, index: u64) {
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        let populated = s.place.as_ref().map(|place| place.populated());
        if s.lingering.is_none() || matches!(populated, Some(Ok(true))) {
            return;
        }
        if let Some(lingering) = s.lingering.take() {
            self.unwatch(lingering.events.as_fd());
            if let Some(timer) = lingering.timer {
                self.timers.remove(&timer);
            }
        }
        self.release_sandbox(index, None);
    }
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut poll = [PollFd::new(pidfd, PollFlags::IN)];
    !matches!(
        rustix::event::poll(&mut poll, Some(&Timespec::default())),
        Ok(0)
    )
}
