//! Messages between the runtime and its launchers: msgpack with descriptors over SOCK_SEQPACKET.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;

use dsec_sys::packet;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::plan::{LaunchError, RunPlan, RunPolicy, SandboxPlan};

/// What a launcher is told before anything else.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Home {
    pub run_dir: PathBuf,
    pub cgroup: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Descriptors: the network namespace.
    Create {
        plan: Box<SandboxPlan>,
        upper: String,
        uid_base: u32,
    },
    /// Descriptors: the init's pidfd, stdin, stdout, stderr, the status pipe, the gate, the cgroup to be born in, with
    /// `control` the third output, and the files of v1 to join others by, memory first. With a helper standard input is its socket.
    Enter {
        plan: Box<RunPlan>,
        policy: RunPolicy,
        entering: String,
        helper: Option<Box<Helper>>,
    },
}

/// A file helper instead of a program.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Helper {
    /// What it says on its socket before it serves.
    pub greeting: ByteBuf,
    /// What it can compare with; none: it cannot.
    pub lower: Option<Lower>,
}

/// What a sandbox was made of.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Lower {
    /// Digests, the lowest first.
    pub layers: Vec<String>,
    /// The directory with `upper` and `work`, in the pinned namespace.
    pub upper: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// Descriptor: the pidfd. The init is set up, or the run is cloned.
    Cloned {
        pid: i32,
    },
    Ready,
    /// Descriptor: the pidfd of an init that was born by then.
    Failed(LaunchError),
}

fn bad(error: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

/// Sends one message.
pub(crate) fn send<T: Serialize>(
    socket: BorrowedFd<'_>,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    packet::send(socket, &rmp_serde::to_vec(message).map_err(bad)?, fds)
}

/// Receives one message; `None` at the end.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    Inbox::default().receive(socket)
}

/// Room for messages, made once.
#[derive(Debug, Default)]
pub(crate) struct Inbox(packet::Inbox);

impl Inbox {
    /// As the function.
    pub(crate) fn receive<T: DeserializeOwned>(
        &mut self,
        socket: BorrowedFd<'_>,
    ) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        let Some((body, fds)) = self.0.receive(socket)? else {
            return Ok(None);
        };
        Ok(Some((rmp_serde::from_slice(&body).map_err(bad)?, fds)))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use dsec_sys::packet::INLINE_MAX;
    use rustix::net::{socketpair, AddressFamily, SocketFlags, SocketType};

    #[test]
    fn small_and_large_messages_arrive_with_their_descriptors() {
        let kind = SocketType::SEQPACKET;
        let (a, b) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
            .expect("a pair of sockets");
        for length in [0, 1, INLINE_MAX, INLINE_MAX + 1, 3 << 20] {
            let text = "x".repeat(length);
            send(a.as_fd(), &text, &[a.as_fd(), b.as_fd()]).expect("sent");
            let (got, fds) = receive::<String>(b.as_fd())
                .expect("received")
                .expect("one");
            assert_eq!((got.len(), fds.len()), (length, 2));
        }
        drop(a);
        assert!(receive::<String>(b.as_fd()).expect("the end").is_none());
    }
}
