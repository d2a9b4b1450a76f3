//! Connections: frames in, frames out, each within bounds. A client that misbehaves or stops reading
//! hurts only itself.

use std::collections::{BTreeSet, VecDeque};
use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};

use dsec_launch::plan::Code;
use dsec_launch::LaunchError;
use rustix::event::epoll::{self, EventFlags};
use rustix::net::{sendmsg, SendAncillaryBuffer, SendFlags, SocketFlags};
use serde::Serialize;

use super::{Server, Timer, Token, ACCEPT_REST_NS};
use crate::proto::{self, Id, Nothing, Plain, Reply, Splitter, OUT_CHUNK};
use crate::{info, util, warning};

/// Connections at once.
const MAX_CLIENTS: usize = 256;
/// Requests of one client that are not answered yet.
const MAX_IN_FLIGHT: usize = 16_384;
/// Above this many unsent bytes no requests are read, and streams and results wait.
pub const OUT_SOFT: usize = 1 << 20;
/// Above this the client is cut off. Only unasked-for events can get here.
const OUT_HARD: usize = 64 << 20;
/// Read at once, and how often before others get their turn.
const READ_BYTES: usize = 64 << 10;
const READS: usize = 8;
/// Frames sent at once.
const PARTS: usize = 16;
/// Of those that were sent so many stay, to be made again in the same memory.
const SPARE_FRAMES: usize = 4;
/// So much of what is sent may wait in the socket: with less than some large frames, sender and reader are woken for
/// each.
const SOCKET_BYTES: usize = 1 << 20;

pub struct Client {
    sock: OwnedFd,
    splitter: Splitter,
    out: VecDeque<Vec<u8>>,
    /// How much of the first one is sent.
    sent: usize,
    pub out_bytes: usize,
    /// The socket took no more: its readiness is waited for.
    blocked: bool,
    interest: EventFlags,
    pub hello: bool,
    in_flight: usize,
    /// Runs this client follows.
    pub follows: BTreeSet<u64>,
    pub subscribed: Option<Id>,
}

impl Server {
    pub(super) fn accept(&mut self) {
        loop {
            match rustix::net::accept_with(
                &self.listen,
                SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            ) {
                Ok(sock) => self.welcome(sock),
                Err(rustix::io::Errno::AGAIN) => return,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(e) => {
                    // Descriptors ran out: the pending connection would wake us for ever.
                    warning!("accept", error = e);
                    self.unwatch(self.listen.as_fd());
                    self.at(util::monotonic_ns() + ACCEPT_REST_NS, Timer::Accept);
                    return;
                }
            }
        }
    }

    fn welcome(&mut self, sock: OwnedFd) {
        let own = rustix::process::getuid();
        let allowed = rustix::net::sockopt::socket_peercred(&sock)
            .is_ok_and(|peer| peer.uid.is_root() || peer.uid == own);
        if !allowed || self.clients.len() >= MAX_CLIENTS {
            info!(
                "client.refused",
                allowed = allowed,
                clients = self.clients.len()
            );
            return;
        }
        // Without it, it is as it was.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size_force(&sock, SOCKET_BYTES);
        let index = self.index();
        if self
            .watch(sock.as_fd(), Token::Client(index), EventFlags::IN)
            .is_err()
        {
            return;
        }
        self.clients.insert(
            index,
            Client {
                sock,
                splitter: Splitter::default(),
                out: VecDeque::new(),
                sent: 0,
                out_bytes: 0,
                blocked: false,
                interest: EventFlags::IN,
                hello: false,
                in_flight: 0,
                follows: BTreeSet::new(),
                subscribed: None,
            },
        );
    }

