//! The keeper: a tiny parent that outlives the runtime. It holds descriptors and metadata in trust,
//! collects the endings of processes whose parent (a dead runtime) cannot, and starts the runtime.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dsec_launch::launcher;
use dsec_sys::io::{read_signals, seqpacket_pair, signal_fd, wait_child, Who};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FlockOperation, Mode};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::args::Options;
use crate::kproto::{self, Fallen, Put, Received, ToKeeper, ToRuntime, GATE};
use crate::netchild::NetChild;
use crate::store::Store;
use crate::util;
use crate::{info, warning};

/// Connections that may wait while the runtime restarts.
const BACKLOG: i32 = 1024;
/// After a life of this length a runtime is started again at once.
const LONG_LIFE: Duration = Duration::from_secs(2);
/// Wait after a shorter one, doubled each time: up to the first limit if it had got to work, up to the
/// second if it does not even start.
const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX_READY: Duration = Duration::from_millis(160);
const BACKOFF_MAX: Duration = Duration::from_secs(10);
/// Standard input, output and error are not for handing down.
const MIN_INHERITED_FD: i32 = 3;
/// The kernel's OOM killer takes the keeper last: it is tiny, and everything hangs on it.
const OOM_SCORE_ADJ: i32 = -1000;

/// What happens once the runtime is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// It died without a word: start it, later and later if it dies at once.
    Crash,
    Restart,
    /// Start it when a client connects.
    Rest,
    Stop,
}

enum Runtime {
    Running {
        pid: i32,
        sock: Option<OwnedFd>,
        since: Instant,
        ready: bool,
    },
    Waiting(Instant),
    Resting,
}

struct Keeper {
    options: Options,
    instance: String,
    nofile: u64,
    listen: OwnedFd,
    store: Store,
    runtime: Runtime,
    next: Next,
    backoff: Duration,
    /// Entries still to be sent for a `List`.
    listing: Option<VecDeque<String>>,
    /// Keys of refused puts, still to be said.
    refused: VecDeque<String>,
    net: NetChild,
    buf: Vec<u8>,
}

/// Runs the keeper in this process until it is told to stop.
pub fn run(options: Options) -> io::Result<()> {
    std::fs::create_dir_all(&options.run_dir)?;
    let pid_file = lock(&options)?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
    let nofile = util::raise_nofile();
    if let Err(e) = util::shield_from_oom(OOM_SCORE_ADJ) {
        info!("oom_score_adj.refused", error = e);
    }
    let signals = signal_fd(&[libc::SIGCHLD, libc::SIGTERM, libc::SIGINT])?;
    let instance = util::random_id()?;
    write_pid_file(&pid_file, &instance)?;
    let listen = listen(&options)?;
    info!(
        "keeper.start",
        pid = std::process::id(),
        instance = instance,
        nofile = nofile
    );
    let mut keeper = Keeper {
        options,
        instance,
        nofile,
        listen,
        store: Store::default(),
        runtime: Runtime::Waiting(Instant::now()),
        next: Next::Crash,
        backoff: BACKOFF_MIN,
        listing: None,
        refused: VecDeque::new(),
        net: NetChild::new(),
        buf: Vec::new(),
    };
    keeper.start_runtime();
    announce_ready();
    let served = keeper.serve(&signals);
    keeper.net.end(&keeper.options);
    served?;
    info!("keeper.end");
    drop(pid_file);
    Ok(())
}

/// The one who started us in the background waits for this line.
fn announce_ready() {
    let mut out = io::stdout();
    let _ = out.write_all(b"ready\n");
    let _ = out.flush();
    // From now on standard output and error lead nowhere: whoever reads them, perhaps as one pipe, must not be kept
    // waiting. What there is to say goes to the log.
    if let Ok(null) = File::options().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(&null);
        let _ = rustix::stdio::dup2_stderr(&null);
    }
}

