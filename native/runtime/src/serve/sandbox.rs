//! Sandboxes: made and released by worker threads, watched by the event loop.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use dsec_launch::launcher::IDS;
use dsec_launch::plan::Code;
use dsec_launch::{LaunchError, RunPolicy, SandboxPlan};
use dsec_sys::io::{wait_child, Who};
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Signal;

use super::making::create_in_worker;
use super::results::gone;
use super::run::FreeLeaf;
use super::{Server, Timer, Token};
use crate::backend::{Made, Place};
use crate::kproto::Fallen;
use crate::proto::{self, Cause, Id, Nothing, Reply, SandboxStatus};
use crate::record::{self, Exit, Record, Stage};
use crate::{fail, info, util, warning};

/// First of the user ids handed out, 65,536 to each sandbox. Far above what a host gives to people.
pub const UID_FIRST: u32 = 1 << 20;
/// From one range to the next. The kernel keeps its users in 128 lists, chosen by bits 0 to 6 of the id plus
/// bits 7 to 13: with multiples of 65,536 the roots of all sandboxes share one, which every change of ids goes
/// through (0.3 ms at 3,200). 128 ids left out between two ranges bring each root into the list after the last.
const UID_STEP: u32 = IDS + 128;
/// Above this, ids are negative to programs that take them for signed.
const UID_END: u32 = 1 << 31;
/// Ended sandboxes that are remembered.
const ENDED_KEPT: usize = 1024;
/// For a release: killing, and removing everything. A dying process may wait for a slow disk.
pub(super) const RELEASE_DEADLINE: Duration = Duration::from_secs(20);
/// How long a release waits for the end of the init before it tries all the same.
const INIT_WAIT: Timespec = Timespec {
    tv_sec: 5,
    tv_nsec: 0,
};
/// How often a release is tried before the caller is told.
const RELEASE_TRIES: u32 = 3;
/// Added to a plan's own deadline before the client is told that it passed.
const CREATE_SLACK_NS: u64 = 5_000_000_000;
/// Longest time a sandbox is given to end by itself.
const GRACE_MAX_MS: u64 = 600_000;
/// Longest set-up.
const DEADLINE_MAX_MS: u64 = 600_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Creating,
    Running,
    Stopping,
    Ended,
}

/// Who collects the ending of an init.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parent {
    Us,
    Keeper,
    /// An earlier keeper is dead too: only that it ended can be seen.
    Stranger,
}

pub struct Sandbox {
    pub record: Record,
    pub phase: Phase,
    pub place: Option<Arc<dyn Place>>,
    pub init: Option<Arc<OwnedFd>>,
    pub parent: Parent,
    pub init_ended: bool,
    pub runs: BTreeMap<String, u64>,
    /// Cgroups of runs that ended, ready for the next.
    pub free_leaves: Vec<FreeLeaf>,
    /// Number of the last one that was made.
    pub last_leaf: u64,
    /// Held by its runs.
    pub descriptors: u64,
    waiters: Vec<(u64, Id)>,
    stoppers: Vec<(u64, Id)>,
    exit: Exit,
    grace: Option<(u64, u64)>,
    released: bool,
    tries: u32,
}

impl Sandbox {
    pub fn new(record: Record, phase: Phase, parent: Parent) -> Self {
        let exit = record.exit.clone().unwrap_or(Exit {
            code: None,
            signal: None,
            oom: false,
            reason: "stopped".into(),
        });
        Self {
            record,
            phase,
            place: None,
            init: None,
            parent,
            init_ended: false,
            runs: BTreeMap::new(),
            free_leaves: Vec::new(),
            last_leaf: 0,
            descriptors: 0,
            waiters: Vec::new(),
            stoppers: Vec::new(),
            exit,
            grace: None,
            released: false,
            tries: 0,
        }
    }
}

/// The entry of an init in the keeper.
pub fn init_key(id: &str) -> String {
    format!("init/{id}")
}

impl Server {
    pub(super) fn sandbox_index(&self, id: &str) -> Result<u64, LaunchError> {
        self.sandbox_ids.get(id).copied().ok_or_else(|| {
            LaunchError::new(Code::NotFound, format!("no sandbox {id}")).with("id", id)
        })
    }

