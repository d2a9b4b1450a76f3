//! Endings: seen, noted in the keeper, then reaped. In this order nothing is ever lost or invented.

use std::os::fd::AsFd;
use std::sync::Arc;

use dsec_launch::LaunchError;
use dsec_sys::io::{wait_child, Who};
use rustix::event::epoll::EventFlags;

use super::run::{self, FreeLeaf};
use super::sandbox::Phase;
use super::stream::no_writers;
use super::{Server, Token};
use crate::backend::Place;
use crate::kproto::Fallen;
use crate::proto::Cause;
use crate::{fail, info, util, warning};

/// A pipe holds this much (16 pages); what is in it when the process ends belongs to the result.
const LAST_BYTES: usize = 64 << 10;
/// Empty cgroups of a sandbox that are kept for its next runs.
const MAX_FREE_LEAVES: usize = 8;

impl Server {
    /// Our own child ended.
    pub(super) fn process_ready(&mut self, index: u64) {
        let Some(run) = self.runs.get(&index) else {
            return;
        };
        let Some(pidfd) = &run.pidfd else { return };
        let ending = match wait_child(Who::PidFd(pidfd.as_fd()), false) {
            Ok(Some(e)) => e,
            Ok(None) => return self.held_by_tracer(index),
            Err(e) => {
                // Someone else reaped it: that is a fault of ours, and is said as such.
                warning!("run.wait", run = run.key(), error = e);
                return self.lost(index);
            }
        };
        fail::pass("run.ended");
        let fallen = Fallen::new(&ending, util::monotonic_ns());
        self.end_run(index, fallen, true);
    }

    /// The keeper collected an ending.
    pub(super) fn fallen(&mut self, key: &str, ending: Fallen) {
        if let Some(id) = key.strip_prefix("init/") {
            return self.init_fallen(id, &ending);
        }
        if let Some(index) = self.run_by_key(key) {
            self.end_run(index, ending, false);
        }
    }

    pub(super) fn run_by_key(&self, key: &str) -> Option<u64> {
        let (sandbox, run) = key.strip_prefix("run/")?.split_once('/')?;
        let name = (sandbox.to_owned(), run.to_owned());
        self.run_ids.get(&name).copied()
    }

    /// A run's process has ended: what it has said so far is taken, then its disk is looked at if need be.
    pub(super) fn end_run(&mut self, index: u64, ending: Fallen, reap: bool) {
        self.take_status(index);
        self.take_last_output(index);
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        if run.ending {
            return;
        }
        if run.done() {
            return self.reap(index, reap);
        }
        let unsettled = run.unsettled.take().map(|u| u.timer);
        for timer in [run.timer.take(), unsettled].into_iter().flatten() {
            self.timers.remove(&timer);
        }
        if let Some(err) = run.failure.take() {
            self.reap(index, reap);
            return self.launch_failed(index, err);
        }
        match self.disk_in_question(index, &ending) {
            Some(place) => self.look_at_disk(index, place, ending, reap),
            None => self.conclude(index, ending, reap, Disk::Fine),
        }
    }

    /// Only what was written to can have been found full; only what failed can have been refused by a disk that
    /// is lost. Not while the sandbox ends: its release waits for this process to be reaped.
    fn disk_in_question(&self, index: u64, ending: &Fallen) -> Option<Arc<dyn Place>> {
        let run = self.runs.get(&index)?;
        let s = self.sandboxes.get(&run.sandbox)?;
        let place = s.place.as_ref().filter(|_| s.phase == Phase::Running)?;
        let asked = ending.code != Some(0) || wrote(ending, &**place);
        asked.then(|| Arc::clone(place))
    }