/// Takes the lock that says: there is one keeper for this directory.
fn lock(options: &Options) -> io::Result<File> {
    let path = options.run_dir.join("keeper.pid");
    let file = File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .mode(0o600)
        .open(&path)?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|e| {
        io::Error::new(
            io::Error::from(e).kind(),
            format!("{}: a keeper is running already ({e})", path.display()),
        )
    })?;
    Ok(file)
}

fn write_pid_file(mut file: &File, instance: &str) -> io::Result<()> {
    let pid = i32::try_from(std::process::id()).unwrap_or(0);
    let start = util::start_time(pid).unwrap_or(0);
    file.set_len(0)?;
    file.write_all(format!("{pid}\n{start}\n{instance}\n").as_bytes())
}

fn listen(options: &Options) -> io::Result<OwnedFd> {
    let path = options.run_dir.join("runtime.sock");
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let sock = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    // The mode must be right from the first moment: the mask makes it so.
    let old = rustix::process::umask(Mode::from_raw_mode(0o177));
    let bound = rustix::net::bind(&sock, &SocketAddrUnix::new(&path)?);
    rustix::process::umask(old);
    bound?;
    rustix::net::listen(&sock, BACKLOG)?;
    Ok(sock)
}

impl Keeper {
    fn serve(&mut self, signals: &OwnedFd) -> io::Result<()> {
        loop {
            if let Runtime::Waiting(at) = self.runtime {
                if at <= Instant::now() {
                    self.start_runtime();
                }
            }
            self.net.look(&self.options);
            let ready = self.poll(signals)?;
            if ready.runtime {
                self.drain_messages();
            }
            if ready.signal {
                for signal in read_signals(signals.as_fd())? {
                    if signal != libc::SIGCHLD {
                        info!("keeper.signal", signal = signal);
                        return Ok(());
                    }
                }
                if self.reap()? {
                    return Ok(());
                }
            }
            if ready.client && matches!(self.runtime, Runtime::Resting) {
                self.start_runtime();
            }
            self.flush();
        }
    }

    fn poll(&self, signals: &OwnedFd) -> io::Result<Ready> {
        let mut fds = vec![PollFd::new(signals, PollFlags::IN)];
        let mut due = self.net.due();
        match &self.runtime {
            Runtime::Running { sock: Some(s), .. } => {
                let mut flags = PollFlags::IN;
                if self.has_output() {
                    flags |= PollFlags::OUT;
                }
                fds.push(PollFd::new(s, flags));
            }
            Runtime::Running { sock: None, .. } => {}
            Runtime::Waiting(at) => due = Some(due.map_or(*at, |net| net.min(*at))),
            Runtime::Resting => fds.push(PollFd::new(&self.listen, PollFlags::IN)),
        }
        let timeout = due
            .map(|at| at.saturating_duration_since(Instant::now()))
            .and_then(|t| rustix::event::Timespec::try_from(t).ok());
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let second = fds.get(1).is_some_and(|f| !f.revents().is_empty());
        Ok(Ready {
            signal: !fds[0].revents().is_empty(),
            runtime: second && matches!(self.runtime, Runtime::Running { .. }),
            client: second && matches!(self.runtime, Runtime::Resting),
        })
    }

    fn has_output(&self) -> bool {
        self.listing.is_some() || !self.refused.is_empty() || self.store.untold().is_some()
    }

    /// Takes every message the runtime has sent so far.
    fn drain_messages(&mut self) {
        loop {
            let Runtime::Running { sock, .. } = &mut self.runtime else {
                return;
            };
            let Some(s) = sock else { return };
            match kproto::recv::<ToKeeper>(s, &mut self.buf, true) {
                Ok(Received::Nothing) => return,
                Ok(Received::Closed) => {
                    *sock = None;
                    return;
                }
                Ok(Received::Msg {
                    msg,
                    fds,
                    truncated,
                }) => self.message(msg, fds, truncated),
                Err(e) => {
                    // A runtime that cannot speak is of no use: let it end and start it again.
                    warning!("keeper.bad_message", error = e);
                    *sock = None;
                    return;
                }
            }
        }
    }

