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
    /// Of a terminal's output: where it is put.
    pub relay: Option<Arc<OwnedFd>>,
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
    pub relay: Option<Arc<OwnedFd>>,
}

impl Copies {
    pub fn of(pipes: &Pipes) -> Self {
        Self {
            out: pipes.out.clone(),
            feed: pipes.feed.clone(),
            relay: pipes.relay.clone(),
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

/// What was cloned, and waits for its gate to open.
pub(super) struct Cloned {
    pub process: Process,
    gate: OwnedFd,
    pub leaf: Arc<dyn Leaf>,
    meta: Meta,
}

impl Cloned {
    /// Tells the keeper. Our copy of the gate goes with the end of this: a keeper that cannot take the run leaves
    /// it shut.
    pub fn keep(
        self,
        link: &Link,
        key: String,
        copies: &Copies,
        master: Option<BorrowedFd<'_>>,
    ) -> Result<Launched, Box<Failed>> {
        match self.put(link, key, copies, master) {
            Ok(()) => Ok(Launched {
                process: self.process,
                leaf: self.leaf,
                meta: self.meta,
                watched: false,
            }),
            Err(error) => Err(Box::new(Failed {
                cloned: self,
                error,
            })),
        }
    }

    fn put(
        &self,
        link: &Link,
        key: String,
        copies: &Copies,
        master: Option<BorrowedFd<'_>>,
    ) -> Result<(), LaunchError> {
        fail::at("run.cloned")?;
        let mut kept = vec![
            (run::STATUS, self.process.status.as_fd()),
            (run::PIDFD, self.process.pidfd.as_fd()),
        ];
        let pipes = copies.out.iter().map(|pipe| pipe.as_fd());
        kept.extend(run::PIPES.into_iter().zip(pipes));
        if let Some(feed) = &copies.feed {
            let pipe = feed.pipe.iter().map(|pipe| (run::STDIN_PIPE, pipe.as_fd()));
            kept.extend(pipe.chain([(run::STDIN_FILE, feed.file.as_fd())]));
        }
        kept.extend(master.map(|master| (run::MASTER, master)));
        let relay = copies.relay.iter();
        kept.extend(relay.map(|relay| (run::RELAY, relay.as_fd())));
        kept.push((run::GATE, self.gate.as_fd()));
        let (add, fds): (Vec<_>, Vec<_>) = kept.into_iter().unzip();
        let put = Put {
            key,
            meta: Some(run::encode(&self.meta)),
            pid: Some(self.process.pid),
            add: add.into_iter().map(str::to_owned).collect(),
            close: Vec::new(),
        };
        link.put(put, &fds).step("run.put_pid")?;
        fail::at("run.put_pid")
    }

    /// Ends and collects a process that was started but could not be noted. Waits for it.
    pub fn undo(self) {
        let (leaf, pidfd) = (self.leaf, self.process.pidfd);
        let _ = leaf.kill();
        let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
        let mut poll = [PollFd::new(&pidfd, PollFlags::IN)];
        let _ = rustix::event::poll(&mut poll, Some(&UNDO_WAIT));
        let _ = wait_child(Who::PidFd(pidfd.as_fd()), true);
        let _ = leaf.remove();
    }
}

/// It could not be noted.
pub(super) struct Failed {
    pub cloned: Cloned,
    pub error: LaunchError,
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
    pub fn carry_out(&self, leaf: TakenLeaf, meta: Meta) -> Result<Launched, LaunchError> {
        let cloned = self.clone_it(leaf, meta)?;
        let key = run::key(&self.plan.sandbox, &self.plan.run);
        cloned
            .keep(self.link, key, self.copies, None)
            .map_err(|failed| {
                failed.cloned.undo();
                failed.error
            })
    }

    /// Up to its gate.
    pub fn clone_it(&self, leaf: TakenLeaf, mut meta: Meta) -> Result<Cloned, LaunchError> {
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
        Ok(Cloned {
            process: Process { pid, pidfd, status },
            gate,
            leaf,
            meta,
        })
    }
}
