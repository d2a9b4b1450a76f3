//! Endings: seen, noted in the keeper, then reaped. In this order nothing is ever lost or invented.

use std::os::fd::AsFd;
use std::sync::Arc;

use dsec_launch::{switch, LaunchError};
use dsec_sys::io::{wait_child, Who};
use rustix::event::epoll::EventFlags;

use super::run::{self, Dying, FreeLeaf, Meta};
use super::sandbox::{Phase, Sandbox};
use super::stream::no_writers;
use super::stuck::{DYING_MAX_NS, DYING_NS, LOOK_NS};
use super::{Server, Timer, Token};
use crate::backend::{Leaf, Place};
use crate::kproto::Fallen;
use crate::proto::Cause;
use crate::{fail, info, util, warning};

/// A pipe holds this much (16 pages); what is in it when the process ends belongs to the result.
const LAST_BYTES: usize = 64 << 10;
/// Empty cgroups of a sandbox that are kept for its next runs.
const MAX_FREE_LEAVES: usize = 8;
/// A sandbox with many runs at once keeps so many: to make one and to remove it costs as much as the rest of a run.
const MAX_CROWD_LEAVES: usize = 64;
/// Beyond the first of each, all sandboxes together: the kernel's memory and our descriptors.
const MAX_CROWDS_LEAVES: usize = 512;

impl Server {
    /// A run's process ended: our own child, or one that the keeper collects.
    pub(super) fn process_ready(&mut self, index: u64) {
        let Some(run) = self.runs.get(&index) else {
            return;
        };
        let Some(pidfd) = &run.pidfd else { return };
        if run.adopted {
            return self.held_by_tracer(index);
        }
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
        let failure = run.failure.take();
        self.drop_timers(index);
        if let Some(err) = failure {
            self.reap(index, reap);
            return self.launch_failed(index, err);
        }
        if self.tree_dies(index, &ending, reap) {
            return;
        }
        self.settle_disk(index, ending, reap);
    }

    /// Whether the rest of a killed run's tree has still to die. The kernel was told to kill it, and each process
    /// dies when it is next on a CPU: whoever hears that a run was killed must find nothing of it.
    fn tree_dies(&mut self, index: u64, ending: &Fallen, reap: bool) -> bool {
        let Some(run) = self.runs.get_mut(&index) else {
            return false;
        };
        let killed = matches!(run.meta.marked, Some((_, 0))) && !switch::off(switch::RUN_TREE);
        // What ends with its sandbox is waited for with it.
        let sandbox = self.sandboxes.get(&run.sandbox);
        if !killed || sandbox.map_or(true, |s| s.phase != Phase::Running) {
            return false;
        }
        let Some(leaf) = run.leaf.clone() else {
            return false;
        };
        if !leaf.populated().unwrap_or(false) {
            return false;
        }
        run.ending = true;
        run.dying = Some(Dying {
            ending: *ending,
            reap,
        });
        if let Some(pidfd) = &run.pidfd {
            let _ = rustix::event::epoll::delete(&self.epoll, pidfd);
        }
        self.at(ending.at_ns + DYING_NS, Timer::Dying(index));
        self.watch_tree(index, &*leaf);
        // It may have emptied before it was watched.
        self.tree_emptied(index);
        true
    }

    /// The rest of a killed tree had its time. What only is slow has more, what waits for a device has not.
    pub(super) fn look_at_tree(&mut self, index: u64) {
        let Some(run) = self.runs.get(&index) else {
            return;
        };
        let (Some(dying), Some(leaf)) = (&run.dying, &run.leaf) else {
            return;
        };
        let now = util::monotonic_ns();
        if now < dying.ending.at_ns + DYING_MAX_NS && !leaf.stuck() {
            self.at(now + LOOK_NS, Timer::Dying(index));
            return;
        }
        self.tree_died(index);
    }

    /// Nothing of a killed tree is left, or will be for longer than anybody should wait.
    pub(super) fn tree_died(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let Some(dying) = run.dying.take() else {
            return;
        };
        run.ending = false;
        if let Some(events) = run.emptied.take() {
            self.unwatch(events.as_fd());
        }
        self.take_last_output(index);
        self.settle_disk(index, dying.ending, dying.reap);
    }

