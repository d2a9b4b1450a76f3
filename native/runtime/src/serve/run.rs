//! A run and what of it is in the keeper.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

use dsec_launch::cgroup::RunUsage;
use dsec_launch::LaunchError;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use super::input::Sender;
use super::kept::Piece;
use super::spool::OnDisk;
use super::terminals::{Opening, Terminal};
use crate::backend::Leaf;
use crate::kproto::Fallen;
use crate::proto::{Cause, Id, ResultUsage};

/// Standard output, standard error, and what is told beside them.
pub const OUTPUTS: usize = 3;
/// The third.
pub const CONTROL: usize = 2;

/// Names of a run's descriptors in the keeper.
pub const PIPES: [&str; OUTPUTS] = ["o1", "o2", "o3"];
pub const SEGMENTS: [&str; OUTPUTS] = ["s1", "s2", "s3"];
pub const SPOOLS: [&str; OUTPUTS] = ["d1", "d2", "d3"];
pub const STDIN_PIPE: &str = "in";
/// The terminal's.
pub const MASTER: &str = "tm";
/// What its output is put into, to be read from the first output's pipe.
pub const RELAY: &str = "rw";
pub const STDIN_FILE: &str = "inf";
pub const STATUS: &str = "st";
pub const PIDFD: &str = "pf";
/// Not kept: the keeper opens it once it has the rest.
pub use crate::kproto::GATE;

/// Output up to this size is kept with the result itself instead of in a descriptor.
pub const INLINE_MAX: u64 = 4 << 10;

pub const META_VERSION: u32 = 1;

/// What stands for a signal in `Meta::signals`.
pub fn signal_bit(signal: i32) -> u64 {
    u32::try_from(signal - 1)
        .ok()
        .and_then(|n| 1u64.checked_shl(n))
        .unwrap_or(0)
}

/// Kept by the keeper with the descriptors: what a new runtime needs to carry on.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Meta {
    pub version: u32,
    pub started_ns: u64,
    pub started_mono_ns: u64,
    pub timeout_ms: u64,
    pub head_bytes: u64,
    pub tail_bytes: u64,
    /// The cgroup it runs in. Empty: an earlier version, which named it after the run.
    #[serde(default)]
    pub leaf: String,
    /// Counters before the run, to tell what happened during it.
    pub base_oom: u64,
    pub base_pids: u64,
    #[serde(default)]
    pub base_user_us: u64,
    #[serde(default)]
    pub base_system_us: u64,
    /// The cause it was killed for, and the signal (0: the whole tree), noted before the kill.
    pub marked: Option<(Cause, i32)>,
    /// Every signal it was sent on request, a bit for each.
    #[serde(default)]
    pub signals: u64,
    /// That kill is the end of its sandbox: it has no result of its own then.
    #[serde(default)]
    pub with_sandbox: bool,
    pub outcome: Option<Outcome>,
    /// Someone followed its output as it came: after a restart nothing is dropped until they are back.
    pub streamed: bool,
    /// The client does not want the result any more; only a leftover's pipe is still drained.
    pub forgotten: bool,
    /// More standard input may come.
    #[serde(default)]
    pub stdin_open: bool,
    /// So many of the newest bytes can be read, beside the tail of the result.
    #[serde(default)]
    pub spool_bytes: u64,
    /// The ring on the disk has room for so much more: a follower is behind by what is kept, and by a pipe that was
    /// taken whole. A run of an earlier version has none, and its ring is as it was.
    #[serde(default)]
    pub slack_bytes: u64,
    /// They are on the disk, but for the newest.
    #[serde(default)]
    pub on_disk: bool,
    /// Where what is on the disk of an output ends, if the disk has failed.
    #[serde(default)]
    pub spool_ends: [Option<u64>; OUTPUTS],
    /// It has a terminal.
    #[serde(default)]
    pub tty: bool,
    /// It has a third output.
    #[serde(default)]
    pub control: bool,
    /// The newest fence.
    #[serde(default)]
    pub fence: u64,
}

impl Meta {
    /// Whether a signal was sent on request.
    pub fn was_sent(&self, signal: i32) -> bool {
        // An earlier version noted the last one alone.
        self.signals & signal_bit(signal) != 0 || matches!(self.marked, Some((_, s)) if s == signal)
    }

    pub fn kept_tail(&self) -> u64 {
        self.tail_bytes.max(self.spool_bytes)
    }

