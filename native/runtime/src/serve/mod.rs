//! The runtime: one thread owns all state and waits in epoll; what may block goes to worker threads.

mod client;
mod dial;
mod disks;
mod ending;
mod fences;
mod files;
mod input;
mod kept;
mod killing;
mod launching;
mod link;
mod making;
mod moving;
mod network;
mod ops;
mod pool;
mod recover;
mod results;
mod room;
mod run;
mod sandbox;
mod spool;
mod start;
mod stopping;
mod stream;
mod stuck;
mod terminals;
mod typing;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use dsec_sys::io::inherited_fd;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::Timespec;

use crate::args::Options;
use crate::backend::Backend;
use crate::kproto::ToKeeper;
use crate::record::Records;
use crate::util;
use crate::{info, warning};

use client::Client;
use files::Helper;
use link::Link;
use network::Network;
use pool::{Pool, Results};
use run::Run;
use sandbox::Sandbox;

/// Threads for creates, stops, layers: one that hangs on a bad disk must not stop the others.
const WORKERS: usize = 8;
/// Threads that launch runs.
const LAUNCHERS: usize = 2;
/// Threads that look at processes: one that is stuck in the kernel with its memory locked holds up who reads its
/// arguments, and nobody else.
const INSPECTORS: usize = 2;
/// Threads that move output to the disk and back. A disk that answers nobody stops them, and those whose output waits
/// for it.
const SPOOLERS: usize = 2;
/// Who waits for the process for connections: it may hang, and nothing else may wait for that.
const STEERERS: usize = 2;
/// Events taken at once.
const EVENTS: usize = 256;
/// After a failed accept (descriptors ran out) the listening socket rests this long.
const ACCEPT_REST_NS: u64 = 100_000_000;
/// Like the keeper's, but the keeper is to survive it.
const OOM_SCORE_ADJ: i32 = -900;

/// What an epoll event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    Listen,
    Keeper,
    Finished,
    Client(u64),
    /// The init of a sandbox ended.
    Init(u64),
    /// The process of a run ended.
    Process(u64),
    /// The exec of a run succeeded or failed.
    Status(u64),
    Output(u64, usize),
    Input(u64),
    /// The last process of an ended run's tree is gone.
    Emptied(u64),
    /// The process of a file helper ended.
    Helper(u64),
    /// A file helper serves, or cannot.
    HelperStatus(u64),
    /// The last process in a file helper's cgroup is gone.
    HelperEmptied(u64),
    /// In the cgroup of a killed sandbox something has changed.
    Lingering(u64),
    /// The process of a run that was over before it had died.
    Late(u64),
}

impl Token {
    fn pack(self) -> EventData {
        let (kind, index) = match self {
            Self::Listen => (0, 0),
            Self::Keeper => (1, 0),
            Self::Finished => (2, 0),
            Self::Client(i) => (3, i),
            Self::Init(i) => (4, i),
            Self::Process(i) => (5, i),
            Self::Status(i) => (6, i),
            Self::Output(i, 0) => (7, i),
            Self::Output(i, 1) => (8, i),
            Self::Output(i, _) => (14, i),
            Self::Input(i) => (9, i),
            Self::Emptied(i) => (10, i),
            Self::Helper(i) => (11, i),
            Self::HelperStatus(i) => (12, i),
            Self::HelperEmptied(i) => (13, i),
            Self::Lingering(i) => (15, i),
            Self::Late(i) => (16, i),
        };
        EventData::new_u64(kind << 56 | index)
    }

    fn unpack(data: EventData) -> Option<Self> {
        let raw = data.u64();
        let index = raw & ((1 << 56) - 1);
        Some(match raw >> 56 {
            0 => Self::Listen,
            1 => Self::Keeper,
            2 => Self::Finished,
            3 => Self::Client(index),
            4 => Self::Init(index),
            5 => Self::Process(index),
            6 => Self::Status(index),
            7 => Self::Output(index, 0),
            8 => Self::Output(index, 1),
            9 => Self::Input(index),
            10 => Self::Emptied(index),
            11 => Self::Helper(index),
            12 => Self::HelperStatus(index),
            13 => Self::HelperEmptied(index),
            14 => Self::Output(index, run::CONTROL),
            15 => Self::Lingering(index),
            16 => Self::Late(index),
            _ => return None,
        })
    }
}

/// What happens at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Timer {
    /// A run's time is up.
    Timeout(u64),
    /// A run is not one of the shortest.
    Settled(u64),
    /// A sandbox had its time to end by itself.
    Grace(u64),
    /// A follower of an earlier runtime had its time to come back.
    Hold(u64),
    /// Job number, see `ops::Deadlines`.
    Deadline(u64),
    Accept,
    /// A run's process that is traced.
    Traced(u64),
    /// A terminal had its time to be opened.
    Opening(u64),
    /// The input of a terminal that took no more is tried again.
    Input(u64),
    /// What has left a terminal already is to be taken.
    Relayed(u64),
    /// The disk below the sandboxes is to be looked at.
    Disks,
    /// A file helper had its time to get ready.
    Helper(u64),
    /// The tree of a run that was killed had its time to die.
    Dying(u64),
    /// The output of what a run left behind is to be drained again.
    Rested(u64, usize),
    /// The process of a run that was killed had its time to die.
    Unkillable(u64),
    /// Who waits for the end of a sandbox in which something does not die has waited long enough.
    Lingering(u64),
}