    pub(super) fn client_ready(&mut self, index: u64, flags: EventFlags) {
        if flags.contains(EventFlags::OUT) {
            self.flush_client(index);
        }
        let stuck = self.out_bytes(index).is_some_and(|n| n > OUT_SOFT);
        if stuck && flags.intersects(EventFlags::HUP | EventFlags::ERR) {
            // Not read from while it has too much to read: its end would be reported for ever.
            self.drop_client(index, "closed unread");
        } else if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            self.read_client(index);
        }
    }

    fn read_client(&mut self, index: u64) {
        // Made once: clearing it for each request would cost more than reading one.
        let mut buf = std::mem::take(&mut self.read_buffer);
        buf.resize(READ_BYTES, 0);
        self.read_into(index, &mut buf);
        self.read_buffer = buf;
    }

    fn read_into(&mut self, index: u64, buf: &mut [u8]) {
        for _ in 0..READS {
            let Some(client) = self.clients.get_mut(&index) else {
                return;
            };
            if client.out_bytes > OUT_SOFT {
                break;
            }
            let n = match rustix::io::read(&client.sock, &mut *buf) {
                Ok(0) => return self.drop_client(index, "closed"),
                Ok(n) => n,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => break,
                Err(_) => return self.drop_client(index, "broken"),
            };
            client.splitter.push(&buf[..n]);
            self.take_frames(index);
            if n < buf.len() {
                break; // there was no more
            }
        }
        self.take_frames(index);
        self.update_interest(index);
    }

    /// Handles the whole frames there are, unless the client has too much to read already.
    fn take_frames(&mut self, index: u64) {
        loop {
            let Some(client) = self.clients.get_mut(&index) else {
                return;
            };
            if client.out_bytes > OUT_SOFT {
                return;
            }
            match client.splitter.next() {
                Ok(Some(body)) => self.frame(index, &body),
                Ok(None) => return,
                Err(_) => return self.drop_client(index, "frame too big"),
            }
        }
    }

    fn frame(&mut self, index: u64, body: &[u8]) {
        let head = match proto::head(body) {
            Ok(head) => head,
            Err(why) => {
                info!("client.garbage", why = why);
                return self.drop_client(index, "garbage");
            }
        };
        let Some(client) = self.clients.get_mut(&index) else {
            return;
        };
        client.in_flight += 1;
        if client.in_flight > MAX_IN_FLIGHT {
            let err = LaunchError::new(
                Code::Limit,
                "too many requests of this connection in flight",
            )
            .with("limit", MAX_IN_FLIGHT as i64);
            return self.answer(index, head.id, Err::<Nothing, _>(err));
        }
        self.request(index, head.id, &head.op, body);
    }

    /// The one answer of a request.
    pub(super) fn answer<T: Serialize>(
        &mut self,
        client: u64,
        id: Id,
        result: Result<T, LaunchError>,
    ) {
        if let Some(c) = self.clients.get_mut(&client) {
            c.in_flight = c.in_flight.saturating_sub(1);
        }
        let encoded = match &result {
            Ok(ok) => proto::frame(&Reply::Ok { id, ok }),
            Err(err) => proto::frame(&Plain::Err { id, err }),
        };
        match encoded {
            Ok(frame) => self.push(client, frame),
            Err(err) => {
                if let Ok(frame) = proto::frame(&Plain::Err { id, err: &err }) {
                    self.push(client, frame);
                }
            }
        }
    }

    /// Queues a frame. It is sent at the end of this turn, together with what else there is by then: a frame
    /// by itself wakes its reader.
    pub(super) fn push(&mut self, index: u64, frame: Vec<u8>) {
        let Some(client) = self.clients.get_mut(&index) else {
            return;
        };
        client.out_bytes += frame.len();
        client.out.push_back(frame);
        if client.out_bytes > OUT_HARD {
            return self.drop_client(index, "does not read");
        }
        // With more already waiting it is in the list, or the socket is full and its readiness will come.
        if client.out.len() == 1 {
            self.unsent.push(index);
        }
    }

    /// Sends what was queued in this turn, as far as the sockets take it.
    pub(super) fn send_queued(&mut self) {
        while let Some(index) = self.unsent.pop() {
            let stuck = self.out_bytes(index).is_some_and(|n| n > OUT_SOFT);
            if stuck {
                self.flush_client(index);
                continue;
            }
            let Some(client) = self.clients.get_mut(&index) else {
                continue;
            };
            if client.write(&mut self.spare_frames).is_err() {
                self.drop_client(index, "broken");
            } else {
                self.update_interest(index);
            }
        }
    }

    fn flush_client(&mut self, index: u64) {
        let Some(client) = self.clients.get_mut(&index) else {
            return;
        };
        if client.write(&mut self.spare_frames).is_err() {
            return self.drop_client(index, "broken");
        }
        if client.out_bytes <= OUT_SOFT {
            let follows: Vec<u64> = client.follows.iter().copied().collect();
            self.take_frames(index);
            for run in follows {
                self.pump(run);
            }
        }
        self.update_interest(index);
    }

    fn update_interest(&mut self, index: u64) {
        let Some(client) = self.clients.get_mut(&index) else {
            return;
        };
        let mut want = EventFlags::empty();
        if client.out_bytes <= OUT_SOFT {
            want |= EventFlags::IN;
        }
        if client.blocked {
            want |= EventFlags::OUT;
        }
        if want != client.interest {
            client.interest = want;
            let _ = epoll::modify(&self.epoll, &client.sock, Token::Client(index).pack(), want);
        }
    }

    pub(super) fn drop_client(&mut self, index: u64, why: &str) {
        let Some(client) = self.clients.remove(&index) else {
            return;
        };
        if why != "closed" {
            info!("client.dropped", why = why, unsent = client.out_bytes);
        }
        self.unwatch(client.sock.as_fd());
        drop(client.sock);
        for run in client.follows {
            self.reader_gone(run, index);
        }
    }

    /// Gives a connection away with nothing on it but the request that asks for that.
    pub(super) fn hand_over(&mut self, index: u64) -> Result<OwnedFd, LaunchError> {
        let busy = || LaunchError::field("op", "the connection must have nothing else on it");
        let client = self.clients.get_mut(&index).ok_or_else(busy)?;
        // The answer to `hello` may still be here.
        let sent = client.write(&mut self.spare_frames).is_ok() && client.out.is_empty();
        let alone = client.in_flight <= 1 && client.follows.is_empty();
        if !sent || !alone || !client.splitter.is_empty() {
            return Err(busy());
        }
        let client = self.clients.remove(&index).ok_or_else(busy)?;
        self.unwatch(client.sock.as_fd());
        Ok(client.sock)
    }

    pub(super) fn out_bytes(&self, client: u64) -> Option<usize> {
        self.clients.get(&client).map(|c| c.out_bytes)
    }
}

