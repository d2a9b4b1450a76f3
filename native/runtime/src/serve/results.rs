//! Results: put together, kept in the keeper, delivered, forgotten.

use std::os::fd::AsFd;

use dsec_launch::cgroup::RunUsage;
use dsec_launch::plan::Code;
use dsec_launch::LaunchError;

use super::ending::cause;
use super::moving::SPOOL;
use super::run::{self, Outcome, Reader, Run};
use super::Server;
use crate::kproto::{Fallen, Put};
use crate::proto::{Met, Nothing, ResultUsage, RunResult, StreamResult};
use crate::warning;

/// Results of one sandbox that are kept after they were delivered.
const MAX_KEPT: usize = 256;

impl Server {
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
    pub(super) fn keep_outcome(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let mut close: Vec<String> = Vec::new();
        for s in 0..run.meta.outputs() {
            run.inline_small(s);
            let stream = &mut run.streams[s];
            if stream.pipe.is_none() && std::mem::take(&mut stream.kept_pipe) {
                close.push(run::PIPES[s].to_owned());
            }
            if stream.segment.is_none() && std::mem::take(&mut stream.kept_segment) {
                close.push(run::SEGMENTS[s].to_owned());
            }
        }
        if run.meta.tty {
            close.extend([run::MASTER, run::RELAY].map(str::to_owned));
            run.kept_others = run.kept_others.saturating_sub(2);
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
    pub(super) fn deliver(
        &mut self,
        index: u64,
        position: usize,
        streams: [StreamResult; run::CONTROL],
    ) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let reader = run.readers.remove(position);
        run.delivered = true;
        let result = match &run.meta.outcome {
            Some(outcome) if outcome.gone => Err(gone()),
            _ => run.result(streams).ok_or_else(|| {
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
        let leaf = run.leaf_name().to_owned();
        let err = super::start::unknown(&name.1);
        // First: with a keeper named and no entry there it would be one that never began.
        self.mark_lost(&name, &leaf);
        self.remove_entry(index);
        self.unknown.insert(name);
        self.refuse(readers, index, &err);
        self.run_ended(sandbox);
    }

    /// There will be no result for those who wait for one.
    pub(super) fn refuse(&mut self, readers: Vec<Reader>, index: u64, err: &LaunchError) {
        for reader in readers {
            self.unfollow(reader.client, index);
            let answer = Err::<Nothing, _>(err.clone());
            self.answer(reader.client, reader.request, answer);
        }
    }

    /// On disk too a run is now one of which nothing is known.
    pub(super) fn mark_lost(&self, (sandbox, run): &(String, String), leaf: &str) {
        if let Err(e) = self.records.marks.mark(sandbox, run, leaf, "") {
            warning!("run.mark", run = run, error = e);
        }
    }

    /// `run.forget`, or room is needed.
    pub(super) fn forget(&mut self, index: u64) {
        if let Some(run) = self.runs.get_mut(&index) {
            let name = (run.sandbox_id.clone(), run.id.clone());
            run.meta.forgotten = true;
            self.run_ids.remove(&name);
            let _ = self.records.marks.unmark(&name.0, &name.1);
            if let Some(s) = self.sandboxes.get_mut(&run.sandbox) {
                s.runs.remove(&name.1);
            }
            let (over, close) = (run.over(), run.let_output_go());
            if !over {
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
        }
        self.forget_if_over(index);
    }

    /// A forgotten run stays for as long as something of it holds a pipe.
    pub(super) fn forget_if_over(&mut self, index: u64) {
        self.count_descriptors(index);
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
            let _ = self.records.marks.unmark(&run.sandbox_id, &run.id);
        }
        self.remove_entry(index);
    }

    /// Drops a run here and in the keeper.
    fn remove_entry(&mut self, index: u64) {
        let Some(mut run) = self.runs.remove(&index) else {
            return;
        };
        self.uncount_descriptors(&run);
        self.input_over(&mut run);
        let key = run.key();
        if !run.meta.forgotten {
            self.run_ids
                .remove(&(run.sandbox_id.clone(), run.id.clone()));
            if let Some(s) = self.sandboxes.get_mut(&run.sandbox) {
                s.runs.remove(&run.id);
            }
        }
        let unsettled = run.unsettled.as_ref().map(|u| u.timer);
        for timer in [run.timer, unsettled].into_iter().flatten() {
            self.timers.remove(&timer);
        }
        for s in 0..run::OUTPUTS {
            if let Some(source) = run.source(s).filter(|_| run.streams[s].watched) {
                self.unwatch(source.as_fd());
            }
        }
        if let Some(opening) = run.opening.take() {
            self.give_up(index, opening, None);
        }
        let others = [&run.status, &run.emptied];
        for fd in others.into_iter().flatten() {
            self.unwatch(fd.as_fd());
        }
        if let Some(fd) = &run.pidfd {
            self.unwatch(fd.as_fd());
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
}

impl Run {
    /// Nothing of it is left to look after.
    fn over(&self) -> bool {
        self.done() && self.streams.iter().all(|s| s.pipe.is_none()) && self.leaf.is_none()
    }

    /// What the ending, the counters and what was noted before add up to.
    pub(super) fn outcome(
        &self,
        ending: &Fallen,
        used: Option<RunUsage>,
        leftover: u64,
    ) -> Outcome {
        let ooms = used.map_or(0, since(|u| u.oom_kills, self.meta.base_oom));
        let limits_hit = self.limits_hit(used);
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
            cause: cause(ending, &self.meta, ooms > 0),
            limits_hit,
            duration_ns: ending.at_ns.saturating_sub(self.meta.started_mono_ns),
            usage,
            leftover,
            totals: self.streams[..self.meta.outputs()]
                .iter()
                .map(|s| s.total)
                .collect(),
            gone: false,
            inline: vec![None; self.meta.outputs()],
        }
    }

    pub(super) fn met(&self, used: Option<RunUsage>) -> Met {
        Met {
            memory: used.map_or(0, since(|u| u.oom_kills, self.meta.base_oom)),
            pids: used.map_or(0, since(|u| u.pids_max_events, self.meta.base_pids)),
        }
    }

    pub(super) fn limits_hit(&self, used: Option<RunUsage>) -> Vec<String> {
        let met = self.met(used);
        let mut limits_hit = Vec::new();
        if met.memory > 0 {
            limits_hit.push("memory".to_owned());
        }
        if met.pids > 0 {
            limits_hit.push("pids".to_owned());
        }
        let kept = self.meta.head_bytes + self.meta.tail_bytes;
        if self.streams[..run::CONTROL].iter().any(|s| s.total > kept) {
            limits_hit.push("output".to_owned());
        }
        if self.short() {
            limits_hit.push(SPOOL.to_owned());
        }
        limits_hit
    }

    /// Not all of its output was kept that should have been.
    fn short(&self) -> bool {
        self.streams[..run::CONTROL].iter().any(run::Stream::short)
    }

    /// Of a forgotten run nobody reads any more: what the keeper is to close, if the run stays.
    fn let_output_go(&mut self) -> Vec<String> {
        let mut close = Vec::new();
        if !self.readers.is_empty() || self.over() {
            return close;
        }
        for (s, stream) in self.streams.iter_mut().enumerate() {
            stream.segment = None;
            if std::mem::take(&mut stream.kept_segment) {
                close.push(run::SEGMENTS[s].to_owned());
            }
            if stream.disk.take().is_some_and(|disk| disk.kept_file) {
                close.push(run::SPOOLS[s].to_owned());
            }
        }
        close
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

    fn result(&self, streams: [StreamResult; run::CONTROL]) -> Option<RunResult> {
        let outcome = self.meta.outcome.as_ref()?;
        let mut limits_hit = outcome.limits_hit.clone();
        // It may have been seen since.
        if self.short() && !limits_hit.iter().any(|limit| limit == SPOOL) {
            limits_hit.push(SPOOL.to_owned());
        }
        Some(RunResult {
            run: self.id.clone(),
            exit_code: outcome.exit_code,
            signal: outcome.signal,
            cause: outcome.cause,
            limits_hit,
            started_ns: self.meta.started_ns,
            duration_ns: outcome.duration_ns,
            streams,
            usage: outcome.usage,
            leftover: outcome.leftover,
        })
    }
}

pub(super) fn gone() -> LaunchError {
    LaunchError::new(Code::Gone, "the sandbox has ended")
}

/// Of a run of which nothing is known any more, while something was fetched for it.
pub(super) fn forgotten() -> LaunchError {
    LaunchError::new(Code::NotFound, "the run was forgotten meanwhile")
}

/// What a counter has grown by.
pub(super) fn since(counter: fn(RunUsage) -> u64, before: u64) -> impl Fn(RunUsage) -> u64 {
    move |used| counter(used).saturating_sub(before)
}