    pub fn outputs(&self) -> usize {
        if self.control {
            OUTPUTS
        } else {
            CONTROL
        }
    }
}

/// The final state, noted before the process is reaped.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub cause: Cause,
    pub limits_hit: Vec<String>,
    pub duration_ns: u64,
    pub usage: ResultUsage,
    pub leftover: u64,
    /// As many as it has outputs.
    pub totals: Vec<u64>,
    /// It was ended by the end of its sandbox: there is no result.
    #[serde(default)]
    pub gone: bool,
    /// Whole output of a stream when it is small; otherwise it is in the segment.
    pub inline: Vec<Option<ByteBuf>>,
}

impl Outcome {
    pub fn total(&self, s: usize) -> u64 {
        self.totals.get(s).copied().unwrap_or(0)
    }

    pub fn inline(&self, s: usize) -> Option<&ByteBuf> {
        self.inline.get(s)?.as_ref()
    }
}

/// Bytes of the third output up to an offset were said after so many of the other two.
#[derive(Debug, Clone, Copy)]
pub struct Barrier {
    pub end: u64,
    pub after: [u64; 2],
}

/// One of the outputs.
#[derive(Debug, Default)]
pub struct Stream {
    /// Shared with the launch, which hands a copy to the keeper.
    pub pipe: Option<Arc<OwnedFd>>,
    /// Whether the pipe is watched. Not watching means taking it out of epoll: a pipe whose writers are
    /// gone reports that even when nothing was asked for.
    pub watched: bool,
    /// The run has ended, and what it left behind writes in small pieces: not looked at for a moment.
    pub resting: bool,
    /// Holds everything that has left the pipe at its own offset; the middle may be a hole, and what was moved to
    /// the disk is one.
    pub segment: Option<Arc<OwnedFd>>,
    /// What was moved; None: everything stays in memory.
    pub disk: Option<OnDisk>,
    pub total: u64,
    /// The pipe was found full, and was made larger.
    pub wide: bool,
    /// End of the hole, which starts at the end of the head. On the disk it is nothing that was written over.
    pub hole_end: u64,
    /// The descriptors in the keeper.
    pub kept_pipe: bool,
    pub kept_segment: bool,
}

/// What is on the disk, for a follower who is to have it next.
#[derive(Debug, Default)]
pub enum Fetched {
    #[default]
    Nothing,
    /// It is being read.
    Busy,
    Ready(Piece, Vec<u8>),
}

/// Someone who waits for a run.
#[derive(Debug)]
pub struct Reader {
    pub client: u64,
    pub request: Id,
    /// Wants `out` events.
    pub stream: bool,
    /// Rather misses some than holds the program back.
    pub lossy: bool,
    pub pos: [u64; OUTPUTS],
    pub credit: u64,
    pub fetched: Fetched,
    pub told_started: bool,
}

/// Standard input that did not fit the pipe at once, or is open.
#[derive(Debug, Clone)]
pub struct Feed {
    /// A pipe, or a master; that of a terminal to be is not here yet.
    pub pipe: Option<Arc<OwnedFd>>,
    pub file: Arc<OwnedFd>,
    /// It goes to a terminal.
    pub tty: bool,
    /// Given since nothing waited to be read in the terminal.
    pub ahead: u64,
    /// The terminal takes no more: when it is tried again, and how long that is after the last time.
    pub retry: Option<((u64, u64), u64)>,
    /// The pipe is watched; if idle, for the end of its last reader only.
    pub watched: bool,
    pub idle: bool,
    /// Up to here the memory of the file was given back.
    pub hole_end: u64,
}

impl Feed {
    pub fn new(pipe: OwnedFd, file: OwnedFd) -> Self {
        Self {
            pipe: Some(Arc::new(pipe)),
            tty: false,
            ..Self::of_terminal(None, file)
        }
    }

    pub fn of_terminal(master: Option<OwnedFd>, file: OwnedFd) -> Self {
        Self {
            pipe: master.map(Arc::new),
            file: Arc::new(file),
            tty: true,
            ahead: 0,
            retry: None,
            watched: false,
            idle: false,
            hole_end: 0,
        }
    }

    /// What of it is in the keeper; a master is the terminal's own there.
    pub fn kept(&self) -> &'static [&'static str] {
        if self.tty {
            &[STDIN_FILE]
        } else {
            &[STDIN_PIPE, STDIN_FILE]
        }
    }
}