    /// Its process was killed, and has not died yet. Its disk is not looked at: that may be what it waits for.
    pub(super) fn end_unkillable(&mut self, index: u64, ending: Fallen) {
        self.take_status(index);
        self.take_last_output(index);
        self.drop_timers(index);
        self.conclude(index, ending, false, Disk::Fine);
    }

    /// What a run had to be looked at for while it went on.
    fn drop_timers(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let unsettled = run.unsettled.take().map(|u| u.timer);
        for timer in [run.timer.take(), unsettled].into_iter().flatten() {
            self.timers.remove(&timer);
        }
    }

    fn settle_disk(&mut self, index: u64, ending: Fallen, reap: bool) {
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
        if let Some(pidfd) = &run.pidfd {
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
                if let (Some(sandbox), Disk::Lost) = (sandbox, disk) {
                    // The kernel tells it once: nobody would find it again.
                    server.disk_is_lost(sandbox);
                }
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
        self.end_terminal(index);
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
            (Some(_), Some((_, 0))) => run.meta.with_sandbox,
            // Of the grace of a stop.
            (Some(signal), Some((_, last))) if signal == last => run.meta.with_sandbox,
            (Some(signal), _) => {
                signal == libc::SIGKILL
                    && !run.meta.was_sent(signal)
                    && self.sandbox_ending(run.sandbox)
            }
        }
    }

    /// What is in the pipes by now belongs to the result, what comes later does not.
    fn take_last_output(&mut self, index: u64) {
        if self
            .runs
            .get(&index)
            .is_some_and(|r| r.terminal.is_some() && !r.done())
        {
            return self.take_last_of_terminal(index, LAST_BYTES);
        }
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
        self.unwatch(pidfd.as_fd());
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
        self.watch_tree(index, &*leaf);
        // It may have emptied before it was watched.
        self.tree_emptied(index);
    }

    fn watch_tree(&mut self, index: u64, leaf: &dyn Leaf) {
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
        // Measured with 6.18: after one write to cgroup.kill everything that is ever cloned into that group dies of
        // signal 9 (what joins it lives): its count of kills is compared with that of the parent's group. The
        // leaf knows of our own kills, the mark of an earlier runtime's.
        let killed = matches!(run.meta.marked, Some((_, 0)));
        let sandbox = run.sandbox;
        let (fence, name) = (run.meta.fence, run.leaf_name().to_owned());
        let room = self.room_for_leaf(sandbox);
        let Some(s) = self.sandboxes.get_mut(&sandbox) else {
            return false;
        };
        // A memory group of its own is what makes it worth keeping; only then is there a peak.
        let wanted = !killed
            && fence == 0
            && used.memory_peak_bytes > 0
            && s.phase == Phase::Running
            && room;
        if !wanted || !leaf.renew(&used) {
            return false;
        }
        s.free_leaves.push(FreeLeaf { name, leaf, used });
        true
    }

    /// Whether a sandbox may keep one more cgroup for its next run.
    fn room_for_leaf(&self, sandbox: u64) -> bool {
        let own = self
            .sandboxes
            .get(&sandbox)
            .map_or(0, |s| s.free_leaves.len());
        let crowded = || -> usize {
            let beyond = |s: &Sandbox| s.free_leaves.len().saturating_sub(MAX_FREE_LEAVES);
            self.sandboxes.values().map(beyond).sum()
        };
        own < MAX_FREE_LEAVES
            || (own < MAX_CROWD_LEAVES
                && !switch::off(switch::CGROUP_CROWD)
                && crowded() < MAX_CROWDS_LEAVES)
    }