struct Server {
    backend: Arc<dyn Backend>,
    link: Arc<Link>,
    network: Arc<Network>,
    records: Records,
    epoll: Arc<OwnedFd>,
    listen: OwnedFd,
    results: Results,
    workers: Pool,
    launchers: Pool,
    inspectors: Pool,
    spoolers: Pool,
    steerers: Pool,
    /// Where output on the disk is.
    spool_dir: Arc<PathBuf>,
    instance: String,
    nofile: u64,
    binary_sha256: Option<String>,
    next_index: u64,
    clients: HashMap<u64, Client>,
    /// Clients for whom something was queued in this turn.
    unsent: Vec<u64>,
    read_buffer: Vec<u8>,
    /// Of large frames that were sent: a new one's memory would have to be got from the kernel, page by page.
    spare_frames: Vec<Vec<u8>>,
    sandboxes: HashMap<u64, Sandbox>,
    sandbox_ids: HashMap<String, u64>,
    /// Ended sandboxes still known, oldest first.
    ended: std::collections::VecDeque<u64>,
    next_uid_base: u32,
    runs: HashMap<u64, Run>,
    run_ids: HashMap<(String, String), u64>,
    helpers: HashMap<u64, Helper>,
    /// Held by all runs together.
    descriptors: u64,
    /// Launched once, lost with the keeper.
    unknown: HashSet<(String, String)>,
    /// Processes of runs that were over before they had died.
    late: HashMap<u64, OwnedFd>,
    timers: BTreeMap<(u64, u64), Timer>,
    /// Requests that are answered with `deadline` if their job takes too long.
    deadlines: HashMap<u64, (u64, u64)>,
    /// How this process is to end.
    leave: Option<ToKeeper>,
}

/// Runs the runtime until it is told to stop or the keeper is gone.
pub fn run(options: Options) -> io::Result<()> {
    let (keeper, listen) = options
        .fds
        .and_then(|(k, l)| Some((inherited_fd(k)?, inherited_fd(l)?)))
        .ok_or_else(|| io::Error::other("serve is started by the keeper"))?;
    dsec_sys::io::unblock_signals()?;
    // Without a keeper nothing that ends is ever collected: end with it, at once.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
    let nofile = util::raise_nofile();
    if let Err(e) = util::shield_from_oom(OOM_SCORE_ADJ) {
        info!("oom_score_adj.refused", error = e);
    }
    let mut link = Link::new(keeper);
    let inventory = link.inventory()?;
    info!(
        "runtime.start",
        pid = std::process::id(),
        items = inventory.items.len()
    );
    let backend = crate::open_backend(&options)?;
    let results = Results::new()?;
    let link = Arc::new(link);
    let network = Network::new(options.net_socket(), Arc::clone(&link), inventory.net);
    let mut server = Server {
        records: Records::open(&options.run_dir)?,
        backend,
        link,
        network: Arc::new(network),
        epoll: Arc::new(epoll::create(CreateFlags::CLOEXEC)?),
        listen,
        workers: Pool::new("work", WORKERS, &results)?,
        launchers: Pool::new("launch", LAUNCHERS, &results)?,
        inspectors: Pool::new("inspect", INSPECTORS, &results)?,
        spoolers: Pool::new("spool", SPOOLERS, &results)?,
        steerers: Pool::new("steer", STEERERS, &results)?,
        spool_dir: Arc::new(spool::directory(&options.state_dir)),
        results,
        instance: inventory.instance.clone(),
        nofile: nofile.min(inventory.nofile),
        binary_sha256: None,
        next_index: 1,
        clients: HashMap::new(),
        unsent: Vec::new(),
        read_buffer: Vec::new(),
        spare_frames: Vec::new(),
        sandboxes: HashMap::new(),
        sandbox_ids: HashMap::new(),
        ended: std::collections::VecDeque::new(),
        next_uid_base: sandbox::UID_FIRST,
        runs: HashMap::new(),
        run_ids: HashMap::new(),
        helpers: HashMap::new(),
        descriptors: 0,
        unknown: HashSet::new(),
        late: HashMap::new(),
        timers: BTreeMap::new(),
        deadlines: HashMap::new(),
        leave: None,
    };
    if let Err(e) = spool::sweep(&server.spool_dir) {
        info!("output.sweep", error = e);
    }
    server.recover(inventory.items)?;
    server.watch(server.link.fd(), Token::Keeper, EventFlags::IN)?;
    server.watch(server.results.fd(), Token::Finished, EventFlags::IN)?;
    server.watch(server.listen.as_fd(), Token::Listen, EventFlags::IN)?;
    server.look_at_disks_later();
    server.link.say(&ToKeeper::Ready)?;
    info!(
        "runtime.ready",
        sandboxes = server.sandboxes.len(),
        runs = server.runs.len()
    );
    server.serve()
}

