//! Endings: seen, noted in the keeper, then reaped. In this order nothing is ever lost or invented.

use std::os::fd::AsFd;
use std::sync::Arc;

use dsec_launch::cgroup::RunUsage;
use dsec_launch::plan::Code;
use dsec_launch::LaunchError;
use dsec_sys::io::{wait_child, Who};
use rustix::event::epoll::EventFlags;

use super::run::{self, FreeLeaf, Outcome, Run};
use super::sandbox::Phase;
use super::{Server, Token};
use crate::backend::Place;
use crate::kproto::{Fallen, Put};
use crate::proto::{Cause, Nothing, ResultUsage, RunResult};
use crate::{fail, info, util, warning};

/// Results of one sandbox that are kept after they were delivered.
const MAX_KEPT: usize = 256;
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
            Ok(None) => return,
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
        self.status_ready(index);
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
        if let Some(timer) = run.timer.take() {
            self.timers.remove(&timer);
        }
        if let Some(err) = run.failure.take() {
            self.reap(index, reap);
            return self.launch_failed(index, err);
        }
        match self.disk_in_question(index, &ending) {
            Some(place) => self.look_at_disk(index, place, ending, reap),
            None => self.conclude(index, ending, reap, false),
        }
    }

    /// Only what was written to can have been found full. Not while the sandbox ends: its release waits
    /// for this process to be reaped.
    fn disk_in_question(&self, index: u64, ending: &Fallen) -> Option<Arc<dyn Place>> {
        let run = self.runs.get(&index)?;
        let s = self.sandboxes.get(&run.sandbox)?;
        let place = s.place.as_ref().filter(|_| s.phase == Phase::Running)?;
        (ending.out_blocks > 0 || !place.counts_writes()).then(|| Arc::clone(place))
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
            let full = place.disk_full();
            Box::new(move |server: &mut Server| {
                if let Err(e) = &full {
                    info!("run.disk", run = index, error = e);
                }
                if let Some(run) = server.runs.get_mut(&index) {
                    run.ending = false;
                }
                server.conclude(index, ending, reap, full.unwrap_or(false));
            })
        });
    }

    /// Everything that is left to do.
    fn conclude(&mut self, index: u64, ending: Fallen, reap: bool, disk_full: bool) {
        self.end_input(index);
        let gone = self.ended_by_sandbox(index, &ending);
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let used = run.leaf.as_ref().and_then(|l| l.usage().ok());
        let left = run.leaf.as_ref().and_then(|l| l.count().ok());
        let mut outcome = run.outcome(&ending, used, left.unwrap_or(0));
        outcome.gone = gone;
        if disk_full {
            outcome.limits_hit.push("disk".to_owned());
        }
        run.spent = used.filter(|_| left == Some(0));
        run.meta.outcome = Some(outcome);
        self.keep_outcome(index);
        fail::pass("run.put_outcome");
        self.reap(index, reap);
        fail::pass("run.reaped");
        self.let_tree_go(index);
        if let Some(sandbox) = self.runs.get(&index).map(|r| r.sandbox) {
            self.pump(index);
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
        for s in 0..2 {
            let Some(run) = self.runs.get(&index) else {
                return;
            };
            if run.done() {
                return;
            }
            let Some(pipe) = &run.streams[s].pipe else {
                continue;
            };
            let mut left = rustix::io::ioctl_fionread(pipe)
                .map_or(LAST_BYTES, |n| usize::try_from(n).unwrap_or(LAST_BYTES));
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
            // Most end with their pipes: seen now, that saves a message later.
            if matches!(self.output_over(index, s), Ok(true)) {
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
                let flags = EventFlags::PRI;
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
        // A memory group of its own is what makes it worth keeping; only then is there a peak.
        let wanted = used.memory_peak_bytes > 0
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

    pub(super) fn keep_meta(&mut self, index: u64) {
        let Some(run) = self.runs.get(&index) else {
            return;
        };
        let put = Put {
            key: run.key(),
            meta: Some(run.encoded()),
            ..Put::default()
        };
        if let Err(e) = self.link.put(put, &[]) {
            warning!("keeper.put", error = e);
        }
    }

    /// One message: the outcome, and every descriptor that is not needed any more.
    fn keep_outcome(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let mut close: Vec<String> = Vec::new();
        for s in 0..2 {
            run.inline_small(s);
            let stream = &mut run.streams[s];
            if stream.pipe.is_none() && std::mem::take(&mut stream.kept_pipe) {
                close.push(run::PIPES[s].to_owned());
            }
            if stream.segment.is_none() && std::mem::take(&mut stream.kept_segment) {
                close.push(run::SEGMENTS[s].to_owned());
            }
        }
        close.push(run::STATUS.to_owned());
        close.push(run::PIDFD.to_owned());
        run.kept_others = run.kept_others.saturating_sub(2);
        let put = Put {
            key: run.key(),
            meta: Some(run.encoded()),
            close,
            ..Put::default()
        };
        if let Err(e) = self.link.put(put, &[]) {
            warning!("keeper.put", error = e);
        }
    }

    /// A follower gets the result.
    pub(super) fn deliver(&mut self, index: u64, position: usize) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let reader = run.readers.remove(position);
        run.delivered = true;
        let result = match &run.meta.outcome {
            Some(outcome) if outcome.gone => Err(gone()),
            _ => run.result().ok_or_else(|| {
                LaunchError::new(Code::Internal, "a run that has not ended has no result")
            }),
        };
        self.unfollow(reader.client, index);
        self.answer(reader.client, reader.request, result);
        self.forget_if_over(index);
    }

    /// Its ending cannot be known.
    pub(super) fn lost(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let name = (run.sandbox_id.clone(), run.id.clone());
        let sandbox = run.sandbox;
        if let Some(leaf) = &run.leaf {
            let _ = leaf.kill();
        }
        let readers = std::mem::take(&mut run.readers);
        let err = super::start::unknown(&name.1);
        self.remove_entry(index);
        self.unknown.insert(name);
        for reader in readers {
            self.unfollow(reader.client, index);
            self.answer(
                reader.client,
                reader.request,
                Err::<Nothing, _>(err.clone()),
            );
        }
        self.run_ended(sandbox);
    }

    /// `run.forget`, or room is needed.
    pub(super) fn forget(&mut self, index: u64) {
        if let Some(run) = self.runs.get_mut(&index) {
            let name = (run.sandbox_id.clone(), run.id.clone());
            run.meta.forgotten = true;
            self.run_ids.remove(&name);
            let _ = self.records.unmark_run(&name.0, &name.1);
            if let Some(s) = self.sandboxes.get_mut(&run.sandbox) {
                s.runs.remove(&name.1);
            }
            let over = run.over();
            if run.readers.is_empty() {
                for s in 0..2 {
                    run.streams[s].segment = None;
                }
            }
            if !over {
                self.keep_meta(index);
            }
        }
        self.forget_if_over(index);
    }

    /// A forgotten run stays for as long as something of it holds a pipe.
    pub(super) fn forget_if_over(&mut self, index: u64) {
        let gone = self
            .runs
            .get(&index)
            .is_some_and(|r| r.meta.forgotten && r.readers.is_empty() && r.over());
        if gone {
            self.remove_entry(index);
        }
    }

    /// Drops a run here, in the keeper and on disk.
    pub(super) fn remove_run(&mut self, index: u64) {
        if let Some(run) = self.runs.get(&index) {
            let _ = self.records.unmark_run(&run.sandbox_id, &run.id);
        }
        self.remove_entry(index);
    }

    /// Drops a run here and in the keeper.
    fn remove_entry(&mut self, index: u64) {
        let Some(run) = self.runs.remove(&index) else {
            return;
        };
        let key = run.key();
        if !run.meta.forgotten {
            self.run_ids
                .remove(&(run.sandbox_id.clone(), run.id.clone()));
            if let Some(s) = self.sandboxes.get_mut(&run.sandbox) {
                s.runs.remove(&run.id);
            }
        }
        if let Some(timer) = run.timer {
            self.timers.remove(&timer);
        }
        for stream in &run.streams {
            if let Some(pipe) = stream.pipe.as_ref().filter(|_| stream.watched) {
                self.unwatch(pipe.as_fd());
            }
        }
        let others = [&run.status, &run.emptied];
        for fd in others.into_iter().flatten() {
            self.unwatch(fd.as_fd());
        }
        if let Some(fd) = run.pidfd.as_ref().filter(|_| !run.adopted) {
            self.unwatch(fd.as_fd());
        }
        if let Some(feed) = &run.feed {
            self.unwatch(feed.pipe.as_fd());
        }
        if let Err(e) = self.link.del(&key, run.kept()) {
            warning!("keeper.del", error = e);
        }
    }

    /// The oldest results that were delivered make room.
    pub(super) fn drop_old_results(&mut self, sandbox: u64) {
        let Some(s) = self.sandboxes.get(&sandbox) else {
            return;
        };
        if s.runs.len() <= MAX_KEPT {
            return;
        }
        let runs = s.runs.values().filter_map(|i| Some((i, self.runs.get(i)?)));
        let mut done: Vec<(u64, u64)> = runs
            .filter(|(_, r)| r.done() && r.delivered && r.readers.is_empty())
            .map(|(i, r)| (r.meta.started_mono_ns, *i))
            .collect();
        if done.len() <= MAX_KEPT {
            return;
        }
        done.sort_unstable();
        for (_, index) in &done[..done.len() - MAX_KEPT] {
            self.forget(*index);
        }
    }

    /// A put was refused: the run is not safe in the keeper, so it is not to go on unseen.
    pub(super) fn keeper_refused(&mut self, key: &str) {
        if let Some(index) = self.run_by_key(key) {
            if let Some(run) = self.runs.get_mut(&index) {
                match &run.leaf {
                    Some(leaf) => drop(leaf.kill()),
                    // The refusal may be read before what the launch left for us.
                    None => run.meta.marked = Some((Cause::Killed, 0)),
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

    pub(super) fn hold_over(&mut self, index: u64) {
        if let Some(run) = self.runs.get_mut(&index) {
            run.hold = false;
        }
        self.watch_output(index);
    }
}

impl Run {
    /// Nothing of it is left to look after.
    fn over(&self) -> bool {
        self.done() && self.streams.iter().all(|s| s.pipe.is_none()) && self.leaf.is_none()
    }

    /// What the ending, the counters and what was noted before add up to.
    fn outcome(&self, ending: &Fallen, used: Option<RunUsage>, leftover: u64) -> Outcome {
        let ooms = used.map_or(0, since(|u| u.oom_kills, self.meta.base_oom));
        let pids = used.map_or(0, since(|u| u.pids_max_events, self.meta.base_pids));
        let mut limits_hit = Vec::new();
        if ooms > 0 {
            limits_hit.push("memory".to_owned());
        }
        if pids > 0 {
            limits_hit.push("pids".to_owned());
        }
        let dropped = |s: usize| {
            let kept = self.meta.head_bytes + self.meta.tail_bytes;
            self.streams[s].total > kept
        };
        if dropped(0) || dropped(1) {
            limits_hit.push("output".to_owned());
        }
        let usage = ResultUsage {
            user_us: used
                .map_or(0, since(|u| u.user_us, self.meta.base_user_us))
                .max(ending.user_us),
            system_us: used
                .map_or(0, since(|u| u.system_us, self.meta.base_system_us))
                .max(ending.system_us),
            max_rss_bytes: ending.max_rss_bytes,
            memory_peak_bytes: used.map_or(0, |u| u.memory_peak_bytes),
        };
        Outcome {
            exit_code: ending.code,
            signal: ending.signal,
            cause: cause(ending, self.meta.marked, ooms > 0),
            limits_hit,
            duration_ns: ending.at_ns.saturating_sub(self.meta.started_mono_ns),
            usage,
            leftover,
            totals: [self.streams[0].total, self.streams[1].total],
            gone: false,
            inline: [None, None],
        }
    }

    /// Small output moves into the outcome, which saves a descriptor here and in the keeper.
    fn inline_small(&mut self, s: usize) {
        let kept = self.meta.head_bytes + self.meta.tail_bytes;
        if self.streams[s].total > run::INLINE_MAX {
            return;
        }
        // A follower gets every byte, also what does not count for the result.
        if self.streams[s].total > kept && self.readers.iter().any(|r| r.stream) {
            return;
        }
        let Some(data) = self.whole_stream(s) else {
            return;
        };
        if let Some(outcome) = &mut self.meta.outcome {
            outcome.inline[s] = Some(data.into());
            self.streams[s].segment = None;
        }
    }

    fn result(&self) -> Option<RunResult> {
        let outcome = self.meta.outcome.as_ref()?;
        Some(RunResult {
            run: self.id.clone(),
            exit_code: outcome.exit_code,
            signal: outcome.signal,
            cause: outcome.cause,
            limits_hit: outcome.limits_hit.clone(),
            started_ns: self.meta.started_ns,
            duration_ns: outcome.duration_ns,
            streams: [self.stream_result(0), self.stream_result(1)],
            usage: outcome.usage,
            leftover: outcome.leftover,
        })
    }
}

pub(super) fn gone() -> LaunchError {
    LaunchError::new(Code::Gone, "the sandbox has ended")
}

/// What a counter has grown by.
fn since(counter: fn(RunUsage) -> u64, before: u64) -> impl Fn(RunUsage) -> u64 {
    move |used| counter(used).saturating_sub(before)
}

/// Why it ended. What was noted before a kill counts only if the kill is what ended it.
fn cause(ending: &Fallen, marked: Option<(Cause, i32)>, oom: bool) -> Cause {
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
