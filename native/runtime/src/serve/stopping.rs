//! How sandboxes end: why is noted first, then they are killed, released by worker threads, and told of.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use dsec_launch::LaunchError;
use dsec_sys::io::{wait_child, Who};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Signal;

use super::sandbox::{init_key, Parent, Phase};
use super::{Server, Timer};
use crate::kproto::Fallen;
use crate::proto::{self, Cause, Id, Nothing, Reply};
use crate::record::{Ending, Stage};
use crate::{fail, info, util, warning};

/// Ended sandboxes that are remembered.
const ENDED_KEPT: usize = 1024;
/// For a release, by a thread: removing everything. What still lives by then is waited for without one.
const RELEASE_DEADLINE: Duration = Duration::from_secs(2);
/// How long a thread waits for the end of the init. A dying process may wait for a slow disk, or for ever.
const INIT_WAIT: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};
/// How often a release is tried before the caller is told.
const RELEASE_TRIES: u32 = 3;
/// Why a sandbox ended that nobody asked to.
pub(super) const INIT_DIED: &str = "init_died";
/// Longest time a sandbox is given to end by itself.
const GRACE_MAX_MS: u64 = 600_000;

impl Server {
    pub(super) fn sandbox_stop(&mut self, client: u64, id: Id, name: &str, grace_ms: u64) {
        let index = match self.sandbox_index(name) {
            Ok(index) => index,
            Err(err) => return self.answer(client, id, Err::<Nothing, _>(err)),
        };
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        if s.phase == Phase::Ended {
            let status = self.status(index);
            return self.answer(client, id, status);
        }
        s.stoppers.push((client, id));
        match s.phase {
            Phase::Running => self.begin_stop(index, "stopped", grace_ms),
            Phase::Stopping if grace_ms == 0 => {
                self.grace_over(index);
                self.stop_takes_long(index);
            }
            Phase::Stopping => self.stop_takes_long(index),
            Phase::Creating | Phase::Ended => {}
        }
    }

    pub(super) fn sandbox_wait(&mut self, client: u64, id: Id, name: &str) {
        let status = match self.sandbox_index(name) {
            Ok(index) => match self.sandboxes.get_mut(&index) {
                Some(s) if s.phase != Phase::Ended => return s.waiters.push((client, id)),
                _ => self.status(index),
            },
            Err(err) => Err(err),
        };
        self.answer(client, id, status);
    }

    /// From here on nothing can be started in it, by a later runtime neither.
    pub(super) fn begin_stop(&mut self, index: u64, reason: &str, grace_ms: u64) {
        self.note_ending(index, reason, grace_ms);
        self.end_sandbox(index);
    }

    /// Before anything of it is killed: whoever comes after us sees only that it has ended.
    pub(super) fn note_ending(&mut self, index: u64, reason: &str, grace_ms: u64) {
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        // The first reason counts: a release that failed is tried again by whoever asks next.
        let ending = s.record.ending.get_or_insert_with(|| Ending {
            reason: reason.into(),
            code: s.exit.code,
            signal: s.exit.signal,
            oom: false,
            until_ns: 0,
        });
        ending.until_ns = util::monotonic_ns() + grace_ms.min(GRACE_MAX_MS) * 1_000_000;
        if let Err(e) = self.records.write(&s.record) {
            warning!("sandbox.record", id = s.record.id, error = e);
        }
        fail::pass("sandbox.stopping");
    }

    /// Ends it as its record says.
    pub(super) fn end_sandbox(&mut self, index: u64) {
        let live = self.live_runs(index);
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        let Some(ending) = &s.record.ending else {
            return;
        };
        s.phase = Phase::Stopping;
        s.exit.reason.clone_from(&ending.reason);
        s.exit.oom |= ending.oom;
        s.exit.code = s.exit.code.or(ending.code);
        s.exit.signal = s.exit.signal.or(ending.signal);
        let until_ns = ending.until_ns;
        info!(
            "sandbox.stop",
            id = s.record.id,
            reason = s.exit.reason,
            runs = live.len()
        );
        if until_ns <= util::monotonic_ns() || live.is_empty() {
            return self.kill_sandbox(index);
        }
        for run in live {
            self.ask_to_end(run);
        }
        let timer = self.at(until_ns, Timer::Grace(index));
        if let Some(s) = self.sandboxes.get_mut(&index) {
            s.grace = Some(timer);
        }
    }