    /// The place of a sandbox that can be entered.
    pub(super) fn running_place(&self, index: u64) -> Result<Arc<dyn Place>, LaunchError> {
        let sandbox = self.sandboxes.get(&index);
        let place = sandbox
            .filter(|s| s.phase == Phase::Running)
            .and_then(|s| s.place.clone());
        place.ok_or_else(|| match sandbox.map(|s| s.phase) {
            Some(Phase::Creating) => LaunchError::new(Code::Conflict, "the sandbox is being made"),
            _ => gone(),
        })
    }

    pub(super) fn init_fd(&self, index: u64) -> Result<Arc<OwnedFd>, LaunchError> {
        self.sandboxes
            .get(&index)
            .and_then(|s| s.init.clone())
            .ok_or_else(gone)
    }

    pub(super) fn status(&self, index: u64) -> Result<SandboxStatus, LaunchError> {
        let s = self
            .sandboxes
            .get(&index)
            .ok_or_else(|| LaunchError::new(Code::NotFound, "no such sandbox"))?;
        let ended = s.phase == Phase::Ended;
        Ok(SandboxStatus {
            id: s.record.id.clone(),
            state: if ended { "ended" } else { "running" }.into(),
            init_pid: s.record.init_pid,
            started_ns: s.record.started_ns,
            uid_base: s.record.uid_base,
            upper_kind: s
                .record
                .upper
                .as_ref()
                .map_or("none", |u| u.kind.name())
                .into(),
            exit: s.record.exit.clone(),
            cgroup_id: s.record.cgroup_id,
            runs: self.live_runs(index).len() as u64,
        })
    }

    fn live_runs(&self, index: u64) -> Vec<u64> {
        let runs = self.sandboxes.get(&index).map(|s| s.runs.values());
        runs.into_iter()
            .flatten()
            .filter(|i| self.runs.get(i).is_some_and(|r| !r.done()))
            .copied()
            .collect()
    }

    /// The next free range of user ids. Going round, so that one is not used again at once.
    fn take_uid_base(&mut self) -> Result<u32, LaunchError> {
        let living = |s: &&Sandbox| s.phase != Phase::Ended;
        for _ in 0..(UID_END - UID_FIRST) / UID_STEP {
            let base = self.next_uid_base;
            let next = base + UID_STEP;
            let room = next + UID_STEP <= UID_END;
            self.next_uid_base = if room { next } else { UID_FIRST };
            let mut living = self.sandboxes.values().filter(living);
            // Also one that an earlier version gave, with other steps.
            if !living.any(|s| s.record.uid_base.abs_diff(base) < IDS) {
                return Ok(base);
            }
        }
        Err(LaunchError::new(Code::Limit, "no user ids left"))
    }

    pub(super) fn sandbox_create(&mut self, client: u64, id: Id, plan: SandboxPlan) {
        if let Err(err) = self.try_create(client, id, plan) {
            self.answer(client, id, Err::<Nothing, _>(err));
        }
    }

    fn try_create(&mut self, client: u64, id: Id, plan: SandboxPlan) -> Result<(), LaunchError> {
        proto::check_sandbox_id(&plan.id)?;
        if plan.deadline_ms == 0 || plan.deadline_ms > DEADLINE_MAX_MS {
            return Err(LaunchError::field(
                "deadline_ms",
                format!("1 to {DEADLINE_MAX_MS}"),
            ));
        }
        if self.sandbox_ids.contains_key(&plan.id) {
            return Err(
                LaunchError::new(Code::Exists, format!("there is a sandbox {}", plan.id))
                    .with("id", plan.id),
            );
        }
        let uid_base = self.take_uid_base()?;
        let record = Record {
            version: record::VERSION,
            id: plan.id.clone(),
            stage: Stage::Creating,
            uid_base,
            layers: plan.layers.clone(),
            policy: RunPolicy::of(&plan),
            upper: None,
            init_pid: 0,
            init_start: 0,
            started_ns: util::realtime_ns(),
            cgroup_id: 0,
            exit: None,
            ended_ns: 0,
        };
        let index = self.index();
        self.sandbox_ids.insert(plan.id.clone(), index);
        let sandbox = Sandbox::new(record.clone(), Phase::Creating, Parent::Us);
        self.sandboxes.insert(index, sandbox);
        let job = self.deadline(client, id, plan.deadline_ms * 1_000_000 + CREATE_SLACK_NS);
        let (backend, link) = (Arc::clone(&self.backend), Arc::clone(&self.link));
        let records = self.records.clone();
        self.workers.run(move || {
            let done = create_in_worker(&*backend, &link, &records, &plan, record);
            Box::new(move |server: &mut Server| server.created(index, job, client, id, done))
        });
        Ok(())
    }

