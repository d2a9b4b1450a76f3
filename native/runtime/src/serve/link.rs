//! The runtime's side of the keeper's socket.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use serde_bytes::ByteBuf;

use crate::kproto::{self, Fallen, Put, Received, ToKeeper, ToRuntime, GATE};

/// What the keeper held when this runtime started.
#[derive(Debug)]
pub struct Held {
    pub meta: ByteBuf,
    pub pid: Option<i32>,
    pub ending: Option<Fallen>,
    pub fds: HashMap<String, OwnedFd>,
}

#[derive(Debug)]
pub struct Inventory {
    pub instance: String,
    pub nofile: u64,
    /// The keeper starts the process for connections.
    pub net: bool,
    pub items: Vec<(String, Held)>,
}

/// Sending may happen from any thread: a packet is atomic.
#[derive(Debug)]
pub struct Link {
    sock: OwnedFd,
    /// Descriptors the keeper holds for us, roughly: the guard against its limit.
    held: AtomicU64,
}

impl Link {
    pub fn new(sock: OwnedFd) -> Self {
        Self {
            sock,
            held: AtomicU64::new(0),
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.sock.as_fd()
    }

    /// Descriptors in the keeper's hands.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// When this returns the keeper has it, whatever happens to us. It may wait for the keeper, which
    /// never waits for us.
    pub fn put(&self, put: Put, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let kept = put.add.iter().filter(|name| *name != GATE);
        let (added, closed) = (kept.count() as u64, put.close.len() as u64);
        kproto::send(self.fd(), &ToKeeper::Put(put), fds, false)?;
        self.held.fetch_add(added, Ordering::Relaxed);
        self.drop_held(closed);
        Ok(())
    }

    /// `fds`: how many descriptors the entry still had.
    pub fn del(&self, key: &str, fds: u64) -> io::Result<()> {
        kproto::send(self.fd(), &ToKeeper::Del(key.to_owned()), &[], false)?;
        self.drop_held(fds);
        Ok(())
    }

    fn drop_held(&self, n: u64) {
        let _ = self
            .held
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |h| {
                Some(h.saturating_sub(n))
            });
    }

    pub fn say(&self, msg: &ToKeeper) -> io::Result<()> {
        kproto::send(self.fd(), msg, &[], false)
    }

    /// Asks for everything; waits for the answer. Only at the start.
    pub fn inventory(&mut self) -> io::Result<Inventory> {
        self.say(&ToKeeper::List)?;
        let (mut items, mut buf) = (Vec::new(), Vec::new());
        loop {
            match kproto::recv::<ToRuntime>(&self.sock, &mut buf, false)? {
                Received::Msg {
                    msg:
                        ToRuntime::End {
                            instance,
                            nofile,
                            net,
                        },
                    ..
                } => {
                    return Ok(Inventory {
                        instance,
                        nofile,
                        net,
                        items,
                    });
                }
                Received::Msg {
                    msg:
                        ToRuntime::Item {
                            key,
                            meta,
                            pid,
                            ending,
                            names,
                        },
                    fds,
                    truncated,
                } => {
                    if truncated || names.len() != fds.len() {
                        return Err(io::Error::other("descriptors of the keeper were lost"));
                    }
                    self.held.fetch_add(fds.len() as u64, Ordering::Relaxed);
                    items.push((
                        key,
                        Held {
                            meta,
                            pid,
                            ending,
                            fds: names.into_iter().zip(fds).collect(),
                        },
                    ));
                }
                // An ending that came while the list was under way is repeated later.
                Received::Msg { .. } | Received::Nothing => {}
                Received::Closed => return Err(io::ErrorKind::BrokenPipe.into()),
            }
        }
    }

    /// What the keeper has said since; never waits. `None`: the keeper is gone.
    pub fn receive(&self) -> io::Result<Option<Vec<ToRuntime>>> {
        let (mut out, mut buf) = (Vec::new(), Vec::new());
        loop {
            match kproto::recv::<ToRuntime>(&self.sock, &mut buf, true)? {
                Received::Msg { msg, .. } => out.push(msg),
                Received::Nothing => return Ok(Some(out)),
                Received::Closed => return Ok(None),
            }
        }
    }
}