    /// Tries to remove the cgroup of an ended run. That of one whose end waits for it is still to be read.
    pub(super) fn tree_emptied(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let Some(leaf) = &run.leaf else { return };
        if run.dying.is_some() {
            if !leaf.populated().unwrap_or(false) {
                self.tree_died(index);
            }
            return;
        }
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
        self.spool_all(index);
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
pub(super) fn cause(ending: &Fallen, meta: &Meta, oom: bool) -> Cause {
    let asked = meta.marked.map_or(Cause::Killed, |(cause, _)| cause);
    match (ending.signal, meta.marked) {
        // The kill of a tree is by SIGKILL; whoever died of something else was faster.
        (Some(libc::SIGKILL), Some((cause, 0))) => cause,
        (Some(signal @ (libc::SIGKILL | libc::SIGTERM)), _) if meta.was_sent(signal) => asked,
        (Some(signal), _) if meta.was_sent(signal) => Cause::Killed,
        (Some(libc::SIGKILL), _) if oom => Cause::Oom,
        (Some(_), _) => Cause::Signalled,
        // It was asked to end, and did so in its own way: SIGTERM was caught.
        (None, Some((cause, signal))) if signal != 0 => cause,
        // As a shell tells of what it was sent.
        (None, None) if ending.code.is_some_and(|code| told_of(code - 128, meta)) => asked,
        (None, _) => Cause::Exited,
    }
}

/// Whether 128 and a number may be how it tells of a signal: not of one that ends nobody by itself.
fn told_of(signal: i32, meta: &Meta) -> bool {
    let harmless = matches!(
        signal,
        libc::SIGCHLD
            | libc::SIGCONT
            | libc::SIGURG
            | libc::SIGWINCH
            | libc::SIGSTOP
            | libc::SIGTSTP
            | libc::SIGTTIN
            | libc::SIGTTOU
    );
    !harmless && meta.was_sent(signal)
}

#[cfg(test)]
mod tests {
    use super::super::run::signal_bit;
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

    fn asked(marked: Option<(Cause, i32)>, signals: &[i32]) -> Meta {
        Meta {
            marked,
            signals: signals.iter().fold(0, |all, one| all | signal_bit(*one)),
            ..Meta::default()
        }
    }

    #[test]
    fn causes() {
        let killed = ended(None, Some(libc::SIGKILL));
        let timeout = asked(Some((Cause::Timeout, 0)), &[]);
        let nothing = asked(None, &[]);
        assert_eq!(cause(&killed, &timeout, false), Cause::Timeout);
        assert_eq!(cause(&killed, &timeout, true), Cause::Timeout);
        assert_eq!(cause(&killed, &nothing, true), Cause::Oom);
        assert_eq!(cause(&killed, &nothing, false), Cause::Signalled);
        assert_eq!(cause(&ended(Some(0), None), &timeout, false), Cause::Exited);
        let crashed = ended(None, Some(libc::SIGSEGV));
        assert_eq!(cause(&crashed, &timeout, false), Cause::Signalled);
        assert_eq!(cause(&ended(Some(1), None), &nothing, true), Cause::Exited);
        // As an earlier version noted it, and as it is now.
        let mark = Some((Cause::Killed, libc::SIGTERM));
        for term in [asked(mark, &[]), asked(mark, &[libc::SIGTERM])] {
            assert_eq!(cause(&ended(Some(143), None), &term, false), Cause::Killed);
            assert_eq!(
                cause(&ended(None, Some(libc::SIGTERM)), &term, false),
                Cause::Killed
            );
            assert_eq!(cause(&killed, &term, true), Cause::Oom);
            assert_eq!(
                cause(&ended(None, Some(libc::SIGSEGV)), &term, false),
                Cause::Signalled
            );
        }
        // What it lived on with is no cause of anything.
        let told = asked(None, &[libc::SIGUSR1, libc::SIGWINCH]);
        assert_eq!(
            cause(&ended(None, Some(libc::SIGUSR1)), &told, false),
            Cause::Killed
        );
        assert_eq!(cause(&ended(Some(138), None), &told, false), Cause::Killed);
        assert_eq!(cause(&ended(Some(0), None), &told, false), Cause::Exited);
        assert_eq!(cause(&ended(Some(9), None), &told, false), Cause::Exited);
        assert_eq!(cause(&killed, &told, true), Cause::Oom);
        assert_eq!(cause(&killed, &told, false), Cause::Signalled);
        // Nor what nobody ends by: its exit code is its own, also if it is 128 and that number.
        for harmless in [
            libc::SIGCHLD,
            libc::SIGCONT,
            libc::SIGURG,
            libc::SIGWINCH,
            libc::SIGSTOP,
        ] {
            let own = ended(Some(128 + harmless), None);
            assert_eq!(cause(&own, &asked(None, &[harmless]), false), Cause::Exited);
        }
    }
}