impl Server {
    fn serve(&mut self) -> io::Result<()> {
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
        loop {
            events.clear();
            let timeout = self.next_timeout();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            // Also when nobody was woken for them: an event may be about what a job has left.
            self.finish_jobs();
            for event in &events {
                if let Some(token) = Token::unpack(event.data) {
                    if !self.event(token, event.flags)? {
                        return Ok(());
                    }
                }
            }
            self.run_timers();
            self.send_queued();
            if let Some(last) = self.leave.take() {
                info!("runtime.end", how = format!("{last:?}"));
                return self.link.say(&last);
            }
        }
    }

    fn finish_jobs(&mut self) {
        while let Some(finish) = self.results.next() {
            finish(self);
        }
    }

    /// `false`: the keeper is gone.
    fn event(&mut self, token: Token, flags: EventFlags) -> io::Result<bool> {
        match token {
            Token::Listen => self.accept(),
            Token::Keeper => return self.keeper_speaks(),
            Token::Finished => {
                self.results.woken();
                self.finish_jobs();
            }
            Token::Client(i) => self.client_ready(i, flags),
            Token::Init(i) => self.init_ready(i),
            Token::Process(i) => self.process_ready(i),
            Token::Status(i) => self.status_ready(i),
            Token::Output(i, s) => self.output_ready(i, s),
            Token::Input(i) => self.input_ready(i, flags),
            Token::Emptied(i) => self.tree_emptied(i),
            Token::Helper(i) => self.helper_ended(i),
            Token::HelperStatus(i) => self.helper_status(i),
            Token::HelperEmptied(i) => self.helper_emptied(i),
            Token::Lingering(i) => self.sandbox_emptied(i),
            Token::Late(i) => self.late_death(i),
        }
        Ok(true)
    }

    fn keeper_speaks(&mut self) -> io::Result<bool> {
        use crate::kproto::ToRuntime;
        let Some(messages) = self.link.receive()? else {
            return Ok(false);
        };
        for message in messages {
            match message {
                ToRuntime::Exit { key, ending } => self.fallen(&key, ending),
                ToRuntime::Full { key } => {
                    warning!("keeper.full", key = key);
                    self.keeper_refused(&key);
                }
                ToRuntime::Item { .. } | ToRuntime::End { .. } => {}
            }
        }
        Ok(true)
    }

    fn index(&mut self) -> u64 {
        self.next_index += 1;
        self.next_index
    }

    fn watch(&self, fd: BorrowedFd<'_>, token: Token, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, token.pack(), flags)?)
    }

    /// A descriptor that is closed everywhere leaves by itself, but the keeper holds copies of ours: an
    /// event for a closed number would come for ever.
    fn unwatch(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    fn at(&mut self, when_ns: u64, timer: Timer) -> (u64, u64) {
        let key = (when_ns, self.index());
        self.timers.insert(key, timer);
        key
    }

    fn next_timeout(&self) -> Option<Timespec> {
        let ((when, _), _) = self.timers.first_key_value()?;
        let wait = when.saturating_sub(util::monotonic_ns());
        Some(Timespec {
            tv_sec: i64::try_from(wait / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (wait % 1_000_000_000) as _,
        })
    }

    fn run_timers(&mut self) {
        let now = util::monotonic_ns();
        while let Some(entry) = self.timers.first_entry() {
            if entry.key().0 > now {
                return;
            }
            match entry.remove() {
                Timer::Timeout(i) => self.timed_out(i),
                Timer::Settled(i) => self.settle(i),
                Timer::Grace(i) => self.grace_over(i),
                Timer::Hold(i) => self.hold_over(i),
                Timer::Deadline(job) => self.deadline_passed(job),
                Timer::Dying(i) => self.look_at_tree(i),
                Timer::Traced(i) => self.look_at_traced(i),
                Timer::Opening(i) => self.opening_late(i),
                Timer::Input(i) => self.feed_again(i),
                Timer::Disks => self.look_at_disks(),
                Timer::Helper(i) => self.helper_late(i),
                Timer::Rested(i, s) => self.rested(i, s),
                Timer::Relayed(i) => self.output_ready(i, 0),
                Timer::Unkillable(i) => self.look_at_killed(i),
                Timer::Lingering(i) => self.stop_took_long(i),
                Timer::Accept => {
                    let _ = self.watch(self.listen.as_fd(), Token::Listen, EventFlags::IN);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back() {
        for token in [
            Token::Listen,
            Token::Keeper,
            Token::Finished,
            Token::Client(5),
            Token::Init(1 << 40),
            Token::Process(7),
            Token::Status(8),
            Token::Output(9, 0),
            Token::Output(9, 1),
            Token::Output(9, run::CONTROL),
            Token::Input(3),
            Token::Emptied(2),
            Token::Helper(4),
            Token::HelperStatus(6),
            Token::HelperEmptied(8),
            Token::Lingering(10),
            Token::Late(11),
        ] {
            assert_eq!(Token::unpack(token.pack()), Some(token));
        }
        assert_eq!(Token::unpack(EventData::new_u64(u64::MAX)), None);
    }
}
