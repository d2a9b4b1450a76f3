//! The launch of one run, on a thread of its own: a mark before it, everything of the run in the keeper right
//! after the clone.

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
pub(super) struct Stdio {
    pub stdin: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

/// Our ends.
pub(super) struct Pipes {
    pub out: [Arc<OwnedFd>; 2],
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
    out: [Arc<OwnedFd>; 2],
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

pub(super) struct Launched {
    pub entered: Entered,
    pub leaf: Arc<dyn Leaf>,
    pub meta: Meta,
    /// The event loop will hear of its end.
    pub watched: bool,
}

impl Launched {
    pub fn watch(&mut self, index: u64, epoll: &OwnedFd) {
        let token = Token::Process(index).pack();
        let added = rustix::event::epoll::add(epoll, &self.entered.pidfd, token, EventFlags::IN);
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
}

impl Launch<'_> {
    /// Marks the run, makes the cgroup if need be, starts the program, and tells the keeper all about it
    /// at once. One message is enough: until it is sent the mark says that the ending would not be known.
    /// The mark comes last before the start: a run that died waiting for its turn was never launched.
    pub fn carry_out(&self, leaf: TakenLeaf, mut meta: Meta) -> Result<Launched, LaunchError> {
        self.records
            .marks
            .mark(&self.plan.sandbox, &self.plan.run, leaf.name())
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
        meta.base_pids = leaf.pids_max_events();
        let fds = [
            self.stdio.stdin.as_fd(),
            self.stdio.stdout.as_fd(),
            self.stdio.stderr.as_fd(),
        ];
        let entered = match self.place.enter(self.plan, fds, &*leaf, self.init) {
            Ok(entered) => entered,
            Err(err) => {
                let _ = leaf.kill();
                let _ = leaf.remove();
                return Err(err);
            }
        };
        match self.keep(&meta, &entered) {
            Ok(()) => Ok(Launched {
                entered,
                leaf,
                meta,
                watched: false,
            }),
            Err(err) => {
                undo(&*leaf, &entered);
                Err(err)
            }
        }
    }

    fn keep(&self, meta: &Meta, entered: &Entered) -> Result<(), LaunchError> {
        fail::at("run.cloned")?;
        let names = [run::PIPES[0], run::PIPES[1], run::STATUS, run::PIDFD];
        let [out, err] = &self.copies.out;
        let mut fds = vec![
            out.as_fd(),
            err.as_fd(),
            entered.status.as_fd(),
            entered.pidfd.as_fd(),
        ];
        let mut add: Vec<String> = names.map(str::to_owned).into();
        if let Some(feed) = &self.copies.feed {
            add.extend([run::STDIN_PIPE, run::STDIN_FILE].map(str::to_owned));
            fds.extend([feed.pipe.as_fd(), feed.file.as_fd()]);
        }
        let put = Put {
            key: run::key(&self.plan.sandbox, &self.plan.run),
            meta: Some(run::encode(meta)),
            pid: Some(entered.pid),
            add,
            close: Vec::new(),
        };
        self.link.put(put, &fds).step("run.put_pid")?;
        fail::at("run.put_pid")
    }
}

/// Ends and collects a process that was started but could not be noted.
fn undo(leaf: &dyn Leaf, entered: &Entered) {
    let _ = leaf.kill();
    let _ = rustix::process::pidfd_send_signal(&entered.pidfd, rustix::process::Signal::KILL);
    let mut poll = [PollFd::new(&entered.pidfd, PollFlags::IN)];
    let _ = rustix::event::poll(&mut poll, Some(&UNDO_WAIT));
    let _ = wait_child(Who::PidFd(entered.pidfd.as_fd()), true);
    let _ = leaf.remove();
}