impl Client {
    fn write(&mut self, spare: &mut Vec<Vec<u8>>) -> Result<(), rustix::io::Errno> {
        while !self.out.is_empty() {
            let mut parts: [IoSlice<'_>; PARTS] = std::array::from_fn(|_| IoSlice::new(&[]));
            for (part, frame) in parts.iter_mut().zip(&self.out) {
                *part = IoSlice::new(frame);
            }
            let count = self.out.len().min(PARTS);
            if let Some(first) = self.out.front() {
                parts[0] = IoSlice::new(&first[self.sent..]);
            }
            let mut none = SendAncillaryBuffer::default();
            match sendmsg(&self.sock, &parts[..count], &mut none, SendFlags::NOSIGNAL) {
                Ok(n) => self.has_sent(n, spare),
                Err(rustix::io::Errno::AGAIN) => {
                    self.blocked = true;
                    return Ok(());
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        self.blocked = false;
        Ok(())
    }

    fn has_sent(&mut self, n: usize, spare: &mut Vec<Vec<u8>>) {
        self.sent += n;
        self.out_bytes -= n;
        while let Some(first) = self.out.front() {
            if self.sent < first.len() {
                return;
            }
            self.sent -= first.len();
            let sent = self.out.pop_front().unwrap_or_default();
            if sent.capacity() >= OUT_CHUNK && spare.len() < SPARE_FRAMES {
                spare.push(sent);
            }
        }
    }
}
