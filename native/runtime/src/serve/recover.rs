//! What an earlier runtime, or an earlier keeper, has left: found again, or ended cleanly.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::EventFlags;
use rustix::process::{pidfd_open, Pid, PidfdFlags};

use super::link::Held;
use super::run::{self, Feed, Meta, Run, Stream};
use super::sandbox::{init_key, Parent, Phase, Sandbox};
use super::spool::OnDisk;
use super::stopping::INIT_DIED;
use super::terminals::Terminal;
use super::{Server, Timer, Token};
use crate::record::{Record, Stage};
use crate::{info, util, warning};

/// For what is to be removed before anything new is made.
const CLEAN_DEADLINE: Duration = Duration::from_secs(20);
/// A follower of the earlier runtime has this long to come back before its run falls back to capture.
const HOLD_NS: u64 = 10_000_000_000;

impl Server {
    pub(super) fn recover(&mut self, items: Vec<(String, Held)>) -> io::Result<()> {
        let (mut inits, mut runs) = (Vec::new(), Vec::new());
        for (key, held) in items {
            if key.starts_with("init/") {
                inits.push((key, held));
            } else {
                runs.push((key, held));
            }
        }
        let (records, broken) = self.records.load()?;
        for name in broken {
            // What it named is a stranger below, and is removed as one.
            warning!("recover.record", name = name);
            let _ = self.records.remove(&name);
        }
        let mut ended = Vec::new();
        for record in records {
            let key = init_key(&record.id);
            let at = inits.iter().position(|(k, _)| *k == key);
            let held = at.map(|i| inits.swap_remove(i).1);
            self.recover_sandbox(record, held, &mut ended);
        }
        for (key, held) in inits {
            let _ = self.link.del(&key, held.fds.len() as u64);
        }
        ended.sort_unstable();
        for (_, index) in ended {
            self.remember_ended(index);
        }
        let mut broken = HashMap::new();
        for (key, held) in runs {
            if let Some(fds) = self.recover_run(&key, held) {
                broken.insert(key, fds);
            }
        }
        self.recover_marks(&broken)?;
        for (key, fds) in broken {
            let _ = self.link.del(&key, fds);
        }
        self.remove_strangers();
        self.end_what_died();
        Ok(())
    }

    fn recover_sandbox(&mut self, record: Record, held: Option<Held>, ended: &mut Vec<(u64, u64)>) {
        match record.stage {
            Stage::Creating => {
                info!("recover.half_made", id = record.id);
                if let Err(e) = self.backend.remove(&record, CLEAN_DEADLINE) {
                    // The record stays, so that the next runtime tries again.
                    warning!("recover.remove", id = record.id, error = e);
                    return;
                }
                let _ = self.records.remove(&record.id);
                if let Some(held) = held {
                    let _ = self.link.del(&init_key(&record.id), held.fds.len() as u64);
                }
            }
            Stage::Ended => {
                if let Some(held) = held {
                    let _ = self.link.del(&init_key(&record.id), held.fds.len() as u64);
                }
                let ended_ns = record.ended_ns;
                let sandbox = Sandbox::new(record, Phase::Ended, Parent::Stranger);
                let index = self.add_sandbox(sandbox);
                ended.push((ended_ns, index));
            }
            Stage::Running => self.recover_running(record, held),
        }
    }

    fn add_sandbox(&mut self, sandbox: Sandbox) -> u64 {
        let index = self.index();
        self.sandbox_ids.insert(sandbox.record.id.clone(), index);
        self.sandboxes.insert(index, sandbox);
        index
    }

    fn recover_running(&mut self, record: Record, held: Option<Held>) {
        let parent = if held.is_some() {
            Parent::Keeper
        } else {
            Parent::Stranger
        };
        let place = self.backend.find(&record);
        let mut sandbox = Sandbox::new(record, Phase::Running, parent);
        let ending = held.as_ref().and_then(|h| h.ending);
        sandbox.init = held
            .and_then(|mut h| h.fds.remove(run::PIDFD))
            .or_else(|| find_process(&sandbox.record))
            .map(Arc::new);
        match place {
            Ok(place) => sandbox.place = Some(place),
            Err(e) => info!("recover.find", id = sandbox.record.id, error = e),
        }
        let record = &sandbox.record;
        sandbox.init_ended = ending.is_some() || !util::alive(record.init_pid, record.init_start);
        info!(
            "recover.sandbox",
            id = record.id,
            ended = sandbox.init_ended
        );
        let index = self.add_sandbox(sandbox);
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        if let Some(e) = ending {
            // Noted now, acted upon when the runs are known too.
            s.knows(e.code, e.signal);
            let id = s.record.id.clone();
            info!("recover.init_ended", id = id, code = e.code.unwrap_or(-1));
        }
        if s.parent == Parent::Stranger && !s.init_ended {
            if let Some(init) = s.init.clone() {
                if let Err(e) = self.watch(init.as_fd(), Token::Init(index), EventFlags::IN) {
                    warning!("recover.watch", error = e);
                }
            }
        }
    }

