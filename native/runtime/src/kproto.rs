//! What keeper and runtime say to each other: one msgpack message per `SOCK_SEQPACKET` packet, so
//! each is handled whole or not at all, in order, also when the sender dies right after sending.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dsec_sys::io::{recv_msg, send_msg, Ending, MAX_MESSAGE};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// Entries the keeper holds at most.
pub const MAX_ENTRIES: usize = 65_536;
/// Bytes of metadata the keeper holds at most, over all entries.
pub const MAX_META_TOTAL: usize = 64 << 20;
/// Descriptors of one entry.
pub const MAX_ENTRY_FDS: usize = dsec_sys::io::MAX_FDS;

/// The name of the gate of a run (see `dsec_launch::launcher::begin`). The keeper opens it after it has
/// taken the message that brings it, or closes it: a run has begun if and only if its entry has a pid.
pub const GATE: &str = "go";

/// Changes an entry; makes it when it is not there.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct Put {
    pub key: String,
    /// Replaces the metadata.
    pub meta: Option<ByteBuf>,
    /// The process whose ending belongs to this entry.
    pub pid: Option<i32>,
    /// Names of the descriptors that come with the message; one of the same name is replaced.
    pub add: Vec<String>,
    /// Names of descriptors to close.
    pub close: Vec<String>,
}

/// From the runtime.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToKeeper {
    Put(Put),
    Del(String),
    /// Asks for every entry, then [`ToRuntime::End`].
    List,
    /// Recovered and at work: from now on a death is not one "at once".
    Ready,
    /// The process for sandboxes' connections is to run from now on. Only to a keeper that says it knows of it.
    Net,
    /// The runtime is about to end and wants to be started again at once, from the disk.
    Restart,
    /// The runtime is about to end; the next client starts it again.
    Rest,
    /// Nothing lives any more: the keeper ends when the runtime has ended.
    Stop,
}

/// An ending the keeper collected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fallen {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub user_us: u64,
    pub system_us: u64,
    pub max_rss_bytes: u64,
    /// CLOCK_MONOTONIC when it was collected.
    pub at_ns: u64,
    /// A keeper of an earlier version does not send it.
    #[serde(default)]
    pub out_blocks: u64,
}

impl Fallen {
    pub fn new(e: &Ending, at_ns: u64) -> Self {
        Self {
            code: e.code,
            signal: e.signal,
            user_us: e.user_us,
            system_us: e.system_us,
            max_rss_bytes: e.max_rss_bytes,
            at_ns,
            out_blocks: e.out_blocks,
        }
    }
}

/// To the runtime.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToRuntime {
    Item {
        key: String,
        meta: ByteBuf,
        pid: Option<i32>,
        ending: Option<Fallen>,
        /// Of the descriptors that come along.
        names: Vec<String>,
    },
    End {
        instance: String,
        /// The keeper's descriptor limit.
        nofile: u64,
        /// It starts the process for connections. A keeper of an earlier version does not say so.
        #[serde(default)]
        net: bool,
    },
    /// The process of an entry ended after it had fallen to the keeper.
    Exit { key: String, ending: Fallen },
    /// A `Put` could not be carried out (a limit of the keeper); the entry is as before.
    Full { key: String },
}

/// A message did not decode, or lost descriptors on its way.
fn broken(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

pub fn send<T: Serialize>(
    sock: BorrowedFd<'_>,
    msg: &T,
    fds: &[BorrowedFd<'_>],
    nonblocking: bool,
) -> io::Result<()> {
    let data = rmp_serde::to_vec(msg).map_err(broken)?;
    send_msg(sock, &data, fds, nonblocking)
}

/// What [`recv`] found.
#[derive(Debug)]
pub enum Received<T> {
    Msg {
        msg: T,
        fds: Vec<OwnedFd>,
        /// Descriptors were lost: the receiver is at its limit.
        truncated: bool,
    },
    /// Nothing there (only when not blocking).
    Nothing,
    /// The other side is gone.
    Closed,
}

pub fn recv<T: DeserializeOwned>(
    sock: &OwnedFd,
    buf: &mut Vec<u8>,
    nonblocking: bool,
) -> io::Result<Received<T>> {
    buf.resize(MAX_MESSAGE, 0);
    match recv_msg(sock.as_fd(), buf, nonblocking) {
        Ok(m) if m.len == 0 => Ok(Received::Closed),
        Ok(m) => Ok(Received::Msg {
            msg: rmp_serde::from_slice(&buf[..m.len]).map_err(broken)?,
            fds: m.fds,
            truncated: m.truncated,
        }),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Received::Nothing),
        Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Ok(Received::Closed),
        Err(e) => Err(e),
    }
}