    fn message(&mut self, msg: ToKeeper, fds: Vec<OwnedFd>, truncated: bool) {
        match msg {
            ToKeeper::Put(put) => self.put(put, fds, truncated),
            ToKeeper::Del(key) => self.store.del(&key),
            ToKeeper::List => {
                self.store.forget_told();
                self.listing = Some(self.store.keys().into());
            }
            ToKeeper::Ready => {
                if let Runtime::Running { ready, .. } = &mut self.runtime {
                    *ready = true;
                }
            }
            ToKeeper::Net => self.net.want(&self.options),
            ToKeeper::Restart => self.next = Next::Restart,
            ToKeeper::Rest => self.next = Next::Rest,
            ToKeeper::Stop => self.next = Next::Stop,
        }
    }

    fn put(&mut self, mut put: Put, mut fds: Vec<OwnedFd>, truncated: bool) {
        let key = put.key.clone();
        let gated = put.add.iter().position(|name| name == GATE);
        // With descriptors missing it is not known which these are; closing all of them keeps it shut.
        let whole = put.add.len() == fds.len();
        let gate = gated.filter(|_| whole).map(|at| {
            put.add.remove(at);
            fds.remove(at)
        });
        match self.store.put(put, fds) {
            Ok(()) => {
                // Its process may have been killed meanwhile.
                let _ = gate.map(|gate| launcher::begin(gate.as_fd()));
            }
            Err(why) => {
                warning!(
                    "keeper.refused",
                    key = key,
                    why = why.0,
                    truncated = truncated
                );
                if gated.is_none() {
                    self.refused.push_back(key);
                }
            }
        }
    }

    /// Collects what has ended. `true` when the keeper is to end.
    fn reap(&mut self) -> io::Result<bool> {
        loop {
            // A look first, then the messages, then the reaping: whatever the runtime said about this
            // process was sent before it died, so it is known by now.
            let ending = match wait_child(Who::Any, false) {
                Ok(Some(e)) => e,
                Ok(None) => return Ok(false),
                Err(e) if e.raw_os_error() == Some(libc::ECHILD) => return Ok(false),
                Err(e) => return Err(e),
            };
            self.drain_messages();
            wait_child(Who::Pid(ending.pid), true)?;
            if matches!(&self.runtime, Runtime::Running { pid, .. } if *pid == ending.pid) {
                if self.runtime_ended(ending.code, ending.signal) {
                    return Ok(true);
                }
            } else if !self.net.ended(ending.pid, ending.code, ending.signal) {
                let fallen = Fallen::new(&ending, util::monotonic_ns());
                self.store.ended(ending.pid, fallen);
            }
        }
    }

    fn runtime_ended(&mut self, code: Option<i32>, signal: Option<i32>) -> bool {
        let Runtime::Running { since, ready, .. } = self.runtime else {
            return false;
        };
        self.listing = None;
        self.refused.clear();
        self.store.forget_told();
        let next = std::mem::replace(&mut self.next, Next::Crash);
        info!(
            "runtime.ended",
            code = code.unwrap_or(-1),
            signal = signal.unwrap_or(0),
            next = format!("{next:?}"),
        );
        match next {
            Next::Stop => return true,
            Next::Rest => self.runtime = Runtime::Resting,
            Next::Restart | Next::Crash if since.elapsed() >= LONG_LIFE => {
                self.backoff = BACKOFF_MIN;
                self.runtime = Runtime::Waiting(Instant::now());
            }
            Next::Restart | Next::Crash => {
                let most = if ready {
                    BACKOFF_MAX_READY
                } else {
                    BACKOFF_MAX
                };
                self.backoff = self.backoff.min(most);
                self.runtime = Runtime::Waiting(Instant::now() + self.backoff);
                self.backoff *= 2;
            }
        }
        false
    }