    fn created(
        &mut self,
        index: u64,
        job: u64,
        client: u64,
        id: Id,
        done: Result<(Made, Record), LaunchError>,
    ) {
        let in_time = self.deadlines.remove(&job).is_some();
        let (made, record) = match done {
            Ok(done) => done,
            Err(err) => {
                let sandbox = self.sandboxes.remove(&index);
                if let Some(s) = sandbox {
                    self.sandbox_ids.remove(&s.record.id);
                    for (c, i) in s.waiters.into_iter().chain(s.stoppers) {
                        let err = LaunchError::new(Code::NotFound, "the sandbox was not made");
                        self.answer(c, i, Err::<Nothing, _>(err));
                    }
                }
                if in_time {
                    self.answer(client, id, Err::<Nothing, _>(err));
                }
                return;
            }
        };
        let init = Arc::new(made.init_pidfd);
        if let Err(e) = self.watch(init.as_fd(), Token::Init(index), EventFlags::IN) {
            warning!("sandbox.watch", error = e);
        }
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        s.record = record;
        s.place = Some(made.place);
        s.init = Some(init);
        s.phase = Phase::Running;
        let stop = !s.stoppers.is_empty() || !in_time;
        info!("sandbox.created", id = s.record.id, pid = made.init_pid);
        if in_time {
            let status = self.status(index);
            self.answer(client, id, status);
        }
        if stop {
            self.begin_stop(index, "stopped", 0);
        }
    }

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
            Phase::Stopping if grace_ms == 0 => self.grace_over(index),
            Phase::Stopping | Phase::Creating | Phase::Ended => {}
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

    /// From here on nothing can be started in it.
    pub(super) fn begin_stop(&mut self, index: u64, reason: &str, grace_ms: u64) {
        let live = self.live_runs(index);
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        s.phase = Phase::Stopping;
        s.exit.reason = reason.into();
        info!(
            "sandbox.stop",
            id = s.record.id,
            reason = reason,
            runs = live.len()
        );
        if grace_ms == 0 || live.is_empty() {
            return self.kill_sandbox(index);
        }
        for run in live {
            self.ends_with_sandbox(run);
            if let Err(e) = self.run_kill(run, Signal::TERM.as_raw(), Cause::Killed) {
                info!("sandbox.term", error = e);
            }
        }
        let span = grace_ms.min(GRACE_MAX_MS) * 1_000_000;
        let timer = self.at(util::monotonic_ns() + span, Timer::Grace(index));
        if let Some(s) = self.sandboxes.get_mut(&index) {
            s.grace = Some(timer);
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
        let Some(s) = self.sandboxes.get_mut(&index) else {
            return;
        };
        s.tries += 1;
        let Some(place) = s.place.clone() else {
            return self.released(index, false, Ok(()));
        };
        let init = s.init.clone();
        let network = init.as_ref().and_then(|init| place.network(init.as_fd()));
        if let Err(e) = place.kill() {
            warning!("sandbox.kill", id = s.record.id, error = e);
        }
        self.workers.run(move || {
            // An init ends last, so that its end says that nothing is left in the cgroups. What keeps it
            // alive for too long is the release's to tell.
            if let Some(init) = init {
                let mut poll = [PollFd::new(&*init, PollFlags::IN)];
                let _ = rustix::event::poll(&mut poll, Some(&INIT_WAIT));
            }
            // Asked before the counters go.
            let oom = place.oom_kills() > 0;
            let done = place
                .release(network, RELEASE_DEADLINE)
                .and_then(|()| fail::at("sandbox.released"));
            Box::new(move |server: &mut Server| server.released(index, oom, done))
        });
    }

    /// Unless it is being killed for a reason of its own.
    fn ends_with_sandbox(&mut self, run: u64) {
        if let Some(run) = self.runs.get_mut(&run) {
            run.meta.with_sandbox |= run.meta.marked.is_none();
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
            Parent::Us => match wait_child(Who::PidFd(init.as_fd()), true) {
                Ok(Some(e)) => Some((e.code, e.signal)),
                Ok(None) => return,
                Err(_) => None,
            },
            Parent::Keeper => return,
            Parent::Stranger => None,
        };
        self.unwatch(init.as_fd());
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
            s.exit.code = code;
            s.exit.signal = signal;
        }
        if s.phase == Phase::Running {
            self.begin_stop(index, "init_died", 0);
        } else {
            self.finish_if_quiet(index);
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