/// A cgroup that can serve the next run: empty, and what its counters say.
#[derive(Clone)]
pub struct FreeLeaf {
    pub name: String,
    pub leaf: Arc<dyn Leaf>,
    pub used: RunUsage,
}

/// A run that was killed and whose process has ended, while the rest of its tree is dying.
pub struct Dying {
    pub ending: Fallen,
    pub reap: bool,
}

/// A run that is only just being started: of its descriptors none but the pidfd is watched, and the event
/// loop is not woken to hear that it was launched.
pub struct Unsettled {
    /// When that ends.
    pub timer: (u64, u64),
    /// Set when it ends before the launch does.
    pub awaited: Arc<AtomicBool>,
}

pub struct Run {
    pub sandbox: u64,
    pub sandbox_id: String,
    pub id: String,
    pub meta: Meta,
    pub leaf: Option<Arc<dyn Leaf>>,
    /// The leaf's counters at the end, while it can serve again: nothing was left in it.
    pub spent: Option<RunUsage>,
    pub pid: Option<i32>,
    pub pidfd: Option<OwnedFd>,
    /// It fell to the keeper, which reaps it and tells.
    pub adopted: bool,
    pub status: Option<OwnedFd>,
    pub exec_done: bool,
    /// Its process has ended, and the rest of its tree or the disk is being looked at: nothing more is read from its
    /// pipes.
    pub ending: bool,
    pub streams: [Stream; OUTPUTS],
    /// Oldest first; the front ones may stand for what came before them too.
    pub barriers: VecDeque<Barrier>,
    /// A terminal that is being opened.
    pub opening: Option<Opening>,
    pub terminal: Option<Terminal>,
    pub feed: Option<Feed>,
    /// Standard input received so far.
    pub fed: u64,
    /// Whose pieces of standard input are to be answered.
    pub senders: Vec<Sender>,
    pub readers: Vec<Reader>,
    pub delivered: bool,
    pub timer: Option<(u64, u64)>,
    pub unsettled: Option<Unsettled>,
    /// The pipes are left alone until a follower of an earlier runtime is back, or its time is up.
    pub hold: bool,
    /// Watches an ended run's cgroup until its last process is gone.
    pub emptied: Option<OwnedFd>,
    /// It was killed and its process has ended; the rest of its tree is dying.
    pub dying: Option<Dying>,
    /// When its tree was killed.
    pub killed_ns: Option<u64>,
    /// The ending, seen before the exec status was read.
    pub failure: Option<LaunchError>,
    /// How often its process had ended and was not ours to collect yet.
    pub held: u32,
    /// Descriptors of this run the keeper holds, beside those of the streams.
    pub kept_others: u64,
    /// What it was last counted with among the descriptors of its sandbox.
    pub counted: u64,
}

impl Run {
    pub fn key(&self) -> String {
        key(&self.sandbox_id, &self.id)
    }

    pub fn leaf_name(&self) -> &str {
        if self.meta.leaf.is_empty() {
            &self.id
        } else {
            &self.meta.leaf
        }
    }

    pub fn done(&self) -> bool {
        self.meta.outcome.is_some()
    }

    pub fn state(&self) -> &'static str {
        match (self.done(), self.exec_done) {
            (true, _) => "done",
            (false, true) => "running",
            (false, false) => "launching",
        }
    }

    /// Descriptors the keeper holds for this run.
    pub fn kept(&self) -> u64 {
        let streams = self.streams.iter();
        let kept: u64 = streams
            .map(|s| {
                let disk = s.disk.as_ref().is_some_and(|disk| disk.kept_file);
                u64::from(s.kept_pipe) + u64::from(s.kept_segment) + u64::from(disk)
            })
            .sum();
        kept + self.kept_others
    }

    /// Where an output is waited for.
    pub fn source(&self, s: usize) -> Option<&OwnedFd> {
        match &self.terminal {
            Some(terminal) if s == 0 => Some(&terminal.master),
            _ => self.streams[s].pipe.as_deref(),
        }
    }

    pub fn encoded(&self) -> ByteBuf {
        encode(&self.meta)
    }
}

/// The entry of a run in the keeper.
pub fn key(sandbox: &str, run: &str) -> String {
    format!("run/{sandbox}/{run}")
}

pub fn encode(meta: &Meta) -> ByteBuf {
    // Numbers, short strings and bytes: there is nothing in it that cannot be encoded.
    ByteBuf::from(rmp_serde::to_vec_named(meta).unwrap_or_default())
}
