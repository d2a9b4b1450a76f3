//! A pool of loopback-only network namespaces owned by the initial user namespace.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use dsec_sys::mount::{NODEV, NOEXEC, NOSUID};
use dsec_sys::{net, process, route};
use rustix::fs::{openat, Mode, OFlags};
use rustix::io::Errno;

use crate::mounting;
use crate::plan::{Code, LaunchError, Result, Step};
use crate::switch;

/// Namespaces kept ready by default; one costs about 0.2 MB and 0.25 ms to make.
pub const DEFAULT_SIZE: usize = 32;

/// Making one takes a lock that a busy machine may hold for long.
const DEADLINE: Duration = Duration::from_secs(10);

/// Capabilities inside do not reach a namespace the initial user namespace owns, so what root inside
/// expects of them is granted to everyone: low ports and ping sockets.
const SETTINGS: [(&str, &str); 2] = [
    ("sys/net/ipv4/ip_unprivileged_port_start", "0"),
    ("sys/net/ipv4/ping_group_range", "0 4294967294"),
];

/// Namespaces set up through one instance of procfs. In each instance the directories `sys/net` of all
/// namespaces lie in one hash chain, by name: looking one up in the host's /proc costs by the sandboxes
/// that live (5 ms at 2,800 of them), in a fresh instance next to nothing.
const PER_PROC: usize = 32;

/// Below this many ready ones the thread makes new ones, up to the pool's size: what ended sandboxes give
/// back finds room.
const REFILL_SHARE: usize = 4;
/// Namespaces that wait to be looked at; more are let go.
const RETURNED_MAX: usize = 64;
/// What a namespace tells about its past: packets and errors of every protocol, labels on lease, addresses and
/// routes. The same text as in a new one means that nothing was ever sent, received or refused in it, and that
/// nothing that steered it is left.
const TRACES: [&str; 8] = [
    "dev",
    "snmp",
    "netstat",
    "snmp6",
    "ip6_flowlabel",
    "fib_trie",
    "ipv6_route",
    "if_inet6",
];
/// Sockets that steered a namespace are held by the kernel for a moment (a grace period of RCU) after they are closed.
const SOCKETS_GO: Duration = Duration::from_millis(100);
/// Counts the sockets there are; what follows counts the machine's too.
const NO_SOCKETS: &str = "sockets: used 0\n";

/// Filled by one background thread (`unshare` moves only that thread; nothing is forked). The thread
/// ends with the pool.
///
/// Making a namespace costs 0.7 ms and its end another 1 ms of kernel threads, so one whose sandbox has
/// ended serves the next if it was never used: no socket is left and every counter is as in a new one.
#[derive(Debug)]
pub struct NetnsPool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    ready: VecDeque<OwnedFd>,
    /// Of ended sandboxes, not looked at yet.
    returned: VecDeque<OwnedFd>,
    /// Looked at, and to be looked at once more: from when on.
    later: VecDeque<(Instant, OwnedFd)>,
    /// For who asks next.
    failed: Option<LaunchError>,
    filling: bool,
    closed: bool,
}

/// What the thread does next.
enum Work {
    Make,
    Look(OwnedFd),
    /// For the last time.
    LookAgain(OwnedFd),
}

