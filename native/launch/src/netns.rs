//! A pool of loopback-only network namespaces owned by the initial user namespace.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{sync_channel, Receiver, RecvTimeoutError, SyncSender};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use dsec_sys::mount::{NODEV, NOEXEC, NOSUID};
use dsec_sys::{net, process};
use rustix::fs::{openat, Mode, OFlags};

use crate::mounting;
use crate::plan::{Code, LaunchError, Result, Step};

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

/// Filled by one background thread (`unshare` moves only that thread; nothing is forked). The thread
/// ends with the pool.
#[derive(Debug)]
pub struct NetnsPool {
    ready: Mutex<Receiver<Result<OwnedFd>>>,
}

impl NetnsPool {
    /// Keeps `size` namespaces ready.
    pub fn new(size: usize) -> Result<Self> {
        // One more is held by the thread while it waits for room.
        let (give, ready) = sync_channel(size.saturating_sub(1));
        thread::Builder::new()
            .name("netns".to_owned())
            .spawn(move || fill(&give))
            .step("netns.thread")?;
        Ok(Self {
            ready: Mutex::new(ready),
        })
    }

    /// One namespace; gone when the last descriptor and process in it are.
    pub fn take(&self) -> Result<OwnedFd> {
        let ended = || LaunchError::new(Code::Internal, "the network namespace pool ended");
        let ready = self.ready.lock().map_err(|_| ended())?;
        match ready.recv_timeout(DEADLINE) {
            Ok(made) => made,
            Err(RecvTimeoutError::Disconnected) => Err(ended()),
            Err(RecvTimeoutError::Timeout) => {
                let text = "no network namespace was made in time";
                Err(LaunchError::new(Code::Deadline, text))
            }
        }
    }
}

fn fill(give: &SyncSender<Result<OwnedFd>>) {
    // A failure is handed to whoever asks next, once for each attempt: the queue bounds the retries.
    loop {
        let proc = match mounting::make("netns.proc", c"proc", &[], NOSUID | NODEV | NOEXEC) {
            Ok(proc) => proc,
            Err(error) => match give.send(Err(error)) {
                Ok(()) => continue,
                Err(_) => return,
            },
        };
        for _ in 0..PER_PROC {
            if give.send(make(proc.as_fd())).is_err() {
                return;
            }
        }
    }
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
