//! Steering of sandboxes' namespaces, and the way to the process that serves them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use dsec_launch::plan::{Code, Step};
use dsec_launch::{LaunchError, Probe};
use dsec_net::steer;
use dsec_sys::packet::{self, Inbox};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::net::sockopt::{set_socket_timeout, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use super::link::Link;
use super::Server;
use crate::kproto::ToKeeper;
use crate::proto::{Id, IdArgs, Nothing};
use crate::{fail, info};

/// What is told of it in a probe.
const MECHANISM: &str = "BPF sk_lookup and a proxy of the node";
/// For its start, and for one answer.
const DEADLINE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(5);

/// The process for connections, as worker threads see it.
#[derive(Debug)]
pub struct Network {
    path: PathBuf,
    link: Arc<Link>,
    /// The keeper knows how to start it.
    startable: bool,
    /// One request at a time; none is open before it is needed, and after one has failed.
    talk: Mutex<Option<OwnedFd>>,
    /// That sandboxes can be steered does not change: looked at once.
    able: OnceLock<()>,
}

/// `{"id": 1, "op": "add", ...}`: with a table that allows nothing. What is allowed is said later.
#[derive(Serialize)]
struct Add<'a> {
    id: u64,
    op: &'static str,
    sandbox: &'a str,
    table: Closed,
}

#[derive(Serialize)]
struct Closed {
    format: u32,
    generation: u64,
    connections: u32,
    rules: [(); 0],
}

#[derive(Deserialize)]
struct Reply {
    error: Option<String>,
}

impl Network {
    pub fn new(path: PathBuf, link: Arc<Link>, startable: bool) -> Self {
        Self {
            path,
            link,
            startable,
            talk: Mutex::new(None),
            able: OnceLock::new(),
        }
    }

    /// Says in a probe whether sandboxes can be steered here.
    pub fn probe(&self, probe: &mut Probe) {
        let old = "the keeper is of an earlier version: end it, with its sandboxes, and start the node again";
        let missing = if !self.startable {
            Some(old.to_owned())
        } else if self.able.get().is_some() {
            None
        } else {
            steer::missing()
        };
        match missing {
            None => {
                self.able.get_or_init(|| ());
                probe.network = Some(MECHANISM.to_owned());
            }
            Some(why) => drop(probe.reasons.insert("network".to_owned(), why)),
        }
    }

    /// Steers the namespace of a living sandbox and gives it to the process, which denies everything until it is told
    /// otherwise. What steered it before ends.
    fn steer(&self, sandbox: &str, init: BorrowedFd<'_>) -> Result<(), LaunchError> {
        let made = steer::steer(init).step("network.steer")?;
        fail::at("network.steered")?;
        // Whoever ends in between gives its namespace back, perhaps to another sandbox. Who lives now has not, and what
        // is looked at from now on is found to be steered.
        if ended(init).step("network.steer")? {
            return Err(LaunchError::new(Code::Gone, "the sandbox has ended"));
        }
        let request = Add {
            id: 1,
            op: "add",
            sandbox,
            table: Closed {
                format: dsec_net::table::FORMAT,
                generation: 0,
                connections: 0,
                rules: [],
            },
        };
        let body = rmp_serde::to_vec_named(&request).map_err(io::Error::other);
        let [four, six] = &made.dns;
        let fds = [
            made.tcp.as_fd(),
            four.as_fd(),
            six.as_fd(),
            made.link.as_fd(),
        ];
        self.ask(&body.step("network.add")?, &fds)?;
        fail::at("network.added")
    }

    /// Has the process started, and waits until it answers.
    fn start(&self) -> Result<(), LaunchError> {
        let socket = self.connect().step("network.start")?;
        *self.talk.lock().unwrap_or_else(PoisonError::into_inner) = Some(socket);
        Ok(())
    }

    fn ask(&self, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), LaunchError> {
        let mut talk = self.talk.lock().unwrap_or_else(PoisonError::into_inner);
        let end = Instant::now() + DEADLINE;
        let mut answer = self.try_ask(&mut talk, body, fds);
        // It may be about to die, or have died. What another one is told a second time holds as the first.
        while answer.is_err() && Instant::now() < end {
            std::thread::sleep(LOOK);
            answer = self.try_ask(&mut talk, body, fds);
        }
        let refused = answer.step("network.add")?;
        match refused {
            None => Ok(()),
            Some(why) => Err(LaunchError::new(Code::Internal, why)),
        }
    }

    fn try_ask(
        &self,
        talk: &mut Option<OwnedFd>,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<Option<String>> {
        // Taken out: after a failure nobody knows what is said next on it.
        let socket = match talk.take() {
            Some(socket) => socket,
            None => self.connect()?,
        };
        packet::send(socket.as_fd(), body, fds)?;
        let mut inbox = Inbox::default();
        let (said, _) = inbox
            .receive(socket.as_fd())?
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        let reply: Reply = rmp_serde::from_slice(&said).map_err(io::Error::other)?;
        *talk = Some(socket);
        Ok(reply.error)
    }

    /// Has it started where it is not there.
    fn connect(&self) -> io::Result<OwnedFd> {
        let address = SocketAddrUnix::new(&self.path)?;
        let end = Instant::now() + DEADLINE;
        let mut asked = false;
        loop {
            let kind = SocketType::SEQPACKET;
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
            let failed = match rustix::net::connect(&socket, &address) {
                Ok(()) => {
                    for which in [Timeout::Recv, Timeout::Send] {
                        set_socket_timeout(&socket, which, Some(DEADLINE))?;
                    }
                    return Ok(socket);
                }
                Err(e) => io::Error::from(e),
            };
            if !asked && self.startable {
                self.link.say(&ToKeeper::Net)?;
                asked = true;
            }
            if !asked || Instant::now() > end {
                info!("network.connect", error = failed);
                return Err(failed);
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// Whether a process (a pidfd) has ended.
fn ended(process: BorrowedFd<'_>) -> io::Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(process, PollFlags::IN)];
    Ok(rustix::io::retry_on_intr(|| poll(&mut fds, Some(&Timespec::default())))? > 0)
}

impl Server {
    /// `network.start`.
    pub(super) fn network_start(&mut self, client: u64, id: Id) {
        let network = Arc::clone(&self.network);
        let job = self.answered(client, id, move || network.start().map(|()| Nothing {}));
        self.steerers.run(job);
    }

    /// `network.steer`.
    pub(super) fn network_steer(
        &mut self,
        client: u64,
        id: Id,
        args: IdArgs,
    ) -> Result<(), LaunchError> {
        let index = self.sandbox_index(&args.id)?;
        // Only one that runs: what ends gives its namespace back.
        self.running_place(index)?;
        let init = self.init_fd(index)?;
        let network = Arc::clone(&self.network);
        let job = self.answered(client, id, move || {
            network.steer(&args.id, init.as_fd()).map(|()| Nothing {})
        });
        self.steerers.run(job);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use rustix::process::{pidfd_open, Pid, PidfdFlags};

    use super::*;

    #[test]
    fn who_has_ended_is_known_before_it_is_waited_for() -> Result<(), Box<dyn std::error::Error>> {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn()?;
        let pid = Pid::from_raw(i32::try_from(child.id())?).ok_or("no pid")?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        assert!(!ended(pidfd.as_fd())?);
        drop(child.stdin.take());
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        poll(&mut fds, None)?;
        assert!(ended(pidfd.as_fd())?);
        child.wait()?;
        Ok(())
    }
}