    /// A run ends with its sandbox. Once: many programs take a second signal for impatience.
    fn ask_to_end(&mut self, index: u64) {
        let asked = self
            .runs
            .get(&index)
            .is_some_and(|run| run.adopted && run.meta.with_sandbox);
        if asked {
            return;
        }
        self.ends_with_sandbox(index);
        if let Err(e) = self.run_kill(index, Signal::TERM.as_raw(), Cause::Killed) {
            info!("sandbox.term", error = e);
        }
    }

    pub(super) fn grace_over(&mut self, index: u64) {
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        if let Some(timer) = s.grace.take() {
            self.timers.remove(&timer);
            self.kill_sandbox(index);
        }
    }

    fn kill_sandbox(&mut self, index: u64) {
        for run in self.live_runs(index) {
            self.ends_with_sandbox(run);
            if let Err(e) = self.run_kill(run, 0, Cause::Killed) {
                info!("sandbox.kill_run", error = e);
            }
        }
        let mut network = None;
        if let Some(s) = self.sandboxes.get(&index) {
            let init = s.init.as_ref();
            if let Some(place) = &s.place {
                // Asked for while the init lives.
                network = init.and_then(|init| place.network(init.as_fd()));
                if let Err(e) = place.kill() {
                    warning!("sandbox.kill", id = s.record.id, error = e);
                }
            }
        }
        self.release_sandbox(index, network);
    }

    /// All of it was killed.
    pub(super) fn release_sandbox(&mut self, index: u64, network: Option<OwnedFd>) {
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        s.tries += 1;
        let Some(place) = s.place.clone() else {
            return self.released(index, false, Ok(()));
        };
        let init = s.init.clone();
        let (records, mut record) = (self.records.clone(), s.record.clone());
        self.workers.run(move || {
            // An init ends last, so that its end says that nothing of its process namespace is left in the cgroups.
            // What keeps it alive is not waited for by a thread, of which there are few.
            if let Some(init) = init {
                let mut poll = [PollFd::new(&*init, PollFlags::IN)];
                let alive = rustix::event::poll(&mut poll, Some(&INIT_WAIT)) == Ok(0);
                if alive && place.populated().unwrap_or(false) {
                    return Box::new(move |server: &mut Server| server.sandbox_lingers(index));
                }
            }
            // Asked, and noted, before the counters go.
            let oom = place.oom_kills() > 0;
            let unknown = record.ending.as_mut().filter(|e| oom && !e.oom);
            if let Some(ending) = unknown {
                ending.oom = true;
                if let Err(e) = records.write(&record) {
                    warning!("sandbox.record", id = record.id, error = e);
                }
            }
            let done = place
                .release(network, RELEASE_DEADLINE)
                .and_then(|()| fail::at("sandbox.released"));
            // A file helper has no part in the process namespace.
            if done.is_err() && place.populated().unwrap_or(false) {
                return Box::new(move |server: &mut Server| server.sandbox_lingers(index));
            }
            Box::new(move |server: &mut Server| server.released(index, oom, done))
        });
    }

    /// Unless it is being killed for a reason of its own.
    fn ends_with_sandbox(&mut self, run: u64) {
        if let Some(run) = self.runs.get_mut(&run) {
            // A SIGTERM that it has survived is none.
            let own = matches!(run.meta.marked, Some((_, 0 | libc::SIGKILL)));
            run.meta.with_sandbox |= !own;
        }
    }

    /// Whether a sandbox ends or is about to. A process namespace ends from the inside out: its programs
    /// are killed and reaped before its init can be waited for, which tells by its flags.
    pub(super) fn sandbox_ending(&self, index: u64) -> bool {
        self.sandboxes.get(&index).map_or(true, |s| {
            s.phase != Phase::Running
                || s.init_ended
                || util::is_ending(s.record.init_pid, s.record.init_start)
        })
    }

    fn released(&mut self, index: u64, oom: bool, done: Result<(), LaunchError>) {
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        s.exit.oom |= oom;
        let Err(err) = done else {
            s.released = true;
            return self.finish_if_quiet(index);
        };
        warning!(
            "sandbox.release",
            id = s.record.id,
            tries = s.tries,
            error = err
        );
        if s.tries < RELEASE_TRIES {
            return self.kill_sandbox(index);
        }
        // It stays as it is; the next `stop` tries again.
        s.tries = 0;
        s.phase = Phase::Running;
        for (client, id) in std::mem::take(&mut s.stoppers) {
            self.answer(client, id, Err::<Nothing, _>(err.clone()));
        }
    }