    /// On a launching thread: those wait for nothing that waits for this.
    fn look_at_disk(&mut self, index: u64, place: Arc<dyn Place>, ending: Fallen, reap: bool) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        run.ending = true;
        if let Some(pidfd) = run.pidfd.as_ref().filter(|_| !run.adopted) {
            let _ = rustix::event::epoll::delete(&self.epoll, pidfd);
        }
        self.watch_output(index);
        self.launchers.run(move || {
            let disk = disk_of(&*place, wrote(&ending, &*place));
            Box::new(move |server: &mut Server| {
                if let Err(e) = &disk {
                    info!("run.disk", run = index, error = e);
                }
                if let Some(run) = server.runs.get_mut(&index) {
                    run.ending = false;
                }
                let sandbox = server.runs.get(&index).map(|run| run.sandbox);
                let disk = disk.unwrap_or(Disk::Fine);
                server.conclude(index, ending, reap, disk);
                if let (Some(sandbox), Disk::Lost) = (sandbox, disk) {
                    server.disk_lost(sandbox);
                }
            })
        });
    }

    /// Everything that is left to do.
    fn conclude(&mut self, index: u64, ending: Fallen, reap: bool, disk: Disk) {
        self.end_input(index);
        let gone = self.ended_by_sandbox(index, &ending);
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let used = run.leaf.as_ref().and_then(|l| l.usage().ok());
        let left = run.leaf.as_ref().and_then(|l| l.count().ok());
        let mut outcome = run.outcome(&ending, used, left.unwrap_or(0));
        // What a program says whose disk was taken from it is not its own.
        outcome.gone = gone || disk == Disk::Lost;
        if disk == Disk::Full {
            outcome.limits_hit.push("disk".to_owned());
        }
        run.spent = used.filter(|_| left == Some(0));
        run.meta.outcome = Some(outcome);
        self.keep_outcome(index);
        fail::pass("run.put_outcome");
        // Whoever waits for it is told at once: what is left to do nobody can get ahead of with another request.
        self.pump(index);
        self.send_queued();
        self.reap(index, reap);
        fail::pass("run.reaped");
        self.let_tree_go(index);
        let sandbox = self.runs.get(&index).map(|r| r.sandbox);
        self.forget_if_over(index);
        if let Some(sandbox) = sandbox {
            self.run_ended(sandbox);
        }
    }

    /// Whether the end of its sandbox is what ended a run. Nobody may take that for its own failure.
    fn ended_by_sandbox(&self, index: u64, ending: &Fallen) -> bool {
        let Some(run) = self.runs.get(&index) else {
            return false;
        };
        match (ending.signal, run.meta.marked) {
            (None, _) => false,
            (Some(_), Some(_)) => run.meta.with_sandbox,
            (Some(signal), None) => signal == libc::SIGKILL && self.sandbox_ending(run.sandbox),
        }
    }

    /// What is in the pipes by now belongs to the result, what comes later does not.
    fn take_last_output(&mut self, index: u64) {
        // Asked first: what was said on the others before is in their pipes then.
        let told = self.waiting_control(index);
        for s in 0..run::OUTPUTS {
            let Some(run) = self.runs.get(&index) else {
                return;
            };
            if run.done() {
                return;
            }
            let Some(pipe) = &run.streams[s].pipe else {
                continue;
            };
            // Asked in this order: without writers nothing can come between the two questions.
            let closed = no_writers(pipe.as_fd()).unwrap_or(false);
            let mut left = rustix::io::ioctl_fionread(pipe)
                .map_or(LAST_BYTES, |n| usize::try_from(n).unwrap_or(LAST_BYTES));
            let mut closed = closed;
            if s == run::CONTROL && left > told {
                (left, closed) = (told, false);
            }
            while left > 0 {
                match self.take_output(index, s, left) {
                    Ok(0) => break,
                    Ok(n) => left = left.saturating_sub(n),
                    Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                    Err(e) => {
                        warning!("output.last", run = index, error = e);
                        break;
                    }
                }
            }
            if s == run::CONTROL {
                if let Some(run) = self.runs.get_mut(&index) {
                    run.set_barrier();
                }
            }
            // Most end with their pipes: seen now, that saves a message later.
            if closed && left == 0 {
                self.close_pipe(index, s);
            }
        }
    }

    fn reap(&mut self, index: u64, reap: bool) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let Some(pidfd) = run.pidfd.take() else {
            return;
        };
        let adopted = run.adopted;
        if !adopted {
            self.unwatch(pidfd.as_fd());
        }
        if reap {
            if let Err(e) = wait_child(Who::PidFd(pidfd.as_fd()), true) {
                warning!("run.reap", error = e);
            }
        }
    }

    /// The run's cgroup goes with its last process.
    fn let_tree_go(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let Some(leaf) = run.leaf.clone() else { return };
        if self.use_again(index) || leaf.remove().is_ok() {
            if let Some(run) = self.runs.get_mut(&index) {
                run.leaf = None;
            }
            return;
        }
        match leaf.events() {
            Ok(events) => {
                // Once for each change: the file says so for as long as it is not read, from its opening on.
                let flags = EventFlags::PRI | EventFlags::ET;
                let watched = self.watch(events.as_fd(), Token::Emptied(index), flags);
                if watched.is_ok() {
                    if let Some(run) = self.runs.get_mut(&index) {
                        run.emptied = Some(events);
                    }
                }
                // It may have emptied before it was watched.
                self.tree_emptied(index);
            }
            Err(e) => info!("run.events", error = e),
        }
    }

    /// Keeps the cgroup of an ended run for the next one, if nothing is left in it.
    fn use_again(&mut self, index: u64) -> bool {
        let Some(run) = self.runs.get_mut(&index) else {
            return false;
        };
        let (Some(leaf), Some(used)) = (run.leaf.clone(), run.spent.take()) else {
            return false;
        };
        let Some(s) = self.sandboxes.get_mut(&run.sandbox) else {
            return false;
        };
        // Measured with 6.18: after one write to cgroup.kill everything that is ever cloned into that group dies of
        // signal 9 (what joins it lives): its count of kills is compared with that of the parent's group. The
        // leaf knows of our own kills, the mark of an earlier runtime's.
        let killed = matches!(run.meta.marked, Some((_, 0)));
        // A memory group of its own is what makes it worth keeping; only then is there a peak.
        let wanted = !killed
            && run.meta.fence == 0
            && used.memory_peak_bytes > 0
            && s.phase == Phase::Running
            && s.free_leaves.len() < MAX_FREE_LEAVES;
        if !wanted || !leaf.renew(&used) {
            return false;
        }
        s.free_leaves.push(FreeLeaf {
            name: run.leaf_name().to_owned(),
            leaf,
            used,
        });
        true
    }

    /// Tries to remove the cgroup of an ended run.
    pub(super) fn tree_emptied(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let Some(leaf) = &run.leaf else { return };
        if leaf.remove().is_err() {
            return;
        }
        run.leaf = None;
        if let Some(events) = run.emptied.take() {
            self.unwatch(events.as_fd());
        }
        self.forget_if_over(index);
    }

    pub(super) fn hold_over(&mut self, index: u64) {
        if let Some(run) = self.runs.get_mut(&index) {
            run.hold = false;
        }
        self.watch_output(index);
    }
}

