//! Sandboxes: made by worker threads, watched by the event loop.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use dsec_launch::launcher::IDS;
use dsec_launch::plan::Code;
use dsec_launch::{LaunchError, RunPolicy, SandboxPlan};
use rustix::event::epoll::EventFlags;

use super::making::create_in_worker;
use super::results::gone;
use super::run::FreeLeaf;
use super::stuck::Lingering;
use super::{Server, Token};
use crate::backend::{Made, Place};
use crate::proto::{self, Id, Nothing, SandboxStatus};
use crate::record::{self, Exit, Record, Stage};
use crate::{info, util, warning};

/// First of the user ids handed out, 65,536 to each sandbox. Far above what a host gives to people.
pub const UID_FIRST: u32 = 1 << 20;
/// From one range to the next. The kernel keeps its users in 128 lists, chosen by bits 0 to 6 of the id plus
/// bits 7 to 13: with multiples of 65,536 the roots of all sandboxes share one, which every change of ids goes
/// through (0.3 ms at 3,200). 128 ids left out between two ranges bring each root into the list after the last.
const UID_STEP: u32 = IDS + 128;
/// Above this, ids are negative to programs that take them for signed.
const UID_END: u32 = 1 << 31;
/// Added to a plan's own deadline before the client is told that it passed.
const CREATE_SLACK_NS: u64 = 5_000_000_000;
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
    pub(super) waiters: Vec<(u64, Id)>,
    pub(super) stoppers: Vec<(u64, Id)>,
    pub(super) exit: Exit,
    pub(super) grace: Option<(u64, u64)>,
    pub(super) released: bool,
    pub(super) tries: u32,
    /// All of it was killed, and something does not die.
    pub(super) lingering: Option<Lingering>,
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
            lingering: None,
        }
    }

    /// How its init ended.
    pub fn knows(&mut self, code: Option<i32>, signal: Option<i32>) {
        self.exit.code = code;
        self.exit.signal = signal;
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

    pub(super) fn live_runs(&self, index: u64) -> Vec<u64> {
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
            ending: None,
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
}
