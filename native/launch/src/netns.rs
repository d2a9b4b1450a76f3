//! A pool of loopback-only network namespaces owned by the initial user namespace.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{sync_channel, Receiver, RecvTimeoutError, SyncSender};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use dsec_sys::{net, process};

use crate::plan::{Code, LaunchError, Result, Step};

/// Namespaces kept ready by default; one costs about 0.2 MB and 0.25 ms to make.
pub const DEFAULT_SIZE: usize = 32;

/// Making one takes a lock that a busy machine may hold for long.
const DEADLINE: Duration = Duration::from_secs(10);

/// Capabilities inside do not reach a namespace the initial user namespace owns, so what root inside
/// expects of them is granted to everyone: low ports and ping sockets.
const SETTINGS: [(&str, &str); 2] = [
    ("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0"),
    ("/proc/sys/net/ipv4/ping_group_range", "0 4294967294"),
];

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
    while give.send(make()).is_ok() {}
}

fn make() -> Result<OwnedFd> {
    process::unshare(process::NEW_NET).step("netns.unshare")?;
    net::loopback_up().step("netns.loopback")?;
    for (file, value) in SETTINGS {
        std::fs::write(file, value).step("netns.sysctl")?;
    }
    let file = File::open("/proc/thread-self/ns/net").step("netns.open")?;
    Ok(file.into())
}