    /// How many descriptors the entry has if nothing can be made of it.
    fn recover_run(&mut self, key: &str, mut held: Held) -> Option<u64> {
        let name = key
            .strip_prefix("run/")
            .and_then(|k| k.split_once('/'))
            .map(|(s, r)| (s.to_owned(), r.to_owned()));
        let meta: Option<Meta> = rmp_serde::from_slice(&held.meta).ok();
        let sandbox = name.as_ref().and_then(|(s, _)| self.sandbox_ids.get(s));
        let sandbox = sandbox.copied().filter(|i| {
            self.sandboxes
                .get(i)
                .is_some_and(|s| s.phase != Phase::Ended)
        });
        let (Some((sandbox_id, id)), Some(meta), Some(sandbox)) = (name, meta, sandbox) else {
            info!("recover.drop_run", key = key);
            return Some(held.fds.len() as u64);
        };
        let place = self.sandboxes.get(&sandbox).and_then(|s| s.place.clone());
        // One that has ended for good with nothing left in it may serve another run by now.
        let empty = meta.outcome.as_ref().is_some_and(|o| o.leftover == 0);
        let name = if meta.leaf.is_empty() {
            &id
        } else {
            &meta.leaf
        };
        let leaf = place.filter(|_| !empty).and_then(|p| p.find_leaf(name));
        let mut stream = |s: usize| -> Stream {
            let pipe = held.fds.remove(run::PIPES[s]).map(Arc::new);
            let segment = held.fds.remove(run::SEGMENTS[s]).map(Arc::new);
            let file = held.fds.remove(run::SPOOLS[s]).map(Arc::new);
            let disk = meta.on_disk.then(|| OnDisk {
                kept_file: file.is_some(),
                file,
                ..OnDisk::default()
            });
            let mut stream = Stream {
                disk,
                kept_pipe: pipe.is_some(),
                kept_segment: segment.is_some(),
                pipe,
                segment,
                ..Stream::default()
            };
            if let Err(e) = stream.recovered(&meta, s) {
                warning!("recover.segment", key = key, error = e);
            }
            stream
        };
        let streams = std::array::from_fn(&mut stream);
        let kept_others = held.fds.len() as u64;
        let terminal = held
            .fds
            .remove(run::MASTER)
            .zip(held.fds.remove(run::RELAY))
            .map(|(master, relay)| Terminal::new(master, Arc::new(relay)));
        let pipe = held.fds.remove(run::STDIN_PIPE);
        let file = held.fds.remove(run::STDIN_FILE);
        let feed = match &terminal {
            Some(terminal) => file.and_then(|file| terminal.feed(file).ok()),
            None => pipe.zip(file).map(|(pipe, file)| Feed::new(pipe, file)),
        };
        let fed = feed.as_ref().and_then(|f| rustix::fs::fstat(&f.file).ok());
        let fed = fed.map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
        let status = held.fds.remove(run::STATUS);
        let mut run = Run {
            sandbox,
            sandbox_id,
            id,
            leaf,
            spent: None,
            pid: held.pid,
            pidfd: held.fds.remove(run::PIDFD),
            adopted: true,
            exec_done: status.is_none(),
            ending: false,
            status,
            streams,
            barriers: VecDeque::new(),
            opening: None,
            terminal,
            feed,
            fed,
            senders: Vec::new(),
            readers: Vec::new(),
            // A result that was on its way may not have arrived.
            delivered: false,
            timer: None,
            unsettled: None,
            hold: meta.streamed && meta.outcome.is_none(),
            emptied: None,
            dying: None,
            held: 0,
            killed_ns: None,
            failure: None,
            kept_others,
            counted: 0,
            meta,
        };
        run.set_barrier();
        self.add_run(run, held.ending);
        None
    }

    fn add_run(&mut self, run: Run, ending: Option<crate::kproto::Fallen>) {
        let index = self.index();
        if !run.meta.forgotten {
            self.run_ids
                .insert((run.sandbox_id.clone(), run.id.clone()), index);
            if let Some(s) = self.sandboxes.get_mut(&run.sandbox) {
                s.runs.insert(run.id.clone(), index);
            }
        }
        let (launched, done, hold) = (run.pid.is_some(), run.done(), run.hold);
        let marked = run.meta.marked.is_some();
        self.runs.insert(index, run);
        self.count_descriptors(index);
        if !launched && !done {
            // Something was to be noted before it was cloned. With a kill among it, asked for and promised,
            // it must not be sent again.
            if marked {
                return self.lost(index);
            }
            return self.remove_run(index);
        }
        if let Err(e) = self.watch_run(index, true) {
            warning!("recover.watch", error = e);
        }
        self.spool_all(index);
        if done {
            self.tree_emptied(index);
            return self.forget_if_over(index);
        }
        self.arm_timeout(index);
        if hold {
            let when = util::monotonic_ns() + HOLD_NS;
            self.at(when, Timer::Hold(index));
        }
        if let Some(ending) = ending {
            self.end_run(index, ending, false);
        } else if marked {
            // The mark was noted; the kill may not have happened.
            self.kill_again(index);
        }
    }