/// What is found in one that comes back.
enum Found {
    Traces(String),
    /// Sockets.
    Used,
    /// Sockets, and the routes of one that was steered.
    Steered,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for work; `None` once the pool is gone.
    fn work(&self) -> Option<Work> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(one) = state.returned.pop_front() {
                return Some(Work::Look(one));
            }
            let due = state.later.front().map(|(at, _)| *at);
            let left = due.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return state.later.pop_front().map(|(_, one)| Work::LookAgain(one));
            }
            if state.ready.len() < self.size.div_ceil(REFILL_SHARE) {
                state.filling = true;
            }
            if state.ready.len() >= self.size {
                state.filling = false;
            }
            // A failure bounds the retries: one for each who asks.
            if state.filling && state.failed.is_none() {
                return Some(Work::Make);
            }
            state = match left {
                Some(left) => {
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => {
                    let waited = self.changed.wait(state);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
    }

    fn later(&self, netns: OwnedFd) {
        let mut state = self.lock();
        if state.later.len() < RETURNED_MAX {
            state.later.push_back((Instant::now() + SOCKETS_GO, netns));
        }
    }

    fn done(&self, made: Result<OwnedFd>) {
        let mut state = self.lock();
        match made {
            Ok(one) if state.ready.len() < self.size => state.ready.push_back(one),
            Ok(_) => return,
            Err(error) => state.failed = Some(error),
        }
        self.changed.notify_all();
    }
}

impl NetnsPool {
    /// Keeps `size` namespaces ready.
    pub fn new(size: usize) -> Result<Self> {
        let shared = Arc::new(Shared {
            size: size.max(1),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let filler = Arc::clone(&shared);
        thread::Builder::new()
            .name("netns".to_owned())
            .spawn(move || fill(&filler))
            .step("netns.thread")?;
        Ok(Self(shared))
    }

    /// One namespace; gone when the last descriptor and process in it are.
    pub fn take(&self) -> Result<OwnedFd> {
        let end = Instant::now() + DEADLINE;
        let mut state = self.0.lock();
        loop {
            let found = state.ready.pop_front();
            let failed = found.is_none().then(|| state.failed.take()).flatten();
            if found.is_some() || failed.is_some() {
                self.0.changed.notify_all();
                return found.map_or_else(|| Err(failed.unwrap_or_else(late)), Ok);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(late());
            }
            let waited = self.0.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The namespace of a sandbox whose init lives, to be given back later. Nothing where the kernel does
    /// not tell it (before 6.11): a path in /proc could be another process's by now.
    pub fn of(&self, init: BorrowedFd<'_>) -> Option<OwnedFd> {
        if switch::off(switch::NETNS_REUSE) {
            return None;
        }
        process::net_namespace(init).ok()
    }

    /// Takes the namespace of an ended sandbox: no process may be left in it.
    pub fn give_back(&self, netns: OwnedFd) {
        let mut state = self.0.lock();
        if state.returned.len() < RETURNED_MAX {
            state.returned.push_back(netns);
            self.0.changed.notify_all();
        }
    }
}

impl Drop for NetnsPool {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
}

fn late() -> LaunchError {
    LaunchError::new(Code::Deadline, "no network namespace was made in time")
}

fn fill(pool: &Shared) {
    let mut proc = None;
    let mut pristine = None;
    let mut used = 0;
    while let Some(work) = pool.work() {
        if used == PER_PROC {
            (proc, used) = (None, 0);
        }
        used += 1;
        let attributes = NOSUID | NODEV | NOEXEC;
        let at = match proc.take() {
            Some(at) => Ok(at),
            None => mounting::make("netns.proc", c"proc", &[], attributes),
        };
        let at = match at {
            Ok(at) => at,
            Err(error) => {
                pool.done(Err(error));
                continue;
            }
        };
        let again = matches!(work, Work::LookAgain(_));
        match work {
            Work::Make => {
                let made = make(at.as_fd());
                if made.is_ok() && pristine.is_none() {
                    pristine = traces(at.as_fd()).ok();
                }
                pool.done(made);
            }
            Work::Look(one) | Work::LookAgain(one) if pristine.is_some() => {
                match look(at.as_fd(), &one) {
                    Ok(Found::Traces(traces)) if Some(&traces) == pristine.as_ref() => {
                        pool.done(Ok(one));
                    }
                    Ok(Found::Steered) if !again => pool.later(one),
                    Ok(_) | Err(_) => {}
                }
            }
            Work::Look(_) | Work::LookAgain(_) => {}
        }
        proc = Some(at);
    }
}

/// What is in a namespace, which this thread joins. The routes of one that was steered are gone then; what else steered
/// it, a program, ends with its sockets, which one process holds.
fn look(proc: BorrowedFd<'_>, netns: &OwnedFd) -> io::Result<Found> {
    process::setns(netns.as_fd(), process::NEW_NET)?;
    // First: the socket by which routes are taken away is counted for a moment after it is closed.
    let sockets = io::read_to_string(File::from(open(proc, "sockstat")?))?;
    let clean = !switch::off(switch::NETNS_CLEAN);
    let steered = clean && route::nothing_local()?;
    if sockets.starts_with(NO_SOCKETS) {
        traces(proc).map(Found::Traces)
    } else if steered {
        Ok(Found::Steered)
    } else {
        Ok(Found::Used)
    }
}

fn open(proc: BorrowedFd<'_>, name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let path = format!("thread-self/net/{name}");
    openat(proc, path, flags, Mode::empty())
}

/// What the namespace of this thread tells about its past.
fn traces(proc: BorrowedFd<'_>) -> io::Result<String> {
    let mut text = String::new();
    for name in TRACES {
        match open(proc, name) {
            Ok(file) => drop(File::from(file).read_to_string(&mut text)?),
            // Without IPv6 two of them are missing.
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(text)
}

fn make(proc: BorrowedFd<'_>) -> Result<OwnedFd> {
    process::unshare(process::NEW_NET).step("netns.unshare")?;
    net::loopback_up().step("netns.loopback")?;
    for (file, value) in SETTINGS {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let opened = openat(proc, file, flags, Mode::empty()).step("netns.sysctl")?;
        File::from(opened)
            .write_all(value.as_bytes())
            .step("netns.sysctl")?;
    }
    let file = File::open("/proc/thread-self/ns/net").step("netns.open")?;
    Ok(file.into())
}