    fn start_runtime(&mut self) {
        match self.spawn() {
            Ok((pid, sock)) => {
                info!("runtime.start", pid = pid);
                self.runtime = Runtime::Running {
                    pid,
                    sock: Some(sock),
                    since: Instant::now(),
                    ready: false,
                };
            }
            Err(e) => {
                warning!(
                    "runtime.start.failed",
                    error = e,
                    wait_ms = self.backoff.as_millis()
                );
                self.backoff = self.backoff.min(BACKOFF_MAX);
                self.runtime = Runtime::Waiting(Instant::now() + self.backoff);
                self.backoff *= 2;
            }
        }
    }

    fn spawn(&self) -> io::Result<(i32, OwnedFd)> {
        let (ours, theirs) = seqpacket_pair()?;
        let log = crate::log::open(&self.options.log_path());
        // Named by path, not /proc/self/exe: an upgrade is the file that is on disk now.
        let mut command = Command::new(&self.options.binary);
        command
            .arg("serve")
            .args(self.options.to_args())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.map_or_else(Stdio::null, Stdio::from));
        let keeper = Inherited::new(&theirs)?;
        let listen = Inherited::new(&self.listen)?;
        command.arg(format!("--fds={},{}", keeper.number(), listen.number()));
        let child = command.spawn();
        drop((keeper, listen));
        let pid = i32::try_from(child?.id()).map_err(io::Error::other)?;
        Ok((pid, ours))
    }

    /// Says what is to be said, as far as the socket takes it.
    fn flush(&mut self) {
        let Runtime::Running {
            sock: Some(sock), ..
        } = &self.runtime
        else {
            return;
        };
        if let Err(e) = say(
            sock.as_fd(),
            &mut self.store,
            &mut self.listing,
            &mut self.refused,
            (&self.instance, self.nofile),
        ) {
            if e.kind() != io::ErrorKind::WouldBlock {
                info!("keeper.send", error = e);
            }
        }
    }
}

struct Ready {
    signal: bool,
    runtime: bool,
    client: bool,
}

fn say(
    sock: BorrowedFd<'_>,
    store: &mut Store,
    listing: &mut Option<VecDeque<String>>,
    refused: &mut VecDeque<String>,
    (instance, nofile): (&str, u64),
) -> io::Result<()> {
    while let Some(key) = refused.front() {
        kproto::send(sock, &ToRuntime::Full { key: key.clone() }, &[], true)?;
        refused.pop_front();
    }
    if let Some(keys) = listing {
        while let Some(key) = keys.front() {
            if let Some(e) = store.get(key) {
                let fds: Vec<_> = e.fds.iter().map(|(_, fd)| fd.as_fd()).collect();
                let item = ToRuntime::Item {
                    key: key.clone(),
                    meta: e.meta.clone(),
                    pid: e.pid,
                    ending: e.ending,
                    names: e.fds.iter().map(|(name, _)| name.clone()).collect(),
                };
                kproto::send(sock, &item, &fds, true)?;
                store.mark_told(key);
            }
            keys.pop_front();
        }
        let end = ToRuntime::End {
            instance: instance.to_owned(),
            nofile,
            net: true,
        };
        kproto::send(sock, &end, &[], true)?;
        *listing = None;
    }
    while let Some((key, ending)) = store.untold() {
        kproto::send(
            sock,
            &ToRuntime::Exit {
                key: key.clone(),
                ending,
            },
            &[],
            true,
        )?;
        store.mark_told(&key);
    }
    Ok(())
}

/// A descriptor that a child started now inherits. The keeper has one thread, so nothing else is
/// started in between.
struct Inherited(OwnedFd);

impl Inherited {
    fn new(fd: &OwnedFd) -> io::Result<Self> {
        let copy = rustix::io::fcntl_dupfd_cloexec(fd, MIN_INHERITED_FD)?;
        rustix::io::fcntl_setfd(&copy, rustix::io::FdFlags::empty())?;
        Ok(Self(copy))
    }

    fn number(&self) -> i32 {
        self.0.as_raw_fd()
    }
}
