//! The launch of one run, on a thread of its own: a mark before it, everything of the run in the keeper right
//! after the clone, and only then the program begins.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use dsec_launch::cgroup::RunUsage;
use dsec_launch::launcher::Entered;
use dsec_launch::plan::Step;
use dsec_launch::{LaunchError, RunPlan};
use dsec_sys::io::{wait_child, Who};
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::link::Link;
use super::run::{self, Feed, FreeLeaf, Meta};
use super::Token;
use crate::backend::{Leaf, Place};
use crate::fail;
use crate::kproto::Put;
use crate::record::Records;

/// How long a killed process may take to go.
const UNDO_WAIT: Timespec = Timespec {
    tv_sec: 5,
    tv_nsec: 0,
};

/// The child's ends.
pub(super) struct Stdio(pub Vec<OwnedFd>);

/// Our ends.
pub(super) struct Pipes {
    pub out: Vec<Arc<OwnedFd>>,
    pub feed: Option<Feed>,
}

/// The cgroup of a run to be.
pub(super) enum TakenLeaf {
    New(String),
    Free(FreeLeaf),
}

impl TakenLeaf {
    pub fn name(&self) -> &str {
        match self {
            Self::New(name) => name,
            Self::Free(free) => &free.name,
        }
    }
}

/// Our ends of the pipes once more, for the message to the keeper.
pub(super) struct Copies {
    out: Vec<Arc<OwnedFd>>,
    feed: Option<Feed>,
}

impl Copies {
    pub fn of(pipes: &Pipes) -> Self {
        Self {
            out: pipes.out.clone(),
            feed: pipes.feed.clone(),
        }
    }
}

/// What there is of it once its gate is out of our hands.
pub(super) struct Process {
    pub pid: i32,
    pub pidfd: OwnedFd,
    pub status: OwnedFd,
}

pub(super) struct Launched {
    pub process: Process,
    pub leaf: Arc<dyn Leaf>,
    pub meta: Meta,
    /// The event loop will hear of its end.
    pub watched: bool,
}

impl Launched {
    pub fn watch(&mut self, index: u64, epoll: &OwnedFd) {
        let token = Token::Process(index).pack();
        let added = rustix::event::epoll::add(epoll, &self.process.pidfd, token, EventFlags::IN);
        self.watched = added.is_ok();
    }
}

/// All that a worker needs.
pub(super) struct Launch<'a> {
    pub plan: &'a RunPlan,
    pub stdio: &'a Stdio,
    pub copies: &'a Copies,
    pub place: &'a dyn Place,
    pub init: BorrowedFd<'a>,
    pub link: &'a Link,
    pub records: &'a Records,
    pub keeper: &'a str,
}

impl Launch<'_> {
    /// Marks the run, makes the cgroup if need be, starts the program, and tells the keeper all about it
    /// at once. The program begins when the keeper has it, by the keeper's hand: so a run that the keeper
    /// knows has begun, one that it does not know has not, and what is between dies with the runtime.
    /// The mark is for the day when the keeper is gone too.
    pub fn carry_out(&self, leaf: TakenLeaf, mut meta: Meta) -> Result<Launched, LaunchError> {
        self.records
            .marks
            .mark(&self.plan.sandbox, &self.plan.run, leaf.name(), self.keeper)
            .step("run.mark")?;
        fail::at("run.marked")?;
        let memory = self.plan.memory_cgroup;
        let (leaf, before) = match leaf {
            TakenLeaf::Free(free) => (free.leaf, free.used),
            TakenLeaf::New(name) => {
                let leaf = self.place.create_leaf(&name, memory)?;
                // Its own counters are new; the memory group may be the whole sandbox's.
                let before = if memory {
                    RunUsage::default()
                } else {
                    leaf.usage().unwrap_or_default()
                };
                (leaf, before)
            }
        };
        meta.base_oom = before.oom_kills;
        meta.base_user_us = before.user_us;
        meta.base_system_us = before.system_us;
        let fds: Vec<_> = self.stdio.0.iter().map(AsFd::as_fd).collect();
        let entered = match self.place.enter(self.plan, &fds, &*leaf, self.init) {
            Ok(entered) => entered,
            Err(err) => {
                let _ = leaf.kill();
                let _ = leaf.remove();
                return Err(err);
            }
        };
        let Entered {
            pid,
            pidfd,
            status,
            gate,
        } = entered;
        // Nothing of the program has happened yet, and entering a full sandbox counts as a refusal.
        meta.base_pids = leaf.pids_max_events();
        let process = Process { pid, pidfd, status };
        match self.keep(&meta, &process, gate) {
            Ok(()) => Ok(Launched {
                process,
                leaf,
                meta,
                watched: false,
            }),
            Err(err) => {
                undo(&*leaf, &process);
                Err(err)
            }
        }
    }

    /// Our copy of the gate goes with the end of this: a keeper that cannot take the run leaves it shut.
    fn keep(&self, meta: &Meta, process: &Process, gate: OwnedFd) -> Result<(), LaunchError> {
        fail::at("run.cloned")?;
        let mut fds = vec![process.status.as_fd(), process.pidfd.as_fd()];
        let mut add: Vec<String> = [run::STATUS, run::PIDFD].map(str::to_owned).into();
        for (name, pipe) in run::PIPES.iter().zip(&self.copies.out) {
            add.push((*name).to_owned());
            fds.push(pipe.as_fd());
        }
        if let Some(feed) = &self.copies.feed {
            add.extend([run::STDIN_PIPE, run::STDIN_FILE].map(str::to_owned));
            fds.extend([feed.pipe.as_fd(), feed.file.as_fd()]);
        }
        add.push(run::GATE.to_owned());
        fds.push(gate.as_fd());
        let put = Put {
            key: run::key(&self.plan.sandbox, &self.plan.run),
            meta: Some(run::encode(meta)),
            pid: Some(process.pid),
            add,
            close: Vec::new(),
        };
        self.link.put(put, &fds).step("run.put_pid")?;
        fail::at("run.put_pid")
    }
}

/// Ends and collects a process that was started but could not be noted.
fn undo(leaf: &dyn Leaf, process: &Process) {
    let _ = leaf.kill();
    let _ = rustix::process::pidfd_send_signal(&process.pidfd, rustix::process::Signal::KILL);
    let mut poll = [PollFd::new(&process.pidfd, PollFlags::IN)];
    let _ = rustix::event::poll(&mut poll, Some(&UNDO_WAIT));
    let _ = wait_child(Who::PidFd(process.pidfd.as_fd()), true);
    let _ = leaf.remove();
}
