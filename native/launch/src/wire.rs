//! Messages between the runtime and its launchers: msgpack with descriptors over SOCK_SEQPACKET.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{memfd_create, MemfdFlags};
use rustix::io::Errno;
use rustix::net::{
    recvmsg, sendmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::plan::{LaunchError, RunPlan, RunPolicy, SandboxPlan};

/// Longer bodies travel in a memfd: a packet is bounded by the socket's buffer.
const INLINE_MAX: usize = 48 << 10;
/// Descriptors of the largest message (six, a third output, a cgroup, three v1 groups), and one for the memfd.
const FDS_MAX: usize = 12;
/// A body that is longer is not one of ours.
const BODY_MAX: u64 = 16 << 20;

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
    let body = rmp_serde::to_vec(message).map_err(bad)?;
    if body.len() <= INLINE_MAX {
        return send_packet(socket, &[0], &body, fds);
    }
    let memfd = memfd_create("dsec-request", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(memfd);
    file.write_all(&body)?;
    file.rewind()?;
    let mut all = fds.to_vec();
    all.push(file.as_fd());
    send_packet(socket, &[1], &[], &all)
}

fn send_packet(
    socket: BorrowedFd<'_>,
    kind: &[u8],
    body: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL.into());
    }
    let parts = [IoSlice::new(kind), IoSlice::new(body)];
    loop {
        match sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => return Ok(other.map(drop)?),
        }
    }
}

/// Receives one message; `None` at the end.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    Inbox::default().receive(socket)
}

/// Room for messages, made once: a launcher that makes and clears it for each would touch all its pages
/// again after each clone, and each costs a fault and a copy.
#[derive(Debug, Default)]
pub(crate) struct Inbox(Vec<u8>);

impl Inbox {
    /// As the function.
    pub(crate) fn receive<T: DeserializeOwned>(
        &mut self,
        socket: BorrowedFd<'_>,
    ) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        self.0.resize(INLINE_MAX + 1, 0);
        receive_in(&mut self.0, socket)
    }
}

fn receive_in<T: DeserializeOwned>(
    buffer: &mut [u8],
    socket: BorrowedFd<'_>,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let parts = &mut [IoSliceMut::new(buffer)];
        match recvmsg(socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    if got.bytes == 0 {
        return Ok(None);
    }
    let mut fds: Vec<OwnedFd> = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(list) = message {
            fds.extend(list);
        }
    }
    if got
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(bad("truncated message"));
    }
    if buffer[0] == 0 {
        let message = rmp_serde::from_slice(&buffer[1..got.bytes]).map_err(bad)?;
        return Ok(Some((message, fds)));
    }
    let file = File::from(fds.pop().ok_or_else(|| bad("a message without its body"))?);
    let mut body = Vec::new();
    file.take(BODY_MAX).read_to_end(&mut body)?;
    let message = rmp_serde::from_slice(&body).map_err(bad)?;
    Ok(Some((message, fds)))
}

#[cfg(test)]
mod tests {
    use super::*;
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