    /// The init of a sandbox ended.
    pub(super) fn init_ready(&mut self, index: u64) {
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        let Some(init) = s.init.clone() else { return };
        let ending = match s.parent {
            Parent::Us => match wait_child(Who::PidFd(init.as_fd()), false) {
                Ok(Some(e)) => Some((e.code, e.signal)),
                Ok(None) => return,
                Err(_) => None,
            },
            Parent::Keeper => return,
            Parent::Stranger => None,
        };
        self.unwatch(init.as_fd());
        if let Some((code, signal)) = ending {
            let Some(s) = self.sandboxes.get_mut(&index) else {
                return;
            };
            s.knows(code, signal);
            if s.phase == Phase::Running {
                self.note_ending(index, INIT_DIED, 0);
            }
            // Noted first: until here the keeper would tell it. And before anything of it is released, which asks
            // whether a process is counted in its groups.
            if let Err(e) = wait_child(Who::PidFd(init.as_fd()), true) {
                warning!("sandbox.reap", error = e);
            }
        }
        self.init_over(index, ending);
    }

    /// The keeper collected an init.
    pub(super) fn init_fallen(&mut self, id: &str, ending: &Fallen) {
        if let Some(&index) = self.sandbox_ids.get(id) {
            self.init_over(index, Some((ending.code, ending.signal)));
        }
    }

    fn init_over(&mut self, index: u64, ending: Option<(Option<i32>, Option<i32>)>) {
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        s.init_ended = true;
        if let Some((code, signal)) = ending {
            s.knows(code, signal);
        }
        match s.phase {
            Phase::Running if s.record.ending.is_some() => self.end_sandbox(index),
            Phase::Running => self.begin_stop(index, INIT_DIED, 0),
            _ => self.finish_if_quiet(index),
        }
    }

    /// A run of a sandbox has ended.
    pub(super) fn run_ended(&mut self, sandbox: u64) {
        let Some(s) = self.sandboxes.get(&sandbox) else {
            return;
        };
        if s.phase != Phase::Stopping {
            return;
        }
        if s.grace.is_some() && self.live_runs(sandbox).is_empty() {
            self.grace_over(sandbox);
        } else {
            self.finish_if_quiet(sandbox);
        }
    }

    /// It has ended once everything is released and every ending in it is known.
    pub(super) fn finish_if_quiet(&mut self, index: u64) {
        let live = self.live_runs(index);
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        if s.phase != Phase::Stopping || !s.released || !s.init_ended || !live.is_empty() {
            return;
        }
        s.phase = Phase::Ended;
        s.place = None;
        s.init = None;
        s.free_leaves.clear();
        s.record.stage = Stage::Ended;
        s.record.exit = Some(s.exit.clone());
        s.record.ended_ns = util::realtime_ns();
        let id = s.record.id.clone();
        let runs: Vec<u64> = s.runs.values().copied().collect();
        let mut told = std::mem::take(&mut s.stoppers);
        told.append(&mut s.waiters);
        if let Err(e) = self.records.write(&s.record) {
            warning!("sandbox.record", id = id, error = e);
        }
        fail::pass("sandbox.ended");
        for run in runs {
            if let Some(r) = self.runs.get_mut(&run) {
                r.leaf = None;
            }
            self.forget(run);
        }
        self.helpers_over(index);
        let _ = self.records.marks.unmark_all(&id);
        self.unknown.retain(|(sandbox, _)| *sandbox != id);
        if let Err(e) = self.link.del(&init_key(&id), 1) {
            warning!("keeper.del", error = e);
        }
        info!("sandbox.ended", id = id);
        for (client, request) in told {
            let status = self.status(index);
            self.answer(client, request, status);
        }
        self.announce(index);
        self.remember_ended(index);
    }

    fn announce(&mut self, index: u64) {
        let Ok(status) = self.status(index) else {
            return;
        };
        let clients = self.clients.iter();
        let subscribed: Vec<(u64, Id)> = clients
            .filter_map(|(c, v)| Some((*c, v.subscribed?)))
            .collect();
        for (client, id) in subscribed {
            let event = Reply::Ended {
                id,
                ev: "ended",
                sandbox: status.id.clone(),
                status: &status,
            };
            if let Ok(frame) = proto::frame(&event) {
                self.push(client, frame);
            }
        }
    }

    pub(super) fn remember_ended(&mut self, index: u64) {
        self.ended.push_back(index);
        while self.ended.len() > ENDED_KEPT {
            let Some(old) = self.ended.pop_front() else {
                return;
            };
            if let Some(s) = self.sandboxes.remove(&old) {
                self.sandbox_ids.remove(&s.record.id);
                let _ = self.records.remove(&s.record.id);
            }
        }
    }
}