/// What a run that has ended found its writable part to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disk {
    Fine,
    Full,
    Lost,
}

fn wrote(ending: &Fallen, place: &dyn Place) -> bool {
    ending.out_blocks > 0 || !place.counts_writes()
}

fn disk_of(place: &dyn Place, wrote: bool) -> Result<Disk, LaunchError> {
    if place.disk_lost()? {
        return Ok(Disk::Lost);
    }
    Ok(if wrote && place.disk_full()? {
        Disk::Full
    } else {
        Disk::Fine
    })
}

/// Why it ended. What was noted before a kill counts only if the kill is what ended it.
pub(super) fn cause(ending: &Fallen, marked: Option<(Cause, i32)>, oom: bool) -> Cause {
    match (ending.signal, marked) {
        (Some(_), Some((cause, _))) => cause,
        (None, Some((cause, signal))) if signal != 0 => cause,
        (Some(libc::SIGKILL), None) if oom => Cause::Oom,
        (Some(_), None) => Cause::Signalled,
        (None, _) => Cause::Exited,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(code: Option<i32>, signal: Option<i32>) -> Fallen {
        Fallen {
            code,
            signal,
            user_us: 0,
            system_us: 0,
            max_rss_bytes: 0,
            at_ns: 0,
            out_blocks: 0,
        }
    }

    #[test]
    fn causes() {
        let killed = ended(None, Some(libc::SIGKILL));
        let timeout = Some((Cause::Timeout, 0));
        assert_eq!(cause(&killed, timeout, false), Cause::Timeout);
        assert_eq!(cause(&killed, timeout, true), Cause::Timeout);
        assert_eq!(cause(&killed, None, true), Cause::Oom);
        assert_eq!(cause(&killed, None, false), Cause::Signalled);
        assert_eq!(cause(&ended(Some(0), None), timeout, false), Cause::Exited);
        assert_eq!(cause(&ended(Some(1), None), None, true), Cause::Exited);
        let term = Some((Cause::Killed, libc::SIGTERM));
        assert_eq!(cause(&ended(Some(143), None), term, false), Cause::Killed);
        assert_eq!(
            cause(&ended(None, Some(libc::SIGTERM)), term, false),
            Cause::Killed
        );
    }
}