    fn kill_again(&mut self, index: u64) {
        let signal = self
            .runs
            .get(&index)
            .and_then(|r| r.meta.marked)
            .map(|(_, signal)| signal);
        if signal == Some(0) {
            self.kill_tree(index);
        }
    }

    /// A mark without an entry: the run was being launched when the runtime died and was not let begin,
    /// or the keeper that knew it is gone.
    fn recover_marks(&mut self, broken: &HashMap<String, u64>) -> io::Result<()> {
        let used = self.used_leaves();
        for mark in self.records.marks.all()? {
            let (name, leaf) = ((mark.sandbox, mark.run), mark.leaf);
            self.never_again(&name.0, &leaf);
            if self.run_ids.contains_key(&name) || self.unknown.contains(&name) {
                continue;
            }
            let place = self
                .sandbox_ids
                .get(&name.0)
                .and_then(|i| self.sandboxes.get(i))
                .filter(|s| s.phase != Phase::Ended)
                .map(|s| s.place.clone());
            let Some(place) = place else {
                let _ = self.records.marks.unmark(&name.0, &name.1);
                continue;
            };
            // The mark of a lost run may be old, and its cgroup another's by now.
            let place = place.filter(|_| !used.contains(&(name.0.clone(), leaf.clone())));
            if let Some(found) = place.and_then(|p| p.find_leaf(&leaf)) {
                let _ = found.kill();
            }
            let certain = mark.keeper == self.instance;
            if certain && !broken.contains_key(&run::key(&name.0, &name.1)) {
                info!("recover.not_begun", sandbox = name.0, run = name.1);
                let _ = self.records.marks.unmark(&name.0, &name.1);
                continue;
            }
            info!("recover.unknown", sandbox = name.0, run = name.1);
            self.mark_lost(&name, &leaf);
            self.unknown.insert(name);
        }
        self.recover_leaves(&used);
        self.recover_helpers();
        Ok(())
    }

    /// No new cgroup gets the name of one that a mark has: at the next recovery it would be killed for it.
    fn never_again(&mut self, sandbox: &str, leaf: &str) {
        let index = self.sandbox_ids.get(sandbox);
        if let Some(s) = index.and_then(|i| self.sandboxes.get_mut(i)) {
            s.last_leaf = s.last_leaf.max(leaf.parse().unwrap_or(0));
        }
    }

    /// (sandbox, cgroup) of every run that is not over, and of those whose ending was known already and who
    /// have left theirs for the next: whatever is cloned into one that was once killed dies.
    fn used_leaves(&self) -> HashSet<(String, String)> {
        let runs = self.runs.values().filter(|r| r.leaf.is_some());
        let runs = runs.map(|r| (r.sandbox_id.clone(), r.leaf_name().to_owned()));
        let free = self.sandboxes.values().flat_map(|s| {
            let names = s.free_leaves.iter().map(|free| free.name.clone());
            names.map(|name| (s.record.id.clone(), name))
        });
        runs.chain(free).collect()
    }

    /// Removes the cgroups that no run uses, of unknown runs or kept for the next, and sees to it that no
    /// new one gets the name of one that is there: a process may be left in it.
    fn recover_leaves(&mut self, used: &HashSet<(String, String)>) {
        for s in self.sandboxes.values_mut() {
            let Some(place) = &s.place else { continue };
            for leaf in place.leaves().unwrap_or_default() {
                s.last_leaf = s.last_leaf.max(leaf.parse().unwrap_or(0));
                let name = (s.record.id.clone(), leaf);
                if used.contains(&name) {
                    continue;
                }
                if let Some(leaf) = place.find_leaf(&name.1) {
                    let _ = leaf.remove();
                }
            }
        }
    }

    /// What belongs to no record: half made or half removed by someone who died.
    fn remove_strangers(&self) {
        let live = self.sandboxes.values().filter(|s| s.phase != Phase::Ended);
        let known: Vec<String> = live.map(|s| s.record.id.clone()).collect();
        match self.backend.remove_strangers(&known, CLEAN_DEADLINE) {
            Ok(removed) => {
                for what in removed {
                    info!("recover.removed", what = what);
                }
            }
            Err(e) => warning!("recover.strangers", error = e),
        }
    }

    /// What was being ended goes on ending; what ended meanwhile is released.
    fn end_what_died(&mut self) {
        let running = self
            .sandboxes
            .iter()
            .filter(|(_, s)| s.phase == Phase::Running);
        let over = running.filter(|(_, s)| s.init_ended || s.record.ending.is_some());
        let over: Vec<(u64, bool, bool)> = over
            .map(|(i, s)| (*i, s.record.ending.is_some(), s.parent == Parent::Keeper))
            .collect();
        for (index, ending, seen) in over {
            if ending {
                self.end_sandbox(index);
            } else {
                self.begin_stop(index, if seen { INIT_DIED } else { "lost" }, 0);
            }
        }
    }
}

/// The init of a record, if it is still that process.
fn find_process(record: &Record) -> Option<OwnedFd> {
    let pid = Pid::from_raw(record.init_pid)?;
    let fd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    // Asked after opening: the descriptor and the start time are of the same process.
    util::alive(record.init_pid, record.init_start).then_some(fd)
}
